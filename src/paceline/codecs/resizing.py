"""The slots of a codec's state, and what becomes of them when the number of workers changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.codecs.shares import undelivered
from paceline.state import Resize, ResizeRule, resize_rule


class Remember(Protocol):
    """Makes a slot in a checkpoint: an object with the attributes `initial`, or their saved values in a resumed run.

    Each slot of a codec has its own name.  `rule` computes the values that every worker starts with after the number of
    workers has changed.  Increase `version` when the meaning of the values changes.
    """

    def __call__(self, name: str, /, *, rule: ResizeRule, version: int = 1, **initial: Any) -> Any: ...


@resize_rule("codec residuals", sees_all=True)
def resize_residuals(values: Sequence[dict[str, Any]], resize: Resize) -> dict[str, Any]:
    """Preserve what the next means deliver: all residuals, each times its unit, and the sum of the owners' residuals.

    The same for a velocity that has the residual's unit.

    Stripes have new owners, and workers have new shares.  So each worker gets all of it, without a unit: it then counts
    for the worker's share of the next mean, and all shares of a mean add up to 1.
    """
    result = dict(values[0])
    for name in result.keys() - {"owner_residual", "shares"}:
        total = undelivered([v[name] for v in values], [v["shares"] for v in values])
        if name == "residual" and "owner_residual" in result:
            total += sum(v["owner_residual"].to(total) for v in values)
            result["owner_residual"] = torch.zeros_like(result["owner_residual"])
        result[name] = total.to(result[name])
    result["shares"] = []
    return result


@resize_rule("codec mean")
def resize_by_mean(values: Sequence[dict[str, Any]], resize: Resize) -> dict[str, Any]:
    """The mean of each floating-point tensor."""
    return {name: _mean([v[name] for v in values]) for name in values[0]}


@resize_rule("codec message count")
def resize_counts(values: Sequence[dict[str, Any]], resize: Resize) -> dict[str, Any]:
    """The largest count: no worker draws the random numbers of an earlier message again."""
    return {name: torch.stack([v[name] for v in values]).amax(0) for name in values[0]}


@resize_rule("codec settings")
def drop_settings(values: Sequence[dict[str, Any]], resize: Resize) -> dict[str, Any]:
    """Drop adapted settings: the stripes that they belong to no longer exist."""
    return {name: {} for name in values[0]}


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    """In double precision; equal tensors keep their bits."""
    stacked = torch.stack([t.to(tensors[0]) for t in tensors])
    if all(torch.equal(t, stacked[0]) for t in stacked[1:]):
        return tensors[0].clone()
    shares = torch.ones(len(tensors), dtype=torch.float64, device=stacked.device) / len(tensors)
    return torch.tensordot(shares, stacked.double(), 1).to(stacked.dtype)
