"""Feed: the minibatches that a session yields to the user's loop."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar, get_args

import torch

from paceline.engines.job import Job
from paceline.op import drive
from paceline.session.agreement import Agreement, ByCollectives, ByStore, InPlace
from paceline.session.batches import Cutter
from paceline.session.loading import (
    Parts,
    Read,
    can_rebuild,
    check_accumulated,
    check_skip,
    is_shuffled_anew,
    length_of,
    loader_name,
    no_minibatch,
    read_whole,
)
from paceline.session.loop import Loop
from paceline.session.loop_place import LoopPlace, Visit
from paceline.session.partition import Partition
from paceline.session.reading import Part, PartLoader

B = TypeVar("B")
T = TypeVar("T")


class Feed:
    """Reads loaders for a session: a worker's part of every minibatch, and the number of its samples."""

    def __init__(self, job: Job, loop: Loop, *, rank: int, workers: int, elastic: bool) -> None:
        """`rank` and `workers` count replicas: the ranks of a tensor-parallel model read the same part."""
        self.job = job
        self.loop = loop
        self.partition = Partition(rank, workers)
        self.workers = workers
        self._elastic = elastic
        self._may_change = job.elastic is not None  # Workers may join and leave between two minibatches.
        self.is_joining = False  # This worker has not begun the pass in which the others took it in.
        self._parts_now: Parts | None = None  # Of the pass that trains.
        self._turn = 0  # How often this worker's part has changed.
        self._is_whole = False  # Whether the last minibatch was read whole, to evaluate the model.
        # A worker that replaces a dead one skips the minibatches of the steps that the dead one has taken.
        self._to_skip = 0 if self._may_change else loop.replica.cursor.step * loop.accumulate
        self.place = LoopPlace(loop)
        self._visit: Visit | None = None  # The pass that has begun last, if it is one to train.
        self.on_minibatch: Callable[[], None] = lambda: None  # The session's hook, before a minibatch is trained,
        self.on_read: Callable[[], None] = lambda: None  # and before it is read.

    @property
    def is_training(self) -> bool:
        return self.loop.learner.flat.model.training and torch.is_grad_enabled()

    def cut_anew(self, rank: int, workers: int) -> None:
        """The workers have changed: from the next minibatch on this is worker `rank` of `workers`."""
        self.partition = Partition(rank, workers)
        self.workers = workers
        self._turn += 1
        if self._parts_now is not None:
            self._parts_now.cut_anew(self.partition)

    def read(self, loader: Iterable[Any], cutter: Cutter, skip: int, *, whole: bool = False) -> Iterator[Any]:
        """One pass over a loader, without its first `skip` minibatches; `whole` says how a DataLoader is read."""
        if self.loop.is_closed:
            raise RuntimeError("session.shard after the end of the session: read the loader itself, which is whole")
        visit = self.place.begin(loader) if self.is_training else None
        if visit is not None:
            skip += visit.skip
            self.is_joining = False
        if isinstance(loader, PartLoader):
            skip = loader.minibatch
            parts: Iterator[tuple[Any, int]] = self._partitioned(loader)
        elif self.workers == 1 and not self._may_change:
            parts = self._whole(loader, cutter, skip)
        else:
            parts = self._parts(loader, cutter, skip, whole)
        last = length_of(loader)
        self.place.begun += 1
        self._visit = visit
        epoch = self.place.begun
        self.loop.guard.whereabouts.passes = epoch
        has_trained = False
        try:
            for number, (part, samples) in enumerate(self._each(parts, visit), start=skip + 1):
                if self.is_training or (has_trained and torch.is_grad_enabled()):
                    has_trained = True
                    if visit is not None:
                        self.on_minibatch()
                        self.place.take(visit)
                    self.loop.epoch.on_minibatch(samples, number=epoch, is_last=number == last)
                    yield part
                elif self.workers == 1 and not self._may_change:
                    yield part
                elif samples:
                    has_trained = yield from self._in_eval_mode(part, samples, epoch)
        except GeneratorExit:  # The user left the loop, perhaps before the step of its last minibatch.
            if has_trained:
                self.loop.batch.forget_samples()
                self.place.end(visit)
            raise
        if has_trained or visit is not None:
            self.place.end(visit)
        if has_trained:
            self.loop.epoch.on_end()

    def _each(self, parts: Iterator[T], visit: Visit | None) -> Iterator[T]:
        """All of these, each after the workers may have changed."""
        while True:
            if visit is not None and self.is_training:
                self.on_read()
            found = next(parts, None)
            if found is None:
                return
            yield found

    def _in_eval_mode(self, part: Any, samples: int, epoch: int) -> Generator[Any, None, bool]:
        """Yield a minibatch to evaluate the model, or to train it with layers in eval mode; whether it was trained."""
        if not torch.is_grad_enabled():
            yield part
            return False
        self.loop.epoch.was_used(epoch)  # Backward passes so far belong to other minibatches.
        self.loop.batch.take_in_eval_mode(samples, epoch)
        was_part = self.loop.learner.reads_full_batches and not self._is_whole
        was_used = False
        try:
            yield part
        finally:
            was_used = self.loop.epoch.was_used(epoch)
        if was_used and was_part:
            raise RuntimeError(
                "session.shard gave this worker a part of a minibatch, since the model was in eval mode, and it was "
                "trained on it; in a warm start (Replicated) all workers train on whole minibatches: call "
                "model.train(), and eval() of the layers that stay as they are"
            )
        return was_used

    def _whole(self, loader: Iterable[Any], cutter: Cutter, skip: int) -> Iterator[tuple[Any, int]]:
        read = 0
        for read, batch in enumerate(read_whole(loader), start=1):
            if read > skip:
                yield batch, _samples_or_one(batch, cutter)
        check_skip(loader, skip, read)
        if not read:
            raise no_minibatch(loader)

    def _parts(self, loader: Iterable[Any], cutter: Cutter, skip: int, whole: bool) -> Iterator[tuple[Any, int]]:
        self._end_exchanges()
        if (length := length_of(loader)) is not None:
            check_skip(loader, skip, length)
        parts = Parts(
            loader,
            self.partition,
            self._agreement(),
            cutter=cutter,
            accumulate=self.loop.accumulate,
            reads_whole=whole,
            reads_full_batches=lambda: self.loop.learner.reads_full_batches and self.is_training,
        )
        parts.skipped = skip
        if self.is_training:
            self._parts_now = parts
            self._to_skip = parts.skip(self._to_skip)
        self._is_whole = False  # In eval mode even a warm start reads parts.
        yield from self._guarded(iter(parts))

    def _partitioned(self, loader: PartLoader) -> Iterator[tuple[Any, int]]:
        """The parts of a loader that reads this worker's part by itself."""
        given = loader.partition
        if self._may_change:
            given = loader.partition = replace(self.partition, after=given.after)
        if (given.index, given.workers) != (self.partition.index, self.workers):
            raise ValueError(
                f"session.shard({given}.loader(...)): this is worker {self.partition.index} of {self.workers}; give "
                "the loader of pl.Partition(session.rank, session.workers)"
            )
        self._end_exchanges()
        if self.is_training:
            self._to_skip = loader.skip(self._to_skip)
        agreement = self._agreement()
        is_resumed = self._visit is not None and self._visit.first is not None  # It has a position instead.
        turn = -1
        while turn != self._turn:
            turn = self._turn
            for number, part in enumerate(self._guarded(loader.read())):
                if not number and (self.workers > 1 or self._may_change) and not is_resumed:
                    assert part.digest is not None
                    agreement.check_same(part.digest)
                is_resumed = True
                if self.is_training:
                    check_accumulated(part.size, self.workers, self.loop.accumulate)
                    self._check_warm_start(loader, part)
                self._is_whole = part.is_whole
                yield part.batch, part.samples
                if turn != self._turn:  # The position of the loader stays; the parts are others.
                    loader.partition = replace(self.partition, after=given.after)
                    break

    def _check_warm_start(self, loader: PartLoader, part: Part) -> None:
        """Raise ValueError unless the loader's warm start is the strategy's."""
        if part.is_whole == self.loop.learner.reads_full_batches:
            return
        name = type(self.loop.run.strategy).__name__
        read = f"session.shard({loader.partition}.loader(...)): after {loader.seen - part.size} samples"
        if part.is_whole:
            raise ValueError(
                f"{read} every worker reads whole minibatches, and {name} has no warm start there, so that all "
                "workers would do the same work: let Partition(after=...) be the samples of Then(Replicated(), ..., "
                "samples=...), or leave it out"
            )
        raise ValueError(
            f"{read} every worker reads its part, and in the warm start of {name} all workers train on whole "
            "minibatches: give Partition(after=...) the samples of the warm start"
        )

    def _end_exchanges(self) -> None:
        # An agreement uses collectives.  An exchange in flight on some ranks only would disturb them.
        if self.workers > 1 or self._may_change:
            drive(self.loop.run.states.end_exchanges())

    def _guarded(self, parts: Generator[T]) -> Iterator[T]:
        doing = "reading session.shard" + ("" if self.is_training else " to evaluate")
        with closing(parts) as rest:
            while True:
                with self.loop.guard.during(doing):  # Not while the user's loop works on a minibatch.
                    found = next(rest, None)
                if found is None:
                    return
                yield found

    def _agreement(self) -> Agreement:
        if self._elastic:
            visit = self._visit
            return ByStore(
                self.job.store,
                self.partition.index,
                self.place.begun,
                resumed=None if visit is None else visit.seed,
                keep=id if visit is None else partial(setattr, visit, "seed"),
            )
        if self._may_change:
            return InPlace(self.loop.replica.endpoint, self._visit, alone=self.is_joining)
        return ByCollectives(self.loop.replica.endpoint)


