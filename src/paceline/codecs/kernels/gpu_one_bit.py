"""OneBit on a GPU: a bucket is read once, encoded, and its residual written while it is in registers."""

# Triton's language has Python's syntax but not its types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportMissingTypeStubs=false

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import triton
import triton.language as tl
from torch import Tensor

from paceline.codecs.kernels import gpu_one_bit_rows
from paceline.codecs.kernels.gpu_one_bit_units import encode_kept, mean_of, means_of, store_means, sum_row
from paceline.codecs.kernels.gpu_parts import LAUNCH, flags, on, unrolled, wanted
from paceline.codecs.layout import LANES, aligned, buffer_for, put
from paceline.codecs.one_bit import OneBit

if TYPE_CHECKING:
    from paceline.codecs.codec import Codec

KEPT_ROWS = 32  # A bucket with more rows of 32 values does not fit into the registers of a warp, and is read twice.
ADDED_AT_ONCE = 64  # Words of 32 values per program.


def shape_of(rows: int) -> tuple[int, int]:
    """How many buckets a program encodes, each with a warp, and how many rows are read at once."""
    return (4, rows) if rows <= KEPT_ROWS else (1, unrolled(rows))


@triton.jit
def encode_reread(
    x,
    residual,
    means,
    bits,
    flag,
    left,
    BY_MEAN: tl.constexpr,
    ROWS: tl.constexpr,
    B: tl.constexpr,
    UNROLL: tl.constexpr,
    TAIL: tl.constexpr,
):
    """`B` buckets with at most `left` values: too large for registers, or the last one, which is not full."""
    b, lane = tl.arange(0, B)[:, None], tl.arange(0, 32)[None, :]
    at = b * (32 * ROWS)
    real = tl.minimum(tl.maximum(left - at, 0), 32 * ROWS)
    least = tl.zeros((B, 1), tl.float32)
    if BY_MEAN:
        sums = tl.zeros((B, 32), tl.float32)
        for i in range(0, ROWS, UNROLL):
            for k in tl.static_range(UNROLL):
                j = i + k
                is_real = (32 * j + lane < real) if TAIL else (real > 0)
                sums += wanted(x, residual, at + (32 * j + lane), is_real)
        least = mean_of(sums, real, B)
    above = tl.zeros((B, 32), tl.float32)
    below = tl.zeros((B, 32), tl.float32)
    uppers = tl.zeros((B, 32), tl.int32)
    for i in range(0, ROWS, UNROLL):
        for k in tl.static_range(UNROLL):
            j = i + k
            is_real = (32 * j + lane < real) if TAIL else (real > 0)
            u = wanted(x, residual, at + (32 * j + lane), is_real)
            word, above, below, uppers = sum_row(u, least, lane, above, below, uppers)
            if TAIL:  # The message may end inside a word.
                byte = tl.arange(0, 4)[None, :]
                tl.store(bits + (4 * j + byte), (word >> (8 * byte)).to(tl.uint8), mask=32 * j + 8 * byte < real)
            else:
                tl.store(bits.to(tl.pointer_type(tl.int32)) + (ROWS * b + j), word, mask=real > 0)
    low, high, is_good = means_of(above, below, uppers, least, real, 32 * ROWS - real, B)
    store_means(means, flag, b, lane, low, high, is_good, real)
    if residual is not None:
        for i in range(0, ROWS, UNROLL):
            for k in tl.static_range(UNROLL):
                there = at + (32 * (i + k) + lane)
                mask = (32 * (i + k) + lane < real) if TAIL else (real > 0)
                u = wanted(x, residual, there, mask)
                tl.store(residual + there, u - tl.where(u >= least, high, low), mask=mask & is_good)


@triton.jit
def encode_full(
    x,
    residual,
    means,
    bits,
    flag,
    full,
    BY_MEAN: tl.constexpr,
    ROWS: tl.constexpr,
    B: tl.constexpr,
    UNROLL: tl.constexpr,
):
    if UNROLL == ROWS:
        real = tl.where(tl.arange(0, B)[:, None] < full, 32 * ROWS, 0)
        encode_kept(x, residual, means, bits, flag, real, BY_MEAN, ROWS, B, False)
    else:
        encode_reread(x, residual, means, bits, flag, full * (32 * ROWS), BY_MEAN, ROWS, B, UNROLL, False)


