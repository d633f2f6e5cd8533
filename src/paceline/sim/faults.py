"""Faults: which failures happen in a simulated run, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from paceline.endpoint import Layout


@dataclass(frozen=True)
class Faults:
    """Deaths and joins of workers, false suspicions, and lost or duplicated messages.

    Only strategies whose workers do not wait for each other can run with faults.

    - `deaths`: for each rank, the time at which it dies.  A message that it is just sending does not arrive.  The
      servers, or without servers the other workers, notice the death `notice` seconds later.
    - `joins`: the times at which new workers join.  Without servers each minibatch has as many parts as there were
      workers at the start, so a new worker waits until it can replace a dead one.
    - `suspicions`: pairs of a rank and a time.  The servers then believe that this worker is dead, although it runs.
    - `lost`, `doubled`: the share of all messages that do not arrive, and the share that arrive twice.
    - `retransmit_s`: the seconds without an answer after which a worker sends a message again.
    - `server_deaths`: pairs of a server's rank and a time at which its process is killed.  `restart_s` seconds later
      another one continues from its log.  What was in flight to it is lost.
    """

    deaths: Mapping[int, float] = field(default_factory=dict[int, float])
    joins: Sequence[float] = ()
    suspicions: Sequence[tuple[int, float]] = ()
    notice: float = 0.001
    lost: float = 0.0
    doubled: float = 0.0
    retransmit_s: float = 5.0
    server_deaths: Sequence[tuple[int, float]] = ()
    restart_s: float = 0.05

    def __post_init__(self) -> None:
        servers = [time for _, time in self.server_deaths]
        times = [
            *servers,
            self.restart_s,
            *self.deaths.values(),
            *self.joins,
            *(time for _, time in self.suspicions),
            self.notice,
        ]
        if not all(0 <= time < inf for time in times):
            raise ValueError(
                f"{self}: the times of deaths, joins, suspicions, notice and restart_s must be finite and at least 0"
            )
        if not (0 <= self.lost < 1 and 0 <= self.doubled <= 1 and self.retransmit_s > 0):
            raise ValueError(
                f"{self}: `lost` must be from 0 to below 1, `doubled` from 0 to 1, and `retransmit_s` above 0"
            )

    @property
    def touches_workers(self) -> bool:
        """Whether a worker dies, joins or is suspected, or a message is lost that no server's death has lost."""
        return bool(self.deaths or self.joins or self.suspicions or self.is_lossy)

    @property
    def is_lossy(self) -> bool:
        return bool(self.lost or self.doubled)

    @property
    def loses(self) -> bool:
        """Whether a message may not arrive although its receiver will be there."""
        return bool(self.is_lossy or self.server_deaths)

    def joining_ranks(self, layout: Layout) -> range:
        """The ranks of the workers that join, after all ranks of the beginning."""
        return range(layout.size, layout.size + len(self.joins))
