"""Partitioned reading: each worker reads its own part of every minibatch.

The order of samples follows from the seed and the epoch alone, as in a Task.  So any number of workers reads the same
global minibatches, and a position (epoch and minibatch) means the same to all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from paceline.checked import check_settings, checked
from paceline.stripes import stripe_of
from paceline.worker.data import order_of

if TYPE_CHECKING:
    from paceline.session.reading import PartLoader


class EmptyShard(RuntimeWarning):
    """A worker got no data at all."""


def filled(part: slice) -> tuple[slice, int]:
    """A part and its samples; for an empty part the minibatch's first sample, which counts as none."""
    size = part.stop - part.start
    return (part, size) if size else (slice(0, 1), 0)


@dataclass(frozen=True)
class Partition:
    """Part `index` of `workers` parts of every minibatch.

    In a warm start every worker reads whole minibatches: those before which fewer than `after` samples were read.

    >>> [list(Partition(i, 3).batches(10, 4, shuffle=False)) for i in range(3)]
    [[[0, 1], [4, 5], [8]], [[2], [6], [9]], [[3], [7], []]]
    >>> list(Partition(2, 3, after=5).batches(10, 4, shuffle=False))
    [[0, 1, 2, 3], [4, 5, 6, 7], []]
    """

    index: int
    workers: int
    after: int = 0

    def __post_init__(self) -> None:
        check_settings(self)
        if self.workers < 1:
            raise ValueError(f"{self}: workers counts the parts of a minibatch and must be at least 1")
        if not 0 <= self.index < self.workers:
            raise ValueError(f"{self}: the index of one of {self.workers} parts is from 0 to {self.workers - 1}")
        if self.after < 0:
            raise ValueError(f"{self}: after is the number of samples of a warm start and must be at least 0")

    def is_whole(self, seen: int) -> bool:
        """Whether every worker reads the whole of the minibatch that comes after `seen` samples of all epochs."""
        return seen < self.after

    def part(self, samples: int, seen: int = 0) -> slice:
        """This worker's part of a minibatch of so many samples, after `seen` samples; it may be empty."""
        return slice(0, samples) if self.is_whole(seen) else stripe_of(self.index, samples, self.workers)

    def batches(
        self,
        samples: int,
        batch: int,
        *,
        seed: int | None = None,
        epoch: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        skip: int = 0,
    ) -> Batches:
        """An epoch's minibatches of a data set of so many samples, without the first `skip`: this worker's indices.

        `batch` counts the samples of all workers together.  A list is empty if a minibatch has fewer samples than
        workers.
        """
        return Batches(self, samples, batch, seed, epoch, shuffle, drop_last, skip)

    def loader(
        self,
        dataset: Dataset[Any] | Iterable[Any],
        batch: int,
        *,
        seed: int | None = None,
        shuffle: bool | None = None,
        drop_last: bool = False,
        **settings: Any,
    ) -> PartLoader:
        """A loader of this worker's parts, whose position can be saved; `settings` are those of torch's DataLoader.

        `batch` counts the samples of all workers together.  A data set with a length is shuffled by `seed` in every
        epoch, unless `shuffle` is False; a stream is read in its own order.
        """
        from paceline.session.reading import PartLoader

        return PartLoader(self, dataset, batch, seed=seed, shuffle=shuffle, drop_last=drop_last, settings=settings)


# What decides which minibatches an epoch has.
READING: dict[str, Any] = {"samples": int, "batch": int, "seed": int | None, "shuffle": bool, "drop_last": bool}


@dataclass(frozen=True)
class Batches:
    """This worker's indices of each minibatch of one epoch.  It can be iterated over again, and read by any reader."""

    partition: Partition
    samples: int
    batch: int
    seed: int | None = None
    epoch: int = 0
    shuffle: bool = True
    drop_last: bool = False
    skip: int = 0

    def __post_init__(self) -> None:
        check_reading("Partition.batches", {name: getattr(self, name) for name in READING})
        for name in ("epoch", "skip"):
            if checked("Partition.batches", name, value := getattr(self, name), int) < 0:
                raise ValueError(f"Partition.batches({name}={value}): {name} is a number from 0")
        if self.skip > self.in_epoch:
            raise ValueError(
                f"Partition.batches(skip={self.skip}): an epoch has {self.in_epoch} minibatches of {self.batch} "
                f"samples; skip those of epoch {self.epoch} alone"
            )

    @property
    def in_epoch(self) -> int:
        """The number of minibatches in a whole epoch."""
        return self.samples // self.batch if self.drop_last else -(-self.samples // self.batch)

    @property
    def seen(self) -> int:
        """The samples that all workers have read before the first of these minibatches, since the first epoch."""
        each = min(self.samples, self.in_epoch * self.batch)
        return self.epoch * each + min(self.skip * self.batch, each)

    def __len__(self) -> int:
        return self.in_epoch - self.skip

    def sizes(self) -> Iterator[tuple[int, slice]]:
        """The samples of each whole minibatch, and this worker's part of it."""
        seen = self.seen
        for number in range(self.skip, self.in_epoch):
            size = min(self.batch, self.samples - number * self.batch)
            yield size, self.partition.part(size, seen)
            seen += size

    def __iter__(self) -> Iterator[list[int]]:
        return self.indices()

    def indices(self, *, fill: bool = False) -> Iterator[list[int]]:
        """With `fill` an empty part has the minibatch's first sample, since a DataLoader cannot collate nothing."""
        order = None if self.seed is None else order_of(self.samples, self.seed, self.epoch)
        start = self.skip * self.batch
        for size, part in self.sizes():
            if fill:
                part, _ = filled(part)
            where = range(start, start + size)[part]
            yield list(where) if order is None else order[where.start : where.stop].tolist()
            start += size


def check_reading(call: str, given: Mapping[str, Any]) -> None:
    """Raise ValueError unless these settings give every worker the same minibatches."""
    for name, value in given.items():
        checked(call, name, value, READING[name])
    samples = given.get("samples", 1)
    batch = given["batch"]
    seed = given["seed"]
    if batch < 1:
        raise ValueError(f"{call}(batch={batch}): a minibatch has at least 1 sample")
    if samples < 1:
        raise ValueError(f"{call}: the data set has {samples} samples, and needs at least 1")
    if given["drop_last"] and "samples" in given and samples < batch:
        raise ValueError(
            f"{call}(batch={batch}, drop_last=True): the data set has {samples} samples, so every epoch would be "
            "empty; give a smaller batch, or drop_last=False"
        )
    if given["shuffle"] and seed is None:
        raise ValueError(f"{call}(seed=None): to shuffle give seed=..., the same on every worker; or shuffle=False")
    if not given["shuffle"] and seed is not None:
        raise ValueError(f"{call}(seed={seed}): nothing is shuffled, so the seed has no effect; leave it out")
    if seed is not None and not 0 <= seed < 2**40:
        raise ValueError(f"{call}(seed={seed}): a seed is a number from 0 to 2**40 - 1")
