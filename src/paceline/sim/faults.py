"""Faults: what goes wrong in a simulated run, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf


@dataclass(frozen=True)
class Faults:
    """Workers that die at a time, and others that join; only methods whose workers do not wait for each other bear it.

    What a dying worker was just sending does not arrive.  The servers, or where there are none the other workers, notice a death
    `notice` seconds later.  Servers may also take for dead who lives (`suspicions`, each a rank and a time), as if it had been silent
    for too long.  Without servers each minibatch has as many parts as there were workers, and who joins waits until it can take a dead
    one's place.  Of all messages a share `lost` does not arrive, and a share `doubled` arrives twice.
    """

    deaths: Mapping[int, float] = field(default_factory=dict[int, float])
    joins: Sequence[float] = ()
    suspicions: Sequence[tuple[int, float]] = ()
    notice: float = 0.001
    lost: float = 0.0
    doubled: float = 0.0
    retransmit_s: float = 5.0  # seconds after which a worker asks whether it was heard

    def __post_init__(self) -> None:
        if not all(
            0 <= t < inf for t in (*self.deaths.values(), *self.joins, *(t for _, t in self.suspicions), self.notice)
        ):
            raise ValueError(f"{self}: deaths, joins, suspicions and their notice are at finite times from 0 on")
        if not (0 <= self.lost < 1 and 0 <= self.doubled <= 1 and self.retransmit_s > 0):
            raise ValueError(f"{self}: `lost` and `doubled` are shares of all messages, and patience is a time")

    @property
    def is_lossy(self) -> bool:
        return bool(self.lost or self.doubled)
