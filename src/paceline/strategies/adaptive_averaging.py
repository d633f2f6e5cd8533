"""Averaging with a period that follows the spread of the replicas, ADPSGD (Jiang & Agrawal, "Adaptive Periodic Averaging").

Not to be confused with AD-PSGD, which gossips.  The spread just before an average should stay proportional to the learning
rate: where it has become smaller the period grows by a step, where larger it shrinks by one.  Small periods early, while
replicas move apart fast; long ones late.  With a band that everything fits into it is PeriodicAveraging.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from paceline.families.averaging import Averaging, SyncRounds
from paceline.families.sync import SyncResult
from paceline.worker.replica import Replica


@dataclass(frozen=True)
class AdaptiveAveraging(Averaging):
    """Average the models as often as their spread asks for, starting with every `period` steps.

    In the first epoch (or `warmup` steps) they are averaged at every step.  Until a quarter of the run (`sampling`: a share of
    its steps, or a number of them above 1) the period stays, and the usual ratio of spread to learning rate is found.  From then
    on the spread is kept within the band `low` to `high` around it.
    """

    period: int = 4
    warmup: int | None = None
    sampling: float = 0.25
    low: float = 0.7
    high: float = 1.3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_period(self.period)
        if not 0 <= self.low <= self.high:
            raise ValueError(
                f"AdaptiveAveraging(low={self.low}, high={self.high}): the band must begin at 0 or above and not end before"
            )
        if (self.warmup is not None and self.warmup < 0) or self.sampling <= 0:
            raise ValueError(
                f"AdaptiveAveraging(warmup={self.warmup}, sampling={self.sampling}): there must be something to sample"
            )

    async def worker(self, w: Replica) -> None:
        warmup = (
            w.plan.require("steps_per_epoch", "AdaptiveAveraging without warmup=...")
            if self.warmup is None
            else self.warmup
        )
        until = self._end_of_sampling(w)
        m = w.state("controller", period=self.period, ratio=0.0, sampled=0, began=w.cursor.step)
        if until < max(warmup, m.began) + self.period and (self.low > 0 or self.high < inf):
            raise ValueError(
                f"AdaptiveAveraging(period={self.period}, warmup={warmup}, sampling={self.sampling}): the spread is sampled from step "
                f"{max(warmup, m.began)} to step {until}, which holds no whole period of {self.period}; "
                "warm up for fewer steps or sample for more"
            )
        rounds = SyncRounds(w, self, period=1 if w.cursor.step < warmup else m.period)
        for k in w.steps():
            await w.local_step()
            met = await rounds.after_step()
            if met is not None and met.lr and met.step >= warmup:
                if met.step < until:
                    m.sampled += 1
                    m.ratio += (met.divergence / met.lr - m.ratio) / m.sampled
                else:
                    m.period = self.next_period(m.period, met, m.ratio)
            rounds.period = 1 if k + 1 < warmup else m.period
        await rounds.finish()

    def next_period(self, period: int, met: SyncResult, ratio: float) -> int:
        """The period after a synchronisation, given the usual ratio of spread to learning rate."""
        if met.divergence < self.low * met.lr * ratio:
            return period + 1
        return max(1, period - 1) if met.divergence > self.high * met.lr * ratio else period

    def _end_of_sampling(self, w: Replica) -> int:
        if self.sampling > 1:
            return int(self.sampling)
        return int(self.sampling * w.plan.require("steps", "AdaptiveAveraging with sampling as a share of the run"))
