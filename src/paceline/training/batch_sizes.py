"""Sizes of minibatches that change during a run.

`GrowingBatch` raises the size over the first epochs, as a warm-up of the minibatch (EA-wild paper, figure 3).
`AutoBatch` is CNTK's automatic minibatch scaling: now and then it tries larger minibatches on a small part of the
coming epoch, and keeps the largest that does not harm the training criterion.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from itertools import count
from math import ceil, isfinite, sqrt

from paceline.checked import check_settings

TRIAL_STEPS = 5  # The losses of a trial are those before its steps: one of a single step says nothing about the size.


class ShortTrials(UserWarning):
    """The trials of an AutoBatch have too few steps to show what a larger minibatch does."""


@dataclass(frozen=True)
class GrowingBatch:
    """From `start` samples a step to `end`, in equal rises over `epochs` epochs, each a multiple of `multiple`.

    >>> growing = GrowingBatch(start=64, end=256, epochs=3, multiple=8)
    >>> [growing.size(epoch) for epoch in range(5)]
    [64, 128, 192, 256, 256]
    """

    start: int
    end: int
    epochs: int
    multiple: int = 1

    def __post_init__(self) -> None:
        check_settings(self)
        if not 1 <= self.start <= self.end:
            raise ValueError(
                f"GrowingBatch(start={self.start}, end={self.end}): minibatches grow from at least 1 sample to as many "
                "or more"
            )
        if self.epochs < 1 or self.multiple < 1:
            raise ValueError(f"GrowingBatch(epochs={self.epochs}, multiple={self.multiple}): both must be at least 1")
        if self.start % self.multiple or self.end % self.multiple:
            raise ValueError(
                f"GrowingBatch(start={self.start}, end={self.end}, multiple={self.multiple}): the first and the last "
                f"size must be multiples of {self.multiple}"
            )

    def size(self, epoch: int) -> int:
        """The samples of a step in that epoch, counted from 0."""
        if epoch >= self.epochs:
            return self.end
        grown = self.start + (self.end - self.start) * epoch / self.epochs
        return int(grown // self.multiple) * self.multiple

    def steps(self, samples: int) -> int:
        """The steps of the epochs before the last size, of so many samples each: the first stage of a TwoStage.

        >>> GrowingBatch(start=64, end=256, epochs=3, multiple=8).steps(samples=768)
        22
        """
        return sum(-(-samples // self.size(epoch)) for epoch in range(self.epochs))


@dataclass(frozen=True)
class AutoBatch:
    """Start with `start` samples a step, and at times choose the largest size that does not harm convergence.

    Before the first epoch, and then before every epoch whose number is a multiple of `every`, sizes are tried from
    half the current one (before the first epoch: from `start`) to twice it, each sqrt(2) times the one before and a
    multiple of `multiple`, at most `largest`.  A trial trains on `trial`, a share of an epoch, from the same state.
    Its criterion is the mean training loss.  The search ends with the first size whose criterion is more than
    `margin` above that of the first trial, or not finite.  A search changes nothing but the size.  A size with less
    than 5 steps in a trial is not tried, because such a trial does not show what its steps do.
    """

    start: int
    largest: int = 1_048_576
    every: int = 1
    margin: float = 0.01
    trial: float = 0.1
    multiple: int = 64

    def __post_init__(self) -> None:
        check_settings(self)
        if not 1 <= self.start <= self.largest:
            raise ValueError(
                f"AutoBatch(start={self.start}, largest={self.largest}): the first size is at least 1, and at most the "
                "largest"
            )
        if self.every < 1 or self.multiple < 1:
            raise ValueError(f"AutoBatch(every={self.every}, multiple={self.multiple}): both must be at least 1")
        if self.multiple > self.start:
            raise ValueError(
                f"AutoBatch(start={self.start}, multiple={self.multiple}): the first size is at least the multiple, to "
                f"which all sizes are rounded; give multiple={self.start} or less"
            )
        if not (self.margin >= 0 and 0 < self.trial <= 1):
            raise ValueError(
                f"AutoBatch(margin={self.margin}, trial={self.trial}): the margin is a share of the criterion, at "
                "least 0, and the trial a share of an epoch, up to 1"
            )

    def is_due(self, epoch: int, *, has_chosen: bool) -> bool:
        """Whether there is a search before that epoch, counted from 0.

        >>> auto = AutoBatch(start=256, every=3)
        >>> [epoch + 1 for epoch in range(12) if auto.is_due(epoch, has_chosen=epoch > 0)]
        [1, 2, 3, 6, 9, 12]
        """
        number = epoch + 1
        return not has_chosen or number <= self.every or number % self.every == 0

    def limited(self, samples: int) -> AutoBatch:
        """The same without sizes that a trial cannot judge, if an epoch has so many samples.

        >>> AutoBatch(start=256).limited(60_000).largest, AutoBatch(start=256, trial=0.5).limited(60_000).largest
        (1200, 6000)
        """
        most = int(round(self.trial * samples, 6) / TRIAL_STEPS)
        return replace(self, largest=min(self.largest, max(self.start, self.rounded(self.start), most)))

    def check_trials(self, samples: int) -> None:
        """Warn if this keeps all minibatches at their first size, and name the trial that does not."""
        if len(self.limited(samples).sizes(None, 1.0)) > 1 or len(self.sizes(None, 1.0)) == 1:
            return
        needed = self.sizes(None, 1.0)[1] * TRIAL_STEPS / samples
        cure = (
            f"give trial={ceil(100 * needed) / 100}" if needed <= 1 else "the data are too few for larger minibatches"
        )
        warnings.warn(
            ShortTrials(
                f"AutoBatch(start={self.start}, trial={self.trial}) with {samples} samples: a trial of a larger size "
                f"has fewer than {TRIAL_STEPS} steps, which do not show what the size does, so no larger size is "
                f"tried; {cure}"
            ),
            stacklevel=2,
        )

    def sizes(self, current: int | None, rate: float) -> list[int]:
        """The sizes to try, from the smallest; `rate` is the current factor on the first learning rate.

        A lower learning rate allows larger minibatches.

        >>> AutoBatch(start=256).sizes(None, 1.0)[:5], AutoBatch(start=256).sizes(512, 1.0)
        ([256, 384, 512, 704, 1024], [256, 384, 512, 704, 1024])
        """
        low = self.start / sqrt(rate) if 0 < rate < 1 else float(self.start)
        high = self.largest
        if current is not None:
            low = max(low, current / 2)
            high = min(self.largest, 2 * current)
        most = max(1, high // self.multiple) * self.multiple
        if low > high:
            return [most]
        found: list[int] = []
        for i in count():
            if (size := low * 2 ** (i / 2)) > high:
                return found
            if (size := min(self.rounded(size), most)) not in found:
                found.append(size)
        raise AssertionError  # The sizes grow.

    def rounded(self, size: float) -> int:
        """The nearest multiple, at least one."""
        return max(1, int((size + self.multiple / 2) // self.multiple)) * self.multiple

    def accepts(self, criterion: float, base: float) -> bool:
        """Whether a trial with that criterion is good enough, if the trial with the smallest size gave `base`."""
        return isfinite(criterion) and criterion <= base + self.margin * abs(base)


BatchPlan = GrowingBatch | AutoBatch
"""A size of minibatches that changes during the run."""
