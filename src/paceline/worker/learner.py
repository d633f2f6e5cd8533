"""Learner: where a replica's gradients come from, and what steps its optimizer.

The simulator, a training process and the user's own loop each have one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from paceline.op import Op, Ready
from paceline.state import StateStore, per_worker
from paceline.worker.flat import Bucket, FlatModel
from paceline.worker.tensors import local

if TYPE_CHECKING:
    from paceline.strategy import Strategy
    from paceline.task import Trainee
    from paceline.worker.replica import Replica


class Learner(Protocol):
    """What a replica needs to train."""

    flat: FlatModel
    has_global_data: (
        bool  # Whether any worker can compute any part of a minibatch.  If not, each worker has its own data.
    )

    stage: int  # The stage of a split model that this process holds, from 0;
    stages: int  # and how many there are.  A model that is not split is one stage.

    @property
    def split_model(self) -> nn.Module | None:
        """The whole model, if this process has only a stage of it."""
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def loss(self) -> float | None:
        """The loss of the last minibatch; None if it was not reported."""
        ...

    def gradient(self, replica: Replica, each: Callable[[Bucket], None] | None) -> Op[Tensor]: ...

    def step(self, replica: Replica, g: Tensor, by: Callable[[Tensor], None] | None = None) -> Op[None]:
        """A step with the gradient `g`: of the optimizer, or by a function that takes the step in its place."""
        ...

    def local_step(self, replica: Replica) -> Op[None]: ...

    def skip(self, replica: Replica) -> Op[None]:
        """End the step without a change to the parameters."""
        ...

    def bind_state(self, states: StateStore) -> None:
        """Register the state that is saved and resumed: the optimizer's, and that of the random numbers."""
        ...

    def has_data(self, step: int) -> bool:
        """Whether there is a minibatch for that step."""
        ...

    def follow(self, method: Strategy) -> None:
        """From now on this method takes the steps: learning rates may depend on what a step is."""
        ...

    def rate(self, step: int) -> float:
        """The factor that the schedule puts on the learning rates at that step, for which there is a minibatch."""
        ...

    def lr(self, step: int) -> float:
        """The largest learning rate of the optimizer's groups at that step, for which there is a minibatch."""
        ...

    def coming_lr(self, step: int) -> Op[float]:
        """The same, for a step that has not begun: in the user's own loop it is known only when the step begins."""
        ...

    def use_full_batches(self, whole: bool) -> None:
        """From now on, compute every minibatch as a `whole`, or only this worker's part of it."""
        ...

    async def sum_over_stages(self, numbers: Sequence[float]) -> Sequence[float]:
        """The sums of these numbers over all stages of this replica's pipeline, so that all stages decide the same.

        A model that is not split is one stage: its sums are the numbers themselves.
        """
        ...

    async def of_first_stage(self, numbers: Sequence[float]) -> Sequence[float]:
        """The numbers that the first stage of this replica's pipeline gave; all stages give equally many."""
        ...


class TaskLearner:
    """The common part of the simulator's learner and that of `train`: it uses the task's data and optimizer."""

    stage = 0
    stages = 1

    def __init__(self, trainee: Trainee) -> None:
        self.trainee = trainee
        self.has_global_data = not trainee.task.has_own_data
        self.flat = trainee.flat

    @property
    def split_model(self) -> nn.Module | None:
        return None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.trainee.optimizer

    @property
    def loss(self) -> float | None:
        return self.trainee.loss

    def bind_state(self, states: StateStore) -> None:
        self.trainee.bind_state(states)

    def has_data(self, step: int) -> bool:
        return self.trainee.has_data(step)

    def rate(self, step: int) -> float:
        return self.trainee.rates.rate(step)

    def lr(self, step: int) -> float:
        return float(max(self.trainee.rates.rates(step)))

    def follow(self, method: Strategy) -> None:
        self.trainee.rates.follow(method)

    def coming_lr(self, step: int) -> Op[float]:
        return Ready("learning rate", self.lr(step))

    def step(self, replica: Replica, g: Tensor, by: Callable[[Tensor], None] | None = None) -> Op[None]:
        self.trainee.step(g, by)
        return Ready("step", None)

    def skip(self, replica: Replica) -> Op[None]:
        return Ready("skip", None)

    def use_full_batches(self, whole: bool) -> None:
        self.trainee.use_full_batches(whole)

    async def sum_over_stages(self, numbers: Sequence[float]) -> Sequence[float]:
        return numbers

    async def of_first_stage(self, numbers: Sequence[float]) -> Sequence[float]:
        return numbers


