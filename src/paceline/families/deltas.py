"""The arithmetic of averaging: deltas from a common anchor, and how they are merged, fused where kernels exist."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from paceline.codecs import kernels
from paceline.codecs.layout import is_finite


def wide(params: Tensor) -> Tensor:
    """The values in single precision at least: small deltas would vanish in 16 bits."""
    return params.to(torch.promote_types(params.dtype, torch.float32))


def compute_delta(params: Tensor, anchor: Tensor, delta: Tensor, snapshot: Tensor | None) -> bool:
    """delta = params - anchor, and snapshot = params, if given; False if the delta may hold NaN or infinity."""
    if (fused := _fused(params, anchor)) is not None:
        return fused.compute_delta(params, anchor, delta, snapshot)
    torch.sub(params, anchor, out=delta)
    if snapshot is not None:
        snapshot.copy_(params)
    return is_finite(delta)


def merge(anchor: Tensor, mean: Tensor, params: Tensor, snapshot: Tensor | None) -> None:
    """anchor += mean, and params = anchor; with a snapshot, params = anchor + (params - snapshot)."""
    if (fused := _fused(params, anchor)) is not None:
        return fused.merge(anchor, mean, params, snapshot)
    go_to(anchor.add_(mean), params, snapshot)


def go_to(anchor: Tensor, params: Tensor, snapshot: Tensor | None) -> None:
    """params = anchor; with a snapshot, which is used up, params = anchor + (params - snapshot)."""
    if snapshot is None:
        params.copy_(anchor)
    else:
        torch.add(anchor, torch.sub(params, snapshot, out=snapshot), out=params)


def squared_distance(params: Tensor, anchor: Tensor, mean: Tensor) -> float:
    """Of this worker's delta, params - anchor, from the mean of all deltas."""
    if (fused := _fused(params, anchor)) is not None:
        return fused.squared_distance(params, anchor, mean)
    # By pieces that stay in the processor's cache.
    pieces = zip(*(t.split(1 << 16) for t in (params, anchor, mean)), strict=True)
    return float(sum(torch.linalg.vector_norm((p - s).sub_(m)).double().square() for p, s, m in pieces))


def _fused(params: Tensor, anchor: Tensor) -> ModuleType | None:
    """Kernels that do all this in one pass each; None if there are none for these vectors."""
    if params.device.type != "cpu" or anchor.dtype != torch.float32:
        return None
    if kernels.is_plain() or not kernels.kernels_of("cpu"):
        return None
    from paceline.codecs.kernels import vectors  # It needs numba, which may be missing.

    return vectors
