"""Optimizers by name: torch's, ours, and the user's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import ceil, isfinite
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from paceline import optimizers
from paceline.checked import spelled
from paceline.settings.decode import SettingsError, Table, dashed, located
from paceline.settings.imported import arguments, function
from paceline.settings.sections import Optimizer, ScalingTable, Settings
from paceline.training import PerSample
from paceline.training.length import Length
from paceline.worker.plan import Plan

ALL = [
    *(v for v in vars(torch.optim).values() if isinstance(v, type) and issubclass(v, torch.optim.Optimizer)),
    *(getattr(optimizers, name) for name in optimizers.__all__),
]
EVALUATE_THEMSELVES = {"lbfgs", "sparseadam"}


def _name(cls: type) -> str:
    return spelled(cls) if cls.__module__.startswith("paceline") else cls.__name__.lower()


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    name: cls for cls in ALL if cls is not torch.optim.Optimizer and (name := _name(cls)) not in EVALUATE_THEMSELVES
}


@dataclass(frozen=True)
class ChosenOptimizer:
    """An optimizer with its settings, not yet with parameters."""

    cls: Callable[..., torch.optim.Optimizer]
    settings: dict[str, Any]
    is_per_sample: bool  # Its rate is given for each sample.
    length: Length | None = None  # Of the first stage of a two-stage optimizer.
    clip_value: float | None = None
    clip_norm: float | None = None

    def make(self, parameters: Iterable[nn.Parameter], plan: Plan | None = None) -> torch.optim.Optimizer:
        more: dict[str, Any] = {}
        if self.length is not None and plan is not None:
            more["steps"] = steps_of(self.length, plan, "optimizer.length")
        elif self.length is not None:
            more["steps"] = 1
        with located("optimizer"):
            made = self.cls(parameters, **self.settings, **more)
        if self.clip_value is not None or self.clip_norm is not None:
            made.register_step_pre_hook(self._clip)
        return made

    def _clip(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Limit the gradient of a step: all of its elements, or the norm of each tensor."""
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if self.clip_value is not None:
                nn.utils.clip_grad_value_(p, self.clip_value)
            if self.clip_norm is not None:
                nn.utils.clip_grad_norm_(p, self.clip_norm)


def steps_of(length: Length, plan: Plan, key: str) -> int:
    """The steps of a length that is given by that key."""
    if length.unit == "steps":
        return ceil(length.value)
    if length.unit == "samples":
        return plan.steps_for(samples=ceil(length.value), by=key)
    return plan.steps_for_epochs(length.value, by=key)


def chosen_optimizer(settings: Settings, base: int, folder: Path) -> ChosenOptimizer:
    """The optimizer of a settings file, whose rate belongs to steps of `base` samples."""
    table = settings.optimizer
    cls = function(table.name, "optimizer.name", OPTIMIZERS, "optimizer", folder)
    given = dict(table.arguments)
    length: Length | None = None
    if cls is optimizers.TwoStage:
        length = Length.of("optimizer.length", given.pop("length", None))
        for stage in ("first", "second"):
            given[stage] = _stage(given.get(stage), f"optimizer.{stage}", folder)
    if settings.scaling is not None and settings.scaling.base is not None:
        base = settings.scaling.base
    _check_keys(table, settings.scaling)
    _check_numbers(given, "optimizer")
    given |= _per_sample(table, given, base, cls)
    skipped = ["steps"] if length is not None else []
    made = arguments(cls, given, "optimizer", given=[_first(cls), *skipped])
    is_per_sample = table.lr_per_sample is not None or table.momentum_time_constant is not None
    chosen = ChosenOptimizer(cls, _tuples(made), is_per_sample, length, table.clip_value, table.clip_norm)
    chosen.make([nn.Parameter(torch.zeros(1))])  # Wrong values are refused before the data are read.
    return chosen


def _stage(value: Any, path: str, folder: Path) -> Callable[..., Any]:
    """One of the two optimizers of a TwoStage."""
    table: Any = {"name": value} if isinstance(value, str) else value
    if not isinstance(table, dict) or "name" not in table:
        raise SettingsError(f"{path}.name is missing: give an optimizer, as in {path} = {{name = 'sgd', lr = 0.1}}")
    rest = dict(cast("Table", table))
    cls = function(rest.pop("name"), f"{path}.name", OPTIMIZERS, "optimizer", folder)
    _check_numbers(rest, path)
    found = _tuples(arguments(cls, rest, path, given=[_first(cls)]))
    return partial(cls, **found)


def _first(make: Callable[..., Any]) -> str:
    """The name of the argument that takes the parameters."""
    return next(iter(inspect.signature(make).parameters), "")


def _check_numbers(given: Table, path: str) -> None:
    """Refuse numbers that torch's optimizers accept, and with which nothing can be trained."""
    for key, value in given.items():
        if isinstance(value, float) and not isfinite(value):
            raise SettingsError(f"{path}.{key} = {value}: it must be finite")
    momentum = given.get("momentum", 0.0)
    if isinstance(momentum, float | int) and momentum >= 1:
        raise SettingsError(f"{path}.momentum = {momentum}: momentum lies in [0, 1)")


def _check_keys(table: Optimizer, scaling: ScalingTable | None) -> None:
    for name in ("clip_value", "clip_norm"):
        if (limit := getattr(table, name)) is not None and not limit > 0:
            raise SettingsError(f"optimizer.{dashed(name)} = {limit}: it limits gradients and must be positive")
    if scaling is None:
        return
    for name, key, kept in (
        ("lr_per_sample", "rate", "linear"),
        ("momentum_time_constant", "momentum", "time-constant"),
    ):
        if (given := getattr(table, name)) is not None and (other := getattr(scaling, key)) != kept:
            raise SettingsError(
                f"optimizer.{dashed(name)} = {given} and scaling.{key} = {other!r}: what belongs to a sample follows "
                f"the size of a step; leave out scaling.{key}, or give optimizer.{key if key != 'rate' else 'lr'}"
            )


def _per_sample(table: Optimizer, given: Table, base: int, cls: Callable[..., Any]) -> Table:
    """`lr` and `momentum` from the rate of a sample and the time constant."""
    pairs = (("lr_per_sample", "lr"), ("momentum_time_constant", "momentum"))
    for ours, torchs in pairs:
        if getattr(table, ours) is None:
            continue
        said = f"optimizer.{dashed(ours)} = {getattr(table, ours)}"
        if torchs in given:
            raise SettingsError(
                f"{said} and optimizer.{torchs} = {given[torchs]}: each follows from the other; give one of them"
            )
        parameters = inspect.signature(cls).parameters.values()
        if not any(p.name == torchs or p.kind is p.VAR_KEYWORD for p in parameters):
            raise SettingsError(f"{said}: {cls.__name__} has no {torchs}")
    found: Table = {}
    momentum = cast("float", given.get("momentum", 0.0))
    if table.momentum_time_constant is not None:
        with located("optimizer"):
            found["momentum"] = momentum = PerSample(0.0, table.momentum_time_constant).settings(base)["momentum"]
    if table.lr_per_sample is not None:
        with located("optimizer"):
            found["lr"] = PerSample(table.lr_per_sample).settings(base)["lr"] * (1 - momentum)
    return found


def _tuples(values: Table) -> Table:
    return {name: tuple(cast("list[Any]", v)) if isinstance(v, list) else v for name, v in values.items()}
