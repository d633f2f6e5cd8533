"""Loop: what the events of the user's training loop do to the strategy.

The events are a minibatch from `shard`, a backward pass, a step, and the end of the data.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from paceline.session.backward import BucketHooks, Each
from paceline.session.backward_watch import BackwardWatch
from paceline.session.driver import StrategyDriver
from paceline.session.epoch import Epoch
from paceline.session.gradients import Gradients
from paceline.session.guard import LoopGuard
from paceline.session.learner import GradientRequest, LocalStepRequest, LoopLearner, RateRequest, Request, StepRequest
from paceline.session.minibatch import Minibatch, Tally
from paceline.session.optimizer import SessionOptimizer
from paceline.worker.flat import Bucket
from paceline.worker.run import WorkerRun

RAN_INSIDE = (
    "backward() ran inside backward(), as torch.utils.checkpoint(..., use_reentrant=True) does, so parts of the "
    "gradient arrive in passes of their own: give use_reentrant=False to checkpoint"
)
SET_BY_HAND = (
    "; {} exchanges gradients during backward(), so a gradient from torch.autograd.grad, or one set by hand, needs a "
    "method whose workers step alone, such as PeriodicAveraging"
)
BETWEEN = (
    " between backward() and session.step(): a state has no gradient, so that of this step would be lost; call it "
    "after the step"
)
SCALED_PARTS = (
    "GradScaler with a model of DTensors: the ranks of a replica would skip different steps; train in bfloat16 or "
    "float32, which need no scaler"
)


class Loop:
    """Handles the events of the user's loop.

    Each event fulfils the request at which the strategy waits, and runs the strategy to its next request.
    """

    def __init__(
        self, run: WorkerRun, learner: LoopLearner, optimizer: SessionOptimizer, guard: LoopGuard, *, accumulate: int
    ) -> None:
        self.run = run
        self.replica = run.replica
        self.learner = learner
        self.accumulate = accumulate
        self.batch = Minibatch(run.replica, learner)
        self.tally = Tally(run.replica)
        self.is_paused = False  # Whether backward passes only add to the gradient.
        self.keeps_watch = False  # Whether backward passes are counted also where the strategy does not need that.
        self.is_closed = False
        self.last_own_step = -1  # The last step for which this worker had data.
        self._flat = learner.flat
        self._optimizer = optimizer
        optimizer.on_step = self.on_step
        self._gradients = Gradients(learner.flat)
        self.driver = StrategyDriver()
        self.guard = guard
        self._doing = "in backward()"
        self._was_exchanged = False  # Whether the gradient of this step is one that all ranks have.
        self._hooks: BucketHooks | None = None
        self._watch = BackwardWatch(learner.flat.parameters, is_paused=lambda: self.is_paused, counts=accumulate > 1)
        self.epoch = Epoch(self.batch, self._watch, accumulate)
        self._passes = 0  # Backward passes since the last step.
        self._is_open_pass = False  # Whether the pass that completes a gradient is running.
        self._is_reentrant = False  # Whether one of these passes ran inside another one.

    def start(self) -> None:
        """Run the strategy to its first request."""
        with self._flat.in_vector():
            self.driver.start(self.run.run())
        self._prepare()

    def close(self) -> None:
        self.is_closed = True
        self.driver.close()
        self.guard.close()
        self._watch.remove()
        if self._hooks is not None:
            self._hooks.remove()

    # Backward passes.

    def on_backward(self) -> Each | None:
        """A backward pass begins.  Return the receiver of its buckets if it completes the gradient, else None."""
        self._watch.note()
        if self.is_paused:
            return None
        self._tell_rate()
        request = self.driver.request
        if request is None or isinstance(request, LocalStepRequest):
            return None
        if self._runs_inside_another(request):
            raise RuntimeError(RAN_INSIDE)
        if isinstance(request, StepRequest):
            self._passes += 1
            raise RuntimeError(_ran_again(self._passes))
        assert isinstance(request, GradientRequest)
        if request.each is None:
            return None
        self._passes += 1
        if self._passes < self.accumulate and not self.epoch.is_rest(self._passes):
            return None
        self._is_open_pass = True
        self.guard.check_model()
        self._flat.refresh()
        self.batch.begin()
        self._doing = "in backward()"
        return partial(self._hand_over, request.each)

    def _hand_over(self, each: Each, bucket: Bucket) -> None:
        with self.guard.during(self._doing):
            each(bucket)

    def _runs_inside_another(self, request: Request) -> bool:
        """Whether a pass of reentrant checkpointing, which has only some gradients, was or would be taken as whole."""
        is_inner = _is_in_reentrant_checkpoint()
        was_inner = self._is_reentrant
        self._is_reentrant = was_inner or is_inner
        if isinstance(request, StepRequest):
            return is_inner or was_inner
        return is_inner and self._is_open_pass

    def on_backward_end(self) -> None:
        """All buckets of a gradient were handed to the strategy."""
        self._is_open_pass = False
        self.batch.record()
        with torch.no_grad():
            self._advance(self._flat.grads)

    # Steps.

    def on_step(self, scale: Tensor | None, overflow: bool) -> None:
        """The user takes a step.

        `scale` is the factor by which the gradients were multiplied.  On `overflow` they must not be used.
        """
        self.last_own_step = self.replica.cursor.step
        self._doing = "in session.step()"
        self._tell_rate()
        request = self.driver.request
        if not isinstance(request, StepRequest):
            self.guard.check_model()
        if request is None:
            return _step_after_end(self.run)
        self._check_passes(request)
        if self._optimizer.has_scaler:
            check_scaler(self.run, self.learner)
        if isinstance(request, LocalStepRequest):
            self._step_locally(scale, overflow)
        elif isinstance(request, StepRequest):
            if not overflow:
                self._gradients.unscale_exposed(scale)
            self._fulfil_step(overflow)
        else:
            self._give_own_gradient(scale, overflow)
            self._fulfil_step(overflow)
        self.tally.add(overflow=overflow)
        self.epoch.on_step()
        self.batch.finish()
        self._watch.passes = 0
        if self._hooks is not None or (self.replica.workers == 1 and self.accumulate == 1 and not self.keeps_watch):
            self._watch.remove()

    def check_between_steps(self, call: str) -> None:
        """Raise if a gradient has been computed and no step was taken with it: no saved state holds it."""
        if self.driver.waits_for_step or self.epoch.has_open_gradient:
            raise RuntimeError(call + BETWEEN)

    def _check_passes(self, request: Request) -> None:
        """Raise if the backward passes that make a gradient have not all run."""
        if isinstance(request, StepRequest):
            return
        is_exchanged = isinstance(request, GradientRequest) and request.each is not None
        ran = self._passes if is_exchanged else self._watch.passes
        if not is_exchanged and (self.accumulate == 1 or ran >= self.accumulate or self.epoch.is_rest(ran)):
            return
        text = f"session.step() without a gradient: {ran} of {self.accumulate} backward passes ran since the last step"
        if not ran and any(p.grad is not None for p in self._flat.parameters):
            text += SET_BY_HAND.format(type(self.run.strategy).__name__)
        raise RuntimeError(text)

    def _give_own_gradient(self, scale: Tensor | None, overflow: bool) -> None:
        """Give this worker's own gradient to a strategy that takes no part in backward."""
        self.batch.begin()
        self._flat.collect_all()
        if not overflow:
            self._gradients.unscale(scale)
        if not self.batch.accepts_gradient(self._flat.first_nonfinite, overflow=overflow):
            self._flat.grads.zero_()
        self.batch.record()
        self._advance(self._flat.grads)

    def _step_locally(self, scale: Tensor | None, overflow: bool) -> None:
        """Step by this worker's own gradient, which backward left in `.grad`."""
        self.batch.begin()
        if not overflow:
            self._gradients.unscale_each(scale)
        if not self.batch.is_empty() and self.batch.accepts_gradient(
            self.learner.first_nonfinite_grad, overflow=overflow
        ):
            self._optimizer.inner_step()
        self.batch.record()
        self._advance(None)

    def _fulfil_step(self, overflow: bool) -> None:
        """Take the step that the strategy waits for, if it waits for one.

        A strategy whose servers take the steps waits for its next gradient instead.
        """
        request = self.driver.request
        if not isinstance(request, StepRequest):
            return
        if self._was_exchanged:
            with self.guard.during(self._doing):
                self.guard.check_step(self.replica.cursor.step, has_ended=self.learner.has_ended)
        if request.gradient is not None and not overflow and not self.learner.has_ended:
            if self._optimizer.needs_closure:
                raise ValueError(_cannot_evaluate(self.run, self._optimizer))
            if request.by is None:
                self._optimizer.inner_step()
            else:
                with self._flat.in_vector():
                    request.by(self._gradients.take_changed())
        self._advance(None)

    # The end of the data.

    def on_end(self) -> None:
        """This worker has no more data: take empty steps until no worker has data."""
        self.epoch.check_step(least=1)
        self.learner.has_ended = True
        self._doing = "at the end of the `with` block"
        self.guard.check_model()
        self.guard.watch.check_members()
        self._fulfil_step(overflow=True)  # If the user left the loop between backward and step.
        while self.driver.request is not None:
            self._step_empty()

    def _step_empty(self) -> None:
        """Take part in the exchanges of a step for which this worker has no data."""
        self._tell_rate()
        request = self.driver.request
        if request is None:
            return
        self.batch.begin_empty()
        if isinstance(request, GradientRequest):
            self._flat.emit_zeros(request.each)
            self._advance(self._flat.grads)
            self._fulfil_step(overflow=False)
        else:
            assert isinstance(request, LocalStepRequest)
            self._advance(None)

    # Between two requests.

    def _tell_rate(self) -> None:
        """A step begins, so its learning rate is known: tell it to a strategy that waits for it."""
        if isinstance(self.driver.request, RateRequest):
            with torch.no_grad():
                self._advance(self.learner.lr(self.replica.cursor.step))

    def _advance(self, value: Tensor | float | None) -> None:
        with self.guard.during(self._doing), self._flat.in_vector():
            self.driver.advance(value)
        self._prepare()

    def _prepare(self) -> None:
        """Prepare the user's loop for the request at which the strategy waits now."""
        request = self.driver.request
        if isinstance(request, StepRequest):
            if request.gradient is not None:
                self._gradients.expose(request.gradient)
            return
        self._passes = 0
        self._is_reentrant = False
        is_exchanged = isinstance(request, GradientRequest) and request.each is not None
        self._was_exchanged = is_exchanged
        if (is_exchanged or isinstance(request, RateRequest)) and self._hooks is None:
            self._hooks = BucketHooks(self._flat, self.on_backward, self.on_backward_end)
            self.epoch.has_hooks = True


