"""Model averaging with a constant period, also called local SGD.

Workers train alone and average their parameters every `period` steps.  With period 1 and plain or momentum SGD it equals
AllReduceSGD.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.replica import Replica
from paceline.strategy import Strategy, check_period


@dataclass(frozen=True)
class PeriodicAveraging(Strategy):
    """Train alone, average the models every `period` steps: 1/period of the bytes and of the waiting."""

    period: int = 8

    def __post_init__(self) -> None:
        check_period(self, self.period)

    async def worker(self, w: Replica) -> None:
        for k in w.steps():
            await w.local_step()
            if (k + 1) % self.period == 0:
                await w.mean(w.params)
                await w.mean_of_buffers()
