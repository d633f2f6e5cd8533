"""Roster: which workers are members, and in which incarnation.  It has no clock and no network: events go in, changes
come out.

A worker that was suspected may be alive.  What it has asked for before is void; to become a member again it begins its
next incarnation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class State(Enum):
    """What is known of a worker."""

    ACTIVE = "active"
    IDLE = "idle"  # It is a member and has nothing to do: no other worker waits for it.
    SUSPECTED = "suspected"  # It has sent nothing for too long.  It may join again.
    LEFT = "left"  # It has finished.  It does not come back.
    DEAD = "dead"  # Its process has ended.


MEMBERS = (State.ACTIVE, State.IDLE)
FINAL = (State.LEFT, State.DEAD)


@dataclass(frozen=True, slots=True)
class Change:
    """A worker's state before and after an event; None: it was not known.  `incarnation` is the one that the change is
    about."""

    rank: int
    before: State | None
    after: State
    incarnation: int

    @property
    def is_loss(self) -> bool:
        """Whether a member is no longer one."""
        return self.before in MEMBERS and self.after not in MEMBERS


class Roster:
    """The state of every worker that was ever heard of.  The first ones are members from the beginning.

    >>> roster = Roster(range(2))
    >>> [change.after.value for change in roster.suspect(1)], roster.members, roster.incarnation(1)
    (['suspected'], [0], 1)
    >>> roster.join(1, incarnation=0), roster.members
    ([], [0])
    >>> [change.after.value for change in roster.join(1, incarnation=1)], roster.members
    (['active'], [0, 1])
    """

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        self._states: dict[int, State] = dict.fromkeys(ranks, State.ACTIVE)
        self._incarnations: dict[int, int] = {}

    def snapshot(self) -> dict[str, Any]:
        """All that is known, as plain values."""
        return {"states": {r: s.value for r, s in self._states.items()}, "incarnations": dict(self._incarnations)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self._states = {rank: State(value) for rank, value in saved["states"].items()}
        self._incarnations = dict(saved["incarnations"])

    # What is known.

    def state(self, rank: int) -> State | None:
        return self._states.get(rank)

    def incarnation(self, rank: int) -> int:
        """The incarnation that counts: of a suspected worker, the one that it must begin to become a member again."""
        return self._incarnations.get(rank, 0)

    def is_member(self, rank: int) -> bool:
        return self._states.get(rank) in MEMBERS

    @property
    def members(self) -> list[int]:
        return [rank for rank, state in self._states.items() if state in MEMBERS]

    @property
    def active(self) -> list[int]:
        return [rank for rank, state in self._states.items() if state is State.ACTIVE]

    def ranks_in(self, state: State) -> list[int]:
        return [rank for rank, its in self._states.items() if its is state]

    # Events.  Each returns what has changed because of it.

    def join(self, rank: int, incarnation: int = 0) -> list[Change]:
        """A worker joins or comes back.  A newer incarnation of a member ends the older one first."""
        state, current = self.state(rank), self.incarnation(rank)
        if state in FINAL or incarnation < current:
            return []
        changes: list[Change] = []
        if incarnation > current:
            changes = self.suspect(rank)
            self._incarnations[rank] = incarnation
        return changes + self._change(rank, State.ACTIVE)

    def idle(self, rank: int) -> list[Change]:
        """A member has nothing to do."""
        return self._change(rank, State.IDLE) if self.is_member(rank) else []

    def wake(self, rank: int) -> list[Change]:
        """A member has something to do."""
        return self._change(rank, State.ACTIVE) if self.is_member(rank) else []

    def leave(self, rank: int) -> list[Change]:
        """A worker has finished."""
        return self._change(rank, State.LEFT) if self.state(rank) is not State.DEAD else []

    def suspect(self, rank: int, incarnation: int | None = None) -> list[Change]:
        """A member has sent nothing for too long, in its current incarnation or in the one given."""
        current = self.incarnation(rank)
        if not self.is_member(rank) or (incarnation is not None and incarnation < current):
            return []
        changes = self._change(rank, State.SUSPECTED)
        self._incarnations[rank] = (current if incarnation is None else incarnation) + 1
        return changes

    def void(self, rank: int, incarnation: int) -> None:
        """Nothing of this incarnation counts any more, also if the worker was not known yet."""
        self._incarnations[rank] = max(self.incarnation(rank), incarnation + 1)

    def die(self, rank: int) -> list[Change]:
        """The process of a worker has ended."""
        return self._change(rank, State.DEAD)

    def _change(self, rank: int, after: State) -> list[Change]:
        before = self.state(rank)
        if before is after:
            return []
        self._states[rank] = after
        return [Change(rank, before, after, self.incarnation(rank))]
