"""Averaging with periods that only become shorter: the opposite of AdaptiveAveraging, and its contrast in that paper.

`DecreasingAveraging` follows a fixed schedule.  `AdaComm` (Wang & Joshi, SysML 2019) lets the training loss choose: seldom while the
loss is high and time is better spent on steps, often near the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt

from paceline.families.averaging import Averaging, SyncRounds
from paceline.families.sync import SyncResult
from paceline.worker.replica import Replica


@dataclass(frozen=True)
class DecreasingAveraging(Averaging):
    """Average the models with one period after another, each for an equal part of the run."""

    periods: Sequence[int] = (20, 5)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.periods:
            raise ValueError("DecreasingAveraging(periods=[]): give at least one period")
        for period in self.periods:
            self.check_period(period)

    async def worker(self, w: Replica) -> None:
        steps = w.plan.require("steps", "DecreasingAveraging")
        rounds = SyncRounds(w, self, period=self.period_at(w.cursor.step, steps))
        for k in w.steps():
            await w.local_step()
            await rounds.after_step()
            rounds.period = self.period_at(k + 1, steps)
        await rounds.finish()

    def period_at(self, step: int, steps: int) -> int:
        """The period in force at a step of a run of so many.

        >>> [DecreasingAveraging(periods=(20, 5)).period_at(step, 4000) for step in (0, 1999, 2000, 4000)]
        [20, 20, 5, 5]
        """
        return self.periods[min(step * len(self.periods) // max(1, steps), len(self.periods) - 1)]


@dataclass(frozen=True)
class AdaComm(Averaging):
    """Average the models the more often the lower the training loss is, starting with every `period` steps.

    The period is chosen anew every `seconds`, or every `steps`.  `most` bounds it.
    """

    period: int = 16
    seconds: float | None = None
    steps: int | None = None
    most: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_period(self.period)
        if self.seconds is not None and self.steps is not None:
            raise ValueError(
                f"AdaComm(seconds={self.seconds}, steps={self.steps}): the period is chosen anew after seconds or steps, not after both"
            )
        if (
            (self.seconds is not None and self.seconds <= 0)
            or (self.steps is not None and self.steps < 1)
            or (self.most is not None and self.most < 1)
        ):
            raise ValueError(
                f"AdaComm(seconds={self.seconds}, steps={self.steps}, most={self.most}): these must be positive"
            )

    async def worker(self, w: Replica) -> None:
        m = w.state("controller", period=self.period, loss=0.0, lr=0.0, last_lr=0.0, elapsed=0.0, has_begun=False)
        rounds = SyncRounds(w, self, period=m.period)
        last: float | None = None  # A clock begins anew when a run is resumed.
        for _ in w.steps():
            await w.local_step()
            met = await rounds.after_step()
            if met is not None and w.workers > 1:
                if met.loss is None:
                    raise ValueError(
                        "AdaComm follows the training loss, which nobody has told: call session.step(loss)"
                    )
                m.elapsed += met.steps if self.steps is not None else met.time - (met.time if last is None else last)
                last = met.time
                if not m.has_begun:
                    m.loss, m.lr, m.last_lr, m.elapsed, m.has_begun = met.loss, met.lr, met.lr, 0.0, True
                elif m.elapsed >= (self.steps or self.seconds or 60.0):
                    m.period = self.next_period(m.period, met, m.loss, m.lr, is_same_rate=met.lr == m.last_lr)
                    m.last_lr, m.elapsed = met.lr, 0.0
                rounds.period = m.period
        await rounds.finish()

    def next_period(
        self, period: int, met: SyncResult, first_loss: float, first_lr: float, *, is_same_rate: bool
    ) -> int:
        """The period for the next interval; if it would not fall although the learning rate has not, half of it."""
        chosen = self.proposal(met.loss or 0.0, met.lr, first_loss, first_lr)
        if chosen >= period and is_same_rate:
            chosen = ceil(period / 2)
        return max(1, chosen if self.most is None else min(chosen, self.most))

    def proposal(self, loss: float, lr: float, first_loss: float, first_lr: float) -> int:
        """What loss and learning rate, against the first ones, make of the first period.

        >>> AdaComm(period=16).proposal(0.5, 0.1, 2.0, 0.1)
        8
        """
        if first_loss <= 0 or lr <= 0:
            return self.period
        return ceil(sqrt(max(0.0, first_lr / lr * loss / first_loss)) * self.period)
