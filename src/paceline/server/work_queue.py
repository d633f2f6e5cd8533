"""Tickets: which worker works on which part of which minibatch.

Workers that run free ask for the next part when they need one: a fast one gets more of them than a slow one, and what a
dead one had not done is done by another.  Each minibatch is begun before the next, so that whatever their speeds all
workers are at about the same place of the data.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class WorkItem(NamedTuple):
    """Part `data_shard` of minibatch `step`."""

    step: int
    data_shard: int


class WorkQueue:
    """The parts of the minibatches from `first` to before `last`, each cut into `data_shards`.

    >>> queue = WorkQueue(0, 2, data_shards=2)
    >>> queue.take(7), queue.take(1), queue.take(7)
    ([WorkItem(step=0, data_shard=0)], [WorkItem(step=0, data_shard=1)], [WorkItem(step=1, data_shard=0)])
    >>> queue.lose(7)
    >>> queue.take(1, 5)
    [WorkItem(step=0, data_shard=0), WorkItem(step=1, data_shard=0), WorkItem(step=1, data_shard=1)]
    """

    def __init__(self, first: int, last: int, data_shards: int) -> None:
        if not 0 <= first <= last or data_shards < 1:
            raise ValueError(
                f"WorkQueue({first}, {last}, data_shards={data_shards}): minibatches are counted upwards from 0, and "
                f"have at least 1 part"
            )
        self.first, self.last = first, last
        self.data_shards = data_shards
        self._row = first  # The last minibatch that was begun,
        self._free = list(range(data_shards)) if first < last else []  # and its parts that nobody has yet.
        self._returned: list[WorkItem] = []  # What was given out and came back, in order.
        self._held: dict[int, deque[WorkItem]] = {}

    @property
    def left(self) -> int:
        """How many nobody has."""
        return len(self._returned) + len(self._free) + max(0, self.last - self._row - 1) * self.data_shards

    @property
    def is_over(self) -> bool:
        """Whether all are done."""
        return not self.left and not any(self._held.values())

    def held(self, worker: int) -> int:
        """How many a worker has and has not done."""
        return len(self._held.get(worker, ()))

    def take(self, worker: int, wanted: int = 1) -> list[WorkItem]:
        """The next ones, for a worker; of one minibatch the part that has its number, if that is there."""
        taken: list[WorkItem] = []
        while len(taken) < wanted and self.left:
            taken.append(self._take(worker))
        self._held.setdefault(worker, deque()).extend(taken)
        return taken

    def _take(self, worker: int) -> WorkItem:
        if not self._free and self._row < self.last - 1:
            self._row, self._free = self._row + 1, list(range(self.data_shards))
        if self._returned and (not self._free or self._returned[0].step <= self._row):
            return self._returned.pop(
                _preferred(self._returned, lambda t: t.step == self._returned[0].step and t.data_shard == worker)
            )
        return WorkItem(self._row, self._free.pop(_preferred(self._free, lambda data_shard: data_shard == worker)))

    def do(self, worker: int, count: int) -> None:
        """A worker has done the first so many of those that it has."""
        for _ in range(count):
            self._held[worker].popleft()

    def lose(self, worker: int) -> None:
        """A worker is gone, and what it has not done is anybody's."""
        for ticket in self._held.pop(worker, ()):
            insort(self._returned, ticket)


def _preferred(items: Sequence[T], is_wanted: Callable[[T], bool]) -> int:
    """Where the first such item is; 0 if there is none."""
    return next((i for i, item in enumerate(items) if is_wanted(item)), 0)