def optimizer_vectors(flat: FlatModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state that has one entry for every parameter value, by name, each as one vector (Adam's moments).

    Parameters that have had no gradient yet have zeros.  All workers have the same dtype, whichever parameters had one.
    """
    states = [optimizer.state.get(p, {}) for p in flat.parameters]
    names = {
        n: v
        for state, p in zip(states, flat.parameters, strict=True)
        for n, v in state.items()
        if _is_for_each_value(n, v, p)
    }
    vectors = {
        name: torch.cat(
            [
                local(state[name]).reshape(-1)
                if _is_for_each_value(name, state.get(name), p)
                else local(like).new_zeros(local(p).numel())
                for state, p in zip(states, flat.parameters, strict=True)
            ]
        )
        for name, like in sorted(names.items())
    }
    if flat.narrow:
        widest = flat.params.dtype
        vectors = {name: v.to(torch.promote_types(v.dtype, widest)) for name, v in vectors.items()}
    return vectors


def optimizer_counters(flat: FlatModel, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The optimizer's step counters, in the order of the parameters."""
    counted = [optimizer.state.get(p, {}).get("step") for p in flat.parameters]
    return [step for step in counted if isinstance(step, Tensor)]


def set_optimizer_vectors(flat: FlatModel, optimizer: torch.optim.Optimizer, vectors: dict[str, Tensor]) -> None:
    """Copy such vectors into the optimizer's state.  State that the optimizer does not have yet is not created."""
    for name, vector in vectors.items():
        for i, p in enumerate(flat.parameters):
            value = optimizer.state.get(p, {}).get(name)
            if _is_for_each_value(name, value, p):
                local(value).copy_(vector[flat.where(i)].view(local(value).shape))


def _is_for_each_value(name: str, value: object, parameter: Tensor) -> bool:
    return (
        isinstance(value, Tensor)
        and value.shape == parameter.shape
        and value.dtype.is_floating_point
        and name != "step"
    )


def evaluates_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer evaluates the loss itself, several times in a step, as L-BFGS does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def bind_optimizer(states: StateStore, optimizer: torch.optim.Optimizer) -> None:
    """Declare the slot of an optimizer's state."""
    states.bind(
        "optimizer",
        rule=per_worker,
        save=optimizer.state_dict,
        load=optimizer.load_state_dict,
        check=partial(_check_same_optimizer, optimizer),
        is_live=True,
    )


BY_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "param_names"}


def _check_same_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Raise ValueError if the saved state is that of another kind of optimizer, or of other parameter groups."""
    groups: list[dict[str, Any]] = saved["param_groups"]
    sizes, own = ([len(g["params"]) for g in each] for each in (groups, optimizer.param_groups))
    if sizes != own:
        raise ValueError(
            f"the saved state of the optimizer has groups of {sizes} parameters, and this optimizer has groups of {own}"
        )
    for group, mine in zip(groups, optimizer.param_groups, strict=True):
        superfluous, missing = sorted({*group} - {*mine} - BY_SCHEDULERS), sorted({*optimizer.defaults} - {*group})
        if superfluous and missing:  # One of the two alone may be another version of the same optimizer.
            raise ValueError(
                f"the saved state of the optimizer has the settings {superfluous} and lacks {missing}: another kind of "
                "optimizer saved it; resume with that one"
            )
