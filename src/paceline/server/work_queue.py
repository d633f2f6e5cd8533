"""WorkQueue: which worker works on which part of which minibatch.

Workers that do not wait for each other lease the next parts when they need them.  A fast worker gets more parts than
a slow one, and the parts that a dead worker had leased go to other workers.  All parts of a minibatch are leased
before the first part of the next, so all workers are at about the same place in the data.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from paceline.state import Values

T = TypeVar("T")


class WorkItem(NamedTuple):
    """Part `data_shard` of minibatch `step`.

    With `parts` the minibatch is cut into so many: it was left over by a run with another number of workers.  `had` are
    the shards that have it already, one a bit: see `landings`.
    """

    step: int
    data_shard: int
    parts: int = 0
    had: int = 0


@dataclass
class Lease:
    """The items that a worker was given in one incarnation, in order; without those that are known to be in all shards.

    `first` is the number of the first of them, and `done` how many are in this shard; both count from the incarnation's
    first item.
    """

    incarnation: int
    items: deque[WorkItem] = field(default_factory=deque[WorkItem])
    first: int = 0
    done: int = 0

    @property
    def undone(self) -> int:
        return self.first + len(self.items) - self.done

    @property
    def not_done(self) -> list[WorkItem]:
        """The items that are not in this shard."""
        return list(self.items)[self.done - self.first :]

    def land(self, count: int) -> None:
        """So many items are in all shards."""
        for _ in range(min(count, self.done) - self.first):
            self.items.popleft()
            self.first += 1

    def lacking(self, counts: Sequence[int]) -> list[WorkItem]:
        """The items that some shard lacks, if the shards have so many each."""
        lacking: list[WorkItem] = []
        for number, item in enumerate(self.items, self.first):
            had = item.had | sum(1 << shard for shard, count in enumerate(counts) if count > number)
            if had != (1 << len(counts)) - 1:
                lacking.append(item._replace(had=had))
        return lacking

    def plain(self) -> list[Any]:
        return [self.incarnation, [list(item) for item in self.items], self.first, self.done]

    @classmethod
    def of(cls, plain: Any) -> Lease:
        incarnation, items, first, done = plain
        return cls(incarnation, deque(WorkItem(*item) for item in items), first, done)


class WorkQueue:
    """The parts of the minibatches from `first` to before `last`, each cut into `data_shards` parts.

    With several `shards` of the parameters this queue, which is on the first one, must be told what the others have.

    >>> queue = WorkQueue(0, 2, data_shards=2)
    >>> [queue.take(worker)[0][:2] for worker in (7, 1, 7)]
    [(0, 0), (0, 1), (1, 0)]
    >>> queue.lose(7)
    >>> [item[:2] for item in queue.take(1, 5)]
    [(0, 0), (1, 0), (1, 1)]
    """

    def __init__(self, first: int, last: int, data_shards: int, *, shards: int = 1) -> None:
        if not 0 <= first <= last or data_shards < 1:
            raise ValueError(
                f"WorkQueue({first}, {last}, data_shards={data_shards}): minibatches are counted upwards from 0, and "
                f"have at least 1 part"
            )
        self.first, self.last = first, last
        self.data_shards = data_shards
        self.shards = shards
        self._row = first  # The last minibatch of which a part was leased,
        self._free = list(range(data_shards)) if first < last else []  # and its parts that are free.
        self._returned: list[WorkItem] = []  # Items that dead workers had leased, in order.
        self.leases: dict[int, Lease] = {}  # Of each worker.
        self.lost: dict[tuple[int, int], Lease] = {}  # Of lost workers: which shards have their items is not known.

    # State.

    def save(self, applied: Mapping[int, int] | None = None) -> Values:
        """The position, as plain numbers.  Of the items of each worker so many, `applied`, count as done."""
        return {
            "first": self.first,
            "last": self.last,
            "data_shards": self.data_shards,
            "row": self._row,
            "free": list(self._free),
            "shards": self.shards,
            "returned": [list(item) for item in self._returned],
            "leased": {
                worker: [list(item) for item in lease.not_done[(applied or {}).get(worker, 0) :]]
                for worker, lease in self.leases.items()
            },
        }

    @classmethod
    def load(cls, saved: Any, *, shards: int = 1) -> WorkQueue:
        """A queue at a saved position."""
        names = {"first", "last", "data_shards", "row", "free", "shards", "returned", "leased"}
        if not isinstance(saved, dict) or saved.keys() != names:
            holds = sorted(saved) if isinstance(saved, dict) else type(saved).__name__
            raise ValueError(f"a saved work queue holds {sorted(names)}, not {holds}")

        def item_of(numbers: Sequence[int]) -> WorkItem:
            item = WorkItem(*numbers)  # Which shards have it is not known if the parameters are cut into others now.
            return item if saved["shards"] == shards else item._replace(had=0)

        queue = cls(saved["first"], saved["last"], saved["data_shards"], shards=shards)
        queue._row = saved["row"]
        queue._free = list(saved["free"])
        queue._returned = sorted(item_of(item) for item in saved["returned"])
        queue.leases = {worker: Lease(0, deque(map(item_of, items))) for worker, items in saved["leased"].items()}
        return queue

    def recut(self, data_shards: int) -> None:
        """From now on minibatches are cut into so many parts; what is left of those that were begun stays as it is."""
        if data_shards == self.data_shards:
            return
        leased = (item for lease in self.leases.values() for item in lease.items)
        left = [*self._returned, *leased, *(WorkItem(self._row, part) for part in self._free)]
        self.leases.clear()
        self._returned = sorted(item._replace(parts=item.parts or self.data_shards) for item in left)
        self.data_shards = data_shards
        self._free = []

    def extend(self, last: int) -> None:
        """The run ends later than it did when it was saved."""
        if last > self.last and self.first == self.last:
            self._free = list(range(self.data_shards))
        self.last = max(last, self.last)

    def keep(self, worker: int, count: int) -> None:
        """Of the items that a worker has leased, it has the first `count`; the others are free again."""
        items = list(self.leases.pop(worker).items) if worker in self.leases else []
        self.leases[worker] = Lease(0, deque(items[:count]))
        for item in items[count:]:
            insort(self._returned, item)

    def snapshot(self) -> Values:
        """The position and what each worker has leased."""
        return {
            **self.save(),
            "leased": {},
            "leases": {worker: lease.plain() for worker, lease in self.leases.items()},
            "lost": {which: lease.plain() for which, lease in self.lost.items()},
        }

    @classmethod
    def restored(cls, saved: Values, *, shards: int) -> WorkQueue:
        own = ("leases", "lost")
        queue = cls.load({name: value for name, value in saved.items() if name not in own}, shards=shards)
        queue.leases = {worker: Lease.of(plain) for worker, plain in saved["leases"].items()}
        queue.lost = {which: Lease.of(plain) for which, plain in saved["lost"].items()}
        return queue

    # Work.

    @property
    def left(self) -> int:
        """How many items are free."""
        return len(self._returned) + len(self._free) + max(0, self.last - self._row - 1) * self.data_shards

    @property
    def is_over(self) -> bool:
        """Whether all items are done, and in all shards."""
        return not self.left and not self.lost and not any(lease.items for lease in self.leases.values())

    @property
    def is_done_here(self) -> bool:
        """Whether all items are in this shard."""
        return not self.left and not self.lost and not any(lease.undone for lease in self.leases.values())

    def held(self, worker: int) -> int:
        """How many items a worker has leased and not done."""
        return self.leases[worker].undone if worker in self.leases else 0

    def take(self, worker: int, wanted: int = 1, incarnation: int = 0) -> list[WorkItem]:
        """Lease the next items to a worker; of one minibatch the part with its rank, if that is free."""
        taken: list[WorkItem] = []
        while len(taken) < wanted and self.left:
            taken.append(self._take(worker))
        if worker not in self.leases:
            self.leases[worker] = Lease(incarnation)
        self.leases[worker].items.extend(taken)
        return taken

    def _take(self, worker: int) -> WorkItem:
        if not self._free and self._row < self.last - 1:
            self._row, self._free = self._row + 1, list(range(self.data_shards))
        if self._returned and (not self._free or self._returned[0].step <= self._row):
            own = self._returned[0]._replace(data_shard=worker)
            return self._returned.pop(_preferred(self._returned, lambda item: item[:3] == own[:3]))
        return WorkItem(self._row, self._free.pop(_preferred(self._free, lambda data_shard: data_shard == worker)))

    def do(self, worker: int, count: int) -> None:
        """A worker has done the next `count` items that it has leased."""
        if count:
            lease = self.leases[worker]
            lease.done += count
            if self.shards == 1:
                lease.land(lease.done)

    def lose(self, worker: int) -> tuple[tuple[int, int], Lease] | None:
        """A worker has left or died: the items that it has not done are free again.

        If other shards may have some of them, they are free after `settle`; which worker this was, and what it had.
        """
        if (lease := self.leases.pop(worker, None)) is None:
            return None
        which = worker, lease.incarnation
        self.lost[which] = lease
        if self.shards == 1 or not lease.items:
            self.settle(which, [lease.done] * self.shards)
            return None
        return which, lease

    def settle(self, which: tuple[int, int], counts: Sequence[int]) -> None:
        """The shards have so many items of a lost worker: those that one of them lacks are free again."""
        for item in self.lost.pop(which).lacking(counts):
            insort(self._returned, item)


def _preferred(items: Sequence[T], is_wanted: Callable[[T], bool]) -> int:
    """The index of the first item that is wanted; 0 if there is none."""
    return next((i for i, item in enumerate(items) if is_wanted(item)), 0)
