"""What a task's loss sees of a model that is split: something that can be called once.

The first stage learns from it what the model is given, and the last one lets the loss have what came out of the others.
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

MICROBATCHES_PER_STAGE = 4  # From there on the time that stages wait for each other hardly counts (GPipe, 2019).


# What a loss may look at of a model, and would find empty here: a penalty on the parameters for instance.
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
    """In the model's place in a loss: it takes the input and gives an output that is already there; without one it ends the loss."""

    def __init__(self, output: Tensor | None = None) -> None:
        super().__init__()
        self.given: Tensor | None = None
        self._outputs = [] if output is None else [output]

    def forward(self, *args: Any, **more: Any) -> Tensor:
        if self.given is not None:
            raise ValueError(
                "the task's loss calls its model more than once: a model in stages can be called only once for a minibatch"
            )
        if len(args) != 1 or more or not isinstance(args[0], Tensor):
            kinds = [type(a).__name__ for a in (*args, *more.values())]
            raise ValueError(f"the task's loss calls its model with {kinds}: a model in stages takes one tensor")
        if torch.is_autocast_enabled(args[0].device.type):
            raise ValueError(
                "the task's loss calls its model under autocast, which stages do not see: enter it within the model's layers"
            )
        self.given = args[0]
        if not self._outputs:
            raise _Asked
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
    raise ValueError(f"the task's loss asks its model for '{name}': a model in stages can only be called") from None


class _Asked(Exception):
    """The loss has come to the model's call, and no further."""


def model_input(task: Task, batch: Batch) -> Tensor:
    """What the task's loss gives to its model."""
    stand_in, samples, chance = StandIn(), len(batch[0]), torch.get_rng_state()
    try:
        task.loss(stand_in, batch)
    except _Asked:
        if not torch.equal(torch.get_rng_state(), chance):
            raise ValueError(
                "the task's loss draws random numbers before it calls its model: stages would not draw the same ones"
            ) from None
        x = stand_in.given
        assert x is not None
        if x.dim() and len(x) and not len(x) % samples:
            return x
        raise ValueError(
            f"the task's loss makes an input of shape {tuple(x.shape)} of {samples} samples: they must lie along the first dimension"
        ) from None
    raise ValueError("the task's loss does not call its model: there is nothing to train in stages")


def count(stages: int | Sequence[str]) -> int:
    """How many stages there are, given as a number or by the names of the layers at which all but the first begin."""
    return stages if isinstance(stages, int) else len(stages) + 1


def usual_microbatches(task: Task, stages: int) -> int:
    """Into how many microbatches a minibatch is cut if nobody says."""
    return max(task.accumulate, MICROBATCHES_PER_STAGE * stages)


def split_for(task: Task, model: nn.Module, stages: int | Sequence[str], workers: int) -> Split:
    """A model of the task's, cut for the minibatches that each worker has."""
    return split(model, stages, model_input(task, task.part(0, 0, workers)))


def check_stages(call: str, strategy: Strategy, stages: int | Sequence[str], microbatches: int | None) -> None:
    """Refuse what cannot be, before anything runs."""
    if count(stages) < 1 or (microbatches is not None and microbatches < 1):
        raise ValueError(
            f"{call}(stages={stages!r}, microbatches={microbatches}): there is at least 1 stage, and 1 microbatch"
        )
    check(strategy, Offers(call, stages=count(stages)))
