"""The values of slots: copies, means over workers, slices for shards."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from paceline.stripes import stripe_of

KEPT_FROM = 1 << 16  # Bytes.


def copied(value: Any) -> Any:
    """A deep copy."""
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


class Copies:
    """Deep copies whose large tensors are in memory that is kept from one copy to the next.

    New memory costs several times as much as the copy.  Each copy takes the place of the one before.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], Tensor] = {}

    def of(self, value: Any, *path: Any) -> Any:
        """A copy of a value, whose name and keys are the `path`."""
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if type(value) is dict:
            return {key: self.of(v, *path, key) for key, v in cast("dict[Any, Any]", value).items()}
        if type(value) in (list, tuple):
            items = cast("list[Any]", value)
            return type(value)(self.of(v, *path, i) for i, v in enumerate(items))
        return copy.deepcopy(value)

    def _tensor(self, value: Tensor, path: tuple[Any, ...]) -> Tensor:
        if value.nbytes < KEPT_FROM or value.layout is not torch.strided:
            return value.detach().clone()
        kept = self._kept.get(path)
        if kept is None or (kept.shape, kept.dtype, kept.device) != (value.shape, value.dtype, value.device):
            kept = self._kept[path] = torch.empty_like(value, requires_grad=False)
        return kept.copy_(value.detach())


def slice_of(name: object, values: Sequence[Any], index: int, count: int, unit: int) -> Any:
    """The part of shard `index` of `count` in equally built values of all old shards; see the resize rule `shard`."""
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        raise ValueError(f"resharded: '{name}' differs in its kind between shards: save all shards at the same moment")
    if isinstance(first, dict):
        return {key: slice_of(key, [v[key] for v in values], index, count, unit) for key in _common_keys(name, values)}
    if isinstance(first, Tensor) and first.dim() == 1:
        joined = torch.cat(list(values))
        return joined[stripe_of(index, joined.numel(), count, unit=unit)].clone()
    return max(values) if isinstance(first, (int, float)) else first


def _common_keys(name: object, values: Sequence[dict[Any, Any]]) -> list[Any]:
    """The keys that all dicts have.  Only ranks may be missing in some of them."""
    common = [key for key in values[0] if all(key in value for value in values)]
    missing = sorted({key for value in values for key in value if isinstance(key, str)} - set(common))
    if missing:
        raise ValueError(f"resharded: not all shards have {missing} in {name}: save all shards at the same moment")
    return common


def mean_of(values: Sequence[Any], weights: Sequence[float], name: str = "") -> Any:
    """The mean of equally built values.

    Equal values stay as they are.  Tensors of floating-point numbers are averaged by weight, single numbers without.
    Of integers, and of an optimizer's `step`, the largest counts.  Of lists and tensors of unequal length, the
    longest is kept.
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
