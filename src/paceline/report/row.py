"""Row: one method's result, all that the table and the page know of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """`curve` holds (seconds, bytes per worker so far, accuracy) at each evaluation.

    `real` rows come from real processes: their seconds are wall time and are never set beside virtual seconds.
    `staleness` says how many updates were how stale; it is empty for a method without servers.
    """

    name: str
    strategy: str
    accuracy: float | None
    seconds: float
    bytes_per_worker: float
    speedup: float | None
    curve: list[tuple[float, float, float]] = field(default_factory=list[tuple[float, float, float]])
    real: bool = False
    staleness: Mapping[int, int] = field(default_factory=dict[int, int])

    @property
    def updates(self) -> int:
        """How many the servers had, one that goes to several shards counted at each."""
        return sum(self.staleness.values())


def best(rows: Sequence[Row]) -> set[tuple[int, str]]:
    """Which (row, field) hold the best figure of their column; a tie has several, a lone row or a diverged one none.

    >>> sgd = Row("sgd", "AllReduceSGD", 0.98, 90.0, 4e6, 1.0)
    >>> local = Row("local", "BlockMomentum", 0.97, 20.0, 1e5, 4.5)
    >>> sorted(best([sgd, local]))
    [(0, 'accuracy'), (1, 'bytes_per_worker'), (1, 'seconds'), (1, 'speedup')]
    """
    found: set[tuple[int, str]] = set()
    for real in (False, True):
        # A method that diverged is often the fastest of all; that is no merit.
        sound = {
            i: row
            for i, row in enumerate(rows)
            if row.real == real and row.accuracy is not None and math.isfinite(row.accuracy)
        }
        for column, choose in (("accuracy", max), ("seconds", min), ("bytes_per_worker", min), ("speedup", max)):
            values: dict[int, float] = {
                i: v for i, row in sound.items() if (v := getattr(row, column)) is not None and math.isfinite(v)
            }
            if len(set(values.values())) > 1:
                winner = choose(values.values())
                found |= {(i, column) for i, value in values.items() if value == winner}
    return found
