"""Settings, compared between ranks: strategy, codec, optimizer, and the arguments of `attach` or `train`.

Ranks with different settings end with different models, or wait for each other in vain.  An error names the first
setting that differs, and both of its values.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import Store

from paceline.endpoint import Endpoint
from paceline.errors import ClusterError
from paceline.families.sync import COMMON_SCHEDULE
from paceline.session.batches import digest
from paceline.strategy import Strategy
from paceline.task import Task
from paceline.training.schedule import Schedule

Settings = list[tuple[str, str]]
"""Names and values, both as text."""


def described(strategy: Strategy, optimizer: torch.optim.Optimizer | None, arguments: Mapping[str, object]) -> Settings:
    """What must be the same on all ranks."""
    found: Settings = []
    _describe("strategy", strategy, found)
    if optimizer is not None:
        found += described_optimizer(optimizer)
    for name, value in arguments.items():
        _describe(name, value, found)
    return found


def described_task(task: Task, model: nn.Module) -> Settings:
    """What a task says that must be the same on all ranks.  Functions are compared by their names and their values."""
    found: Settings = [("Task's steps", str(task.total_steps))]
    for name in ("batch", "seed", "accumulate", "bucket_bytes", "scaling", "adjust"):
        _describe(f"Task's {name}", getattr(task, name), found)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    found.append(("the model's number of trainable parameters", str(trainable)))
    found.append(("Task's loss", _name_of(task.loss)))
    _describe_schedule(task, found)
    if callable(task.data):
        found.append(("Task's data", _name_of(task.data)))
    else:
        found += [(f"Task's data[{i}]", f"a tensor of shape {list(t.shape)}") for i, t in enumerate(task.data)]
        found.append(("the hash of the first minibatch", digest(task.part(0, 0, 1)).hex()[:16]))
    return found


def _describe_schedule(task: Task, found: Settings) -> None:
    """Some factors of the schedule, and a hash of more; to 12 digits, since processors round differently."""
    if task.schedule is None or isinstance(task.schedule, Schedule):
        _describe("Task's schedule", task.schedule, found)
        return
    last = max(0, task.total_steps - 1)
    steps = sorted({round(i * last / 1024) for i in range(1025)})
    factors = [(f"Task's schedule({k})", _rounded(task.schedule(k))) for k in steps]
    found.append(("Task's schedule", _name_of(task.schedule)))
    found += [*factors[:: len(factors) // 16 + 1], factors[-1]]
    found.append(("the hash of Task's schedule", hashlib.blake2b(json.dumps(factors).encode()).hexdigest()[:16]))


def _rounded(factor: object) -> str:
    try:
        return f"{float(factor):.12g}"  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        return repr(factor)


def _name_of(value: object) -> str:
    """Of an object whose text may hold an address, which differs between processes."""
    return getattr(value, "__qualname__", type(value).__name__)


def described_optimizer(optimizer: torch.optim.Optimizer) -> Settings:
    return [("optimizer", type(optimizer).__name__), *described_groups(optimizer)]


def described_groups(optimizer: torch.optim.Optimizer) -> Settings:
    """The settings of an optimizer's parameter groups: learning rates and all others."""
    found: Settings = []
    for i, group in enumerate(optimizer.param_groups):
        where = f"group {i} of the optimizer's " if len(optimizer.param_groups) > 1 else "the optimizer's "
        for name, value in group.items():
            if name == "params":
                _describe(f"{where}number of parameters", len(value), found)
            else:
                _describe(f"{where}{name}", value, found)
    return found


def _describe(name: str, value: object, found: Settings) -> None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found.append((name, type(value).__name__))
        for f in dataclasses.fields(value):
            if f.init:
                _describe(f"{type(value).__name__}'s {f.name}", getattr(value, f.name), found)
    elif isinstance(value, Tensor):
        found.append((name, repr(value.tolist()) if value.numel() <= 16 else f"a tensor of shape {list(value.shape)}"))
    elif isinstance(value, (list, tuple)):
        found.append((f"{name} (length)", str(len(value))))
        for i, v in enumerate(value):
            _describe(f"{name}[{i}]", v, found)
    elif value is None or isinstance(value, (bool, int, float, str)):
        found.append((name, repr(value)))
    else:
        found.append((name, _name_of(value)))


