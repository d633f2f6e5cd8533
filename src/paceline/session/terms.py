"""Terms: how a task is trained by `train`.  They must be the same on every rank of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import Store

from paceline.checkpoint import Checkpoints
from paceline.pipeline.processes import Order
from paceline.pipeline.stand_in import count
from paceline.session.settings import check_same_settings, described, described_optimizer, described_task
from paceline.strategy import Strategy
from paceline.task import Task
from paceline.transport.endpoint import SILENT_S
from paceline.worker.batch import NonFinite


@dataclass(frozen=True)
class Terms:
    """A task, a strategy, and the arguments of `train` that all ranks must have in common."""

    task: Task
    strategy: Strategy
    nonfinite: NonFinite
    ordered: bool
    timeout_s: float
    replacements: int = 0
    silent_s: float = SILENT_S
    stages: int | Sequence[str] = 1
    microbatches: int | None = None
    pipeline: Order = "1f1b"
    checkpoint: Checkpoints | None = None
    elastic: bool = False

    def __post_init__(self) -> None:
        if self.replacements < 0:
            raise ValueError(f"train(replacements={self.replacements}): it counts workers started again, from 0")

    @property
    def depth(self) -> int:
        """How many processes hold a replica."""
        return count(self.stages)

    @property
    def is_elastic(self) -> bool:
        """Whether the job goes on if a process dies.  A replica in stages cannot lose one."""
        return (self.strategy.needs.elastic or self.elastic) and self.depth == 1

    def check_same(self, model: nn.Module, store: Store, rank: int, workers: int) -> None:
        """Raise ValueError if the ranks of the job do not train the same task in the same way."""
        if workers == 1:
            return
        given: dict[str, object] = {"nonfinite": self.nonfinite, "ordered": self.ordered, "stages": self.stages}
        given |= {"checkpoint": self.checkpoint, "elastic": self.elastic}
        if self.depth > 1:
            given |= {"microbatches": self.microbatches, "pipeline": self.pipeline}
            given |= {"evaluate": self.task.evaluate, "the steps between evaluations": self.task.evaluate_every}
        settings = described(self.strategy, None, given) + described_task(self.task, model)
        check_same_settings(store, rank, workers, settings, call="train", is_elastic=self.is_elastic)

    def check_same_optimizer(self, optimizer: torch.optim.Optimizer, store: Store, rank: int, workers: int) -> None:
        """The same for the optimizers of the ranks with the same stage of the model, whose store this is."""
        settings = described_optimizer(optimizer)
        check_same_settings(store, rank, workers, settings, call="train", is_elastic=self.is_elastic, stages=self.depth)
