"""LoopLearner: it turns what a replica asks for into requests to the user's training loop.

The strategy waits at such a request until the user's next `backward()` or `step()` fulfils it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.op import Op
from paceline.session.backward import Each
from paceline.session.optimizer import SessionOptimizer
from paceline.session.tensor_parallel import TensorParallel
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
    """The strategy waits for the optimizer's step.  `gradient` is None if the step must change nothing."""

    __slots__ = ("gradient",)

    def __init__(self, gradient: Tensor | None) -> None:
        super().__init__("step")
        self.gradient = gradient


class LocalStepRequest(Op[None]):
    """The strategy waits for a gradient and the optimizer's step with it, both on this worker alone."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__("local step")


Request = GradientRequest | StepRequest | LocalStepRequest


class LoopLearner:
    """The Learner of a replica whose training loop belongs to the user.  It computes nothing itself."""

    has_global_data = False
    stage = 0
    stages = 1

    def __init__(self, flat: FlatModel, optimizer: SessionOptimizer, parts: TensorParallel | None = None) -> None:
        self.flat = flat
        self.parts = parts  # The ranks that hold this replica's tensors together.
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

    def step(self, replica: Replica, g: Tensor) -> Op[None]:
        if self.parts is not None and any(refused for [refused] in self.parts.all_gather([0.0]).wait()):
            replica.batch.skipped += 1
            return StepRequest(None)
        return StepRequest(g)

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