@triton.jit(do_not_specialize=["numel"])
def one_bit_encode(
    x,
    residual,
    data,
    flag,
    numel,
    BY_MEAN: tl.constexpr,
    ROWS: tl.constexpr,
    B: tl.constexpr,
    UNROLL: tl.constexpr,
    TAIL: tl.constexpr,
):
    """`B` buckets per program, in registers if all rows are unrolled; if TAIL, the last has the partial bucket."""
    BUCKET: tl.constexpr = 32 * ROWS
    numel, first = numel.to(tl.int64), tl.program_id(0).to(tl.int64) * B
    is_last = tl.program_id(0) == tl.num_programs(0) - 1
    full, buckets = numel // BUCKET, (numel + BUCKET - 1) // BUCKET
    if TAIL:
        first = tl.where(is_last, full, first)
    x += first * BUCKET
    if residual is not None:
        residual += first * BUCKET
    means = data.to(tl.pointer_type(tl.float32)) + 2 * first
    bits = data + 8 * buckets + first * (BUCKET // 8)
    here = tl.minimum(full - first, B).to(tl.int32)
    if TAIL:
        # A partial bucket has its own program: with masks that can end anywhere, no program could read whole words.
        if is_last:
            left = (numel - full * BUCKET).to(tl.int32)
            encode_reread(x, residual, means, bits, flag, left, BY_MEAN, ROWS, 1, 1, True)
        else:
            encode_full(x, residual, means, bits, flag, here, BY_MEAN, ROWS, B, UNROLL)
    else:
        encode_full(x, residual, means, bits, flag, here, BY_MEAN, ROWS, B, UNROLL)


@triton.jit
def add_words(
    data, into, weight, numel, first, ROWS: tl.constexpr, W: tl.constexpr, FRESH: tl.constexpr, TAIL: tl.constexpr
):
    """`W` full words of 32 values from `first` on; if TAIL, the partial one."""
    full, buckets = numel // 32, (numel + 32 * ROWS - 1) // (32 * ROWS)
    w, lane = tl.arange(0, W)[:, None], tl.arange(0, 32)[None, :]
    means = data.to(tl.pointer_type(tl.float32)) + 2 * (first // ROWS)
    bits = data + 8 * buckets + 4 * first
    into += 32 * first
    if TAIL:
        real = tl.where(w == 0, (numel - full * 32).to(tl.int32), 0)
        word = tl.zeros((W, 1), tl.int32)
        for k in tl.static_range(4):
            word |= tl.load(bits + (4 * w + k), mask=8 * k < real, other=0).to(tl.int32) << (8 * k)
    else:
        real = tl.where(w < tl.minimum(full - first, W).to(tl.int32), 32, 0)
        word = tl.load(bits.to(tl.pointer_type(tl.int32)) + w, mask=real > 0, other=0)
    at = 2 * (((first % ROWS).to(tl.int32) + w) // ROWS)
    low = tl.load(means + at, mask=real > 0, other=0.0) * weight
    high = tl.load(means + (at + 1), mask=real > 0, other=0.0) * weight
    values = tl.where(((word >> lane) & 1) != 0, high, low)
    mask = (lane < real) if TAIL else (real > 0)
    if not FRESH:
        values = tl.load(into + (32 * w + lane), mask=mask, other=0.0) + values
    tl.store(into + (32 * w + lane), values, mask=mask)


@triton.jit(do_not_specialize=["numel"])
def one_bit_add(
    data, into, weight, numel, ROWS: tl.constexpr, W: tl.constexpr, FRESH: tl.constexpr, TAIL: tl.constexpr
):
    numel, program = numel.to(tl.int64), tl.program_id(0)
    if TAIL:
        if program == tl.num_programs(0) - 1:
            add_words(data, into, weight, numel, numel // 32, ROWS, W, FRESH, True)
        else:
            add_words(data, into, weight, numel, program.to(tl.int64) * W, ROWS, W, FRESH, False)
    else:
        add_words(data, into, weight, numel, program.to(tl.int64) * W, ROWS, W, FRESH, False)


def encode(codec: Codec, x: Tensor, residual: Tensor | None, seed: int, out: Tensor | None) -> tuple[Tensor, bool]:
    codec = cast(OneBit, codec)
    if codec.rows is not None:
        return gpu_one_bit_rows.encode(codec, x, residual, out)
    bucket = codec.bucket_size
    numel, rows = x.numel(), bucket // LANES
    data = buffer_for(codec, x, out)
    if not numel:
        return data, True
    extras, flag = numel % bucket != 0, flags.get(x)
    at_once, unroll = shape_of(rows)
    programs = triton.cdiv(numel // bucket, at_once) + extras
    with on(x):
        one_bit_encode[programs,](
            *(x, residual, data, flag, numel),
            *(codec.threshold == "mean", rows, at_once, unroll, extras),
            num_warps=at_once,
            **LAUNCH,
        )
        return put(data, out), flags.is_unset(flag, x)


def add(codec: Codec, data: Tensor, into: Tensor, weight: float, fresh: bool) -> None:
    codec = cast(OneBit, codec)
    if codec.rows is not None:
        return gpu_one_bit_rows.add(codec, data, into, weight, fresh)
    numel, rows = into.numel(), codec.bucket_size // LANES
    if not numel:
        return
    extras = numel % LANES != 0
    programs = triton.cdiv(numel // LANES, ADDED_AT_ONCE) + extras
    with on(into):
        one_bit_add[programs,](
            *(aligned(data), into, float(weight), numel),
            *(rows, ADDED_AT_ONCE, fresh, extras),
            num_warps=1,
            **LAUNCH,
        )
