"""LoopLearner: it turns what a replica asks for into requests to the user's training loop.

The strategy waits at such a request until the user's next `backward()` or `step()` fulfils it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.op import Op
from paceline.session.backward import Each
from paceline.session.optimizer import SessionOptimizer
from paceline.state import StateStore
from paceline.worker.flat import FlatModel
from paceline.worker.learner import bind_optimizer
from paceline.worker.replica import Replica


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


Request = GradientRequest | StepRequest | LocalStepRequest


class LoopLearner:
    """The Learner of a replica whose training loop belongs to the user.  It computes nothing itself."""

    has_global_data = False

    def __init__(self, flat: FlatModel, optimizer: SessionOptimizer) -> None:
        self.flat = flat
        self.loss: float | None = None  # The loss of the current minibatch; None if the user did not give it.
        self.has_ended = False  # Whether the user's loop has ended on this worker.
        self.reads_full_batches = False  # Whether each worker reads whole minibatches.
        self._optimizer = optimizer

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer.inner

    def bind_state(self, states: StateStore) -> None:
        bind_optimizer(states, self._optimizer)

    def has_data(self, step: int) -> bool:
        return not self.has_ended

    def gradient(self, replica: Replica, each: Each | None) -> Op[Tensor]:
        return GradientRequest(each)

    def step(self, replica: Replica, g: Tensor, by: Callable[[Tensor], None] | None = None) -> Op[None]:
        return StepRequest(g, by)

    def local_step(self, replica: Replica) -> Op[None]:
        return LocalStepRequest()

    def skip(self, replica: Replica) -> Op[None]:
        return StepRequest(None)

    def use_full_batches(self, whole: bool) -> None:
        self.reads_full_batches = whole

    async def sum_over_stages(self, numbers: Sequence[float]) -> Sequence[float]:
        return numbers
