"""The list of all comparisons with a reference: the tests run it, `python -m benchmarks.fidelity` prints it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

LIMIT = 1e-7


@dataclass(frozen=True)
class Row:
    """An algorithm, its setting, and a function that gives the largest difference, relative to the largest value.

    A `limit` other than 1e-7, or a difference in other units, needs a `reason`.
    """

    algorithm: str
    setting: str
    source: str
    difference: Callable[[], float]
    limit: float = LIMIT
    reason: str = ""

    def __post_init__(self) -> None:
        if self.limit != LIMIT and not self.reason:
            raise ValueError(f"{self.algorithm}, {self.setting}: a limit of {self.limit} needs a reason")


TABLE: list[Row] = []


def compared(algorithm: str, setting: str, source: str, limit: float = LIMIT, reason: str = "") -> Callable[..., None]:
    """Register a function as a row of the table."""

    def register(difference: Callable[[], float]) -> None:
        TABLE.append(Row(algorithm, setting, source, difference, limit, reason))

    return register
