"""Schedule: a factor on the learning rate that follows the samples seen, whatever the size of a step.

It starts with a gradual warm-up and goes on with one of the usual decays.  It is a function of the position in the run.
So it is the same under any number of workers, follows minibatches that grow, and reaches the rules on servers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, cos, pi, prod
from typing import Any, Literal

import torch

from paceline.checked import check_settings
from paceline.training.length import Length, Position

Decay = Literal["constant", "polynomial", "cosine", "multistep", "exponential"]


@dataclass(frozen=True)
class Schedule:
    """A warm-up, then a decay.

    `warmup` is a length, such as "5 epochs" or "500 steps".  The factor rises from `start` to 1, evenly with every
    step, or by `stairs` with every epoch.  With `start="base"` it starts at the rate before it was scaled up for a
    larger step (`Scaling`), as in Goyal et al. (2017).

    `decay` is "polynomial" ((1 - t)^power), "cosine", "multistep" (times `factor` at each of the `milestones`, or a
    factor for each), or "exponential" (to `end` at the end).  It falls to `end` over the length `over`, by default the
    whole run, and counts from the start of the training, as the warm-up does.
    """

    warmup: str | Length | None = None
    start: float | Literal["base"] = 0.1
    stairs: bool = False
    decay: Decay = "constant"
    power: float = 1.0
    milestones: Sequence[str | Length] = ()
    factor: float | Sequence[float] = 0.1
    end: float = 0.0
    over: str | Length | None = None

    def __post_init__(self) -> None:
        for name in ("warmup", "over"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, Length.of(f"Schedule({name})", given))
        if isinstance(self.milestones, (list, tuple)):
            lengths = tuple(Length.of(f"Schedule(milestones[{i}])", m) for i, m in enumerate(self.milestones))
            object.__setattr__(self, "milestones", lengths)
        check_settings(self)
        if isinstance(self.start, float | int) and not 0 <= self.start <= 1:
            raise ValueError(f"Schedule(start={self.start}): a warm-up starts with a share of the rate, from 0 to 1")
        if self.power <= 0 or not (all(f >= 0 for f in self._factors) and self.end >= 0):
            raise ValueError(
                f"Schedule(power={self.power}, factor={self.factor}, end={self.end}): the power must be positive, the "
                "factors at least 0"
            )
        self._check_use()

    def _check_use(self) -> None:
        """Refuse settings without effect."""
        default = {f: type(self).__dataclass_fields__[f].default for f in ("start", "power", "factor", "end")}
        unused = [
            ("start", "warmup", self.warmup is None),
            ("start", "a rise with every step (stairs=False)", self.stairs),
            ("stairs", "warmup", self.warmup is None and self.stairs),
            ("power", "decay='polynomial'", self.decay != "polynomial"),
            ("factor", "decay='multistep'", self.decay != "multistep"),
            ("end", "a decay that ends, such as 'cosine'", self.decay in ("constant", "multistep")),
        ]
        for name, needed, is_unused in unused:
            if is_unused and getattr(self, name) != default.get(name, False):
                call = f"Schedule({name}={getattr(self, name)!r}, decay={self.decay!r})"
                raise ValueError(f"{call}: {name} has no effect without {needed}")
        if bool(self.milestones) != (self.decay == "multistep"):
            raise ValueError(
                f"Schedule(decay={self.decay!r}, milestones={[str(m) for m in self.milestones]}): decay='multistep' "
                "and milestones belong together"
            )
        if len(self._factors) != len(self.milestones):
            raise ValueError(
                f"Schedule(factor={list(self._factors)}, milestones={[str(m) for m in self.milestones]}): give one "
                "factor, or one for each milestone"
            )
        if self.over is not None and self.decay in ("constant", "multistep"):
            raise ValueError(f"Schedule(over='{self.over}', decay={self.decay!r}): over has no effect with this decay")
        if self.decay == "exponential" and not self.end:
            raise ValueError("Schedule(decay='exponential', end=0.0): give the factor at the end, above 0")
        if len({m.unit for m in self._milestones}) > 1 or list(self._milestones) != sorted(
            self._milestones, key=lambda m: m.value
        ):
            raise ValueError(
                f"Schedule(milestones={[str(m) for m in self.milestones]}): give them in one unit and in order"
            )
        if self.stairs and self.warmup is not None and Length.of("warmup", self.warmup).unit != "epochs":
            raise ValueError(f"Schedule(warmup='{self.warmup}', stairs=True): stairs are epochs; give warmup in epochs")

    @property
    def _milestones(self) -> Sequence[Length]:
        return [m for m in self.milestones if isinstance(m, Length)]

    @property
    def _factors(self) -> Sequence[float]:
        """By what the rate is multiplied at each milestone."""
        return [self.factor] * len(self.milestones) if isinstance(self.factor, float | int) else self.factor

    def at(self, position: Position, gain: float = 1.0) -> float:
        """The factor at a position; `gain` is the factor by which the rate was scaled up for the size of a step.

        >>> step = Schedule(warmup="8 epochs", stairs=True, decay="multistep", milestones=["30 epochs", "60 epochs"])
        >>> [round(step.at(Position(0, 0, epoch)), 3) for epoch in (0, 1, 7.5, 8, 29.9, 30, 60)]
        [0.125, 0.25, 1.0, 1.0, 1.0, 0.1, 0.01]
        """
        return self._warmed(position, gain) * self._decayed(position)

    @property
    def needs_gain(self) -> bool:
        """Whether its warm-up starts at the rate before it was scaled up."""
        return self.warmup is not None and self.start == "base"

    def _warmed(self, at: Position, gain: float) -> float:
        if self.warmup is None:
            return 1.0
        warmup = Length.of("Schedule(warmup)", self.warmup)
        done = warmup.done("Schedule(warmup)", at)
        if self.stairs:
            assert at.epochs is not None
            return min(1.0, (int(at.epochs) + 1) / ceil(warmup.value)) if warmup.value else 1.0
        start = self.start if isinstance(self.start, float | int) else min(1.0, 1 / gain)
        return start + (1 - start) * done

    def _decayed(self, at: Position) -> float:
        if self.decay == "constant":
            return 1.0
        if self.decay == "multistep":
            here = [m.done("Schedule(milestones)", at) for m in self._milestones]
            passed = bisect_right([-share for share in here], -1.0)
            return self.factor**passed if isinstance(self.factor, float | int) else prod(self.factor[:passed])
        done = at.share if self.over is None else Length.of("Schedule(over)", self.over).done("Schedule(over)", at)
        if done is None:
            raise ValueError(
                f"Schedule(decay={self.decay!r}): the length of this run is not known; give over=, as in "
                "over='90 epochs'"
            )
        if self.decay == "exponential":
            return self.end**done
        left = (1 - done) ** self.power if self.decay == "polynomial" else (1 + cos(pi * done)) / 2
        return self.end + (1 - self.end) * left

    def scheduler(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        steps_per_epoch: int | None = None,
        batch: int | None = None,
        epochs: float | None = None,
        gain: float | None = None,
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """The same schedule as a scheduler of torch, for a loop of your own; call its `step` after every step.

        `batch` is needed for lengths in samples, `steps_per_epoch` for those in epochs, `epochs` for a decay over the
        whole run, and with start="base" the `gain`, by which you have scaled up the rate.
        """
        if gain is None and self.needs_gain:
            raise ValueError(
                "Schedule.scheduler(gain=None): a warm-up that starts at the base rate needs the factor by which the "
                "rate was scaled up, as in gain=Scaling(base=256).gain(8192)"
            )
        if batch is None and any(length.unit == "samples" for length in self._lengths):
            raise ValueError("Schedule.scheduler(batch=None): a length in samples needs the samples of a step")

        def factor(step: int) -> float:
            epoch = None if steps_per_epoch is None else step / steps_per_epoch
            total = None if steps_per_epoch is None or epochs is None else steps_per_epoch * epochs
            return self.at(Position(step, step * (batch or 0), epoch, total, epochs), gain or 1.0)

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    @property
    def _lengths(self) -> list[Length]:
        given: list[Any] = [self.warmup, self.over, *self.milestones]
        return [length for length in given if isinstance(length, Length)]