def difference(one: Sequence[Sequence[str]], other: Sequence[Sequence[str]], ranks: tuple[int, int]) -> str | None:
    """The first setting that differs, with both values; None if there is none."""
    first, second = ranks
    for (name, mine), (other_name, theirs) in zip(one, other, strict=False):
        if name != other_name:
            return f"rank {first} gives {name} = {mine}, where rank {second} gives {other_name} = {theirs}"
        if mine != theirs:
            return f"{name} is {mine} on rank {first} and {theirs} on rank {second}"
    if len(one) != len(other):
        return f"rank {first} has {len(one)} settings and rank {second} has {len(other)}"
    return None


def check_same_settings(
    store: Store, rank: int, workers: int, settings: Settings, *, call: str, is_elastic: bool, stages: int = 1
) -> None:
    """Raise the same ValueError on every rank if the ranks' settings differ.

    Elastic ranks may join later: each compares its settings with those of the first rank that came, and only a rank
    that differs raises.  With several `stages`, only the ranks of the same stage are compared.
    """
    ranks = range(rank % stages, workers, stages)
    if len(ranks) == 1:
        return
    mine = json.dumps(settings)
    first, theirs = json.loads(store.compare_set("settings/first", "", json.dumps([rank, settings])))
    store.set(f"settings/{rank}", mine)
    if is_elastic:
        _raise_if_different(theirs, json.loads(mine), (first, rank), call)
        return
    everyones = {other: store.get(f"settings/{other}").decode() for other in ranks}
    for other, theirs in everyones.items():
        if theirs != everyones[ranks[0]]:
            _raise_if_different(json.loads(everyones[ranks[0]]), json.loads(theirs), (ranks[0], other), call)


def _raise_if_different(one: Any, other: Any, ranks: tuple[int, int], call: str) -> None:
    found = difference(one, other, ranks)
    if found is not None:
        raise ValueError(f"{call}: the ranks differ: {found}; give the same on every rank")


class GroupSettings:
    """The optimizer's settings, which schedules change, compared between ranks while they train."""

    def __init__(self, endpoint: Endpoint, store: Store, optimizer: torch.optim.Optimizer) -> None:
        self._endpoint = endpoint
        self._store = store
        self._optimizer = optimizer

    def digest(self) -> float:
        """A number that is equal on two ranks whose settings are equal."""
        data = json.dumps(described_groups(self._optimizer)).encode()
        return float(int.from_bytes(hashlib.blake2b(data, digest_size=6).digest()))

    def check(self, step: int, *, has_ended: bool) -> None:
        """Raise the same error on every rank if a rank steps with other settings than another one does.

        All ranks call this at the same step.  A rank whose data has ended takes no steps: its settings do not count.
        """
        # With its rank: the endpoint's may be others afterwards, if one has died.
        mine = torch.tensor([self._endpoint.rank, not has_ended, self.digest()], dtype=torch.float64)
        found = self._endpoint.all_gather(mine).wait()
        digests = {int(t[0]): float(t[2]) for t in found if float(t[1])}
        text = self.difference(digests, f"step/{step}")
        if text is not None:
            raise ClusterError(
                f"{text}, at step {step}: their steps would differ, and with them their models.  {COMMON_SCHEDULE}"
            )

    def difference(self, digests: Mapping[int, float], key: str) -> str | None:
        """The first setting that differs between these ranks; all ranks call this with the same digests."""
        other = next((r for r, d in digests.items() if d != next(iter(digests.values()))), None)
        if other is None:
            return None
        first = next(iter(digests))
        self._store.set(f"groups/{key}/{self._endpoint.rank}", json.dumps(described_groups(self._optimizer)))
        one, two = (json.loads(self._store.get(f"groups/{key}/{r}")) for r in (first, other))
        return difference(one, two, (first, other))
