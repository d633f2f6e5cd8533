"""Watched: a worker as its meters see it, and what they say of it.

A meter only reads.  It runs in the worker's process, between two of its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.monitor.channel import Channel
from paceline.monitor.reader import Reader
from paceline.trace import Staleness, Trace

Record = dict[str, Any]
"""What a meter says: plain data, with its `kind`."""


@dataclass(frozen=True)
class Facts:
    """What is known of a run before it starts."""

    strategy: str
    workers: int
    steps: int | None  # None: not known.
    is_simulated: bool = False


@dataclass(frozen=True)
class Watched:
    """One worker.  In the simulator `trace` is that of all ranks, and all times are virtual."""

    rank: int
    workers: int
    ranks: Sequence[int]  # Of all workers, also of those that may join later.
    trace: Trace
    now: Callable[[], float]
    reader: Callable[[], Reader]  # A new reader of what is in the trace of this rank alone.
    channel: Channel  # To the first worker.
    lr: Callable[[], float | None]  # None: servers take the steps.
    steps: Callable[[], int | None]  # How many there are; None: not known.
    samples_before: Callable[[int], int | None]  # How many samples all workers have read before a step,
    epochs_before: Callable[[int], float | None]  # and how many epochs.
    notes_syncs: Callable[[], bool]  # Whether the method notes its syncs in the trace.
    host: str = ""  # Ranks of one host have one clock.
    is_simulated: bool = False
    # What this worker does besides what is in its trace: its optimizer's steps, or the user's own loop.
    own: Trace = field(default_factory=lambda: Trace(keep=1000))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sent(self) -> int:
        """The bytes that this worker has sent."""
        return self.trace.sent[self.rank] if self.is_simulated else sum(self.trace.sent.values())

    def staleness(self) -> tuple[Staleness, Staleness]:
        """That of the updates that this worker alone knows of, and that of those that all know of.

        The latter are in the trace of the simulation; of servers in other processes, their last answers say it.
        """
        trace = self.trace
        counts = trace.staleness_counts.items()
        counted = Staleness(sum(staleness * n for staleness, n in counts), sum(n for _, n in counts))
        if self.is_simulated:
            return Staleness(), counted
        return counted, sum(trace.servers_staleness.values(), Staleness())


class Meter(Protocol):
    """A monitor's part in the process of a worker."""

    def step(self, step: int) -> Iterable[Record]:
        """Called before every step; what is to be shown now."""
        ...

    def look(self) -> Iterable[Record]:
        """Called when the model was evaluated between two steps."""
        ...

    def end(self) -> Iterable[Record]:
        """The worker has taken its last step."""
        ...
