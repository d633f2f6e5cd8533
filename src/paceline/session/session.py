"""Session: a model that is trained by a strategy in the user's own loop.  Made by `attach`."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.engines.job import Job
from paceline.needs import Offers, check
from paceline.op import drive
from paceline.session.loading import Agreement, ByCollectives, ByStore, Parts, samples_in
from paceline.session.loop import Loop
from paceline.session.optimizer import SessionOptimizer
from paceline.strategy import Strategy
from paceline.trace import Trace
from paceline.worker.flat import untie
from paceline.worker.tensors import named_tensors

B = TypeVar("B")


class Session:
    """A model under a strategy, until the `with` block ends."""

    def __init__(self, job: Job, loop: Loop, optimizer: SessionOptimizer, strategy: Strategy) -> None:
        self.job = job
        self.loop = loop
        self.optimizer = optimizer
        self.strategy = strategy
        self._endpoint = loop.replica.endpoint
        self._is_open = True
        self._passes = 0
        # A worker that replaces a dead one skips the minibatches of the steps that the dead one has taken.
        self._to_skip = loop.replica.cursor.step * loop.accumulate

    @property
    def rank(self) -> int:
        """This worker's number; the ranks that hold the tensors of one replica together have the same."""
        return self.job.rank if self._is_whole else self._endpoint.ranks.index(self.job.rank)

    @property
    def workers(self) -> int:
        return self.job.workers if self._is_whole else len(self._endpoint.ranks)

    @property
    def _is_whole(self) -> bool:
        """Whether this rank holds whole tensors."""
        return self.loop.learner.parts is None

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

    def shard(self, loader: Iterable[B]) -> Iterator[B]:
        """Yield this worker's part of every minibatch of `loader`.

        Every rank gives the same loader, and iterates over it once an epoch.  Minibatches that are read to evaluate the
        model (in eval mode, or without gradients) are split in the same way and change nothing.
        """
        if self.workers == 1:
            for batch in loader:
                self.count(_samples_or_one(batch))
                yield batch
            return
        # The agreement below uses collectives.  An exchange in flight on some ranks only would disturb them.
        drive(self.loop.run.states.before_save())
        parts = Parts(
            loader,
            self.rank,
            self.workers,
            self._agreement(),
            accumulate=self.loop.accumulate,
            reads_full_batches=lambda: self.loop.learner.reads_full_batches and self._is_training(),
        )
        self._passes += 1
        if self._is_training():
            self._to_skip = parts.skip(self._to_skip)
        try:
            for part, samples in parts:
                if self._is_training():
                    self.count(samples)
                    yield part
                elif samples:
                    yield part
        except GeneratorExit:  # The user left the loop, perhaps before the step of its last minibatch.
            self.loop.batch.forget_samples()
            raise

    def _is_training(self) -> bool:
        return self.loop.learner.flat.model.training and torch.is_grad_enabled()

    def _agreement(self) -> Agreement:
        if self.strategy.needs.elastic:
            return ByStore(self.job.store, self.rank, self._passes)
        return ByCollectives(self._endpoint)

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

    def model_state_dict(self) -> dict[str, Any]:
        """A copy of the model's state_dict, to save.  Inside the block parameters are views of one vector, and
        torch.save would write all of it for each file, and safetensors would refuse."""
        state = self.loop.learner.flat.model.state_dict()
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}

    def state_dict(self) -> dict[str, Any]:
        """This rank's state between two steps, in slots: parameters, optimizer state, the strategy's state.

        It waits for the exchange in flight, so the other ranks must still be training.  To resume with another number
        of workers, give the states of all ranks to `resized`.
        """
        if not self._is_whole:
            raise ValueError(
                "session.state_dict() of a model of DTensors: save the model and the optimizer by "
                "torch.distributed.checkpoint"
            )
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

    def _take_model_of_last(self) -> None:
        """Take the model of the rank with the most steps.

        A rank whose data ended first cannot take the steps of the others: their clipping, scaling and schedules ran in
        their own loops.
        """
        if self.workers == 1 or not self.strategy.needs.ordered:
            return
        endpoint = self._endpoint
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
        untie(self.loop.learner.flat.parameters)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._is_open:
            self._release(failed=True)


def _samples_or_one(batch: object) -> int:
    """The samples of a minibatch, or 1 if it has no length: with one worker the weights do not matter."""
    try:
        return samples_in(batch)
    except ValueError:
        return 1