def check_scaler(run: WorkerRun, learner: LoopLearner) -> None:
    """Raise if the user's gradient scaler cannot be used here."""
    if learner.parts is not None:
        raise ValueError(SCALED_PARTS)
    why = run.strategy.needs_unscaled
    if why is not None:
        raise RuntimeError(f"{type(run.strategy).__name__} with a GradScaler: {why}")


def _is_in_reentrant_checkpoint() -> bool:
    """Whether this runs in a backward pass that torch's reentrant checkpointing started inside another one."""
    frame = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_code is CheckpointFunction.backward.__code__:
            return True
        frame = frame.f_back
    return False


def _ran_again(passes: int) -> str:
    return (
        "backward() ran again before session.step(), after the gradient of this step had been exchanged: to add up "
        f"{passes} passes, give attach(accumulate={passes}) or run all passes but the last `with session.no_sync()`; "
        "run a pass that trains another model (the generator of a GAN) in that block too"
    )


def _cannot_evaluate(run: WorkerRun, optimizer: SessionOptimizer) -> str:
    name = type(optimizer.inner).__name__
    return (
        f"{name} evaluates the loss several times in a step, and {type(run.strategy).__name__} exchanges one gradient "
        f"a step: use {name} under a method whose workers step alone, such as PeriodicAveraging, or use Sandblaster, "
        "which is L-BFGS on all workers, or another optimizer"
    )


def _step_after_end(run: WorkerRun) -> None:
    """If the others have finished without this worker, what is left of its loop trains nothing."""
    if not run.missed_end:
        raise RuntimeError("session.step() after the strategy has ended: no worker had data left")
