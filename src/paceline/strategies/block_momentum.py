"""Blockwise model-update filtering, BMUF (Chen & Huo, ICASSP 2016).

The mean displacement of a block of local steps is treated as a gradient and low-pass filtered, so that N workers get as far
as N times the data should take them at an unchanged learning rate.  With momentum 0 and rate 1 it is PeriodicAveraging.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.replica import Replica
from paceline.strategy import Strategy, check_period


@dataclass(frozen=True)
class BlockMomentum(Strategy):
    """Average models every `period` steps and give the blocks momentum (default 1 - 1/workers), Nesterov's by default.

    `reset` starts every block with a fresh optimizer state: local momentum across the jump between blocks tends to diverge.
    """

    period: int = 64
    momentum: float | None = None
    rate: float = 1.0
    nesterov: bool = True
    reset: bool = True

    def __post_init__(self) -> None:
        check_period(self, self.period)
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ValueError(f"BlockMomentum(momentum={self.momentum}): block momentum lies in [0, 1); at 1 updates never die out")
        if self.rate <= 0:
            raise ValueError(f"BlockMomentum(rate={self.rate}): the block learning rate must be positive")

    async def worker(self, w: Replica) -> None:
        eta = 1 - 1 / w.workers if self.momentum is None else self.momentum
        m = w.memory(model=w.params.clone(), start=w.params.clone(), delta=torch.zeros_like(w.params))
        w.deploy(m.model)
        for k in w.steps():
            await w.local_step()
            if (k + 1) % self.period == 0:
                block = await w.mean(w.params) - m.start
                m.delta.mul_(eta).add_(block, alpha=self.rate)
                m.model.add_(m.delta)
                m.start.copy_(m.model)
                if self.nesterov:
                    m.start.add_(m.delta, alpha=eta)
                w.params.copy_(m.start)
                if self.reset:
                    w.reset_optimizer()
                await w.mean_of_buffers()
