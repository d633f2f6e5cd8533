"""Each worker's part of every minibatch.

A DataLoader is rebuilt so that a worker reads only its own part.  Any other iterable is read whole and cut, and so is a
DataLoader if the user wants that.  In all cases the parts of one minibatch are disjoint, their sizes differ by at most
one, and together they are the minibatch.  With a function of the user's (`split`) every minibatch is read whole, and
that function says what a part is.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import chain, islice
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from paceline.session.agreement import Agreement
from paceline.session.batches import SPLIT, Cutter, digest, is_plain
from paceline.session.partition import EmptyShard, Partition, filled

Read = Literal["part", "whole"]
"""Whether a worker reads only its part of each minibatch, or the whole of it and keeps its part."""


class Parts:
    """This worker's part of each minibatch, with the number of its samples.

    A worker for which a minibatch has no part gets one sample of another worker, with a count of 0.  So the user's loop
    takes the same number of steps on every rank, and the sample changes nothing.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        partition: Partition,
        agreement: Agreement,
        *,
        cutter: Cutter | None = None,
        accumulate: int = 1,
        reads_whole: bool = False,
        reads_full_batches: Callable[[], bool] = lambda: False,
    ) -> None:
        """With `reads_whole` a worker reads whole minibatches and keeps its part of them.

        While `reads_full_batches` is true, every worker gets every minibatch whole.
        """
        self.loader = loader
        self.partition = partition
        self.agreement = agreement
        self.cutter = Cutter() if cutter is None else cutter
        self.accumulate = accumulate
        self.reads_whole = reads_whole or self.cutter.split is not None
        self.reads_full_batches = reads_full_batches
        self.turn = 0  # How often the parts of minibatches have changed.
        self.skipped = 0
        self._most = 0  # Samples of a minibatch so far.

    def cut_anew(self, partition: Partition) -> None:
        """From the next minibatch on this worker has another part."""
        self.partition = partition
        self.turn += 1

    def skip(self, most: int) -> int:
        """Skip up to `most` minibatches more, if possible without reading them; return how many remain."""
        if not most:
            return 0
        length = length_of(self.loader)
        if length is None:
            raise ValueError(
                f"session.shard({type(self.loader).__name__}): this worker replaces a dead one and must skip "
                f"{most} minibatches; for that the loader must have a length"
            )
        skipped = min(most, length - self.skipped)
        self.skipped += skipped
        return most - skipped

    def __iter__(self) -> Generator[tuple[Any, int]]:
        seen = 0
        has_data = False
        for part, samples in self._rebuilt() if can_rebuild(self.loader) else self._sliced():
            seen += 1
            has_data |= samples > 0
            yield part, samples
        if not seen and not self.skipped:
            raise no_minibatch(self.loader)
        if not has_data and not self.skipped:
            warnings.warn(
                EmptyShard(
                    f"rank {self.partition.index} got no sample out of {seen} minibatches: they have at most "
                    f"{self._most} samples for {self.partition.workers} workers"
                ),
                stacklevel=3,
            )

    def _rebuilt(self) -> Iterator[tuple[Any, int]]:
        loader = self.loader
        assert isinstance(loader, DataLoader)
        sampler = _PartSampler(loader, self)
        turn = -1
        while turn != self.turn:  # What was fetched ahead before a change is fetched again.
            turn = self.turn
            yield from self._fetched(loader, sampler)
            sampler.put_back()

    def _fetched(self, loader: DataLoader[Any], sampler: _PartSampler) -> Iterator[tuple[Any, int]]:
        """The minibatches up to the end, or to a change of this worker's part."""
        turn = self.turn
        rebuilt = DataLoader(
            loader.dataset,
            batch_sampler=sampler,  # pyright: ignore[reportArgumentType]
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
            generator=loader.generator if not turn else _apart(turn),
        )
        for i, batch in enumerate(rebuilt):
            samples, is_whole, _ = sampler.requested.popleft()
            is_cut = is_whole and not self.reads_full_batches()
            # A minibatch may be fetched whole before the change to parts.  If that will happen, it is tested at once.
            will_be_cut = is_whole and not i and (self.reads_whole or loader.num_workers)
            if self.cutter.split is None and (is_cut or will_be_cut):
                self._check_collated(batch, samples)
            yield self._cut(batch) if is_cut else (batch, samples)
            if turn != self.turn:
                return

    def _check_collated(self, batch: Any, samples: int) -> None:
        """Raise ValueError if a minibatch of a DataLoader cannot be cut into its samples."""
        if (found := self.cutter.samples(batch)) != samples:
            raise ValueError(
                f"session.shard: the loader's collate_fn made a minibatch of length {found} along dimension "
                f"{self.cutter.dim} of {samples} samples; give shard(loader, dim=...) with the dimension of the "
                f"samples, or {SPLIT}"
            )

    def _sliced(self) -> Iterator[tuple[Any, int]]:
        if isinstance(self.loader, DataLoader) and not getattr(self.loader, "in_order", True):
            raise ValueError(
                f"session.shard({loader_name(self.loader)}, in_order=False): workers would cut different minibatches, "
                "in the order in which the loader workers of each are ready; leave in_order out"
            )
        read = 0
        for read, batch in enumerate(read_whole(self.loader), start=1):
            if read == 1:
                self.check_same(batch)
            if read > self.skipped:
                yield (batch, self.cutter.samples(batch)) if self.reads_full_batches() else self._cut(batch)
        check_skip(self.loader, self.skipped, read)

    def _cut(self, batch: Any) -> tuple[Any, int]:
        """This worker's part of a whole minibatch, and how many of its samples count."""
        if self.cutter.split is None:
            where, samples = self.stripe(self.cutter.samples(batch))
            return self.cutter.part(batch, where), samples
        return self.cutter.apply(batch, self.partition.index, self.partition.workers)

    def stripe(self, samples: int) -> tuple[slice, int]:
        """This worker's slice of a minibatch of `samples`, and how many of its samples count."""
        check_accumulated(samples, self.partition.workers, self.accumulate)
        self._most = max(self._most, samples)
        return filled(self.partition.part(samples))

    def check_same(self, first: Any) -> None:
        """Raise ValueError if the ranks read different first minibatches."""
        self.agreement.check_same(digest(first))


