"""OneBit's units on a GPU: a warp reads a unit once, encodes it, and writes its residual while it is in registers.

A thread has one lane of its unit, and so one value of each row of 32.  Tensors of one unit per warp have this layout
from their loads to their stores.  With more units per warp the compiler would choose another one for the loads than
for the sum of lanes, and would move every value between threads or to memory.
"""

# Triton's language has Python's syntax but not its types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportMissingTypeStubs=false

from __future__ import annotations

import triton
import triton.language as tl

from paceline.codecs.kernels.gpu_parts import halved_in_place, is_finite, wanted


@triton.jit
def sum_row(u, least, lane, above, below, uppers):
    """32 values of each unit: their bits, and the sums including them."""
    upper = u >= least
    word = tl.sum(upper.to(tl.int32) << lane, axis=1, keep_dims=True)
    return (
        word,
        above + tl.where(upper, u, 0.0),
        below + tl.where(upper, 0.0, u),
        uppers + upper.to(tl.int32),
    )


@triton.jit
def mean_of(sums, real, B: tl.constexpr):
    """The mean of each unit; units that are not there have no values."""
    return tl.div_rn(halved_in_place(sums, B), tl.maximum(real, 1).to(tl.float32))


@triton.jit
def means_of(above, below, uppers, least, real, padding, B: tl.constexpr):
    """The means of the values below the threshold and of the others; NaN for a unit where they are not finite."""
    high, low = halved_in_place(above, B), halved_in_place(below, B)
    # Padding is zero.
    count = tl.sum(uppers, axis=1, keep_dims=True) - tl.where(least <= 0, padding, 0)
    is_good = is_finite(high) & is_finite(low)
    high = tl.where(is_good, tl.div_rn(high, tl.maximum(count, 1).to(tl.float32)), float("nan"))
    low = tl.where(is_good, tl.div_rn(low, tl.maximum(real - count, 1).to(tl.float32)), float("nan"))
    return low, high, is_good


@triton.jit
def store_means(means, flag, b, lane, low, high, is_good, real):
    tl.store(means + (2 * b + lane), tl.where(lane == 0, low, high), mask=(real > 0) & (lane < 2))
    tl.store(flag + 0 * (b + lane), 1, mask=(real > 0) & (is_good == 0) & (lane == 0))


@triton.jit
def encode_kept(
    x,
    residual,
    means,
    bits,
    flag,
    real,
    BY_MEAN: tl.constexpr,
    ROWS: tl.constexpr,
    B: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """`B` units, one after another, each read once and kept in registers until its means are known.

    Each has `real` values: if RAGGED any number up to 32 * ROWS, otherwise exactly that or none.
    """
    b, lane = tl.arange(0, B)[:, None], tl.arange(0, 32)[None, :]
    at = b * (32 * ROWS) + lane
    sums = tl.zeros((B, 32), tl.float32)
    above = tl.zeros((B, 32), tl.float32)
    below = tl.zeros((B, 32), tl.float32)
    uppers = tl.zeros((B, 32), tl.int32)
    words = tl.zeros((B, 32), tl.int32)
    kept = ()
    for j in tl.static_range(ROWS):
        u = wanted(x, residual, at + 32 * j, (32 * j + lane < real) if RAGGED else (real > 0))
        kept = kept + (u,)  # noqa: RUF005
        sums += u
    least = mean_of(sums, real, B) if BY_MEAN else tl.zeros((B, 1), tl.float32)
    for j in tl.static_range(ROWS):
        word, above, below, uppers = sum_row(kept[j], least, lane, above, below, uppers)
        words = tl.where(lane == j % 32, word, words)
        if j % 32 == 31 or j == ROWS - 1:
            first = j - j % 32
            left = real - 32 * (first + lane)
            if RAGGED:
                words &= tl.where(left < 32, (1 << tl.maximum(left, 0)) - 1, -1)
            tl.store(bits.to(tl.pointer_type(tl.int32)) + (ROWS * b + first + lane), words, mask=left > 0)
    low, high, is_good = means_of(above, below, uppers, least, real, 32 * ROWS - real, B)
    store_means(means, flag, b, lane, low, high, is_good, real)
    if residual is not None:
        stored = tl.where(is_good, real, 0)
        for j in tl.static_range(ROWS):
            u = kept[j]
            mask = (32 * j + lane < stored) if RAGGED else (stored > 0)
            tl.store(residual + (at + 32 * j), u - tl.where(u >= least, high, low), mask=mask)
