"""Session: a model that is trained by a strategy in the user's own loop.  Made by `attach`."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from numbers import Real
from operator import index
from types import TracebackType
from typing import Any, TypeVar, overload

from torch import Tensor, nn

from paceline.engines.job import Job
from paceline.session.batches import Cutter, Split
from paceline.session.ending import end_with_same_model
from paceline.session.feed import Feed, ShardedLoader
from paceline.session.kept_session import KeptSession
from paceline.session.loading import Read
from paceline.session.loop import Loop
from paceline.session.loop_members import NO_SHARD
from paceline.session.loop_saving import LoopSaving
from paceline.session.optimizer import SessionOptimizer
from paceline.session.reading import PartLoader
from paceline.session.settings import GroupSettings
from paceline.session.shared_buffers import SharedBuffers
from paceline.session.watching import LoopWatch
from paceline.strategy import Strategy
from paceline.trace import Trace
from paceline.worker.flat import untie

B = TypeVar("B")


class UnclosedSession(RuntimeWarning):
    """A session took steps and was never closed."""


class Session(KeptSession):
    """A model under a strategy, until the `with` block ends."""

    def __init__(self, job: Job, loop: Loop, optimizer: SessionOptimizer, strategy: Strategy, watch: LoopWatch) -> None:
        self.job = job
        self.loop = loop
        self.optimizer = optimizer
        self.strategy = strategy
        self._watch = watch
        self._endpoint = loop.replica.endpoint
        self._settings = GroupSettings(self._endpoint, job.store, optimizer.inner)
        self._is_open = True
        if strategy.needs.collectives:  # Otherwise no rank waits for another one in its loop.
            loop.guard.whereabouts.start()
        _open.add(self)
        self._unclosed = weakref.finalize(self, _warn_of_unclosed, type(strategy).__name__, loop, job.workers, watch)
        self._feed = Feed(job, loop, rank=self.rank, workers=self.workers, elastic=strategy.needs.elastic)
        load = self.load_state_dict if job.elastic is None else self._load
        self._saving = LoopSaving(job, loop, self._feed, watch, load)
        self._members = None

    @property
    def rank(self) -> int:
        """This worker's number; the ranks that hold the tensors of one replica together have the same.

        With elastic=True it changes when workers are lost or join, and so does `workers`: ask each time.
        """
        if self.job.elastic is not None:
            return self.job.elastic.rank
        return self.job.rank if self._is_whole else self._endpoint.ranks.index(self.job.rank)

    @property
    def workers(self) -> int:
        if self.job.elastic is not None:
            return self.job.elastic.layout.workers
        return self.job.workers if self._is_whole else len(self._endpoint.ranks)

    @property
    def trace(self) -> Trace:
        """What this rank did, and when."""
        return self.job.endpoint.trace

    @property
    def skipped(self) -> int:
        """The number of steps skipped because a gradient had NaN or infinity."""
        return self.loop.replica.batch.skipped

    def step(self, loss: float | Tensor | None = None) -> None:
        """Take the step of this minibatch, and take part in what the strategy exchanges.

        `loss`, if given, goes to the trace, and to strategies that follow the loss.
        """
        if loss is not None:
            self.tell(loss)
        self.optimizer.step()

    def tell(self, loss: float | Tensor) -> None:
        """Give the loss of the next step, if other code than `session.step` takes that step."""
        self.loop.batch.tell(_mean_loss(loss))

    # Data.

    @overload
    def shard(self, loader: PartLoader) -> ShardedLoader[Any]: ...

    @overload
    def shard(
        self, loader: Iterable[B], *, dim: int = 0, split: Split | None = None, skip: int = 0, read: Read | None = None
    ) -> ShardedLoader[B]: ...

    def shard(
        self,
        loader: Iterable[Any],
        *,
        dim: int = 0,
        split: Split | None = None,
        skip: int = 0,
        read: Read | None = None,
    ) -> ShardedLoader[Any]:
        """This worker's part of every minibatch of `loader`, to be iterated over once in every epoch.

        Every rank gives the same loader, or that of its own `Partition`.  Minibatches that are read to evaluate the
        model (in eval mode, or without gradients) are split in the same way and change nothing.  Samples lie along the
        dimension `dim` of each array.  For other minibatches `split(batch, index, workers)` returns the part of a
        worker and the number of its samples.  The first pass leaves out the first `skip` minibatches: so a resumed run
        finds its place.  A DataLoader fetches only the part; with `read="whole"` it fetches whole minibatches, and the
        part is cut.
        """
        return ShardedLoader(self._feed, loader, Cutter(dim, split), skip, read)

    def count(self, samples: int) -> None:
        """Without `shard`: give the number of samples of the next backward pass; means are weighted by it."""
        if isinstance(samples, bool) or not hasattr(samples, "__index__") or index(samples) < 0:
            raise ValueError(f"session.count({samples!r}): it is the number of samples, a whole number from 0")
        if self._members is not None:
            raise ValueError(f"session.count({samples}): {NO_SHARD}")
        self.loop.batch.count(index(samples))

    # Evaluation and accumulation.

    def evaluated(self, values: Mapping[str, float]) -> None:
        """Add the values of an evaluation to the trace, for monitors and reports to show."""
        batch = self.loop.replica.batch
        numbers = {name: float(value) for name, value in values.items()}
        self.trace.evaluation(self._endpoint.now(), round(batch.total * self.workers), numbers)
        self._watch.look()

    @contextmanager
    def published(self) -> Generator[None]:
        """In this block the model has the parameters to evaluate and save, if the strategy trains at other ones."""
        vector = self.loop.replica.published
        flat = self.loop.learner.flat
        flat.refresh()
        on_step, self.optimizer.on_step = self.optimizer.on_step, _refuse_to_train_published
        try:
            with flat.showing(flat.params if vector is None else vector):
                yield
        finally:
            self.optimizer.on_step = on_step

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Backward passes in this block only add to the gradient; the first pass after the block completes it."""
        self.loop.is_paused = True
        try:
            yield
        finally:
            self.loop.is_paused = False

    # The end.

    def close(self) -> None:
        """This worker has no more data: take part until no worker has data, then release everything."""
        if not self._is_open:
            return
        buffers = None
        if self.workers > 1 and self.strategy.needs.keeps_own_buffers:
            buffers = SharedBuffers(self.job.store, self.loop.replica, self.job.rank, self.job.workers)
        try:
            self.loop.on_end()
            self.job.endpoint.missed_end = self.loop.run.missed_end
            if buffers is not None and not self.loop.run.missed_end:
                buffers.take_mean()
            if self.workers > 1 and self.strategy.needs.ordered:
                flat = self.loop.learner.flat
                with self.loop.guard.during("at the end of the `with` block"):
                    end_with_same_model(self._endpoint, flat, self._settings, self.loop.last_own_step)
            if self._members is not None:
                self._members.leave()
            self._saving.finish()
        except BaseException as error:
            self.loop.guard.whereabouts.leave(error)
            self._release(failed=True)
            raise
        self._release(failed=False)
        self.loop.tally.check()

    def _release(self, *, failed: bool) -> None:
        self._is_open = False
        _open.discard(self)
        self._unclosed.detach()
        with ExitStack() as closing:
            closing.callback(self.job.close, failed=failed)
            closing.callback(self._watch.end, failed=failed)
            closing.callback(self._saving.close, failed=failed)
            self.loop.close()
            self.optimizer.release()
            self.optimizer.on_step = _refuse_step
        untie(self.loop.learner.flat.parameters)

    def __enter__(self) -> Session:
        if not self._is_open:
            raise RuntimeError("this session has ended, and its `with` block cannot run again: attach the model again")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._is_open:
            self.loop.guard.whereabouts.leave(error)
            self._release(failed=True)