class ShardedLoader(Generic[B]):
    """A loader as this worker reads it.  Each iteration is one pass; only the first one skips minibatches."""

    def __init__(
        self, feed: Feed, loader: Iterable[B], cutter: Cutter, skip: int = 0, read: Read | None = None
    ) -> None:
        if isinstance(loader, ShardedLoader):
            raise ValueError("session.shard(session.shard(loader)): the loader is sharded already; give the loader")
        if not isinstance(loader, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"session.shard({type(loader).__name__}): give an iterable of minibatches, such as a DataLoader"
            )
        if not isinstance(skip, int) or isinstance(skip, bool) or skip < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"session.shard(skip={skip!r}): skip is a number of minibatches, from 0")
        if skip and is_shuffled_anew(loader):
            raise ValueError(
                f"session.shard({loader_name(loader)}, skip={skip}): the loader is shuffled by a new seed in every "
                "pass, so the minibatches to skip are not those that were read; give DataLoader(generator=...), and "
                "seed it for each epoch"
            )
        _check_read(loader, cutter, read)
        if isinstance(loader, PartLoader) and (skip or read or cutter != Cutter()):
            raise ValueError(
                "session.shard(Partition.loader(...)): the loader reads parts and has a position of its own, so skip, "
                "read, dim and split have no effect; leave them out, and resume by load_state_dict of the loader"
            )
        self.loader = loader
        self._feed = feed
        self._cutter = cutter
        self._skip = skip
        self._whole = read == "whole"

    def __iter__(self) -> Iterator[B]:
        skip = self._skip
        self._skip = 0
        return self._feed.read(self.loader, self._cutter, skip, whole=self._whole)

    def __len__(self) -> int:
        return len(self.loader) - self._skip  # pyright: ignore[reportArgumentType]


def _check_read(loader: Iterable[Any], cutter: Cutter, read: Read | None) -> None:
    """Raise ValueError if a loader cannot be read in the way that the user wants."""
    if read is not None and read not in get_args(Read):
        raise ValueError(
            f"session.shard(read={read!r}): give 'part' to read only this worker's part of each minibatch, or 'whole' "
            "to read the whole of it and keep the part"
        )
    if read == "part" and cutter.split is not None:
        raise ValueError("session.shard(read='part', split=...): split cuts whole minibatches; leave one of them out")
    if read == "part" and not can_rebuild(loader) and not isinstance(loader, PartLoader):
        raise ValueError(
            f"session.shard({loader_name(loader)}, read='part'): only a DataLoader of a data set with indices can be "
            "read in parts, and this loader is read whole and cut; leave `read` out, or give "
            "pl.Partition(session.rank, session.workers).loader(dataset, ...)"
        )


def _samples_or_one(batch: object, cutter: Cutter) -> int:
    """The samples of a minibatch, or 1 if it has no length: with one worker the weights do not matter."""
    if cutter.split is not None:
        return cutter.samples(batch)
    try:
        return cutter.samples(batch)
    except ValueError:
        return 1
