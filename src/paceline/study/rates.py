"""Learning rates to try, and how a task gets one of them.

Where the workers' optimizers take the steps, the rates of all their groups are multiplied by the same number.  Where a
rule takes the steps, the schedule is multiplied, which every rule follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import nn

from paceline.checked import check_settings
from paceline.families.server_strategy import ServerStrategy
from paceline.strategy import Strategy
from paceline.task import Task, Trainee
from paceline.training.schedule import Schedule

CLOSEST = 1.02  # The least ratio of two rates: nearer ones would be equal once they are rounded to three digits.
DECADES = 3.0


@dataclass(frozen=True)
class RateRange:
    """`number` learning rates from `low` to `high`, each the same number of times the one before.

    >>> RateRange(0.01, 1.0, number=5).rates
    (0.01, 0.0316, 0.1, 0.316, 1.0)
    """

    low: float
    high: float
    number: int = 7

    def __post_init__(self) -> None:
        check_settings(self)
        call = f"RateRange({self.low}, {self.high}, number={self.number})"
        if not 0 < self.low < self.high < inf:
            raise ValueError(f"{call}: learning rates are positive and finite, and the second is the higher one")
        if self.number < 2:
            raise ValueError(f"{call}: a search compares at least 2 rates")
        if self._ratio < CLOSEST:
            raise ValueError(f"{call}: these lie closer together than 2 %; give fewer")

    @property
    def _ratio(self) -> float:
        return (self.high / self.low) ** (1 / (self.number - 1))

    @property
    def rates(self) -> tuple[float, ...]:
        """From the lowest to the highest; those between are rounded to three digits."""
        between = [float(f"{self.low * self._ratio**i:.3g}") for i in range(1, self.number - 1)]
        return (self.low, *between, self.high)


def rates_around(rate: float, number: int) -> tuple[float, ...]:
    """Rates over three decades with that one in the middle.

    >>> rates_around(0.1, 7)
    (0.00316, 0.01, 0.0316, 0.1, 0.316, 1.0, 3.16)
    """
    return tuple(float(f"{rate * 10 ** (DECADES * (i / (number - 1) - 0.5)):.3g}") for i in range(number))


def checked_rates(given: int | Sequence[float] | RateRange, own: float) -> tuple[float, ...]:
    """The rates to try, from the lowest to the highest."""
    if isinstance(given, RateRange):
        return given.rates
    if isinstance(given, int):
        if given < 2:
            raise ValueError(
                f"tune(rates={given}): a number of rates around the task's own; a search compares 2 or more"
            )
        return rates_around(own, given)
    rates = tuple(sorted(float(rate) for rate in given))
    call = f"tune(rates={list(given)})"
    if len(rates) < 2:
        raise ValueError(f"{call}: a search compares at least 2 rates; give more, or RateRange(low, high)")
    wrong = [rate for rate in given if not 0 < rate < inf]
    if wrong:
        raise ValueError(f"{call}: learning rates are positive and finite, and {wrong[0]} is not")
    if len(set(rates)) < len(rates):
        raise ValueError(f"{call}: give each rate once")
    return rates


def own_rate(task: Task, strategy: Strategy, workers: int) -> float:
    """The learning rate that a task has: the largest of its optimizer's groups, or that of the rule which steps."""
    method = method_of(strategy)
    name = type(method).__name__
    if method.needs.optimizer:
        groups = Trainee(task, task.build(), 0, workers).optimizer.param_groups
        rate = max(float(group.get("lr", 0.0)) for group in groups)
        what = "Task(optimizer=...)"
    else:
        found = _rate_of_rule(method, workers)
        if found is None:
            raise ValueError(
                f"tune({name}): it has no learning rate that could be chosen; use a method that steps by the task's "
                "optimizer or by a rule with lr, such as ParameterServer(rule=Sgd(lr=0.1))"
            )
        rate = found
        what = name
    if not 0 < rate < inf:
        raise ValueError(
            f"tune({what}): its learning rate is {rate:g}, and the search multiplies it; give it a positive one"
        )
    return rate


def method_of(strategy: Strategy) -> Strategy:
    """The method that takes the steps: of a warm start either, if both step by the task's optimizer."""
    methods = strategy.methods
    if len(methods) > 1 and not all(method.needs.optimizer for method in methods):
        rules = ", ".join(type(method).__name__ for method in methods if not method.needs.optimizer)
        raise ValueError(
            f"tune({strategy}): {rules} steps by a rule with a learning rate of its own, so there are two to choose; "
            "tune the two methods one after the other"
        )
    return methods[0]


def _rate_of_rule(method: Strategy, workers: int) -> float | None:
    rule: object = method
    if isinstance(method, ServerStrategy):
        rule = method.shard_rule(workers)
        while (inner := getattr(rule, "rule", None)) is not None:
            rule = inner
    return getattr(rule, "lr", None)


def multiplied(task: Task, strategy: Strategy, workers: int, factor: float) -> Task:
    """The task with its learning rates times a factor."""
    if not method_of(strategy).needs.optimizer:
        before = schedule_of(task, strategy, workers)

        def schedule(step: int) -> float:
            return factor * (1.0 if before is None else before(step))

        return replace(task, schedule=schedule)

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        made = task.optimizer(parameters)
        for group in made.param_groups:
            group["lr"] = group["lr"] * factor
        return made

    return replace(task, optimizer=optimizer)


def schedule_of(task: Task, strategy: Strategy, workers: int) -> Callable[[int], float] | None:
    """The factor of the task's schedule at each of its steps, as a function."""
    schedule = task.schedule
    if not isinstance(schedule, Schedule):
        return schedule
    timetable = task.timetable()
    method = method_of(strategy)

    def factor(step: int) -> float:
        gain = 1.0
        if task.scaling is not None:
            gain = task.scaling.gain(method.samples_of_rate(timetable.samples_in(step), workers))
        return schedule.at(task.position(step, timetable), gain)

    return factor
