"""Slow momentum on top of local training, SlowMo (Wang, Tantia, Ballas & Rabbat, ICLR 2020).

Like block momentum, but the momentum is in units of the learning rate: when the learning rate drops, the momentum has
less effect too.  At a constant learning rate it is classical BlockMomentum; with momentum 0 and rate 1 it is
PeriodicAveraging.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.families.averaging import Averaging, OptimizerState, SyncRounds
from paceline.families.deltas import wide
from paceline.families.sync import SyncResult
from paceline.state import Slot
from paceline.worker.replica import Replica


@dataclass(frozen=True)
class SlowMo(Averaging):
    """Average models every `period` steps, with momentum over the mean deltas in units of the learning rate.

    The authors' code advises momentum 0 below 4 workers, 0.2 for 4, 0.5 for 8, 0.6 for 16, and rate 1.
    """

    period: int = 48
    momentum: float = 0.5
    rate: float = 1.0
    optimizer_state: OptimizerState = "reset"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_period(self.period)
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"SlowMo(momentum={self.momentum}): slow momentum lies in [0, 1); at 1 updates never decay"
            )
        if self.rate <= 0:
            raise ValueError(f"SlowMo(rate={self.rate}): the slow learning rate must be positive")

    def outer_gain(self, samples: float, workers: int) -> float:
        return self.rate / (1 - self.momentum)

    async def worker(self, w: Replica) -> None:
        memory = {"slow": torch.zeros_like(wide(w.params))}
        await SyncRounds(w, self, period=self.period, outer=self.outer, memory=memory).train()

    def outer(self, m: Slot, anchor: Tensor, mean: Tensor, where: slice, sync: SyncResult) -> None:
        """Move the anchor by the slow momentum, which is kept in units of the learning rate."""
        if sync.lr:
            m.slow.mul_(self.momentum).add_(mean, alpha=1 / sync.lr)
            anchor.add_(m.slow, alpha=self.rate * sync.lr)
        else:  # At a learning rate of 0 the momentum has no effect.
            anchor.add_(mean, alpha=self.rate)
