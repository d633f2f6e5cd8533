"""AutoAdjust: go back to the best model and lower the learning rate when the training criterion rises (CNTK).

It is CNTK's protection against divergence, for example of model averaging, whose learning rate is multiplied by the
number of workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import NamedTuple

from paceline.checked import check_settings


class Verdict(NamedTuple):
    """What follows from a criterion."""

    goes_back: bool  # To the state of the last accepted check.
    factor: float  # On the learning rate.


@dataclass(frozen=True)
class AutoAdjust:
    """Every `interval` epochs compare the mean training loss since the last check with the best one before.

    If it rose, or is not finite, all workers go back to the state of the last accepted check, with everything that
    the method remembers (unless `load_best` is False), and repeat those epochs with the learning rate times `decrease`.
    If it fell by no more than the share `reduce_below`, the rate is also lowered; if it fell by more than
    `increase_above`, the rate is multiplied by `increase`.  Training ends when the rate is below `minimum` times the
    first one, or after `rollbacks` returns in a row.
    """

    interval: int = 1
    load_best: bool = True
    decrease: float = 0.618
    increase: float = 1.382
    reduce_below: float = 0.0
    increase_above: float = inf
    minimum: float = 0.0
    rollbacks: int = 5

    def __post_init__(self) -> None:
        check_settings(self)
        if self.interval < 1 or self.rollbacks < 1:
            raise ValueError(
                f"AutoAdjust(interval={self.interval}, rollbacks={self.rollbacks}): both must be at least 1"
            )
        if not (0 < self.decrease < 1 <= self.increase < inf):
            raise ValueError(
                f"AutoAdjust(decrease={self.decrease}, increase={self.increase}): the learning rate is multiplied by "
                "them, so give a decrease between 0 and 1, and an increase of at least 1"
            )
        if not self.reduce_below <= self.increase_above:
            raise ValueError(
                f"AutoAdjust(reduce_below={self.reduce_below}, increase_above={self.increase_above}): both are shares "
                "by which the criterion falls; the second is at least the first"
            )
        if not 0 <= self.minimum < 1:
            raise ValueError(
                f"AutoAdjust(minimum={self.minimum}): it is a share of the first learning rate, from 0 and below 1"
            )

    def judge(self, criterion: float, before: float) -> Verdict:
        """What follows from a criterion, if the last accepted one was `before` (infinite at the start).

        >>> AutoAdjust().judge(2.5, 2.0), AutoAdjust().judge(1.9, 2.0)
        (Verdict(goes_back=True, factor=0.618), Verdict(goes_back=False, factor=1.0))
        """
        is_lost = not isfinite(criterion)
        goes_back = self.load_best and (is_lost or criterion > before)
        gain = before - criterion
        if is_lost or gain <= self.reduce_below * before:
            return Verdict(goes_back, self.decrease)
        return Verdict(goes_back, self.increase if gain > self.increase_above * before else 1.0)
