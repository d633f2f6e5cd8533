"""Passes over whole vectors that are not a codec's, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from paceline.codecs.kernels.cpu_parts import ZERO, as_array, compiled, share_out
from paceline.codecs.kernels.lanes import LANES, add_up, full, load

BLOCK = 4096  # Values whose squares are summed in single precision.


@compiled
def _squares(params: Any, start: Any, mean: Any, sums: Any, first: int, last: int) -> bool:
    for b in range(first, last):
        total = full(ZERO)
        for at in range(b * BLOCK, (b + 1) * BLOCK, LANES):
            off = load(params, at) - load(start, at) - load(mean, at)
            total = total + off * off
        sums[b] = add_up(total)
    return True


def squared_distance(params: Tensor, start: Tensor, mean: Tensor) -> float:
    """`|params - start - mean|^2`; the same bits however many threads there are."""
    blocks, rest = divmod(params.numel(), BLOCK)
    values = [as_array(t) for t in (params, start, mean)]
    sums = np.zeros(blocks + 1)
    share_out(lambda first, last: _squares(*values, sums, first, last), blocks, params.numel())
    if rest:
        ends = [np.zeros(BLOCK, v.dtype) for v in values]
        for end, v in zip(ends, values, strict=True):
            end[:rest] = v[-rest:]
        _squares(*ends, sums[-1:], 0, 1)
    return float(sums.sum())
