"""Blockwise model-update filtering, BMUF (Chen & Huo, ICASSP 2016).

The mean displacement of a block of local steps is treated as a gradient and low-pass filtered, so that N workers get as far
as N times the data should take them at an unchanged learning rate.  With momentum 0 and rate 1 it is PeriodicAveraging.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from math import exp, log
from typing import Literal

import torch
from torch import Tensor

from paceline.families.averaging import Averaging, OptimizerState, SyncRounds
from paceline.families.deltas import wide
from paceline.families.sync import SyncResult
from paceline.state import Slot
from paceline.worker.replica import Replica


class TooFewSamples(UserWarning):
    """There are not enough samples for the updates of block momentum to be delivered."""


@dataclass(frozen=True)
class BlockMomentum(Averaging):
    """Average models after every block of `period` steps and give the blocks momentum, Nesterov's by default.

    A block is 120 000 samples of each worker, unless it is given in steps or `samples`.  The momentum is 1 - 1/workers, unless it
    is given, or follows from a `time_constant` in samples of each worker.  The form is the paper's; CNTK's sums displacements and
    looks ahead cumulatively, with nearly twice the gain.  Optimizer state is reset with every block: local momentum across the
    jump between two blocks tends to diverge.
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
                f"BlockMomentum(momentum={self.momentum}): block momentum lies in [0, 1); at 1 updates never die out"
            )
        if self.momentum is not None and self.time_constant is not None:
            raise ValueError(
                f"BlockMomentum(momentum={self.momentum}, time_constant={self.time_constant}): one follows from the other; give one"
            )
        if self.time_constant is not None and not self.time_constant >= 0:
            raise ValueError(
                f"BlockMomentum(time_constant={self.time_constant}): it counts samples of each worker, from 0"
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
        m = w.state("outer", model=anchor, delta=torch.zeros_like(anchor))
        w.published = m.model
        outer = partial(self.outer, m)
        await SyncRounds(w, self, period=self.period, samples=samples, outer=outer).train()

    def outer(self, m: Slot, anchor: Tensor, block: Tensor, where: slice, sync: SyncResult) -> None:
        """Filter the mean delta of a block; start the next block from the filtered model, looking ahead if Nesterov's."""
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

    def momentum_of(self, workers: int, samples: float) -> float:
        """The momentum for a block of so many samples of each worker.

        >>> round(BlockMomentum(time_constant=417_127).momentum_of(4, 120_000), 6)
        0.75
        """
        if self.time_constant is not None:
            return exp(-samples / self.time_constant) if self.time_constant else 0.0
        return 1 - 1 / workers if self.momentum is None else self.momentum

    def _warn(self, w: Replica, samples: float | None) -> None:
        """Of settings that cannot do what they are for, as far as the length of the run is known."""
        if samples is None and (self.period is None or w.plan.batch is None):
            return
        block = samples or (self.period or 0) * (w.plan.batch or 0) / w.workers
        eta = self.momentum_of(w.workers, block)
        needed = time_constant(block, eta) * w.workers
        if w.plan.samples is not None and w.plan.samples < needed:
            warnings.warn(
                TooFewSamples(
                    f"BlockMomentum with momentum {eta:g} and blocks of {block:,.0f} samples on {w.workers} workers spreads an update over "
                    f"{needed:,.0f} samples, and there are {w.plan.samples:,}: shorten the period or lower the momentum"
                ),
                stacklevel=2,
            )
        gain = (1 - eta) * self.rate * w.workers
        if self.form == "cntk" and w.workers > 1 and (gain >= 2 or eta == 0):
            warnings.warn(
                f"BlockMomentum(form='cntk') with momentum {eta:g}, rate {self.rate:g} and {w.workers} workers adds {gain:g} times "
                "their mean displacement after every block: at 2 or more, or without momentum, it overshoots",
                stacklevel=2,
            )


def time_constant(samples: float, momentum: float) -> float:
    """In how many samples an update dies down to 1/e, with a block of so many.

    >>> round(time_constant(120_000, 0.75))
    417127
    """
    return -samples / log(momentum) if momentum > 0 else 0.0
