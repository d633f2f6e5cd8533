"""The flags of the command line that multiply the learning rates of a settings file."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from paceline.checked import spelled
from paceline.settings.recipe import Recipe
from paceline.strategies import Then

Flags = dict[str, float | str]


def rate_flags(recipe: Recipe, factor: float) -> list[str] | None:
    """Keys with their new values; None if the rates are in a function of the user's, which no key reaches."""
    optimizer = recipe.settings.optimizer
    if not recipe.main.needs.optimizer:
        found = _of_rule(recipe, factor)
    elif optimizer.lr_per_sample is not None:
        found: Flags | None = {"optimizer.lr-per-sample": optimizer.lr_per_sample * factor}
    else:
        found = _of_optimizer(recipe, factor)
    if found is None:
        return None
    return [part for key, value in found.items() for part in (f"--{key}", _shown(value))]


def _of_optimizer(recipe: Recipe, factor: float) -> Flags | None:
    chosen = recipe.optimizer
    group = chosen.make([nn.Parameter(torch.zeros(1))]).param_groups[0]
    stages = [name for name in ("first.lr", "second.lr") if name in group]
    if stages:
        return {f"optimizer.{name}": group[name] * factor for name in stages}
    parameters = inspect.signature(chosen.cls).parameters.values()
    if not any(p.name == "lr" or p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {"optimizer.lr": group["lr"] * factor}


def _of_rule(recipe: Recipe, factor: float) -> Flags:
    """Where a rule on the servers takes the steps: its rate is the method's, or that of a rule within."""
    path = "strategy"
    method: Any = recipe.settings.strategy
    while isinstance(method, Then):
        method = method.then
        path += ".then"
    local = getattr(method, "local_lr", 0.0)
    found: Flags = {f"{path}.local-lr": local * factor} if local else {}
    while getattr(method, "lr", None) is None:
        method = method.rule
        path += ".rule"
        found[f"{path}.name"] = spelled(type(method))
    return found | {f"{path}.lr": method.lr * factor}


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
