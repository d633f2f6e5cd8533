"""Resize rules: what becomes of a slot of state with another number of workers or shards.

A slot names its rule where it is declared.  A rule sees only the values of that slot; a new one is registered by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from paceline.stripes import stripe_of

Values = dict[str, Any]


@dataclass(frozen=True)
class Resize:
    """A change in the number of workers, or of shards, as a resize rule sees it."""

    count: int  # The new number.
    weights: Sequence[float]  # Of each old worker: its samples since its parameters were last averaged.
    step: int  # The step at which the states were saved.
    unit: int = 1  # Vectors are cut between shards at multiples of this.


class ResizeRule(Protocol):
    """What becomes of a slot with another number of workers or shards.

    It gets the values of the old workers that count (a worker whose parameters are not finite does not), and returns the
    values of every new one: one dict that all get, or one for each.
    """

    def __call__(self, values: Sequence[Values], resize: Resize, /) -> Values | Sequence[Values]: ...


RESIZE_RULES: dict[str, ResizeRule] = {}
_NAMES: dict[ResizeRule, str] = {}
SEES_ALL: set[str] = set()  # The rules that also get the workers that do not count.
R = TypeVar("R", bound=ResizeRule)


def resize_rule(name: str, *, sees_all: bool = False) -> Callable[[R], R]:
    """Register a rule under a name.  A saved slot names its rule, so that states on disk can be resized too."""

    def register(rule: R) -> R:
        if name in RESIZE_RULES:
            raise ValueError(f"resize_rule({name!r}): another rule has this name")
        RESIZE_RULES[name] = rule
        _NAMES[rule] = name
        if sees_all:
            SEES_ALL.add(name)
        return rule

    return register


@resize_rule("same")
def same(values: Sequence[Values], resize: Resize) -> Values:
    """All workers have equal values; new workers get them too."""
    return values[0]


@resize_rule("per worker")
def per_worker(values: Sequence[Values], resize: Resize) -> Values:
    """Each worker has its own values; new workers get the mean, weighted by samples."""
    return mean_of(values, resize.weights)


@resize_rule("residual")
def residual(values: Sequence[Values], resize: Resize) -> Values:
    """Each worker has still to deliver its values, as its share of a mean; the next mean delivers as much as before."""
    return mean_of(values, [1.0] * len(values))


@resize_rule("shard")
def shard(values: Sequence[Values], resize: Resize) -> Sequence[Values]:
    """Each shard has a slice of every vector; the slices are joined and cut again.  Other values are the same for all."""
    return [_cut(values, index, resize) for index in range(resize.count)]


def _cut(values: Sequence[Any], index: int, resize: Resize) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {key: _cut([value[key] for value in values], index, resize) for key in first}
    if isinstance(first, Tensor) and first.dim() == 1:
        joined = torch.cat(list(values))
        return joined[stripe_of(index, joined.numel(), resize.count, unit=resize.unit)].clone()
    return first


def name_of(rule: ResizeRule) -> str:
    if rule not in _NAMES:
        raise ValueError(
            f"{rule!r} is no resize rule: use same, per_worker, residual or shard of paceline.state, or @resize_rule"
        )
    return _NAMES[rule]


def copied(value: Any) -> Any:
    """A deep copy."""
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def mean_of(values: Sequence[Any], weights: Sequence[float], name: str = "") -> Any:
    """The mean of equally built values.

    Equal values stay as they are.  Tensors of floating-point numbers are averaged by weight, single numbers without.  Of
    integers, and of an optimizer's `step`, the largest counts.  Of lists and tensors of unequal length, the longest is kept.
    """
    first = values[0]
    if isinstance(first, dict):
        names = list(dict.fromkeys(key for value in values for key in value))
        having = {key: [i for i, value in enumerate(values) if key in value] for key in names}
        return {
            key: mean_of([values[i][key] for i in having[key]], [weights[i] for i in having[key]], str(key))
            for key in names
        }
    if isinstance(first, (list, tuple)):
        if len({len(value) for value in values}) > 1:
            return copied(max(values, key=len))
        return type(first)(mean_of(column, weights, name) for column in zip(*values, strict=True))
    if isinstance(first, Tensor):
        return _mean_tensor(values, weights, is_counter=name == "step")
    if isinstance(first, (bool, str)) or not isinstance(first, (int, float)) or all(v == first for v in values):
        return copied(first)
    return sum(values) / len(values) if isinstance(first, float) else max(values)


def _mean_tensor(values: Sequence[Tensor], weights: Sequence[float], *, is_counter: bool) -> Tensor:
    first = values[0]
    if any(v.shape != first.shape for v in values):
        return max(values, key=Tensor.numel).clone()
    stacked = torch.stack([v.to(first) for v in values])
    if all(torch.equal(v, first) for v in stacked[1:]):
        return first.clone()
    if not first.dtype.is_floating_point or is_counter:
        return stacked.max(0).values
    shares = torch.tensor(weights if sum(weights) else [1.0] * len(weights), dtype=torch.float64, device=first.device)
    return torch.tensordot(shares / shares.sum(), stacked.double(), 1).to(first.dtype)
