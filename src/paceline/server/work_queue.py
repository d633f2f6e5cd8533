"""WorkQueue: which worker works on which part of which minibatch.

Workers that do not wait for each other lease the next parts when they need them.  A fast worker gets more parts than
a slow one, and the parts that a dead worker had leased go to other workers.  All parts of a minibatch are leased
before the first part of the next, so all workers are at about the same place in the data.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from paceline.state import Values

T = TypeVar("T")


class WorkItem(NamedTuple):
    """Part `data_shard` of minibatch `step`."""

    step: int
    data_shard: int


class WorkQueue:
    """The parts of the minibatches from `first` to before `last`, each cut into `data_shards` parts.

    >>> queue = WorkQueue(0, 2, data_shards=2)
    >>> [tuple(queue.take(worker)[0]) for worker in (7, 1, 7)]
    [(0, 0), (0, 1), (1, 0)]
    >>> queue.lose(7)
    >>> [tuple(item) for item in queue.take(1, 5)]
    [(0, 0), (1, 0), (1, 1)]
    """

    def __init__(self, first: int, last: int, data_shards: int) -> None:
        if not 0 <= first <= last or data_shards < 1:
            raise ValueError(
                f"WorkQueue({first}, {last}, data_shards={data_shards}): minibatches are counted upwards from 0, and "
                f"have at least 1 part"
            )
        self.first, self.last = first, last
        self.data_shards = data_shards
        self._row = first  # The last minibatch of which a part was leased,
        self._free = list(range(data_shards)) if first < last else []  # and its parts that are free.
        self._returned: list[WorkItem] = []  # Items that dead workers had leased, in order.
        self._held: dict[int, deque[WorkItem]] = {}  # The items that each worker has leased and not done.

    # State.

    def save(self) -> Values:
        """The position, as plain numbers.  Leased items are saved as returned: in another run they are free again."""
        leased = [item for items in self._held.values() for item in items]
        return {
            "first": self.first,
            "last": self.last,
            "data_shards": self.data_shards,
            "row": self._row,
            "free": list(self._free),
            "returned": [list(item) for item in sorted([*self._returned, *leased])],
        }

    @classmethod
    def load(cls, saved: Any) -> WorkQueue:
        """A queue at a saved position."""
        names = {"first", "last", "data_shards", "row", "free", "returned"}
        if not isinstance(saved, dict) or saved.keys() != names:
            holds = sorted(saved) if isinstance(saved, dict) else type(saved).__name__
            raise ValueError(f"a saved work queue holds {sorted(names)}, not {holds}")
        queue = cls(saved["first"], saved["last"], saved["data_shards"])
        queue._row = saved["row"]
        queue._free = list(saved["free"])
        queue._returned = [WorkItem(step, data_shard) for step, data_shard in saved["returned"]]
        return queue

    def snapshot(self) -> Values:
        """The position and what each worker has leased."""
        held = {worker: [list(item) for item in items] for worker, items in self._held.items()}
        return {**self.save(), "returned": [list(item) for item in self._returned], "held": held}

    @classmethod
    def restored(cls, saved: Values) -> WorkQueue:
        held = saved["held"]
        queue = cls.load({name: value for name, value in saved.items() if name != "held"})
        queue._held = {worker: deque(WorkItem(*item) for item in items) for worker, items in held.items()}
        return queue

    # Work.

    @property
    def left(self) -> int:
        """How many items are free."""
        return len(self._returned) + len(self._free) + max(0, self.last - self._row - 1) * self.data_shards

    @property
    def is_over(self) -> bool:
        """Whether all items are done."""
        return not self.left and not any(self._held.values())

    def held(self, worker: int) -> int:
        """How many items a worker has leased and not done."""
        return len(self._held.get(worker, ()))

    def take(self, worker: int, wanted: int = 1) -> list[WorkItem]:
        """Lease the next items to a worker; of one minibatch the part with its rank, if that is free."""
        taken: list[WorkItem] = []
        while len(taken) < wanted and self.left:
            taken.append(self._take(worker))
        self._held.setdefault(worker, deque()).extend(taken)
        return taken

    def _take(self, worker: int) -> WorkItem:
        if not self._free and self._row < self.last - 1:
            self._row, self._free = self._row + 1, list(range(self.data_shards))
        if self._returned and (not self._free or self._returned[0].step <= self._row):
            return self._returned.pop(_preferred(self._returned, lambda item: item == (self._returned[0].step, worker)))
        return WorkItem(self._row, self._free.pop(_preferred(self._free, lambda data_shard: data_shard == worker)))

    def do(self, worker: int, count: int) -> None:
        """A worker has done the first `count` items that it has leased."""
        for _ in range(count):
            self._held[worker].popleft()

    def lose(self, worker: int) -> None:
        """A worker has left or died: the items that it has not done are free again."""
        for item in self._held.pop(worker, ()):
            insort(self._returned, item)


def _preferred(items: Sequence[T], is_wanted: Callable[[T], bool]) -> int:
    """The index of the first item that is wanted; 0 if there is none."""
    return next((i for i, item in enumerate(items) if is_wanted(item)), 0)
