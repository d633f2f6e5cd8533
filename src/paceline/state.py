"""Memory: what a strategy remembers between iterations, and what becomes of it when the number of workers changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

Kind = str
"""Shared: the same on all workers.  Own: each worker's, of which the mean counts.  Else: the name of a resize rule."""

ResizeRule = Callable[[Sequence[dict[str, Any]], int], dict[str, Any]]
"""From all old workers' values and the new number of workers: the values that every new worker starts with."""

RESIZE_RULES: dict[str, ResizeRule] = {}


def resize_rule(name: str) -> Callable[[ResizeRule], ResizeRule]:
    """Register a resize rule by its name, under which a checkpoint refers to it."""

    def register(rule: ResizeRule) -> ResizeRule:
        if name in RESIZE_RULES:
            raise ValueError(f"resize_rule({name!r}): a rule of this name is registered already")
        RESIZE_RULES[name] = rule
        rule.rule_name = name  # pyright: ignore[reportFunctionMemberAccess]
        return rule

    return register


class Memory:
    """What a strategy remembers between iterations, as attributes; it is saved and resumed."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value

    def __getattr__(
        self, name: str
    ) -> Any:  # Only asked for what is not there; it tells type checkers that the rest is.
        raise AttributeError(f"this memory holds {sorted(vars(self))}, not '{name}'")


def restored(initial: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """What was saved, in the place of what a strategy would begin with; refused if it is another's."""
    if saved and saved.keys() != initial.keys():
        raise ValueError(
            f"the saved memory holds {sorted(saved)}, the strategy remembers {sorted(initial)}: it was saved by another strategy"
        )
    for name, value in initial.items():
        if isinstance(value, Tensor) and (was := saved.get(name, value)).shape != value.shape:
            raise ValueError(
                f"the saved memory's '{name}' has the shape {tuple(was.shape)}, but the strategy remembers {tuple(value.shape)}: "
                "it was saved with another model, or with other settings"
            )
    return {name: _like(value, saved.get(name, value)) for name, value in initial.items()}


def _like(initial: Any, value: Any) -> Any:
    """A copy of a value, where and as the strategy would have made it."""
    return value.to(initial, copy=True) if isinstance(initial, Tensor) else copy.deepcopy(value)


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def resized(states: Sequence[dict[str, Any]], workers: int) -> list[dict[str, Any]]:
    """The saved states of some workers, made into those of another number of workers.

    What all workers had alike they have again.  Where each had its own (parameters between two synchronisations, optimizer
    state, statistics in buffers) all begin with the mean, weighted by samples, and of counters with the largest; who has NaN or
    infinity in its parameters does not count.  What workers still owed each other (the residuals of codecs) is shared out so that
    the next mean delivers as much as it would have.  Random numbers go on where a worker stays, and begin anew where one joins.
    No minibatch is lost: each is cut into as many parts as there are workers.
    """
    if workers < 1 or not states:
        raise ValueError(f"resized({len(states)} states, workers={workers}): there must be at least one of each")
    if len({state["replica"]["k"] for state in states}) > 1:
        raise ValueError(
            f"resized: the states were saved at different steps, {[state['replica']['k'] for state in states]}"
        )
    if workers == len(states):
        return [copy.deepcopy(state) for state in states]
    sound = [state for state in states if state["replica"]["params"].isfinite().all()] or list(states)
    mean = partial(_mean, weights=[_samples_since_meeting(state["replica"]) for state in sound])
    replica = _resized_replica([state["replica"] for state in sound], mean, workers)
    result = []
    for rank in range(workers):
        state = copy.deepcopy(states[min(rank, len(states) - 1)]) | {"replica": copy.deepcopy(replica)}
        if "trainee" in state:
            state["trainee"]["optimizer"] = mean([s["trainee"]["optimizer"] for s in sound])
            if rank >= len(states):
                seed = (replica["k"] + 1) * 1_000_003 + rank
                state["trainee"]["rng"] = torch.Generator().manual_seed(seed).get_state()
        elif "optimizer" in state:
            state["optimizer"] = mean([s["optimizer"] for s in sound])
        result.append(state)
    return result


def _samples_since_meeting(replica: dict[str, Any]) -> float:
    """What a worker's parameters would count for in a mean."""
    seen = [
        m["seen"]
        for kind, m in zip(replica["kinds"], replica["memories"], strict=True)
        if kind == "own" and "seen" in m
    ]
    return replica["samples"] - sum(seen[0]) / len(seen[0]) if seen else replica["since_mean"]


def _resized_replica(
    replicas: Sequence[dict[str, Any]], mean: Callable[[Sequence[Any]], Any], workers: int
) -> dict[str, Any]:
    kinds = replicas[0]["kinds"]
    if any(r["kinds"] != kinds for r in replicas):
        raise ValueError("resized: the states were saved by different strategies")
    rules: dict[Kind, Callable[[Sequence[Any]], Any]] = {
        "shared": lambda memories: copy.deepcopy(memories[0]),
        "own": mean,
    }
    memories = [
        rules[kind](values) if kind in rules else RESIZE_RULES[kind](values, workers)
        for kind, *values in zip(kinds, *(r["memories"] for r in replicas), strict=True)
    ]
    own = mean([{n: v for n, v in r.items() if n not in ("memories", "kinds")} for r in replicas])
    return own | {"memories": memories, "kinds": list(kinds)}


def _mean(values: Sequence[Any], weights: Sequence[float], name: str = "") -> Any:
    """Of floating-point numbers the mean, weighted if they are parts of a vector; of others, and of what counts steps, the largest.

    What is alike stays as it is.  Of what differs in length, as some workers have had no data yet, the longest.
    """
    first = values[0]
    if isinstance(first, dict):
        names = list(dict.fromkeys(k for v in values for k in v))
        having = {k: [i for i, v in enumerate(values) if k in v] for k in names}
        return {k: _mean([values[i][k] for i in having[k]], [weights[i] for i in having[k]], str(k)) for k in names}
    if isinstance(first, (list, tuple)):
        if len({len(v) for v in values}) > 1:
            return copy.deepcopy(max(values, key=len))
        return type(first)(_mean(column, weights, name) for column in zip(*values, strict=True))
    if isinstance(first, Tensor):
        if any(v.shape != first.shape for v in values):
            return max(values, key=Tensor.numel).clone()
        stacked = torch.stack([v.to(first) for v in values])
        if all(torch.equal(v, first) for v in stacked[1:]):
            return first.clone()
        if not first.dtype.is_floating_point or name == "step":
            return stacked.max(0).values
        shares = torch.tensor(
            weights if sum(weights) else [1.0] * len(weights), dtype=torch.float64, device=first.device
        )
        return torch.tensordot(shares / shares.sum(), stacked.double(), 1).to(first.dtype)
    if isinstance(first, (bool, str)) or not isinstance(first, (int, float)) or all(v == first for v in values):
        return copy.deepcopy(first)
    return sum(values) / len(values) if isinstance(first, float) else max(values)
