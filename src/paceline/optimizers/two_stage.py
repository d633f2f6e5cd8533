"""TwoStage: one optimizer first, and another from a given step on (Wongpanich, You and Demmel 2020, figure 3).

Plain gradient descent begins, because its rate is easy to choose while the batch grows; then comes Adam, with no memory
of the first steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from paceline.checked import checked

Stage = Literal["first", "second"]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


class TwoStage(torch.optim.Optimizer):
    """The optimizer that `first` makes for the first `steps` steps, then a fresh one that `second` makes.

    A group's `lr` is the first optimizer's rate, in both stages.  The second has its own rate times the factor by which
    `lr` has changed since the beginning: a schedule acts on both.  A group holds the other settings of both, as
    "first.momentum" or "second.betas".  `state` is that of the optimizer that takes the next step.

    >>> from functools import partial
    >>> from torch.optim import SGD, Adam
    >>> w = torch.nn.Parameter(torch.tensor([10.0]))
    >>> optimizer = TwoStage([w], first=partial(SGD, lr=0.1), second=partial(Adam, lr=0.25), steps=2)
    >>> for _ in range(4):
    ...     w.grad = torch.tensor([8.0])
    ...     optimizer.step()
    ...     print(optimizer.stage, round(w.item(), 3))
    first 9.2
    second 8.4
    second 8.15
    second 7.9
    """

    def __init__(self, params: ParamsT, *, first: MakeOptimizer, second: MakeOptimizer, steps: int) -> None:
        checked("TwoStage", "steps", steps, int)
        if steps < 0:
            raise ValueError(f"TwoStage(steps={steps}): it counts the first optimizer's steps and must be at least 0")
        given = [_listed(p) for p in params]
        self.stages = {"first": _made("first", first, given), "second": _made("second", second, given)}
        self._taken = 0
        self._is_built = False
        groups = _joined(self.stages, steps)
        super().__init__(groups, {name: value for name, value in groups[0].items() if name != "params"})
        self._is_built = True

    @property
    def stage(self) -> Stage:
        """Which of the two takes the next step."""
        return "first" if self._taken < self.param_groups[0]["steps"] else "second"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        inner = self._inner()
        loss = inner.step() if closure is None else inner.step(closure)
        self._taken += 1
        if self._taken == self.param_groups[0]["steps"]:
            self.state.clear()
        return loss

    def _inner(self) -> torch.optim.Optimizer:
        """The optimizer that takes the next step, with the state and the settings as they are now."""
        stage = self.stage
        inner = self.stages[stage]
        inner.state = self.state
        for group, own in zip(self.param_groups, inner.param_groups, strict=True):
            own.update({name: group[f"{stage}.{name}"] for name in own if f"{stage}.{name}" in group})
            own["lr"] = group["lr"] if stage == "first" else group["second.lr"] * (group["lr"] / group["first.lr"])
        return inner

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_built:
            raise ValueError("TwoStage.add_param_group: its groups are fixed; give all of them when you make it")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps_taken": self._taken}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "steps_taken" not in state_dict:
            raise ValueError(
                "TwoStage.load_state_dict: there is no 'steps_taken', which says where its two stages stand: load what "
                f"TwoStage.state_dict() gave, not {sorted(state_dict)}"
            )
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self._taken = state_dict["steps_taken"]
        if self._taken != self.param_groups[0]["steps"]:  # There, the second has no state yet.
            inner = self._inner()
            inner.load_state_dict({**inner.state_dict(), "state": state_dict["state"]})
            self.state = inner.state

    def __getstate__(self) -> dict[str, Any]:
        own = {name: vars(self)[name] for name in ("stages", "_taken", "_is_built")}
        return {**super().__getstate__(), **own}


def _listed(given: Any) -> Any:
    """A parameter, or a group of them that can be read twice."""
    if not isinstance(given, Mapping) or isinstance(given["params"], Tensor):
        return given
    return {**given, "params": list(given["params"])}


def _made(name: Stage, make: MakeOptimizer, params: Iterable[Any]) -> torch.optim.Optimizer:
    """The optimizer that the function `make` gives for these parameters."""
    if isinstance(make, torch.optim.Optimizer) or not callable(make):
        raise ValueError(
            f"TwoStage({name}=<{type(make).__name__}>): {name} is a function that makes an optimizer; give "
            "partial(torch.optim.Adam, lr=0.001)"
        )
    if any(isinstance(p, dict) and "lr" in p for p in params):
        raise ValueError(
            "TwoStage(params=[{'lr': ...}]): the rate of a group would be that of both optimizers; let `first` and "
            "`second` make the groups, each with rates of its own"
        )
    made: Any = make([{**p} if isinstance(p, dict) else p for p in params])  # Optimizers keep the dicts of groups.
    if not isinstance(made, torch.optim.Optimizer) or isinstance(made, TwoStage):
        raise ValueError(
            f"TwoStage({name}=...): the function must return one optimizer of torch, and it returned {made!r:.80}"
        )
    closure = inspect.signature(type(made).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"TwoStage({name}={type(made).__name__}): it evaluates the loss several times in a step, and a step of "
            "TwoStage has one gradient; use SGD, Adam or the like"
        )
    return made


def _joined(stages: Mapping[str, torch.optim.Optimizer], steps: int) -> list[dict[str, Any]]:
    """The groups of both optimizers as one list, with the settings of both."""
    first, second = ([[id(p) for p in group["params"]] for group in s.param_groups] for s in stages.values())
    if first != second:
        raise ValueError(
            f"TwoStage(first=..., second=...): the two have different parameter groups, of {list(map(len, first))} and "
            f"{list(map(len, second))} parameters; give both the same parameters in the same groups"
        )
    groups: list[dict[str, Any]] = []
    for pair in zip(*(s.param_groups for s in stages.values()), strict=True):
        group: dict[str, Any] = {"params": pair[0]["params"], "lr": pair[0]["lr"], "steps": steps}
        for stage, own in zip(stages, pair, strict=True):
            group |= {f"{stage}.{name}": value for name, value in own.items() if name not in ("params", "param_names")}
            checked("TwoStage", f"{stage}.lr", own["lr"], float)
        if not group["lr"] > 0:
            raise ValueError(
                f"TwoStage(first={type(stages['first']).__name__}(lr={group['lr']})): a schedule's factor is measured "
                "against this rate, so it must be above 0"
            )
        if "param_names" in pair[0]:
            group["param_names"] = pair[0]["param_names"]
        groups.append(group)
    return groups
