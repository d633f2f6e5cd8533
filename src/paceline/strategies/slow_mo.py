"""Slow momentum on top of local training, SlowMo (Wang, Tantia, Ballas & Rabbat, ICLR 2020).

Like block momentum, but in units of the learning rate: when that drops, so does what the momentum still carries.  At a constant
learning rate it is classical BlockMomentum; without momentum and at rate 1, PeriodicAveraging.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.families.averaging import Averaging, OptimizerState, SyncResult, SyncRounds
from paceline.worker.replica import Replica


@dataclass(frozen=True)
class SlowMo(Averaging):
    """Average models every `period` steps and give the mean steps momentum, in units of the learning rate.

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
                f"SlowMo(momentum={self.momentum}): slow momentum lies in [0, 1); at 1 updates never die out"
            )
        if self.rate <= 0:
            raise ValueError(f"SlowMo(rate={self.rate}): the slow learning rate must be positive")

    async def worker(self, w: Replica) -> None:
        def outer(where: slice, mean: Tensor, met: SyncResult) -> None:
            if met.lr:
                m.slow.mul_(self.momentum).add_(mean, alpha=1 / met.lr)
                rounds.anchor.add_(m.slow, alpha=self.rate * met.lr)
            else:  # A schedule that has come to 0 leaves the momentum without effect.
                rounds.anchor.add_(mean, alpha=self.rate)

        rounds = SyncRounds(w, self, period=self.period, outer=outer)
        m = w.memory(slow=torch.zeros_like(rounds.anchor))
        await rounds.train()
