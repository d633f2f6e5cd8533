"""Rows: parts of a vector as runs, each a pair of (start, length).

A minibatch touches some rows of an embedding.  Only these are sent, each as a run.  A dense parameter is one long run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rows(start: int, width: int, indices: Tensor) -> Tensor:
    """The runs of some rows of a table that begins at `start` in a vector.

    >>> rows(100, 4, torch.tensor([0, 2]))
    tensor([[100,   4],
            [108,   4]])
    """
    begins = start + width * indices.to(torch.int64)
    return torch.stack([begins, torch.full_like(begins, width)], dim=1)


def within(runs: Tensor, where: slice) -> Tensor:
    """The parts of the runs that lie in a slice, with positions relative to its start.

    >>> within(torch.tensor([[0, 4], [8, 4], [20, 4]]), slice(2, 10))
    tensor([[0, 2],
            [6, 2]])
    """
    begins = runs[:, 0].clamp(min=where.start)
    ends = (runs[:, 0] + runs[:, 1]).clamp(max=where.stop)
    found = torch.stack([begins - where.start, ends - begins], dim=1)
    return found[found[:, 1] > 0]


def union(several: Sequence[Tensor]) -> Tensor:
    """All different runs, sorted.  Any two of the given runs must be equal or disjoint."""
    return torch.unique(torch.cat(list(several)), dim=0)


def positions(runs: Tensor) -> Tensor:
    """The position of every value in the runs.

    >>> positions(torch.tensor([[3, 2], [8, 1]]))
    tensor([3, 4, 8])
    """
    begins, lengths = runs.unbind(1)
    skipped = begins - (lengths.cumsum(0) - lengths)
    return torch.repeat_interleave(skipped, lengths) + torch.arange(int(lengths.sum()))


def refusal(runs: Tensor, numel: int) -> str | None:
    """Why these are not valid runs of a vector with `numel` values; None if they are."""
    if runs.dtype != torch.int64 or runs.dim() != 2 or runs.shape[1] != 2:
        return f"runs are pairs of int64, not {runs.dtype} of shape {tuple(runs.shape)}"
    begins, lengths = runs.unbind(1)
    if not len(runs):
        return None
    first, last = int(begins.min()), int(begins.max())
    shortest, longest = int(lengths.min()), int(lengths.max())
    if first < 0 or last > numel or shortest < 1 or longest > numel:  # Checked first, so that the sums cannot overflow.
        return f"runs from {first} to {last}, of lengths from {shortest} to {longest}, in {numel} values"
    order = begins.argsort()
    ends = (begins + lengths)[order]
    if int(ends.max()) > numel or bool((ends[:-1] > begins[order][1:]).any()):
        return f"runs overlap, or end after the last of {numel} values"
    return None
