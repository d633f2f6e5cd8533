"""Model averaging with a constant period, also called local SGD.

Workers train alone and average their parameters every `period` steps.  With period 1 and plain or momentum SGD it
equals AllReduceSGD.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.families.averaging import Averaging, SyncRounds
from paceline.worker.replica import Replica


@dataclass(frozen=True)
class PeriodicAveraging(Averaging):
    """Train alone and average the models every `period` steps: 1/period of the bytes and of the waiting.

    The default is 8 steps; set `period` in steps, or `samples` of each worker.
    """

    period: int | None = None
    samples: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_period(self.period, self.samples)

    async def worker(self, w: Replica) -> None:
        period = 8 if self.period is None and self.samples is None else self.period
        await SyncRounds(w, self, period=period, samples=self.samples).train()
