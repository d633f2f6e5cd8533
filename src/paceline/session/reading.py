"""PartLoader: a data set as one worker reads it, with a position that can be saved.

The position is global: an epoch, and a minibatch in it.  It counts the minibatches that the training loop has received,
not those that torch's loader workers have fetched ahead, and any number of workers can continue from it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker as loader_worker

from paceline.checked import checked
from paceline.session.batches import digest
from paceline.session.partition import Batches, EmptyShard, Partition, check_reading, filled

CALL = "Partition.loader"
POSITION = ("epoch", "minibatch", "seen")
# Settings of a DataLoader that a PartLoader makes itself, and what to give instead.
REFUSED = {
    "batch_size": "give batch=..., the samples of all workers together",
    "sampler": "the order follows from seed=..., or is that of the data set",
    "batch_sampler": "the minibatches follow from batch=... and seed=...; read your own by Partition.part",
}


class Part(NamedTuple):
    """A minibatch as one worker reads it."""

    batch: Any
    samples: int  # This worker's; with 0 the batch is one sample of another worker.
    size: int  # The samples of all workers.
    is_whole: bool  # Whether every worker reads the whole of it.
    digest: bytes | None  # Of the whole minibatch, if it is the first that a loader worker reads.


class PartLoader:
    """Yields this worker's part of each minibatch of the rest of the current epoch, with the number of its samples.

    A worker for which a minibatch has no part gets one sample of another worker, with the number 0: it keeps taking
    part, and must give that sample no weight.
    """

    def __init__(
        self,
        partition: Partition,
        dataset: Dataset[Any] | Iterable[Any],
        batch: int,
        *,
        seed: int | None,
        shuffle: bool | None,
        drop_last: bool,
        settings: dict[str, Any],
    ) -> None:
        self.partition = partition
        self.dataset = dataset
        self.batch_size = batch
        self.drop_last = drop_last
        self.epoch = 0
        self.minibatch = 0  # The minibatches of this epoch that the training loop has received,
        self.seen = 0  # and the samples of all workers in those and in all epochs before.
        self._settings = settings
        self._turn = 0  # Changes with every pass and loaded state, which end the pass before.
        self._reading = _checked_reading(dataset, batch, seed, shuffle, drop_last)
        _refuse_settings(settings)
        self._torch_loader()  # torch refuses wrong settings.
        if self.samples is not None and not any(part.stop > part.start for _, part in self._batches().sizes()):
            warnings.warn(
                EmptyShard(
                    f"worker {partition.index} gets no sample: minibatches have at most {min(batch, self.samples)} "
                    f"samples for {partition.workers} workers"
                ),
                stacklevel=3,
            )

    @property
    def samples(self) -> int | None:
        """The number of samples of the data set; None for a stream."""
        return self._reading.get("samples")

    def __len__(self) -> int:
        """The number of minibatches in a whole epoch."""
        if self.samples is None:
            raise TypeError("the length of a stream is not known")
        return self._batches().in_epoch

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        with closing(self.read()) as parts:
            for part in parts:
                yield part.batch, part.samples

    def read(self) -> Generator[Part]:
        """The same, with what a session must know about each minibatch."""
        self._turn += 1
        turn = self._turn
        first: bytes | None = None
        for part in self._parts():
            if part.digest is not None and first not in (None, part.digest):
                raise ValueError(
                    f"{CALL}({_name(self.dataset)}): loader workers read the stream in different orders, so samples "
                    "would come twice or never: shuffle it by one seed, which does not depend on the loader worker"
                )
            first = first or part.digest
            self.minibatch += 1
            self.seen += part.size
            yield part
            if turn != self._turn:
                raise RuntimeError(
                    "this pass over a Partition.loader has ended: since its last minibatch another pass has begun, or "
                    "a position was loaded; give each loop a loader of its own"
                )
        if not self.minibatch:
            raise ValueError(
                f"{CALL}({_name(self.dataset)}): the stream yielded no minibatch; an iterator or generator can be read "
                "only once, so give a data set that starts anew in every epoch"
            )
        self.epoch += 1
        self.minibatch = 0

    def skip(self, most: int) -> int:
        """Go past up to `most` minibatches of this epoch without reading them; return how many remain."""
        if not most:
            return 0
        if self.samples is None:
            raise ValueError(
                f"{CALL}({_name(self.dataset)}): a stream has no length, so it is not known in which epoch a worker "
                f"is that must skip {most} minibatches; load the position of another worker"
            )
        skipped = min(most, len(self) - self.minibatch)
        self._turn += 1
        self.minibatch += skipped
        self.seen = self._batches().seen
        return most - skipped

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on every worker; a minibatch counts as soon as the training loop has it."""
        return {"epoch": self.epoch, "minibatch": self.minibatch, "seen": self.seen, **self._reading}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position, also with another number of workers; the data and its order must be the same."""
        for name in (*POSITION, *self._reading):
            if name not in state:
                raise ValueError(f"{CALL}.load_state_dict: the state has no '{name}'; give that of a Partition.loader")
        for name, saved in state.items():
            if name not in POSITION and saved != (mine := self._reading.get(name)):
                raise ValueError(
                    f"{CALL}.load_state_dict: the position was saved with {name}={saved}, and this loader has "
                    f"{name}={mine}, so its minibatches are others; give the same data and settings"
                )
        self._turn += 1
        self.epoch = state["epoch"]
        self.minibatch = state["minibatch"]
        self.seen = state["seen"]

    def _batches(self) -> Batches:
        """The rest of this epoch, of a data set with a length."""
        return Batches(self.partition, **self._reading, epoch=self.epoch, skip=self.minibatch)

    def _parts(self) -> Iterator[Part]:
        loader = self._torch_loader()
        if self.samples is None:
            yield from loader
            return
        known: bytes | None = digest([self.partition.after, *self.state_dict().items()])
        whole = self.partition.is_whole
        for batch, (size, part) in zip(loader, self._batches().sizes(), strict=True):
            yield Part(batch, part.stop - part.start, size, whole(self.seen), known)
            known = None

    def _torch_loader(self) -> DataLoader[Any]:
        """torch's loader for the rest of this epoch."""
        dataset: Any = self.dataset
        if self.samples is not None:
            return DataLoader(dataset, batch_sampler=_Indices(self._batches()), **self._settings)
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(self.epoch)
        stream = PartStream(dataset, self.partition, self.batch_size, self.drop_last, self.minibatch, self.seen)
        settings: dict[str, Any] = dict(self._settings)
        settings["collate_fn"] = CollatePart(settings.get("collate_fn") or default_collate)
        return DataLoader(stream, batch_size=None, **settings)


