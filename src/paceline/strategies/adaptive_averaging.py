"""Averaging with a period that follows the replicas' spread, ADPSGD (Jiang & Agrawal, "Adaptive Periodic Averaging").

This is not AD-PSGD, which is a gossip method.  The spread just before a sync should stay proportional to the learning
rate.  If it is smaller, the period grows by one step; if it is larger, the period shrinks by one.  So periods are short
early, while replicas move apart fast, and long later.  With low=0 and high=inf it is PeriodicAveraging.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from paceline.families.averaging import Averaging, SyncRounds
from paceline.families.sync import SyncResult
from paceline.worker.replica import Replica


@dataclass(frozen=True)
class AdaptiveAveraging(Averaging):
    """Average the models with a period that follows their spread; the first period is `period` steps.

    In the first epoch (or for `warmup` steps) models are averaged at every step.  Then the period is constant until a
    quarter of the run (`sampling`: up to 1 a fraction of the run, above 1 a step), and the mean ratio of spread to
    learning rate is measured.  After that the period is adapted so that spread / lr stays between `low` and `high`
    times this ratio.  If the first epoch leaves no time to measure, in a run of up to four epochs, half of that time is
    the default warm-up.
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
                f"AdaptiveAveraging(low={self.low}, high={self.high}): low must be at least 0, and high at least low"
            )
        if (self.warmup is not None and self.warmup < 0) or self.sampling <= 0:
            raise ValueError(
                f"AdaptiveAveraging(warmup={self.warmup}, sampling={self.sampling}): warmup must be at least 0 steps, "
                "and sampling must be positive"
            )

    async def worker(self, w: Replica) -> None:
        until = self._end_of_sampling(w)
        warmup = self._end_of_warmup(w, until)
        m = w.state("controller", period=self.period, ratio=0.0, sampled=0, began=w.cursor.step)
        if until < max(warmup, m.began) + self.period and (self.low > 0 or self.high < inf):
            raise ValueError(self._too_short(warmup, m.began, until))
        rounds = SyncRounds(w, self, period=1 if w.cursor.step < warmup else m.period)
        for k in w.steps():
            await w.local_step()
            sync = await rounds.after_step()
            if sync is not None and sync.lr and sync.step >= warmup:
                if sync.step < until:
                    m.sampled += 1
                    m.ratio += (sync.divergence / sync.lr - m.ratio) / m.sampled
                else:
                    m.period = self.next_period(m.period, sync, m.ratio)
            rounds.period = 1 if k + 1 < warmup else m.period
        await rounds.finish()

    def next_period(self, period: int, sync: SyncResult, ratio: float) -> int:
        """The period after a sync, given the sampled ratio of spread to learning rate."""
        if sync.divergence < self.low * sync.lr * ratio:
            return period + 1
        return max(1, period - 1) if sync.divergence > self.high * sync.lr * ratio else period

    def _end_of_warmup(self, w: Replica, until: int) -> int:
        if self.warmup is not None:
            return self.warmup
        epoch = w.plan.require("steps_per_epoch", "AdaptiveAveraging without warmup=...")
        return epoch if epoch + self.period <= until else min(epoch, until // 2)

    def _too_short(self, warmup: int, began: int, until: int) -> str:
        first = max(warmup, began)
        remedy = f"give sampling={first + 2 * self.period} (a step)"
        if until >= began + self.period:
            remedy += f", or warmup={until - self.period} or less"
        return (
            f"AdaptiveAveraging(period={self.period}, warmup={warmup}, sampling={self.sampling}): the spread is "
            f"sampled from step {first} to step {until}, which is shorter than one period of {self.period}; {remedy}"
        )

    def _end_of_sampling(self, w: Replica) -> int:
        if self.sampling > 1:
            return int(self.sampling)
        return int(self.sampling * w.plan.require("steps", "AdaptiveAveraging with sampling as a fraction of the run"))
