"""A check of buffers: nothing may write to a tensor while an Op is sending it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.sim.simulator import SimOp

FEW = 64  # Up to this many values, a list is made and compared faster than a tensor.

Snapshot = Tensor | list[float]  # The values of a buffer at one time.


def snapshot(x: Tensor) -> Snapshot:
    return x.reshape(-1).tolist() if x.numel() <= FEW else x.clone()


def check_unchanged(op: SimOp[Any], buffers: Sequence[Tensor], before: Sequence[Snapshot]) -> None:
    """Raise an error if a buffer of this Op differs from its snapshot."""
    for x, was in zip(buffers, before, strict=True):
        if isinstance(was, list):
            if x.reshape(-1).tolist() == was:
                continue
            was = torch.tensor(was, dtype=x.dtype).view(x.shape)
        if not torch.equal(x, was) and not torch.equal(torch.nan_to_num(x), torch.nan_to_num(was)):
            raise RuntimeError(
                f"rank {op.rank} wrote to a buffer of {x.numel()} values while '{op!r}' was sending it: await it first"
            )
