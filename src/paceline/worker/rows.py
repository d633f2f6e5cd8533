"""Rows: some stretches (runs) of a vector, each by where it begins and how long it is.

A minibatch touches some rows of an embedding: only these travel, a run each.  What is not sparse is one long run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rows(start: int, width: int, indices: Tensor) -> Tensor:
    """Rows of a table that begins at `start` in a vector.

    >>> rows(100, 4, torch.tensor([0, 2]))
    tensor([[100,   4],
            [108,   4]])
    """
    begins = start + width * indices.to(torch.int64)
    return torch.stack([begins, torch.full_like(begins, width)], dim=1)


def within(runs: Tensor, where: slice) -> Tensor:
    """What of these runs lies in a slice, counted from its beginning.

    >>> within(torch.tensor([[0, 4], [8, 4], [20, 4]]), slice(2, 10))
    tensor([[0, 2],
            [6, 2]])
    """
    begins, ends = runs[:, 0].clamp(min=where.start), (runs[:, 0] + runs[:, 1]).clamp(max=where.stop)
    found = torch.stack([begins - where.start, ends - begins], dim=1)
    return found[found[:, 1] > 0]


def union(several: Sequence[Tensor]) -> Tensor:
    """All runs once, in order; runs are alike or apart."""
    return torch.unique(torch.cat(list(several)), dim=0)


def positions(runs: Tensor) -> Tensor:
    """Where all the values of these runs are.

    >>> positions(torch.tensor([[3, 2], [8, 1]]))
    tensor([3, 4, 8])
    """
    begins, lengths = runs.unbind(1)
    skipped = begins - (lengths.cumsum(0) - lengths)
    return torch.repeat_interleave(skipped, lengths) + torch.arange(int(lengths.sum()))


def refusal(runs: Tensor, numel: int) -> str | None:
    """Why these cannot be runs of a vector; None if they can."""
    if runs.dtype != torch.int64 or runs.dim() != 2 or runs.shape[1] != 2:
        return f"runs are pairs of int64, not {runs.dtype} of shape {tuple(runs.shape)}"
    begins, lengths = runs.unbind(1)
    if not len(runs):
        return None
    first, last, shortest, longest = (int(n) for n in (begins.min(), begins.max(), lengths.min(), lengths.max()))
    if first < 0 or last > numel or shortest < 1 or longest > numel:  # Or their sums might overflow.
        return f"runs from {first} to {last}, of lengths from {shortest} to {longest}, in {numel} values"
    order = begins.argsort()
    ends = (begins + lengths)[order]
    if int(ends.max()) > numel or bool((ends[:-1] > begins[order][1:]).any()):
        return f"runs overlap, or end behind the last of {numel} values"
    return None
