"""StandIn: a module that takes the place of a split model in a task's loss, and can be called once.

It gives the first stage the input of the model.  On the last stage, it gives the loss the output of the other stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from paceline.needs import Offers, check
from paceline.pipeline.split import Split, split
from paceline.strategy import Strategy
from paceline.task import Batch, Task

MICROBATCHES_PER_STAGE = 4  # With more, stages hardly wait for each other (GPipe, 2019).


# Attributes that a loss may read, for example for a penalty on the parameters.  They would be empty here.
LOOKS = {
    "parameters",
    "named_parameters",
    "buffers",
    "named_buffers",
    "modules",
    "named_modules",
    "children",
    "named_children",
    "state_dict",
}


class StandIn(nn.Module):
    """Takes the model's input, and returns a given output.  Without an output, it stops the loss at the call."""

    def __init__(self, output: Tensor | None = None) -> None:
        super().__init__()
        self.given: Tensor | None = None
        self._outputs = [] if output is None else [output]

    def forward(self, *args: Any, **more: Any) -> Tensor:
        if self.given is not None:
            raise ValueError(
                "the task's loss calls its model more than once: "
                "a model in stages can be called only once for a minibatch"
            )
        if len(args) != 1 or more or not isinstance(args[0], Tensor):
            kinds = [type(a).__name__ for a in (*args, *more.values())]
            raise ValueError(f"the task's loss calls its model with {kinds}: a model in stages takes one tensor")
        if torch.is_autocast_enabled(args[0].device.type):
            raise ValueError(
                "the task's loss calls its model under autocast, which other stages do not enter: "
                "enter autocast inside the model's layers"
            )
        self.given = args[0]
        if not self._outputs:
            raise _Called
        return self._outputs[0]

    def __getattribute__(self, name: str) -> Any:
        if name in LOOKS:
            _refuse(name)
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            _refuse(name)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"the task's loss reads '{name}' of its model: a model in stages can only be called") from None


class _Called(Exception):
    """The loss has called its model."""


def model_input(task: Task, batch: Batch) -> Tensor:
    """The input that the task's loss gives to its model."""
    stand_in = StandIn()
    samples = len(batch[0])
    random_state = torch.get_rng_state()
    try:
        task.loss(stand_in, batch)
    except _Called:
        if not torch.equal(torch.get_rng_state(), random_state):
            raise ValueError(
                "the task's loss draws random numbers before it calls its model: stages would draw different ones"
            ) from None
        x = stand_in.given
        assert x is not None
        if x.dim() and len(x) and not len(x) % samples:
            return x
        raise ValueError(
            f"the task's loss makes an input of shape {tuple(x.shape)} from {samples} samples: "
            "the first dimension must be that of the samples"
        ) from None
    raise ValueError("the task's loss does not call its model: there is nothing to train in stages")


def count(stages: int | Sequence[str]) -> int:
    """The number of stages, given as a number or as the names of the layers at which all but the first start."""
    return stages if isinstance(stages, int) else len(stages) + 1


def usual_microbatches(task: Task, stages: int) -> int:
    """The number of microbatches if the user gives none."""
    return max(task.accumulate, MICROBATCHES_PER_STAGE * stages)


def split_for(task: Task, model: nn.Module, stages: int | Sequence[str], workers: int) -> Split:
    """The task's model in stages, balanced for a worker's part of a minibatch."""
    return split(model, stages, model_input(task, task.part(0, 0, workers)))


def check_stages(call: str, strategy: Strategy, stages: int | Sequence[str], microbatches: int | None) -> None:
    """Raise ValueError if these stages are impossible, or impossible with this strategy."""
    if count(stages) < 1 or (microbatches is not None and microbatches < 1):
        raise ValueError(f"{call}(stages={stages!r}, microbatches={microbatches}): both must be at least 1")
    check(strategy, Offers(call, stages=count(stages)))
