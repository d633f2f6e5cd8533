"""Memory: what a strategy remembers between iterations, and what becomes of it when the number of workers changes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["shared", "own", "owed"]
"""Shared: the same on all workers.  Own: each worker's, of which the mean counts.  Owed: what a worker has still to say."""


class Memory:
    """What a strategy remembers between iterations, as attributes; it is saved and resumed."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:  # Only asked for what is not there; it tells type checkers that the rest is.
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
    state, statistics in buffers) all begin with the mean, and of counters with the largest.  What workers still owed each other
    (the residuals of codecs) is shared out so that the next mean delivers as much as it would have.  Random numbers go on where
    a worker stays, and begin anew where one joins.  No minibatch is lost: each is cut into as many parts as there are workers.
    """
    if workers < 1 or not states:
        raise ValueError(f"resized({len(states)} states, workers={workers}): there must be at least one of each")
    if len({state["replica"]["k"] for state in states}) > 1:
        raise ValueError(f"resized: the states were saved at different steps, {[state['replica']['k'] for state in states]}")
    if workers == len(states):
        return [copy.deepcopy(state) for state in states]
    replica = _resized_replica([state["replica"] for state in states])
    result = []
    for rank in range(workers):
        state = copy.deepcopy(states[min(rank, len(states) - 1)]) | {"replica": copy.deepcopy(replica)}
        if "trainee" in state:
            state["trainee"]["optimizer"] = _mean([s["trainee"]["optimizer"] for s in states])
            if rank >= len(states):
                seed = (replica["k"] + 1) * 1_000_003 + rank
                state["trainee"]["rng"] = torch.Generator().manual_seed(seed).get_state()
        elif "optimizer" in state:
            state["optimizer"] = _mean([s["optimizer"] for s in states])
        result.append(state)
    return result


def _resized_replica(replicas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    kinds = replicas[0]["kinds"]
    if any(r["kinds"] != kinds for r in replicas):
        raise ValueError("resized: the states were saved by different strategies")
    memories = [_RULES[kind]([r["memories"][i] for r in replicas]) for i, kind in enumerate(kinds)]
    return _mean([{n: v for n, v in r.items() if n not in ("memories", "kinds")} for r in replicas]) | {
        "memories": memories,
        "kinds": list(kinds),
    }


def _first(memories: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return copy.deepcopy(memories[0])


def _mean(values: Sequence[Any], name: str = "") -> Any:
    """Of floating-point numbers the mean, of others, and of what counts steps, the largest.

    What is alike stays as it is.  Of what differs in length, as some workers have had no data yet, the longest.
    """
    first = values[0]
    if isinstance(first, dict):
        names = list(dict.fromkeys(k for v in values for k in v))
        return {k: _mean([v[k] for v in values if k in v], str(k)) for k in names}
    if isinstance(first, (list, tuple)):
        if len({len(v) for v in values}) > 1:
            return copy.deepcopy(max(values, key=len))
        return type(first)(_mean(column, name) for column in zip(*values, strict=True))
    if isinstance(first, Tensor):
        if any(v.shape != first.shape for v in values):
            return max(values, key=Tensor.numel).clone()
        stacked = torch.stack([v.to(first) for v in values])
        if all(torch.equal(v, first) for v in stacked[1:]):
            return first.clone()
        is_mean = first.dtype.is_floating_point and name != "step"
        return stacked.double().mean(0).to(first.dtype) if is_mean else stacked.max(0).values
    if isinstance(first, (bool, str)) or not isinstance(first, (int, float)) or all(v == first for v in values):
        return copy.deepcopy(first)
    return sum(values) / len(values) if isinstance(first, float) else max(values)


def _owed(memories: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Each worker's residual counts for its share of a mean, an owner's for all of its stripe, wherever stripes will lie."""
    result = _mean(memories)
    if "owner_residual" in result:
        result["residual"] = result["residual"] + sum(m["owner_residual"] for m in memories)
        result["owner_residual"] = torch.zeros_like(result["owner_residual"])
    if "adapted" in result:
        result["adapted"] = {}  # Settings that were found for stripes that are no more.
    return result


_RULES = {"shared": _first, "own": _mean, "owed": _owed}
