"""Each worker's part of every minibatch.

A DataLoader is rebuilt so that a worker reads only its own part; any other iterable is read whole and sliced.  Either way the
parts of one minibatch are disjoint, their sizes differ by at most one, and together they are the minibatch.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import Store
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from paceline.endpoint import Endpoint
from paceline.stripes import stripe_of


class EmptyShard(RuntimeWarning):
    """A worker got no data at all."""


class Agreement(Protocol):
    """How ranks that iterate over the same minibatches make sure of it."""

    def check_same(self, digest: bytes) -> None:
        """Raise ValueError if this rank reads another first minibatch than others."""
        ...

    def seed(self) -> int:
        """A number to shuffle by, the same on every rank."""
        ...


class ByCollectives:
    """Among ranks that are all there."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    def check_same(self, digest: bytes) -> None:
        ranks = self.endpoint.ranks
        everyones = self.endpoint.all_gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8)).wait()
        for rank, other in zip(ranks, everyones, strict=True):
            if not torch.equal(other, everyones[0]):
                raise _different(rank, ranks[0])

    def seed(self) -> int:
        return int(self.endpoint.broadcast(_drawn_seed(), self.endpoint.ranks[0]).wait())


class ByStore:
    """Among ranks that come and go: who begins its `number`-th pass first decides."""

    def __init__(self, store: Store, rank: int, number: int) -> None:
        self.store, self.rank, self.prefix = store, rank, f"pass/{number}"

    def check_same(self, digest: bytes) -> None:
        mine = f"{digest.hex()} {self.rank}"
        first, rank = self.store.compare_set(f"{self.prefix}/first", "", mine).decode().split()
        if first != digest.hex():
            raise _different(self.rank, int(rank))

    def seed(self) -> int:
        return int(self.store.compare_set(f"{self.prefix}/seed", "", str(int(_drawn_seed()))).decode())


def _drawn_seed() -> Tensor:
    return torch.randint(2**62, (1,), dtype=torch.int64)


def _different(rank: int, other: int) -> ValueError:
    """Ranks that read different minibatches would train on some samples twice and on others never."""
    return ValueError(
        f"session.shard: rank {rank} reads another first minibatch than rank {other}; every rank must iterate over the same global "
        "minibatches: give its shuffling one seed, and no DistributedSampler (this is one)"
    )


class Parts:
    """This worker's part of each minibatch, with how many samples it has.

    Where there is none for it, it gets one that is another worker's, with a count of 0: so the user's loop takes the same
    turns on every rank, and nothing comes of it.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        index: int,
        workers: int,
        agreement: Agreement,
        *,
        accumulate: int = 1,
        is_whole: Callable[[], bool] = lambda: False,
    ) -> None:
        """While `is_whole`, every worker gets every minibatch as it is."""
        self.loader, self.agreement, self.accumulate, self.is_whole = loader, agreement, accumulate, is_whole
        self.index, self.workers, self.skipped = index, workers, 0

    def skip(self, most: int) -> int:
        """Leave out up to so many minibatches at the beginning, without reading them if possible; how many are then left to skip."""
        if most:
            try:
                length = len(self.loader)  # pyright: ignore[reportArgumentType]
            except TypeError:
                raise ValueError(
                    f"session.shard({type(self.loader).__name__}): to go on where a dead worker was, the loader must have a length"
                ) from None
            self.skipped = min(most, length)
        return most - self.skipped

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        filled = seen = 0
        for part, samples in self._rebuilt() if self._can_rebuild() else self._sliced():
            seen += 1
            filled += samples > 0
            yield part, samples
        if not seen and not self.skipped:
            raise ValueError(f"session.shard({type(self.loader).__name__}): the loader yielded no minibatch")
        if not filled and not self.skipped:
            warnings.warn(
                EmptyShard(
                    f"rank {self.index} got no sample out of {seen} minibatches: they hold fewer than {self.workers} samples"
                ),
                stacklevel=3,
            )

    def _can_rebuild(self) -> bool:
        loader = self.loader
        return (
            isinstance(loader, DataLoader)
            and loader.batch_sampler is not None
            and not isinstance(loader.dataset, IterableDataset)
        )

    def _rebuilt(self) -> Iterator[tuple[Any, int]]:
        loader = self.loader
        assert isinstance(loader, DataLoader)
        parts = _PartsOfIndices(loader, self)
        mine = DataLoader(
            loader.dataset,
            batch_sampler=parts,  # pyright: ignore[reportArgumentType]
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
            generator=loader.generator,
        )
        for batch in mine:
            samples, was_whole = parts.counts.popleft()
            if was_whole and not self.is_whole():  # It was read ahead of the change.
                where, samples = self.stripe(samples)
                batch = _part(batch, where)
            yield batch, samples

    def _sliced(self) -> Iterator[tuple[Any, int]]:
        for i, batch in enumerate(self.loader):
            if i == 0:
                self.check_same(batch)
            if i < self.skipped:
                continue
            if self.is_whole():
                yield batch, samples_in(batch)
                continue
            where, samples = self.stripe(samples_in(batch))
            yield _part(batch, where), samples

    def stripe(self, samples: int) -> tuple[slice, int]:
        """Where this worker's part of a minibatch of so many samples lies, and how many it may count."""
        if samples < self.workers and self.accumulate > 1:
            raise ValueError(
                f"a minibatch of {samples} samples for {self.workers} workers, {self.accumulate} of which make a step: a sample would "
                "count twice; let the loader drop it (drop_last=True), or give every worker at least one sample"
            )
        where = stripe_of(self.index, samples, self.workers)
        return (where, where.stop - where.start) if where.stop > where.start else (slice(0, 1), 0)

    def check_same(self, first: Any) -> None:
        """Ranks that read different minibatches would train on some samples twice and on others never."""
        self.agreement.check_same(hashlib.sha256(_bytes(first)).digest())


