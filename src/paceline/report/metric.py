"""Metric: how to show a value that an evaluation returns, and whether high or low values are better."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from paceline.report.row import Row

Better = Literal["higher", "lower"]
SHARES = ("accuracy", "precision", "recall")  # From 0 to 1, shown as per cent.
COSTS = ("loss", "error", "perplexity")


@dataclass(frozen=True)
class Metric:
    """A metric by its name, as the evaluation calls it."""

    name: str

    @property
    def is_share(self) -> bool:
        return self._last_word in SHARES

    @property
    def better(self) -> Better | None:
        """None if the name does not say it.

        >>> Metric("test accuracy").better, Metric("val_loss").better, Metric("radius").better
        ('higher', 'lower', None)
        """
        if self.is_share:
            return "higher"
        return "lower" if self._last_word in COSTS else None

    @property
    def _last_word(self) -> str:
        return re.split(r"[^a-z]+", self.name.lower())[-1]


def metrics(rows: Iterable[Row]) -> list[Metric]:
    """Every metric of these rows, in the order of their first appearance."""
    names = (name for row in rows for values in (row.metrics, *(v for _, _, v in row.curve)) for name in values)
    return [Metric(name) for name in dict.fromkeys(names)]
