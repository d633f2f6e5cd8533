"""Averaging with periods that only become shorter: the opposite of AdaptiveAveraging, whose paper compares both.

`DecreasingAveraging` follows a fixed schedule.  In `AdaComm` (Wang & Joshi, SysML 2019) the period follows the training
loss: long periods while the loss is high, so that time goes into steps, and short ones near the end.
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
    """Average the models with the given periods in turn, each for an equal part of the run."""

    periods: Sequence[int] = (20, 5)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "periods", tuple(self.periods))  # A list could not be hashed.
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
        """The period at a step of a run of `steps` steps.

        >>> [DecreasingAveraging(periods=(20, 5)).period_at(step, 4000) for step in (0, 1999, 2000, 4000)]
        [20, 20, 5, 5]
        """
        return self.periods[min(step * len(self.periods) // max(1, steps), len(self.periods) - 1)]


@dataclass(frozen=True)
class AdaComm(Averaging):
    """Average the models more often as the training loss falls; the first period is `period` steps.

    A new period is chosen every `seconds` (60 by default), or every `steps`.  `most` is its upper limit.
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
                f"AdaComm(seconds={self.seconds}, steps={self.steps}): give the time between two choices of the period "
                "in seconds or in steps, not in both"
            )
        if (
            (self.seconds is not None and self.seconds <= 0)
            or (self.steps is not None and self.steps < 1)
            or (self.most is not None and self.most < 1)
        ):
            raise ValueError(
                f"AdaComm(seconds={self.seconds}, steps={self.steps}, most={self.most}): all of these must be positive"
            )

    async def worker(self, w: Replica) -> None:
        m = w.state("controller", period=self.period, loss=0.0, lr=0.0, last_lr=0.0, elapsed=0.0, has_begun=False)
        rounds = SyncRounds(w, self, period=m.period)
        last: float | None = None  # Not saved: the clock starts at 0 again when a run is resumed.
        for _ in w.steps():
            await w.local_step()
            sync = await rounds.after_step()
            if sync is not None and w.workers > 1:
                if sync.loss is None:
                    raise ValueError(
                        "AdaComm follows the training loss, which was not reported: call session.step(loss)"
                    )
                m.elapsed += sync.steps if self.steps is not None else sync.time - (sync.time if last is None else last)
                last = sync.time
                if not m.has_begun:
                    m.loss = sync.loss
                    m.lr = sync.lr
                    m.last_lr = sync.lr
                    m.elapsed = 0.0
                    m.has_begun = True
                elif m.elapsed >= (self.steps or self.seconds or 60.0):
                    m.period = self.next_period(m.period, sync, m.loss, m.lr, is_same_rate=sync.lr == m.last_lr)
                    m.last_lr = sync.lr
                    m.elapsed = 0.0
                rounds.period = m.period
        await rounds.finish()

    def next_period(
        self, period: int, sync: SyncResult, first_loss: float, first_lr: float, *, is_same_rate: bool
    ) -> int:
        """The next period.  If it would not become shorter and the learning rate is unchanged, half of the last one."""
        chosen = self.proposal(sync.loss or 0.0, sync.lr, first_loss, first_lr)
        if chosen >= period and is_same_rate:
            chosen = ceil(period / 2)
        return max(1, chosen if self.most is None else min(chosen, self.most))

    def proposal(self, loss: float, lr: float, first_loss: float, first_lr: float) -> int:
        """The first period, scaled by the loss and the learning rate relative to the first ones.

        >>> AdaComm(period=16).proposal(0.5, 0.1, 2.0, 0.1)
        8
        """
        if first_loss <= 0 or lr <= 0:
            return self.period
        return ceil(sqrt(max(0.0, first_lr / lr * loss / first_loss)) * self.period)
