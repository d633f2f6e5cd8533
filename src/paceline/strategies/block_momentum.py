"""Blockwise model-update filtering, BMUF (Chen & Huo, ICASSP 2016).

The mean delta of a block of local steps is treated as a gradient and low-pass filtered.  So N workers move the model as
far as N times the data would, at the same learning rate.  With momentum 0 and rate 1 it is PeriodicAveraging.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from paceline.families.averaging import Averaging, OptimizerState, SyncRounds
from paceline.families.deltas import wide
from paceline.families.sync import SyncResult
from paceline.state import Slot
from paceline.training.scaling import momentum_of, time_constant_of
from paceline.worker.replica import Replica


class TooFewSamples(UserWarning):
    """The run has too few samples for the updates of block momentum to take full effect."""


@dataclass(frozen=True)
class BlockMomentum(Averaging):
    """Average models after every block of `period` steps, with momentum over blocks (Nesterov's by default).

    By default a block is 120 000 samples of each worker; set `period` in steps, or `samples` of each worker.  By
    default the momentum is 1 - 1/workers; set `momentum`, or a `time_constant` in samples of each worker.  The default
    `form` is the paper's.  CNTK's form sums deltas and adds up its look-ahead steps, with nearly twice the gain.  The
    optimizer state is reset at every block: local momentum that continues into the next block tends to diverge.
    One worker alone, with the default momentum, trains as it would without blocks.
    """

    period: int | None = None
    samples: int | None = None
    momentum: float | None = None
    time_constant: float | None = None
    rate: float = 1.0
    nesterov: bool = True
    form: Literal["paper", "cntk"] = "paper"
    optimizer_state: OptimizerState = "reset"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_period(self.period, self.samples)
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ValueError(
                f"BlockMomentum(momentum={self.momentum}): block momentum lies in [0, 1); at 1 updates never decay"
            )
        if self.momentum is not None and self.time_constant is not None:
            raise ValueError(
                f"BlockMomentum(momentum={self.momentum}, time_constant={self.time_constant}): each follows from the "
                "other; give only one"
            )
        if self.time_constant is not None and not self.time_constant >= 0:
            raise ValueError(
                f"BlockMomentum(time_constant={self.time_constant}): it counts samples of each worker, at least 0"
            )
        if self.rate <= 0:
            raise ValueError(f"BlockMomentum(rate={self.rate}): the block learning rate must be positive")
        if self.form not in ("paper", "cntk"):
            raise ValueError(f"BlockMomentum(form={self.form!r}): the form is 'paper' or 'cntk'")

    async def worker(self, w: Replica) -> None:
        samples = 120_000 if self.period is None and self.samples is None else self.samples
        if w.rank == 0:
            self._warn(w, samples)

        anchor = wide(w.params)
        memory = {"model": anchor, "delta": torch.zeros_like(anchor)}
        # Alone, by default, there is nothing to filter, and a reset would only hurt: it is plain training.
        is_plain = w.workers == 1 and self.rate == 1 and not self.momentum_of(1, samples=1.0)
        method = replace(self, optimizer_state="keep") if is_plain else self
        rounds = SyncRounds(w, method, period=self.period, samples=samples, outer=self.outer, memory=memory)
        w.published = rounds.memory.model
        await rounds.train()

    def outer(self, m: Slot, anchor: Tensor, block: Tensor, where: slice, sync: SyncResult) -> None:
        """Filter the mean delta of a block.  The next block starts from the new model, or with Nesterov ahead of it."""
        eta = self.momentum_of(sync.workers, sync.samples / sync.workers)
        if self.form == "cntk":
            m.delta.mul_(eta).add_(block, alpha=(1 - eta) * self.rate * sync.workers)
            anchor.add_(m.delta, alpha=1 + eta if self.nesterov else 1)
            m.model.copy_(anchor)
        else:
            m.delta.mul_(eta).add_(block, alpha=self.rate)
            m.model.add_(m.delta)
            anchor.copy_(m.model)
            if self.nesterov:
                anchor.add_(m.delta, alpha=eta)

    def outer_gain(self, samples: float, workers: int) -> float:
        """By default `workers`: so the learning rate stays that of one worker."""
        block = self.samples or 120_000 if self.period is None else self.period * samples / workers
        eta = self.momentum_of(workers, block)
        if self.form == "cntk":
            return self.rate * workers * (1 + eta if self.nesterov else 1)
        return self.rate / (1 - eta)

    def momentum_of(self, workers: int, samples: float) -> float:
        """The momentum for a block of `samples` of each worker.

        >>> round(BlockMomentum(time_constant=417_127).momentum_of(4, 120_000), 6)
        0.75
        """
        if self.time_constant is not None:
            return momentum_of(self.time_constant, samples)
        return 1 - 1 / workers if self.momentum is None else self.momentum

    def _warn(self, w: Replica, samples: float | None) -> None:
        """Warn about settings that cannot work well, if the length of the run is known."""
        if samples is None and (self.period is None or w.plan.batch is None):
            return
        block = samples or (self.period or 0) * (w.plan.batch or 0) / w.workers
        eta = self.momentum_of(w.workers, block)
        needed = time_constant_of(eta, block) * w.workers
        if w.plan.samples is not None and w.plan.samples < needed:
            warnings.warn(
                TooFewSamples(
                    f"BlockMomentum with momentum {eta:g} and blocks of {block:,.0f} samples on {w.workers} workers "
                    f"spreads an update over {needed:,.0f} samples, but there are only {w.plan.samples:,}: use a "
                    "shorter period or a smaller momentum"
                ),
                stacklevel=2,
            )
        gain = (1 - eta) * self.rate * w.workers
        if self.form == "cntk" and w.workers > 1 and (gain >= 2 or eta == 0):
            warnings.warn(
                f"BlockMomentum(form='cntk') with momentum {eta:g}, rate {self.rate:g} and {w.workers} workers adds "
                f"{gain:g} times their mean delta after every block: at 2 or more, or without momentum, it overshoots",
                stacklevel=2,
            )
