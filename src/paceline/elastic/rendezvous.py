"""Rendezvous: how the workers of a run agree who they are, after a death and before a newcomer joins.

A run goes through generations.  In each one the same workers take part in all collectives.  A generation ends when one
of its collectives fails, or when all its workers have paused to let others join.  Its workers then meet: all who are
alive arrive, and agree on the next generation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.endpoint import Endpoint
from paceline.errors import ClusterError
from paceline.op import Op


class LeftOut(ClusterError):
    """The other workers went on without this one: it was silent for too long, and they took it for dead."""


class Over(ClusterError):
    """The run has ended before this worker could join it."""


@dataclass(frozen=True)
class Arrival:
    """What a worker says when it meets the others.

    `committed` counts its commits, and `renewed` those at the last change of the workers that it knows of.  `pause` is
    the commit after which it pauses for the next one; None: it does not know.  `is_paused`: it stands there, with
    nothing in flight.  `cause` is the error that has led it here.
    """

    committed: int
    renewed: int = 0
    pause: int | None = None
    is_paused: bool = False
    cause: str = ""


@dataclass(frozen=True)
class Generation:
    """What the workers have agreed on.

    `committed` is the largest count of commits of any of them, and `pause` the commit after which all pause.  If
    `is_new`, all were paused: ranks count from 0 again, and newcomers are among them.  Otherwise the endpoint has those
    of the last generation's ranks that are left.
    """

    number: int
    endpoint: Endpoint
    committed: int
    pause: int
    is_new: bool


@dataclass(frozen=True)
class Proposal:
    """A generation as its workers agree on it.

    Its processes have numbers in the job, which stay, and ranks.  `workers` is how many parts a minibatch is cut into.
    `newcomers` counts those that have asked to join and were considered, taken in or not.
    """

    processes: Sequence[int]
    ranks: Sequence[int]
    workers: int
    committed: int
    pause: int
    is_new: bool
    newcomers: int

    @classmethod
    def first(cls, workers: int) -> Proposal:
        every = list(range(workers))
        return cls(every, every, workers, committed=0, pause=0, is_new=True, newcomers=0)


def following(
    now: Proposal, arrived: Mapping[int, Arrival], left: Sequence[int], waiting: Callable[[], Sequence[int]], asked: int
) -> Proposal:
    """The generation that follows when each worker of this one has arrived, has come to the end, or is dead.

    `left` are the commits of those that have come to the end.  `waiting` gives the newcomers that are alive, of the
    `asked` that have ever asked to join.
    """
    committed = max([*left, *(a.committed for a in arrived.values())])
    latest = max((a.renewed for a in arrived.values()), default=0)  # Who has missed it has a pause from before it.
    pauses = [a.pause for a in arrived.values() if a.pause is not None and a.renewed == latest]
    pause = max(pauses, default=committed + 1)
    if left or not all(a.is_paused for a in arrived.values()):
        ranks = [now.ranks[now.processes.index(p)] for p in arrived]
        return Proposal(list(arrived), ranks, now.workers, committed, pause, is_new=False, newcomers=now.newcomers)
    processes = [*arrived, *waiting()]
    count = len(processes)
    return Proposal(processes, list(range(count)), count, committed, pause, is_new=True, newcomers=asked)


class Rendezvous(Protocol):
    """Where the workers of a run meet."""

    is_newcomer: bool  # Whether this worker has yet to join them.

    def has_newcomers(self) -> bool:
        """Whether a worker waits to join, as far as this one knows.  It costs next to nothing."""
        ...

    def meet(self, arrival: Arrival) -> Op[Generation]:
        """Meet the others, after the last generation has ended for this worker; LeftOut if they went on without it."""
        ...

    def why_lost(self, rank: int) -> str | None:
        """Why a rank of this generation takes no more part in it; None if it may.  Any thread may ask."""
        ...

    def come_back(self) -> None:
        """The others went on without this worker; it will meet them again as a newcomer."""
        ...

    def leave(self, committed: int) -> None:
        """This worker has come to the end of the run."""
        ...