def _mean_loss(loss: object) -> float:
    if isinstance(loss, Tensor) and loss.numel() == 1:
        loss = float(loss.detach())
    if isinstance(loss, bool) or not isinstance(loss, Real):
        given = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise ValueError(f"session.step(loss): loss is {given}, and must be one number, the mean of the minibatch")
    return float(loss)


def _refuse_step(scale: Tensor | None, overflow: bool) -> None:
    raise RuntimeError(
        "session.step() after the end of the session: step with the optimizer that you gave to attach, or attach the "
        "model again"
    )


def _refuse_to_train_published(scale: Tensor | None, overflow: bool) -> None:
    raise RuntimeError(
        "session.step() inside session.published(): at the end of that block the model is what it was before, so the "
        "step would be lost; use the block to evaluate and save alone"
    )


_open: weakref.WeakSet[Session] = weakref.WeakSet()


def refuse_attached(model: nn.Module) -> None:
    """Raise ValueError if an open session already trains a parameter of this model."""
    own = {id(p) for p in model.parameters()}
    for session in _open:
        flat = session.loop.learner.flat
        for name, p in zip(flat.names, flat.parameters, strict=True):
            if id(p) in own:
                raise ValueError(
                    f"attach({type(model).__name__}): an open session of {type(session.strategy).__name__} already "
                    f"trains its parameter '{name}'; leave that session's `with` block, or call its close(), first"
                )


def _warn_of_unclosed(strategy: str, loop: Loop, workers: int, watch: LoopWatch) -> None:
    loop.guard.whereabouts.close()
    watch.end(failed=True)
    if workers > 1 and loop.last_own_step >= 0:
        warnings.warn(
            UnclosedSession(
                f"a session of {strategy} took {loop.last_own_step + 1} steps and was never closed: this rank missed "
                "the last exchange, so the ranks may have different models; use `with pl.attach(...) as session:`, or "
                "call session.close() after the last step"
            ),
            stacklevel=2,
        )