class _PartsOfIndices:
    """A batch sampler that passes on this worker's indices of each batch, under one shuffling seed for all ranks."""

    def __init__(self, loader: DataLoader[Any], parts: Parts) -> None:
        self.batch_sampler, self.parts = loader.batch_sampler, parts
        self.counts: deque[tuple[int, bool]] = (
            deque()
        )  # of the batches that were asked for and not yet handed out, and if they are whole
        sampler = loader.sampler
        self._seed = None
        if isinstance(sampler, RandomSampler) and sampler.generator is None:
            # Without a generator torch draws a seed from the process's own, which the ranks need not share.
            self._seed = parts.agreement.seed()

    def __iter__(self) -> Iterator[list[int]]:
        assert self.batch_sampler is not None
        batches = iter(self.batch_sampler)
        first = self._first(batches)
        if first is None:
            return
        self.parts.check_same(torch.tensor(list(first)))
        for indices in islice(chain([first], batches), self.parts.skipped, None):
            whole = self.parts.is_whole()
            where, samples = (slice(None), len(indices)) if whole else self.parts.stripe(len(indices))
            self.counts.append((samples, whole))
            yield list(indices)[where]

    def _first(self, batches: Iterator[Any]) -> Any:
        """The first batch: where the sampler draws its seed."""
        if self._seed is None:
            return next(batches, None)
        kept = torch.get_rng_state()
        torch.default_generator.manual_seed(self._seed)  # Not torch.manual_seed, which would seed every GPU too.
        try:
            return next(batches, None)
        finally:
            torch.set_rng_state(kept)

    def __len__(self) -> int:
        return len(self.batch_sampler)  # pyright: ignore[reportArgumentType]


def samples_in(batch: Any) -> int:
    """How many samples a minibatch holds: the length of the first tensor found in it."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 1
    if isinstance(batch, Mapping):
        return samples_in(next(iter(batch.values())))
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return (
            samples_in(batch[0])
            if len(batch) and isinstance(batch[0], (Tensor, Mapping, Sequence)) and not isinstance(batch[0], str)
            else len(batch)
        )
    raise ValueError(
        f"session.shard: a minibatch of type {type(batch).__name__} has no length; use tensors, or tuples, lists and dicts of them"
    )


def _part(batch: Any, where: slice) -> Any:
    if isinstance(batch, Tensor):
        return batch[where]
    if isinstance(batch, Mapping):
        return {k: _part(v, where) for k, v in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_part(v, where) for v in batch))
    if len(batch) and isinstance(batch[0], (Tensor, Mapping, tuple, list)):
        return type(batch)(_part(v, where) for v in batch)
    return batch[where]


def _bytes(batch: Any) -> bytes:
    if isinstance(batch, Tensor):
        return batch.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(batch, Mapping):
        return b"".join(_bytes(v) for v in batch.values())
    if isinstance(batch, (list, tuple)):
        return b"".join(_bytes(v) for v in batch)
    return repr(batch).encode()
