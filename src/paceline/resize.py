"""Resize rules: what becomes of a slot of state with another number of workers or shards.

A slot names its rule where it is declared.  A rule sees only the values of that slot; a new one is registered by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from paceline.slot_values import mean_of, slice_of

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

    It gets the values of the old workers that count (a worker whose parameters are not finite does not), and returns
    the values of every new one: one dict that all get, or one for each.
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


@resize_rule("own position")
def own_position(values: Sequence[Values], resize: Resize) -> Values:
    """Each worker stands at a step of its own; all continue at the first of these, so no minibatch is left out."""
    return {**mean_of(values, resize.weights), "step": resize.step}


@resize_rule("residual")
def residual(values: Sequence[Values], resize: Resize) -> Values:
    """Each worker has still to deliver its values, as its share of a mean; the next mean delivers as much as before."""
    return mean_of(values, [1.0] * len(values))


@resize_rule("shard")
def shard(values: Sequence[Values], resize: Resize) -> Sequence[Values]:
    """Each shard has a slice of every vector; the slices are joined and cut again.

    Of a number, the largest counts.  A dict by rank keeps the ranks that every shard has.  Other values are the same
    for all.
    """
    return [slice_of("a slot", values, index, resize.count, resize.unit) for index in range(resize.count)]


def name_of(rule: ResizeRule) -> str:
    if rule not in _NAMES:
        raise ValueError(
            f"{rule!r} is no resize rule: use same, per_worker, residual or shard of paceline.state, or @resize_rule"
        )
    return _NAMES[rule]
