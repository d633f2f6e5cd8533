"""DiLoCo (Douillard et al. 2023) and its streaming form (Douillard et al. 2025): few syncs between distant workers.

Workers make many steps with their own optimizer.  The mean of their deltas is the gradient of an outer optimizer with
Nesterov momentum.  Streaming cuts the model into fragments that are exchanged in turn, so that the link is used evenly.
With `delay`, the next steps start before an exchange has ended.  With rate 1 and momentum 0 it is PeriodicAveraging.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.families.averaging import Averaging, SyncRounds
from paceline.families.deltas import wide
from paceline.families.sync import SyncResult
from paceline.state import Slot
from paceline.worker.replica import Replica


@dataclass(frozen=True)
class DiLoCo(Averaging):
    """Every `period` steps, an outer optimizer makes a step with the workers' mean delta as its gradient.

    Each worker keeps the state of its inner optimizer.  `fragments` is the number of parts into which the model is cut:
    they are exchanged in turn, each every `period` steps.
    """

    period: int = 500
    rate: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    fragments: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fragments < 1 or self.period % self.fragments:
            raise ValueError(
                f"DiLoCo(period={self.period}, fragments={self.fragments}): fragments are exchanged in turn, "
                "so their number must divide the period"
            )
        self.check_period(self.period)
        if self.delay >= self.period // self.fragments > 1:
            raise ValueError(
                f"DiLoCo(period={self.period}, fragments={self.fragments}, delay={self.delay}): a fragment must be "
                f"merged before the next one starts, {self.period // self.fragments} steps later; give a shorter delay"
            )
        if self.fragments > 1 and self.optimizer_state == "reset":
            raise ValueError(
                f"DiLoCo(fragments={self.fragments}, optimizer_state='reset'): the sync of one fragment would reset "
                "the optimizer state of all; use 'keep' or 'average'"
            )
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"DiLoCo(momentum={self.momentum}): outer momentum lies in [0, 1); at 1 updates never decay"
            )
        if self.rate <= 0:
            raise ValueError(f"DiLoCo(rate={self.rate}): the outer learning rate must be positive")

    def outer_gain(self, samples: float, workers: int) -> float:
        return self.rate / (1 - self.momentum)

    async def worker(self, w: Replica) -> None:
        memory = {"velocity": torch.zeros_like(wide(w.params))}
        rounds = SyncRounds(w, self, period=self.period, outer=self.outer, memory=memory, fragments=self.fragments)
        await rounds.train()

    def outer(self, m: Slot, anchor: Tensor, mean: Tensor, where: slice, sync: SyncResult) -> None:
        """Move the anchor by an outer step, with the mean delta as the gradient."""
        velocity = m.velocity[where].mul_(self.momentum).add_(mean)
        anchor.add_(mean if self.nesterov else velocity, alpha=self.rate)
        if self.nesterov:
            anchor.add_(velocity, alpha=self.rate * self.momentum)
