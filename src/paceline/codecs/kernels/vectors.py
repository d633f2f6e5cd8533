"""The arithmetic of a synchronisation on whole vectors, each in one pass over memory, on the CPU.

All vectors but the parameters are float32.  Differences and merged vectors have the same bits as in plain torch.  The
distance is summed in another order than torch's, the same with any number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.codecs.kernels.cpu_parts import ZERO, as_array, compiled, share_out
from paceline.codecs.kernels.lanes import LANES, add_up, full, load, store

BLOCK = 4096  # Values at a time; plain torch does the rest of a vector.


@compiled
def _delta(params: Any, start: Any, delta: Any, sent: Any, sums: Any, first: int, last: int) -> bool:
    for b in range(first, last):
        total = full(ZERO)
        for at in range(b * BLOCK, (b + 1) * BLOCK, LANES):
            here = load(params, at)
            moved = here - load(start, at)
            total = total + moved
            store(delta, at, moved)
            if sent is not None:
                store(sent, at, here)
        sums[b] = add_up(total)
    return True


@compiled
def _merge(start: Any, mean: Any, params: Any, sent: Any, first: int, last: int) -> bool:
    for at in range(first * BLOCK, last * BLOCK, LANES):
        there = load(start, at) + load(mean, at)
        store(start, at, there)
        if sent is None:
            store(params, at, there)
        else:
            store(params, at, there + (load(params, at) - load(sent, at)))
    return True


@compiled
def _squares(params: Any, start: Any, mean: Any, sums: Any, first: int, last: int) -> bool:
    for b in range(first, last):
        total = full(ZERO)
        for at in range(b * BLOCK, (b + 1) * BLOCK, LANES):
            off = load(params, at) - load(start, at) - load(mean, at)
            total = total + off * off
        sums[b] = add_up(total)
    return True


def compute_delta(params: Tensor, start: Tensor, delta: Tensor, sent: Tensor | None) -> bool:
    """delta = params - start, and sent = params if given; False if the sum of delta is not finite."""
    arrays = _arrays(params, start, delta, sent)
    blocks = len(params) // BLOCK
    sums = np.zeros(blocks + 1)
    share_out(lambda first, last: _delta(*arrays, sums, first, last), blocks, len(params))
    rest = slice(blocks * BLOCK, None)
    sums[-1] = float(torch.sub(params[rest], start[rest], out=delta[rest]).sum())
    if sent is not None:
        sent[rest].copy_(params[rest])
    with np.errstate(invalid="ignore"):
        return bool(np.isfinite(sums.sum()))


def merge(start: Tensor, mean: Tensor, params: Tensor, sent: Tensor | None) -> None:
    """start += mean, and params = start; or params = start + (params - sent), if `sent` is given."""
    arrays = _arrays(start, mean, params, sent)
    blocks = len(params) // BLOCK
    share_out(lambda first, last: _merge(*arrays, first, last), blocks, len(params))
    rest = slice(blocks * BLOCK, None)
    start[rest].add_(mean[rest])
    params[rest].copy_(start[rest] if sent is None else start[rest] + (params[rest] - sent[rest]))


def squared_distance(params: Tensor, start: Tensor, mean: Tensor) -> float:
    """|params - start - mean|^2; the same bits with any number of threads."""
    arrays = _arrays(params, start, mean)
    blocks = len(params) // BLOCK
    sums = np.zeros(blocks + 1)
    share_out(lambda first, last: _squares(*arrays, sums, first, last), blocks, len(params))
    rest = slice(blocks * BLOCK, None)
    sums[-1] = float((params[rest] - start[rest] - mean[rest]).square().sum())
    return float(sums.sum())


def _arrays(*vectors: Tensor | None) -> list[Any]:
    return [None if v is None else as_array(v) for v in vectors]
