"""Feed: the minibatches that a session yields to the user's loop."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from typing import Any, Generic, TypeVar

import torch

from paceline.engines.job import Job
from paceline.op import drive
from paceline.session.batches import Cutter
from paceline.session.loading import Agreement, ByCollectives, ByStore, Parts, length_of, no_minibatch
from paceline.session.loop import Loop

B = TypeVar("B")


class Feed:
    """Reads loaders for a session: a worker's part of every minibatch, and the number of its samples."""

    def __init__(self, job: Job, loop: Loop, *, rank: int, workers: int, elastic: bool) -> None:
        """`rank` and `workers` count replicas: the ranks of a tensor-parallel model read the same part."""
        self.job = job
        self.loop = loop
        self.rank = rank
        self.workers = workers
        self._elastic = elastic
        self._passes = 0
        # A worker that replaces a dead one skips the minibatches of the steps that the dead one has taken.
        self._to_skip = loop.replica.cursor.step * loop.accumulate

    @property
    def is_training(self) -> bool:
        return self.loop.learner.flat.model.training and torch.is_grad_enabled()

    def read(self, loader: Iterable[B], cutter: Cutter, skip: int) -> Iterator[B]:
        """One pass over a loader, without its first `skip` minibatches."""
        if self.loop.is_closed:
            raise RuntimeError("session.shard after the end of the session: read the loader itself, which is whole")
        parts = self._whole(loader, cutter, skip) if self.workers == 1 else self._parts(loader, cutter, skip)
        last = length_of(loader)
        self._passes += 1
        epoch = self._passes
        self.loop.guard.whereabouts.passes = epoch
        has_trained = False
        try:
            for number, (part, samples) in enumerate(parts, start=skip + 1):
                if self.is_training or (has_trained and torch.is_grad_enabled()):
                    has_trained = True
                    self.loop.epoch.on_minibatch(samples, number=epoch, is_last=number == last)
                    yield part
                elif self.workers == 1:
                    yield part
                elif samples:
                    has_trained = yield from self._in_eval_mode(part, samples, epoch)
        except GeneratorExit:  # The user left the loop, perhaps before the step of its last minibatch.
            if has_trained:
                self.loop.batch.forget_samples()
            raise
        if has_trained:
            self.loop.epoch.on_end()

    def _in_eval_mode(self, part: B, samples: int, epoch: int) -> Generator[B, None, bool]:
        """Yield a minibatch to evaluate the model, or to train it with layers in eval mode; whether it was trained."""
        if not torch.is_grad_enabled():
            yield part
            return False
        self.loop.epoch.was_used(epoch)  # Backward passes so far belong to other minibatches.
        self.loop.batch.take_in_eval_mode(samples, epoch)
        was_used = False
        try:
            yield part
        finally:
            was_used = self.loop.epoch.was_used(epoch)
        return was_used

    def _whole(self, loader: Iterable[Any], cutter: Cutter, skip: int) -> Iterator[tuple[Any, int]]:
        read = 0
        for read, batch in enumerate(loader, start=1):
            if read > skip:
                yield batch, _samples_or_one(batch, cutter)
        _check_skip(loader, skip, read)
        if not read:
            raise no_minibatch(loader)

    def _parts(self, loader: Iterable[Any], cutter: Cutter, skip: int) -> Iterator[tuple[Any, int]]:
        # The agreement below uses collectives.  An exchange in flight on some ranks only would disturb them.
        drive(self.loop.run.states.before_save())
        if (length := length_of(loader)) is not None:
            _check_skip(loader, skip, length)
        parts = Parts(
            loader,
            self.rank,
            self.workers,
            self._agreement(),
            cutter=cutter,
            accumulate=self.loop.accumulate,
            reads_full_batches=lambda: self.loop.learner.reads_full_batches and self.is_training,
        )
        parts.skipped = skip
        if self.is_training:
            self._to_skip = parts.skip(self._to_skip)
        doing = "reading session.shard" + ("" if self.is_training else " to evaluate")
        with closing(iter(parts)) as rest:
            while True:
                with self.loop.guard.during(doing):  # Not while the user's loop works on a minibatch.
                    found = next(rest, None)
                if found is None:
                    return
                yield found

    def _agreement(self) -> Agreement:
        if self._elastic:
            return ByStore(self.job.store, self.rank, self._passes)
        return ByCollectives(self.loop.replica.endpoint)


class ShardedLoader(Generic[B]):
    """A loader as this worker reads it.  Each iteration is one pass; only the first one skips minibatches."""

    def __init__(self, feed: Feed, loader: Iterable[B], cutter: Cutter, skip: int = 0) -> None:
        if isinstance(loader, ShardedLoader):
            raise ValueError("session.shard(session.shard(loader)): the loader is sharded already; give the loader")
        if not isinstance(loader, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"session.shard({type(loader).__name__}): give an iterable of minibatches, such as a DataLoader"
            )
        if not isinstance(skip, int) or isinstance(skip, bool) or skip < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"session.shard(skip={skip!r}): skip is a number of minibatches, from 0")
        self.loader = loader
        self._feed = feed
        self._cutter = cutter
        self._skip = skip

    def __iter__(self) -> Iterator[B]:
        skip = self._skip
        self._skip = 0
        return self._feed.read(self.loader, self._cutter, skip)

    def __len__(self) -> int:
        return len(self.loader) - self._skip  # pyright: ignore[reportArgumentType]


def _check_skip(loader: Iterable[Any], skip: int, length: int) -> None:
    if skip > length:
        raise ValueError(
            f"session.shard({type(loader).__name__}, skip={skip}): the loader has {length} minibatches; skip those of "
            "this epoch alone"
        )


def _samples_or_one(batch: object, cutter: Cutter) -> int:
    """The samples of a minibatch, or 1 if it has no length: with one worker the weights do not matter."""
    if cutter.split is not None:
        return cutter.samples(batch)
    try:
        return cutter.samples(batch)
    except ValueError:
        return 1
