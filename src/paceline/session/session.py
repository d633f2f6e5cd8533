"""Session: a model that is trained by a strategy in the user's own loop.  Made by `attach`."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.engines.job import Job
from paceline.needs import Offers, check
from paceline.op import drive
from paceline.session.batches import Cutter, Split
from paceline.session.feed import Feed, ShardedLoader
from paceline.session.loop import Loop
from paceline.session.optimizer import SessionOptimizer
from paceline.strategy import Strategy
from paceline.trace import Trace
from paceline.worker.tensors import named_tensors

B = TypeVar("B")


class Session:
    """A model under a strategy, until the `with` block ends."""

    def __init__(self, job: Job, loop: Loop, optimizer: SessionOptimizer, strategy: Strategy) -> None:
        self.job = job
        self.loop = loop
        self.optimizer = optimizer
        self.strategy = strategy
        self._is_open = True
        self._feed = Feed(job, loop, elastic=strategy.needs.elastic)

    @property
    def rank(self) -> int:
        return self.job.rank

    @property
    def workers(self) -> int:
        return self.job.workers

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
        self.loop.learner.loss = float(loss.detach()) if isinstance(loss, Tensor) else loss

    # Data.

    def shard(
        self, loader: Iterable[B], *, dim: int = 0, split: Split | None = None, skip: int = 0
    ) -> ShardedLoader[B]:
        """This worker's part of every minibatch of `loader`, to be iterated over once in every epoch.

        Every rank gives the same loader.  Minibatches that are read to evaluate the model (in eval mode, or without
        gradients) are split in the same way and change nothing.  Samples lie along the dimension `dim` of each array.
        For other minibatches `split(batch, index, workers)` returns the part of a worker and the number of its
        samples.  The first pass leaves out the first `skip` minibatches: so a resumed run finds its place.
        """
        return ShardedLoader(self._feed, loader, Cutter(dim, split), skip)

    def count(self, samples: int) -> None:
        """Without `shard`: give the number of samples of the next backward pass; means are weighted by it."""
        self.loop.batch.count(samples)

    # Evaluation and accumulation.

    @contextmanager
    def published(self) -> Generator[None]:
        """In this block the model has the parameters to evaluate and save, if the strategy trains at other ones."""
        vector = self.loop.replica.published
        params = self.loop.replica.params
        before = params.clone()
        if vector is not None:
            params.copy_(vector)
        try:
            yield
        finally:
            params.copy_(before)

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Backward passes in this block only add to the gradient; the first pass after the block completes it."""
        self.loop.is_paused = True
        try:
            yield
        finally:
            self.loop.is_paused = False

    # Save and resume.

    def state_dict(self) -> dict[str, Any]:
        """This rank's state between two steps, in slots: parameters, optimizer state, the strategy's state.

        It waits for the exchange in flight, so the other ranks must still be training.  To resume with another number
        of workers, give the states of all ranks to `resized`.
        """
        drive(self.loop.run.states.before_save())
        return self.loop.run.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state; call it before the first step.  A state that does not fit changes nothing."""
        check(self.strategy, Offers("session.load_state_dict", unbroken=False))
        run = self.loop.run
        before = self.state_dict()
        try:
            run.load_state_dict(state)
            self.loop.start()
            run.states.check_complete()
        except BaseException:
            run.load_state_dict(before)
            self.loop.start()
            raise

    # The end.

    def close(self) -> None:
        """This worker has no more data: take part until no worker has data, then release everything."""
        if not self._is_open:
            return
        try:
            self.loop.on_end()
            self._take_model_of_last()
        except BaseException:
            self._release(failed=True)
            raise
        self._release(failed=False)
        self.loop.tally.check()

    def _take_model_of_last(self) -> None:
        """Take the model of the rank with the most steps.

        A rank whose data ended first cannot take the steps of the others: their clipping, scaling and schedules ran in
        their own loops.
        """
        if self.workers == 1 or not self.strategy.needs.ordered:
            return
        endpoint = self.job.endpoint
        last_steps = [int(t) for t in endpoint.all_gather(torch.tensor(self.loop.last_own_step)).wait()]
        if len(set(last_steps)) > 1:
            source = endpoint.ranks[last_steps.index(max(last_steps))]
            for _, values in named_tensors(self.loop.learner.flat.model):
                endpoint.broadcast(values, source).wait()

    def _release(self, *, failed: bool) -> None:
        self._is_open = False
        self.loop.close()
        self.optimizer.release()
        self.job.close(failed=failed)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._is_open:
            self._release(failed=True)
