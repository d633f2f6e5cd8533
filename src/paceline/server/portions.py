"""Portions: which worker works on which part of a batch, and whose result is counted.

A worker that has finished a portion claims it, adds it to a sum of its own, and hands the sum in now and then.  A
portion counts once it was handed in.  Towards the end idle workers do again what others are slow to finish: the first
result wins.
"""

from __future__ import annotations

from collections import deque


class Portions:
    """So many portions, each of which may be worked on by `backups` workers beside the first.

    >>> portions = Portions(2, backups=1)
    >>> portions.take(0), portions.take(1), portions.take(1)
    (0, 1, None)
    >>> portions.report(1, 1), portions.back_up(1), portions.report(1, 0), portions.report(0, 0)
    (True, 0, True, False)
    >>> portions.settle(1)
    >>> portions.is_done
    True
    """

    def __init__(self, count: int, backups: int) -> None:
        self.count, self.backups = count, backups
        self.free = deque(range(count))
        self._at: dict[int, list[int]] = {}  # Who works on a portion, in the order in which they were first given out,
        self._hand: dict[int, list[int]] = {}  # and what a worker has and has not reported.
        self._owner: dict[int, int] = {}  # In whose sum a portion is, that has not been handed in,
        self._claims: dict[int, list[int]] = {}  # and what is in a worker's sum.
        self._sums: dict[int, int] = {}  # How many sums a worker has begun before this one.
        self._done: set[int] = set()

    @property
    def is_done(self) -> bool:
        return len(self._done) == self.count

    def sum_of(self, worker: int) -> int:
        """Which of its sums a worker is adding to: what it hands in of another does not count."""
        return self._sums.get(worker, 0)

    def is_busy(self, worker: int) -> bool:
        """Whether a worker has one that it has not reported."""
        return bool(self._hand.get(worker))

    def claimed(self, worker: int) -> int:
        """How many are in a worker's sum."""
        return len(self._claims.get(worker, ()))

    def take(self, worker: int) -> int | None:
        """The next one that nobody has."""
        if not self.free:
            return None
        self._give(worker, self.free[0])
        return self.free.popleft()

    def back_up(self, worker: int) -> int | None:
        """What another is slow to finish, for a worker that has nothing to do: first what nobody has finished, longest
        ago given out, then what is in the sum of one that is still at work, and so cannot hand it in."""
        taken = self._done | self._owner.keys()
        unfinished = [
            p for p, at in self._at.items() if p not in taken and worker not in at and len(at) <= self.backups
        ]
        if not unfinished:
            unfinished = [
                p
                for p, owner in self._owner.items()
                if self.is_busy(owner) and worker != owner and self._has_room(p, worker)
            ]
        if not unfinished:
            return None
        portion = min(unfinished, key=lambda p: len(self._at.get(p, ())))
        self._give(worker, portion)
        return portion

    def _has_room(self, portion: int, worker: int) -> bool:
        at = self._at.get(portion, ())
        return len(at) < self.backups and worker not in at

    def report(self, worker: int, portion: int) -> bool:
        """A worker has finished a portion; whether it may add it to its sum, which nobody else then does."""
        if portion not in self._hand.get(worker, ()):
            return False
        self._take_back(worker, portion)
        if portion in self._done:
            return False
        if (owner := self._owner.get(portion)) is not None:
            if not self.is_busy(owner):  # It is handing its sum in.
                return False
            self.void(owner)
        if portion in self.free:
            self.free.remove(portion)
        self._owner[portion] = worker
        self._claims.setdefault(worker, []).append(portion)
        return True

    def settle(self, worker: int) -> None:
        """A worker has handed in its sum."""
        for portion in self._end_sum(worker):
            self._done.add(portion)

    def void(self, worker: int) -> None:
        """A worker's sum does not count: what is in it is anybody's."""
        for portion in self._end_sum(worker):
            if not self._at.get(portion):
                self.free.append(portion)

    def lose(self, worker: int) -> None:
        """A worker is gone, and what it had not handed in is anybody's."""
        self.void(worker)
        for portion in list(self._hand.get(worker, ())):
            self._take_back(worker, portion)
            if portion not in self._at and portion not in self._owner and portion not in self._done:
                self.free.append(portion)

    def _end_sum(self, worker: int) -> list[int]:
        self._sums[worker] = self.sum_of(worker) + 1
        claims = self._claims.pop(worker, [])
        for portion in claims:
            del self._owner[portion]
        return claims

    def _give(self, worker: int, portion: int) -> None:
        self._at.setdefault(portion, []).append(worker)
        self._hand.setdefault(worker, []).append(portion)

    def _take_back(self, worker: int, portion: int) -> None:
        self._hand[worker].remove(portion)
        self._at[portion].remove(worker)
        if not self._at[portion]:
            del self._at[portion]
