"""The list of all comparisons with a reference: the tests run it, `python -m benchmarks.fidelity` prints it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LIMIT = 1e-7


@dataclass(frozen=True)
class Row:
    """An algorithm, its setting, and a function that gives the largest difference from its reference.

    `subject` is what is compared, a strategy or a codec; `compare` gets it.  Differences are relative to the way that
    the model has gone.  A `limit` other than 1e-7, or a difference in other units, needs a `reason`.
    """

    subject: Any
    algorithm: str
    setting: str
    source: str
    compare: Callable[[Any], float]
    limit: float = LIMIT
    reason: str = ""

    def __post_init__(self) -> None:
        if self.limit != LIMIT and not self.reason:
            raise ValueError(f"{self.algorithm}, {self.setting}: a limit of {self.limit} needs a reason")

    def __str__(self) -> str:
        return f"{self.algorithm}, {self.setting}"

    @property
    def shown_limit(self) -> str:
        return "1e-7" if self.limit == LIMIT else f"{self.limit:g}"

    def difference(self) -> float:
        return self.compare(self.subject)


TABLE: list[Row] = []


def compared(
    subject: Any, algorithm: str, setting: str, source: str, limit: float = LIMIT, reason: str = ""
) -> Callable[..., None]:
    """Register a function as a row of the table."""

    def register(compare: Callable[[Any], float]) -> None:
        TABLE.append(Row(subject, algorithm, setting, source, compare, limit, reason))

    return register


def rows_of(module: str) -> list[Row]:
    """The rows whose functions a module defines."""
    return [row for row in TABLE if row.compare.__module__ == module]