@dataclass(frozen=True)
class _Indices:
    """What a DataLoader shall fetch: it cannot collate an empty part, so that has one sample."""

    batches: Batches

    def __iter__(self) -> Iterator[list[int]]:
        return self.batches.indices(fill=True)

    def __len__(self) -> int:
        return len(self.batches)


@dataclass(frozen=True)
class PartStream(IterableDataset[Part]):
    """A worker's part of each minibatch of a stream, not yet collated.

    Each of torch's loader workers reads the whole stream, and yields one minibatch in turn.  A DataLoader asks them in
    the same order, so its minibatches are those of the stream.
    """

    stream: Iterable[Any]
    partition: Partition
    batch: int
    drop_last: bool
    skip: int
    seen: int  # Samples of all workers before the first minibatch that is not skipped.

    def __iter__(self) -> Iterator[Part]:
        info = get_worker_info()
        mine, readers = (0, 1) if info is None else (info.id, info.num_workers)
        seen = self.seen
        first: bytes | None = None
        for number, samples in enumerate(self._minibatches(), start=-self.skip):
            if number < 0:
                continue
            if not number:
                first = digest([*self.identity, samples])
            size = len(samples)
            if number % readers == mine:
                where, own = filled(self.partition.part(size, seen))
                yield Part(samples[where], own, size, self.partition.is_whole(seen), first)
                first = None
            seen += size

    @property
    def identity(self) -> tuple[int, ...]:
        """What the workers' readers must have in common, beside the stream."""
        return self.batch, self.drop_last, self.skip, self.seen, self.partition.after

    def _minibatches(self) -> Iterator[list[Any]]:
        with _outside_of_loader_workers():
            stream = iter(self.stream)
        while True:
            with _outside_of_loader_workers():
                samples = list(islice(stream, self.batch))
            if not samples or (self.drop_last and len(samples) < self.batch):
                return
            yield samples


@dataclass(frozen=True)
class CollatePart:
    """Collates the samples of a part."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, part: Part) -> Part:
        return part._replace(batch=self.collate(part.batch))


@contextmanager
def _outside_of_loader_workers() -> Generator[None]:
    """In this block a stream that shares its samples out to torch's loader workers yields all of them."""
    info = get_worker_info()
    loader_worker._worker_info = None  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        loader_worker._worker_info = info  # pyright: ignore[reportPrivateUsage]


def _checked_reading(
    dataset: object, batch: int, seed: int | None, shuffle: bool | None, drop_last: bool
) -> dict[str, Any]:
    """The settings that decide which minibatches an epoch has; ValueError if the data set cannot be read so."""
    if isinstance(dataset, (DataLoader, PartLoader)):
        raise ValueError(
            f"{CALL}({_name(dataset)}): give the data set, and the settings of its loader beside it; "
            "session.shard(loader) cuts the minibatches of any loader"
        )
    shuffle = checked(CALL, "shuffle", shuffle, bool | None)
    reading: dict[str, Any] = {"batch": batch, "seed": seed, "drop_last": drop_last}
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        if not isinstance(dataset, Iterable):
            raise TypeError(f"{CALL}({_name(dataset)}): give a data set with a length and indices, or an iterable")
        if shuffle:
            raise ValueError(
                f"{CALL}({_name(dataset)}, shuffle=True): a stream is read in its own order; shuffle it where it is "
                "made, by one seed on all workers"
            )
        reading["shuffle"] = False
    else:
        if not hasattr(dataset, "__len__"):
            raise TypeError(f"{CALL}({_name(dataset)}): the data set has indices and no length; give it a __len__")
        reading["shuffle"] = True if shuffle is None else shuffle
        reading["samples"] = len(dataset)  # pyright: ignore[reportArgumentType]
    check_reading(CALL, reading)
    return reading


def _refuse_settings(settings: dict[str, Any]) -> None:
    for name, instead in REFUSED.items():
        if name in settings:
            raise ValueError(f"{CALL}({name}=...): the loader makes its own; {instead}")
    if not settings.get("in_order", True):
        raise ValueError(f"{CALL}(in_order=False): a position in the data needs minibatches in order; leave it out")
    if settings.get("persistent_workers"):
        raise ValueError(
            f"{CALL}(persistent_workers=True): loader workers start anew in every epoch, so this has no effect; leave "
            "it out"
        )


def _name(dataset: object) -> str:
    return type(dataset).__name__
