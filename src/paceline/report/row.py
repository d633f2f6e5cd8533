"""Row: the result of one method, as tables and charts need it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Values = Mapping[str, float]  # What an evaluation returned, by the name of the metric.
Curve = Sequence[tuple[float, float, Values]]


@dataclass(frozen=True)
class Row:
    """One method.

    `metrics` are the values of the last evaluation.  `curve` has (seconds, bytes sent per worker, metrics) at every
    evaluation.  `real` rows come from real processes: their seconds are wall time, and are never compared with virtual
    seconds.  `staleness` counts the updates of each staleness; it is empty for a method without servers or shared
    memory.  `style` is the number of its swatch; None: its place among the rows.
    """

    name: str
    strategy: str
    metrics: Values
    seconds: float
    bytes_per_worker: float
    speedup: float | None
    curve: Curve = ()
    real: bool = False
    staleness: Mapping[int, int] = field(default_factory=dict[int, int])
    style: int | None = None

    @property
    def updates(self) -> int:
        """The number of updates.  An update that goes to several shards counts at each."""
        return sum(self.staleness.values())
