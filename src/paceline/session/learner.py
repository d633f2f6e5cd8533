"""LoopLearner: it turns what a replica asks for into requests to the user's training loop.

The strategy waits at such a request until the user's next `backward()` or `step()` fulfils it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isclose

import torch
from torch import Tensor

from paceline.op import Op
from paceline.session.backward import Each
from paceline.session.optimizer import SessionOptimizer
from paceline.session.tensor_parallel import TensorParallel
from paceline.state import StateStore
from paceline.strategy import Strategy
from paceline.worker.flat import FlatModel
from paceline.worker.learner import bind_optimizer
from paceline.worker.replica import Replica

NO_RATE = (
    "the optimizer's learning rate was 0 at attach, so that the servers' rule cannot follow its changes: give it a "
    "positive learning rate, and build schedulers on session.optimizer"
)


def first_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rates that schedulers multiply: if one was built already, those before it."""
    return [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]


class GradientRequest(Op[Tensor]):
    """The strategy waits for a gradient.

    `each` receives the buckets while backward runs.  It is None if the strategy takes no part in backward.
    """

    __slots__ = ("each",)

    def __init__(self, each: Each | None) -> None:
        super().__init__("gradient")
        self.each = each


class StepRequest(Op[None]):
    """The strategy waits for the optimizer's step.  `gradient` is None if the step must change nothing.

    `by` takes the step in place of the optimizer, if it is given.
    """

    __slots__ = ("by", "gradient")

    def __init__(self, gradient: Tensor | None, by: Callable[[Tensor], None] | None = None) -> None:
        super().__init__("step")
        self.gradient = gradient
        self.by = by


class LocalStepRequest(Op[None]):
    """The strategy waits for a gradient and the optimizer's step with it, both on this worker alone."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__("local step")


class RateRequest(Op[float]):
    """The strategy waits for the learning rate of the coming step, which the user's scheduler may still change."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__("learning rate")


Request = GradientRequest | StepRequest | LocalStepRequest | RateRequest


class LoopLearner:
    """The Learner of a replica whose training loop belongs to the user.  It computes nothing itself."""

    has_global_data = False
    stage = 0
    stages = 1
    split_model = None

    def __init__(self, flat: FlatModel, optimizer: SessionOptimizer, parts: TensorParallel | None = None) -> None:
        self.flat = flat
        self.parts = parts  # The ranks that hold this replica's tensors together.
        self.loss: float | None = None  # The loss of the current minibatch; None if the user did not give it.
        self.has_ended = False  # Whether the user's loop has ended on this worker.
        self.reads_full_batches = False  # Whether each worker reads whole minibatches.
        self._optimizer = optimizer
        self._first_rates = first_rates(optimizer.inner)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer.inner

    @property
    def has_scaler(self) -> bool:
        """Whether a GradScaler has taken the last step."""
        return self._optimizer.has_scaler

    def bind_state(self, states: StateStore) -> None:
        bind_optimizer(states, self._optimizer)

    def has_data(self, step: int) -> bool:
        return not self.has_ended

    def follow(self, method: Strategy) -> None:
        """The user's own schedule sets the rates."""

    def rate(self, step: int) -> float:
        """The current learning rate divided by the first one.  It must be the same number for all groups."""
        groups = self.optimizer.param_groups
        now = [float(group["lr"]) for group in groups]
        factors = [lr / first for lr, first in zip(now, self._first_rates, strict=True) if first]
        if not factors or any(lr for lr, first in zip(now, self._first_rates, strict=True) if not first):
            raise ValueError(NO_RATE)
        if not all(isclose(factor, factors[0], rel_tol=1e-9) for factor in factors):
            raise ValueError(
                f"the learning rates of the optimizer's groups were {self._first_rates} and are {now}: servers "
                "have one learning rate, and follow it only if it changes by the same factor in all groups"
            )
        if not 0 <= factors[0] < inf:
            raise ValueError(f"the optimizer's learning rate is {now[0]}: it must be finite and at least 0")
        return factors[0]

    def lr(self, step: int) -> float:
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

    def coming_lr(self, step: int) -> Op[float]:
        return RateRequest()

    def gradient(self, replica: Replica, each: Each | None) -> Op[Tensor]:
        return GradientRequest(each)

    def step(self, replica: Replica, g: Tensor, by: Callable[[Tensor], None] | None = None) -> Op[None]:
        if self.parts is not None and any(refused for [refused] in self.parts.all_gather([0.0]).wait()):
            replica.batch.skipped += 1
            return StepRequest(None)
        return StepRequest(g, by)

    def local_step(self, replica: Replica) -> Op[None]:
        return LocalStepRequest()

    def skip(self, replica: Replica) -> Op[None]:
        if self.parts is not None:  # The other ranks of this replica must skip the step too.
            self.parts.all_gather([1.0]).wait()
        return StepRequest(None)

    def first_nonfinite_grad(self) -> str | None:
        """The first parameter with NaN or infinity in its gradient, on any rank of this replica."""
        name = self.flat.first_nonfinite_grad()
        return name if self.parts is None else self.parts.first_fault(self.flat, name)

    def use_full_batches(self, whole: bool) -> None:
        self.reads_full_batches = whole

    async def sum_over_stages(self, numbers: Sequence[float]) -> Sequence[float]:
        if self.parts is None:
            return numbers
        return [sum(column) for column in zip(*await self.parts.all_gather(numbers), strict=True)]

    async def of_first_stage(self, numbers: Sequence[float]) -> Sequence[float]:
        return numbers
