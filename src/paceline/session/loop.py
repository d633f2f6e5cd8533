"""Loop: a strategy's coroutine carried on by the events of a training loop that it does not own.

The coroutine stands still at two places, where it waits for a gradient and where it waits for a step.  `backward()` and
`step()` carry it from one to the other; everything else it waits for is waited for on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.endpoint import Endpoint
from paceline.op import Op
from paceline.session.backward import BucketHooks, Each
from paceline.session.optimizer import SessionOptimizer
from paceline.strategy import Strategy
from paceline.worker.flat import FlatModel
from paceline.worker.plan import Plan
from paceline.worker.replica import NonFinite, Replica


class LoopRequest(Op[Any]):
    """What only the loop can fulfil: a gradient (`each` wants its buckets), a step (with `update`; None: without a change), or
    a local step, which is both at once."""

    __slots__ = ("each", "update")

    def __init__(self, kind: str, *, each: Each | None = None, update: Tensor | None = None) -> None:
        super().__init__(kind)
        self.each, self.update = each, update


class Loop:
    """Learner to the replica, driver to the strategy."""

    has_global_data = False

    def __init__(
        self,
        flat: FlatModel,
        endpoint: Endpoint,
        optimizer: SessionOptimizer,
        *,
        nonfinite: NonFinite,
        accumulate: int,
        plan: Plan,
    ) -> None:
        self.flat, self.endpoint, self.accumulate = flat, endpoint, accumulate
        self.is_paused = False
        self.samples: float | None = None  # of the minibatches drawn since the last step; None: nobody counts them
        self.last_own_step = -1
        self.is_whole = False  # Whether every worker gets whole minibatches.
        self.loss: float | None = None  # of the last minibatch, if the user has told
        self.replica = Replica(endpoint, self, nonfinite=nonfinite, plan=plan)
        self.wish: LoopRequest | None = None
        self._optimizer = optimizer
        self._strategy: Any = None
        self._hooks: BucketHooks | None = None
        self._passes = 0
        self._is_over = False
        self._unreached: list[int] = []

    # What the replica asks of its learner.

    def has_data(self, step: int) -> bool:
        return not self._is_over

    def gradient(self, replica: Replica, each: Each | None) -> Op[Tensor]:
        return LoopRequest("gradient", each=each)

    def step(self, replica: Replica, g: Tensor) -> Op[None]:
        return LoopRequest("step", update=g)

    def local_step(self, replica: Replica) -> Op[None]:
        return LoopRequest("local step")

    def skip(self, replica: Replica) -> Op[None]:
        return LoopRequest("step")

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer.inner

    def use_full_batches(self, whole: bool) -> None:
        self.is_whole = whole

    async def sum_over_stages(self, numbers: Sequence[float]) -> Sequence[float]:
        return numbers

    # What happens in the loop.

    def start(self, strategy: Strategy) -> None:
        """Run the strategy up to its first wish."""
        if self._strategy is not None:
            self._strategy.close()
        self._strategy = self.replica.run(strategy)
        self._carry_on(None)

    def take(self, scale: Tensor | None, overflow: bool) -> None:
        """The user's step.  `scale` is what the gradients were multiplied by; on `overflow` they are worthless."""
        self.last_own_step = self.replica.cursor.step
        if self.wish is None:
            raise RuntimeError("session.step() after the strategy has ended: no worker had data left")
        if self.wish.kind == "local step":
            self._step_locally(scale, overflow)
        elif self.wish.kind == "gradient":
            if self.wish.each is not None:
                raise RuntimeError(
                    f"session.step() without a gradient: {self._passes} of {self.accumulate} backward passes ran since the last step"
                )
            self._deliver_own(scale, overflow)
            self._fulfil_step(overflow)
        else:
            if scale is not None and not overflow:
                self.flat.grads.div_(scale.to(self.flat.grads))
            self._fulfil_step(overflow)
        self.samples = self.loss = None

    def take_empty(self) -> None:
        """A step after this worker's end: nothing of its own, but its turn in every exchange."""
        wish = self.wish
        assert wish is not None and wish.kind != "step"
        self.replica.batch.begin(0.0)
        if wish.kind == "local step":
            self._carry_on(None)
            return
        self.flat.emit_zeros(wish.each)
        self._unreached = []
        self._carry_on(self.flat.grads)
        self._fulfil_step(overflow=False)

    def end(self) -> None:
        """No more data here: go on in empty steps until nobody has any."""
        self._is_over = True
        self._fulfil_step(overflow=True)  # The loop was left between backward and step.
        while self.wish is not None:
            self.take_empty()

    def close(self) -> None:
        if self._strategy is not None:
            self._strategy.close()
        if self._hooks is not None:
            self._hooks.remove()

    # In between.

    def _carry_on(self, value: Any) -> None:
        """Run the strategy up to its next wish."""
        self.wish = None
        error: BaseException | None = None
        while self.wish is None:
            try:
                op = self._strategy.send(value) if error is None else self._strategy.throw(error)
            except StopIteration:
                return
            if isinstance(op, LoopRequest):
                self.wish = op
            else:
                try:
                    value, error = op.wait(), None
                except Exception as failure:
                    error = failure
        if self.wish.kind != "step":
            self._passes = 0
            if self.wish.each is not None and self._hooks is None:
                self._hooks = BucketHooks(self.flat, self._pass_begins, self._exchanged)
        elif self.wish.update is not None:
            self._show(self.wish.update)

    def _fulfil_step(self, overflow: bool) -> None:
        """Take the step, if the strategy wants one after all; a method without local steps goes straight to its next gradient."""
        if self.wish is not None and self.wish.kind == "step":
            if self.wish.update is not None and not overflow and not self._is_over:
                self._optimizer.inner_step()
            self._carry_on(None)

    def _show(self, g: Tensor) -> None:
        """Let the optimizer, and whoever looks at `.grad` before it, see `g`."""
        if g.data_ptr() != self.flat.grads.data_ptr():
            self.flat.grads.copy_(g)
        for i in range(len(self.flat.parameters)):
            self.flat.expose(i)
        for i in self._unreached:  # As on one machine: what has no gradient is not touched, not even by weight decay.
            self.flat.parameters[i].grad = None

    def _pass_begins(self) -> Each | None:
        """Whether this backward pass completes the gradient, and who gets its buckets then."""
        if self.is_paused or self.wish is None or (self.wish.kind != "step" and self.wish.each is None):
            return None
        self._passes += 1
        if self.wish.kind == "step":
            passes = self._passes
            raise RuntimeError(
                f"backward() ran again before session.step(), after this step's gradient had been exchanged: to add up {passes} passes, "
                f"give attach(accumulate={passes}) or run all but the last `with session.no_sync()`"
            )
        if self._passes < self.accumulate:
            return None
        self._begin()
        self._unreached = []
        return self.wish.each

    def _begin(self) -> None:
        self.replica.batch.is_counted = self.samples is not None
        self.replica.batch.begin(1.0 if self.samples is None else self.samples)

    def _exchanged(self) -> None:
        self._note()
        with torch.no_grad():
            self._carry_on(self.flat.grads)

    def _deliver_own(self, scale: Tensor | None, overflow: bool) -> None:
        """This worker's own gradient, to a strategy that has no part in backward."""
        self._begin()
        self._unreached = [i for i, p in enumerate(self.flat.parameters) if p.grad is None]
        self.flat.collect_all()
        if overflow:
            self.flat.grads.zero_()
            self.replica.batch.discard()
        else:
            if scale is not None:
                self.flat.grads.div_(scale.to(self.flat.grads))
            if not self.replica.batch.accept(self.flat.first_nonfinite):
                self.flat.grads.zero_()
        self._note()
        self._carry_on(self.flat.grads)

    def _step_locally(self, scale: Tensor | None, overflow: bool) -> None:
        """The optimizer's step with this worker's own gradient, where backward has left it."""
        self._begin()
        if overflow:
            self.replica.batch.discard()
        else:
            if scale is not None:
                for p in self.flat.parameters:
                    if p.grad is not None:
                        p.grad.div_(scale.to(p.grad))
            if self.replica.batch.samples and self.replica.batch.accept(self.flat.first_nonfinite_grad):
                self._optimizer.inner_step()
        self._note()
        self._carry_on(None)

    def _note(self) -> None:
        self.endpoint.trace.point(
            self.endpoint.now(), self.replica.rank, self.replica.cursor.step, int(self.replica.batch.samples), self.loss
        )
