"""Rates: the learning rates and the momentum of a worker's optimizer at every step of a task.

They follow the schedule, the number of samples behind a step (`Scaling`), and what the run has learnt (`AutoAdjust`).
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import torch

from paceline.strategy import Strategy
from paceline.training.length import Position
from paceline.training.scaling import Scaling
from paceline.training.schedule import Schedule


class Rates:
    """What an optimizer's groups have at each step.  `position` and `samples` say where a step lies, and its size."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: Schedule | Callable[[int], float] | None,
        scaling: Scaling | None,
        is_adjusted: bool,
        position: Callable[[int], Position],
        samples: Callable[[int], int],
        workers: int,
    ) -> None:
        self.factor = 1.0  # By which the run has adjusted the rate.
        self._optimizer = optimizer
        self._initial = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        self._schedule = schedule
        self._scaling = scaling
        self._is_fixed = schedule is None and scaling is None and not is_adjusted
        self._position = position
        self._samples = samples
        self.workers = workers
        self._method: Strategy | None = None

    def follow(self, method: Strategy) -> None:
        """From now on this method takes the steps."""
        if not method.follows_rate and not self._is_fixed:
            raise ValueError(
                f"Task(schedule=..., scaling=...) under {type(method).__name__}: it finds the length of each step "
                "itself, so a learning rate has no effect; leave schedule and scaling out"
            )
        if self._scaling is not None and self._scaling.momentum != "none":
            self._check_momentum(method, self._scaling)
        self._method = method

    def rate(self, step: int) -> float:
        """The factor on the learning rates at that step."""
        if self._is_fixed:
            return 1.0
        gain = self._gain(step)
        return self._scheduled(step, gain) * gain * self.factor

    def change(self, step: int) -> float:
        """By what factor the rate has changed since the first step, apart from what the size of a step does to it."""
        first = self._scheduled(0, self._gain(0))
        return self._scheduled(step, self._gain(step)) * self.factor / first if first else 1.0

    def rates(self, step: int) -> list[float]:
        """The learning rates of the groups at that step; their momentum becomes that of the step, too."""
        groups = self._optimizer.param_groups
        if self._is_fixed:
            return [group["lr"] for group in groups]
        return self._scaled(step, self.rate(step))

    def unscheduled(self, step: int) -> list[float]:
        """The learning rates for a step of that size, before the schedule and without what the run has adjusted."""
        return self._scaled(step, self._gain(step))

    def _scaled(self, step: int, rate: float) -> list[float]:
        groups = self._optimizer.param_groups
        found: list[float] = []
        for group, initial in zip(groups, self._initial, strict=True):
            own = 1.0 if self._scaling is None else self._scaling.apply(group, initial, self._behind(step)[0])
            found.append(initial["lr"] * rate * own)
        return found

    def apply(self, step: int) -> None:
        for group, rate in zip(self._optimizer.param_groups, self.rates(step), strict=True):
            group["lr"] = rate

    def _gain(self, step: int) -> float:
        """The factor on the rate by the size of a step."""
        return 1.0 if self._scaling is None else self._scaling.gain(self._behind(step)[1])

    def _behind(self, step: int) -> tuple[float, float]:
        """The samples behind a step of the optimizer, and those that count for its rate."""
        samples = self._samples(step)
        if self._method is None:
            return float(samples), float(samples)
        return (
            self._method.samples_of_step(samples, self.workers),
            self._method.samples_of_rate(samples, self.workers),
        )

    def _scheduled(self, step: int, gain: float) -> float:
        if self._schedule is None:
            return 1.0
        if isinstance(self._schedule, Schedule):
            return self._schedule.at(self._position(step), gain)
        given: Any = self._schedule(step)
        try:
            factor = float(given)
        except (TypeError, ValueError):
            factor = nan
        if not 0 <= factor < inf:
            raise ValueError(
                f"Task(schedule=...): schedule({step}) is {given!r}, and the factor on the learning rate must be a "
                "finite number, at least 0"
            )
        return factor

    def _check_momentum(self, method: Strategy, scaling: Scaling) -> None:
        if not method.needs.optimizer or method.has_own_momentum:
            what = "it has a momentum of its own" if method.needs.optimizer else "a rule on its servers takes the steps"
            raise ValueError(
                f"Task(scaling={scaling}) under {type(method).__name__}: {what}, and its momentum does not follow the "
                "size of a step; give Scaling(momentum='none')"
            )
        if type(self._optimizer).__name__ == "Muon":
            raise ValueError(
                f"Task(scaling={scaling}) with Muon: the length of its steps does not depend on its momentum, as that "
                "of SGD does; give Scaling(momentum='none')"
            )
        for group in self._initial:
            staged = [n for n in group if n.endswith((".momentum", ".betas")) and group[n]]  # Of TwoStage.
            if staged:
                raise ValueError(
                    f"Task(scaling={scaling}) with an optimizer of two stages: {staged[0]} does not follow the size of "
                    "a step; give Scaling(momentum='none')"
                )
            if (group.get("momentum") or 0) >= 1:
                raise ValueError(
                    f"Task(scaling={scaling}) with an optimizer of momentum={group['momentum']}: a momentum that "
                    "follows the size of a step lies in [0, 1)"
                )
            if group.get("momentum") and group.get("dampening"):
                raise ValueError(
                    f"Task(scaling={scaling}) with an optimizer of dampening={group['dampening']}: a momentum as time "
                    "constant belongs to undamped momentum; give dampening=0, or Scaling(momentum='none')"
                )