def _apart(turn: int) -> torch.Generator:
    """A generator for a loader that is built again: a draw from the user's would change the order of the next pass."""
    return torch.Generator().manual_seed(torch.initial_seed() % 2**32 + turn)


class _PartSampler:
    """A batch sampler that yields this worker's indices of each batch; all ranks shuffle by the same seed."""

    def __init__(self, loader: DataLoader[Any], parts: Parts) -> None:
        self.batch_sampler = loader.batch_sampler
        self.parts = parts
        # The batches that the DataLoader requested and has not yet returned: samples, whether the batch is whole, and
        # the indices of the whole one.
        self.requested: deque[tuple[int, bool, list[int]]] = deque()
        self._batches: Iterator[Any] | None = None  # Those that are still to be requested.
        self._seed = None
        if is_shuffled_anew(loader):
            # Without a generator torch draws a seed from the process's own generator, which may differ between ranks.
            self._seed = parts.agreement.seed()

    def __iter__(self) -> Iterator[list[int]]:
        if self._batches is None:
            self._batches = self._all()
        for indices in self._batches:
            is_whole = self.parts.reads_full_batches() or self.parts.reads_whole
            where, samples = (slice(None), len(indices)) if is_whole else self.parts.stripe(len(indices))
            self.requested.append((samples, is_whole, list(indices)))
            yield list(indices)[where]

    def put_back(self) -> None:
        """What was requested and not returned is to be requested again."""
        waiting = [indices for _, _, indices in self.requested]
        self.requested.clear()
        self._batches = chain(waiting, self._batches or ())

    def _all(self) -> Iterator[Any]:
        """Each whole minibatch of this pass, but those to skip."""
        assert self.batch_sampler is not None
        batches = iter(self.batch_sampler)
        first = self._first(batches)
        if first is None:
            return
        self.parts.check_same(list(first))
        yield from islice(chain([first], batches), self.parts.skipped, None)

    def _first(self, batches: Iterator[Any]) -> Any:
        """The first batch.  The sampler draws its seed here."""
        if self._seed is None:
            return next(batches, None)
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(self._seed)  # torch.manual_seed would seed every GPU too.
        try:
            return next(batches, None)
        finally:
            torch.set_rng_state(state)

    def __len__(self) -> int:
        return len(self.batch_sampler)  # pyright: ignore[reportArgumentType]


def can_rebuild(loader: Iterable[Any]) -> bool:
    """Whether a loader can be built anew so that it reads only a part of each minibatch."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__  # Otherwise its own way of reading would be left out.
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
    )


def is_shuffled_anew(loader: Iterable[Any]) -> bool:
    """Whether a loader draws a seed of its own for every pass."""
    if not isinstance(loader, DataLoader):
        return False
    sampler: Any = loader.sampler
    is_random = isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler))
    return is_random and sampler.generator is None


def read_whole(loader: Iterable[Any]) -> Iterator[Any]:
    """Its minibatches; ValueError if each of torch's loader workers reads the whole of a stream."""
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset) or loader.num_workers < 2:
        yield from loader
        return
    first: bytes | None = None
    for number, batch in enumerate(loader):
        if number < 2 and is_plain(batch):  # They are the first ones of two loader workers.
            found = digest(batch)
            if found == first:
                raise _read_twice(loader)
            first = found
        yield batch


def _read_twice(loader: DataLoader[Any]) -> ValueError:
    stream = type(loader.dataset).__name__
    return ValueError(
        f"session.shard({loader_name(loader)}): its {loader.num_workers} loader workers begin with equal minibatches, "
        f"so each of them reads the whole stream, and every sample would come {loader.num_workers} times: let "
        f"{stream}.__iter__ share its samples out by torch.utils.data.get_worker_info(), or read it by "
        f"pl.Partition(session.rank, session.workers).loader({stream}(...), batch=..., num_workers="
        f"{loader.num_workers})"
    )


def loader_name(loader: Iterable[Any]) -> str:
    """A loader as an error shows it."""
    name = type(loader).__name__
    if not isinstance(loader, DataLoader):
        return name
    workers = f", num_workers={loader.num_workers}" if loader.num_workers else ""
    return f"{name}({type(loader.dataset).__name__}{workers})"


def check_skip(loader: Iterable[Any], skip: int, length: int) -> None:
    if skip > length:
        raise ValueError(
            f"session.shard({type(loader).__name__}, skip={skip}): the loader has {length} minibatches; skip those of "
            "this epoch alone"
        )


def check_accumulated(samples: int, workers: int, accumulate: int) -> None:
    """Raise ValueError if a worker without a part would add another worker's sample to its gradient."""
    if samples < workers and accumulate > 1:
        raise ValueError(
            f"session.shard: a minibatch has {samples} samples for {workers} workers, and {accumulate} minibatches "
            "make a step, so a sample would count twice; let the loader drop it (drop_last=True), or give every worker "
            "at least one sample"
        )


def length_of(loader: Iterable[Any]) -> int | None:
    """The number of minibatches of a loader; None if it does not say."""
    try:
        return len(loader)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return None


def no_minibatch(loader: Iterable[Any]) -> ValueError:
    return ValueError(
        f"session.shard({type(loader).__name__}): the loader yielded no minibatch; an iterator or generator can be "
        "read only once, so give a loader that starts anew in every epoch"
    )
