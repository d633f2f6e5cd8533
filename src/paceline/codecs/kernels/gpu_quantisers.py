"""GPU kernels of the codecs that send a scale and a code of 2, 4, 8 or 16 bits per value: NBit, QSGD and TernGrad.

They differ in the scale and in how a value is rounded; decoding is the same for all.  A message is a float32 scale
per bucket and then the codes, which have an offset so that they are positive.  32 values are as many 32-bit words as
a code has bits.
"""

# Triton's language has Python's syntax but not its types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportMissingTypeStubs=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.codecs.kernels.gpu_parts import (
    LAUNCH,
    flags,
    halved,
    halved_in_place,
    is_finite,
    on,
    unrolled,
    wanted,
)
from paceline.codecs.layout import LANES, aligned, buffer_for, put
from paceline.codecs.n_bit import NBit
from paceline.codecs.noise import FIRST, SECOND, halves
from paceline.codecs.qsgd import QSGD, TernGrad

if TYPE_CHECKING:
    from paceline.codecs.codec import Codec

# What the scale is: a statistic of the bucket, or GIVEN for the whole vector.
SIGMA: Any = tl.constexpr(0)
L2: Any = tl.constexpr(1)
MAX: Any = tl.constexpr(2)
GIVEN: Any = tl.constexpr(3)
MIX_FIRST: Any = tl.constexpr(FIRST)
MIX_SECOND: Any = tl.constexpr(SECOND)

KEPT_ROWS = 32  # A bucket with more rows of 32 values does not fit into the registers of a warp.
BLOCK = 512  # A sum over a whole vector starts with rows of this many values.
ADDED_AT_ONCE = 32  # Rows of 32 values per program.


@dataclass(frozen=True, slots=True)
class Plan:
    """A codec's parameters: its codes are from -levels to levels, and are decoded as at most `top` units."""

    bucket: int
    bits: int
    kind: int
    levels: int
    top: float
    parts: int  # How many units make a scale.

    def count(self, numel: int) -> int:
        """How many scales a message has."""
        return min(numel, 1) if self.kind == GIVEN.value else -(-numel // self.bucket)


def plan_of(codec: Codec) -> Plan:
    if isinstance(codec, NBit):
        return Plan(codec.bucket, codec.bits, SIGMA.value, codec.centre, codec.centre + 0.5, 1)
    if isinstance(codec, QSGD):
        return Plan(
            codec.bucket,
            codec.bits,
            (L2 if codec.norm == "l2" else MAX).value,
            codec.levels,
            float(codec.levels),
            codec.levels,
        )
    return Plan(BLOCK, 2, GIVEN.value, 1, 1.0, 1)


@triton.jit
def mixed(words):
    words ^= words >> 16
    words *= MIX_FIRST
    words ^= words >> 15
    words *= MIX_SECOND
    return words ^ (words >> 16)


@triton.jit
def uniform(low, high, index):
    """The numbers of `noise.uniform` with these indices."""
    words = mixed(mixed(index + low.to(tl.uint32, bitcast=True)) ^ high.to(tl.uint32, bitcast=True))
    return (words >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2**-24


@triton.jit
def gathered(found, u, KIND: tl.constexpr):
    """The scale's statistic in 32 lanes: a sum of squares, or the largest |u| as an integer; NaN is the largest."""
    return tl.maximum(found, u.to(tl.int32, bitcast=True) & 0x7FFFFFFF) if KIND == MAX else found + u * u


@triton.jit
def scales_of(found, given, real, KIND: tl.constexpr, LEVELS: tl.constexpr, B: tl.constexpr):
    """The scale, the unit of a level, its inverse, and whether all are finite."""
    if KIND == SIGMA:
        unit = tl.sqrt_rn(tl.div_rn(halved_in_place(found, B), tl.maximum(real, 1).to(tl.float32))) * (
            8 / (2 * LEVELS + 1)
        )
        scale = unit
        per_unit = tl.div_rn(tl.full((B, 1), 1.0, tl.float32), unit)
    else:
        if KIND == L2:
            scale = tl.sqrt_rn(halved_in_place(found, B))
        elif KIND == MAX:
            scale = tl.max(found, axis=1, keep_dims=True).to(tl.float32, bitcast=True)
        else:
            scale = tl.zeros((B, 1), tl.float32) + tl.load(given)
        levels = tl.full((B, 1), LEVELS, tl.float32)
        unit = tl.div_rn(scale, levels)
        per_unit = tl.div_rn(levels, scale)
    is_good = is_finite(unit * LEVELS)
    is_something = is_finite(per_unit)
    scale = tl.where(is_something, scale, 0.0)
    return (
        tl.where(is_good, scale, float("nan")),
        tl.where(is_something, unit, 0.0),
        tl.where(is_something, per_unit, 0.0),
        is_good,
    )


@triton.jit
def level_of(u, per_unit, low, high, index, KIND: tl.constexpr, LEVELS: tl.constexpr):
    if KIND == SIGMA:
        level = tl.minimum(tl.maximum(tl.floor(u * per_unit + 0.5), -1.0 * LEVELS), LEVELS + 1.0).to(tl.int32)
    else:
        exact = tl.abs(u) * per_unit
        below = tl.floor(exact)
        level = tl.minimum(below + (uniform(low, high, index) < exact - below).to(tl.float32), 1.0 * LEVELS).to(
            tl.int32
        )
        level = tl.where(u < 0, -level, level)
    return level


@triton.jit
def encode_row(u, unit, per_unit, is_good, residual, codes, at, real, j, low, high, index,
            KIND: tl.constexpr, LEVELS: tl.constexpr, TOP: tl.constexpr, BITS: tl.constexpr, B: tl.constexpr,
            TAIL: tl.constexpr):  # fmt: skip
    """32 values of each bucket: store their codes, and what the codes leave out."""
    PER: tl.constexpr = 32 // BITS
    lane = tl.arange(0, 32)[None, :]
    level = level_of(u, per_unit, low, high, index, KIND, LEVELS)
    code = tl.reshape(tl.where(is_good, level + LEVELS, 0), (B, BITS, PER))
    words = tl.sum(code << (BITS * tl.arange(0, PER))[None, None, :], axis=2)
    w = tl.arange(0, BITS)[None, :]
    place = at * BITS // 8 + 4 * (j * BITS + w)
    if TAIL:  # The message may end inside a word.
        for k in tl.static_range(4):
            tl.store(codes + (place + k), (words >> (8 * k)).to(tl.uint8), mask=32 * j + w * PER + 8 * k // BITS < real)
    else:
        tl.store((codes + place).to(tl.pointer_type(tl.int32)), words, mask=real > 0)
    if residual is not None:
        mask = (32 * j + lane < real) if TAIL else (real > 0)
        tl.store(residual + (at + 32 * j + lane), u - tl.minimum(level.to(tl.float32), TOP) * unit, mask=mask & is_good)


@triton.jit
def encode_buckets(x, residual, scales, codes, flag, given, low, high, begin, left, ROWS: tl.constexpr,
                   KIND: tl.constexpr, LEVELS: tl.constexpr, TOP: tl.constexpr, BITS: tl.constexpr, B: tl.constexpr,
                   UNROLL: tl.constexpr, TAIL: tl.constexpr):  # fmt: skip
    """`B` buckets with at most `left` values, from index `begin` of the vector; in registers if all are unrolled."""
    BUCKET: tl.constexpr = 32 * ROWS
    b, lane = tl.arange(0, B)[:, None], tl.arange(0, 32)[None, :]
    at = b * BUCKET
    real = tl.minimum(tl.maximum(left - at, 0), BUCKET)
    index = begin.to(tl.uint32) + (at + lane).to(tl.uint32)
    found = tl.zeros((B, 32), tl.int32 if KIND == MAX else tl.float32)
    kept = ()
    if KIND != GIVEN:
        if UNROLL == ROWS:
            for j in tl.static_range(ROWS):
                u = wanted(x, residual, at + (32 * j + lane), (32 * j + lane < real) if TAIL else (real > 0))
                kept = kept + (u,)  # noqa: RUF005
                found = gathered(found, u, KIND)
        else:
            for i in range(0, ROWS, UNROLL):
                for k in tl.static_range(UNROLL):
                    j = i + k
                    u = wanted(x, residual, at + (32 * j + lane), (32 * j + lane < real) if TAIL else (real > 0))
                    found = gathered(found, u, KIND)
    scale, unit, per_unit, is_good = scales_of(found, given, real, KIND, LEVELS, B)
    if KIND == GIVEN:  # Only the first program writes it: it would be slow if all wrote to one address.
        tl.store(scales + b, scale, mask=begin + b == 0)
    else:
        tl.store(scales + b, scale, mask=real > 0)
    tl.store(flag + 0 * b, 1, mask=(real > 0) & (is_good == 0))
    if KIND != GIVEN and UNROLL == ROWS:
        for j in tl.static_range(ROWS):
            encode_row(kept[j], unit, per_unit, is_good, residual, codes, at, real, j, low, high, index + 32 * j,
                       KIND, LEVELS, TOP, BITS, B, TAIL)  # fmt: skip
    else:
        for i in range(0, ROWS, UNROLL):
            for k in tl.static_range(UNROLL):
                j = i + k
                u = wanted(x, residual, at + (32 * j + lane), (32 * j + lane < real) if TAIL else (real > 0))
                encode_row(u, unit, per_unit, is_good, residual, codes, at, real, j, low, high,
                           index + (32 * j).to(tl.uint32), KIND, LEVELS, TOP, BITS, B, TAIL)  # fmt: skip


@triton.jit(do_not_specialize=["numel", "low", "high"])
def quantise(x, residual, data, flag, given, numel, low, high, ROWS: tl.constexpr, KIND: tl.constexpr,
             LEVELS: tl.constexpr, TOP: tl.constexpr, BITS: tl.constexpr, B: tl.constexpr, UNROLL: tl.constexpr,
             TAIL: tl.constexpr):  # fmt: skip
    """`B` buckets per program; if TAIL, the last program has the partial bucket."""
    BUCKET: tl.constexpr = 32 * ROWS
    numel, first = numel.to(tl.int64), tl.program_id(0).to(tl.int64) * B
    is_last = tl.program_id(0) == tl.num_programs(0) - 1
    full, count = numel // BUCKET, (numel + BUCKET - 1) // BUCKET
    if TAIL:
        first = tl.where(is_last, full, first)
    begin = first * BUCKET
    x += begin
    if residual is not None:
        residual += begin
    scales = data.to(tl.pointer_type(tl.float32))
    codes = data + begin * BITS // 8
    if KIND == GIVEN:
        codes += 4
    else:
        scales += first
        codes += 4 * count
    left = tl.minimum(full * BUCKET - begin, B * BUCKET).to(tl.int32)
    if TAIL:
        # A partial bucket has its own program: with masks that can end anywhere, no program could read whole words.
        if is_last:
            encode_buckets(x, residual, scales, codes, flag, given, low, high, begin, (numel - begin).to(tl.int32),
                           ROWS, KIND, LEVELS, TOP, BITS, 1, 1, True)  # fmt: skip
        else:
            encode_buckets(x, residual, scales, codes, flag, given, low, high, begin, left,
                           ROWS, KIND, LEVELS, TOP, BITS, B, UNROLL, False)  # fmt: skip
    else:
        encode_buckets(x, residual, scales, codes, flag, given, low, high, begin, left,
                       ROWS, KIND, LEVELS, TOP, BITS, B, UNROLL, False)  # fmt: skip


@triton.jit
def add_rows(scales, codes, into, weight, begin, left, ROWS: tl.constexpr, ALONE: tl.constexpr, LEVELS: tl.constexpr,
             TOP: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr, FRESH: tl.constexpr,
             TAIL: tl.constexpr):  # fmt: skip
    """`W` rows of 32 values, with at most `left` values; `begin` is the index of the first row."""
    PER: tl.constexpr = 32 // BITS
    row = tl.arange(0, W)[:, None]
    lane = tl.arange(0, 32)[None, :]
    w = tl.arange(0, BITS)[None, :]
    if TAIL:
        words = tl.zeros((W, BITS), tl.int32)
        for k in tl.static_range(4):
            there = 32 * row + w * PER + 8 * k // BITS < left
            words |= tl.load(codes + (4 * (BITS * row + w) + k), mask=there, other=0).to(tl.int32) << (8 * k)
    else:
        words = tl.load(codes.to(tl.pointer_type(tl.int32)) + (BITS * row + w), mask=32 * row < left, other=0)
    shifts = (BITS * tl.arange(0, PER))[None, None, :]
    code = tl.reshape((words[:, :, None] >> shifts) & ((1 << BITS) - 1), (W, 32))
    at = 0 * row if ALONE else ((begin % ROWS).to(tl.int32) + row) // ROWS
    scale = tl.load(scales + at, mask=32 * row < left, other=0.0)
    unit = tl.div_rn(scale, tl.full((W, 1), PARTS, tl.float32))
    values = tl.minimum((code - LEVELS).to(tl.float32), TOP) * unit * weight
    mask = (32 * row + lane < left) if TAIL else (32 * row < left)
    if not FRESH:
        values = tl.load(into + (32 * row + lane), mask=mask, other=0.0) + values
    tl.store(into + (32 * row + lane), values, mask=mask)


@triton.jit(do_not_specialize=["numel"])
def add_quantised(data, into, weight, numel, ROWS: tl.constexpr, ALONE: tl.constexpr, LEVELS: tl.constexpr,
                  TOP: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr, FRESH: tl.constexpr,
                  TAIL: tl.constexpr):  # fmt: skip
    numel, begin = numel.to(tl.int64), tl.program_id(0).to(tl.int64) * W
    is_last, full = tl.program_id(0) == tl.num_programs(0) - 1, numel // 32
    if TAIL:
        begin = tl.where(is_last, full, begin)
    scales = data.to(tl.pointer_type(tl.float32))
    codes = data + 4 * BITS * begin
    if ALONE:
        codes += 4
    else:
        scales += begin // ROWS
        codes += 4 * ((numel + 32 * ROWS - 1) // (32 * ROWS))
    into += 32 * begin
    left = (32 * tl.minimum(full - begin, W)).to(tl.int32)
    if TAIL:
        if is_last:
            rest = (numel - 32 * full).to(tl.int32)
            add_rows(scales, codes, into, weight, begin, rest, ROWS, ALONE, LEVELS, TOP, PARTS, BITS, 1, FRESH, True)
        else:
            add_rows(scales, codes, into, weight, begin, left, ROWS, ALONE, LEVELS, TOP, PARTS, BITS, W, FRESH, False)
    else:
        add_rows(scales, codes, into, weight, begin, left, ROWS, ALONE, LEVELS, TOP, PARTS, BITS, W, FRESH, False)


@triton.jit
def measure_rows(x, residual, largest, sums, left, SQUARED: tl.constexpr, B: tl.constexpr, TAIL: tl.constexpr):
    b, lane = tl.arange(0, B)[:, None], tl.arange(0, 32)[None, :]
    most, total = tl.zeros((B, 32), tl.int32), tl.zeros((B, 32), tl.float32)
    for j in tl.static_range(16):
        at = 512 * b + (32 * j + lane)
        u = wanted(x, residual, at, (at < left) if TAIL else (512 * b < left))
        if SQUARED:
            most = gathered(most, u, MAX)
            total = gathered(total, u, L2)
        else:
            total += u
    if SQUARED:
        tl.store(largest + b, tl.max(most, axis=1, keep_dims=True).to(tl.float32, bitcast=True), mask=512 * b < left)
    tl.store(sums + b, halved(total, B), mask=512 * b < left)


@triton.jit(do_not_specialize=["numel"])
def measure(x, residual, largest, sums, numel, SQUARED: tl.constexpr, B: tl.constexpr, TAIL: tl.constexpr):
    """The largest |u| and the sum of squares of each row of 512 values; only the sum of values if not SQUARED."""
    first = tl.program_id(0).to(tl.int64) * B
    left = tl.minimum(numel - first * 512, B * 512).to(tl.int32)
    x += first * 512
    if residual is not None:
        residual += first * 512
    if TAIL:
        if tl.program_id(0) == tl.num_programs(0) - 1:
            measure_rows(x, residual, largest + first, sums + first, left, SQUARED, B, True)
        else:
            measure_rows(x, residual, largest + first, sums + first, left, SQUARED, B, False)
    else:
        measure_rows(x, residual, largest + first, sums + first, left, SQUARED, B, False)


def scale_of(codec: TernGrad, x: Tensor, residual: Tensor | None) -> Tensor:
    """The scale of the whole vector."""

    def measured(values: Tensor, rest: Tensor | None, squared: bool) -> tuple[Tensor, Tensor]:
        rows = triton.cdiv(values.numel(), BLOCK)
        largest, sums = values.new_empty(2, rows, dtype=torch.float32)
        extras = values.numel() % BLOCK != 0
        measure[triton.cdiv(rows, 4),](
            values, rest, largest, sums, values.numel(), squared, 4, extras, num_warps=1, **LAUNCH
        )
        return largest, sums

    largest, sums = measured(x, residual, True)
    while sums.numel() > 1:
        sums = measured(sums, None, False)[1]
    return codec.scale(largest, sums, x.numel()).view(1)


def signed(word: int) -> int:
    """A 32-bit word as the signed integer with the same bits: Triton would treat a larger one as 64 bits."""
    return word - 2**32 if word >= 2**31 else word


def encode(codec: Codec, x: Tensor, residual: Tensor | None, seed: int, out: Tensor | None) -> tuple[Tensor, bool]:
    p, numel = plan_of(codec), x.numel()
    data = buffer_for(codec, x, out)
    rows = p.bucket // LANES
    if not numel:
        return data, True
    low, high = halves(seed)
    unroll = rows if rows <= KEPT_ROWS else unrolled(rows)
    # 32 values per thread; 16 if random numbers are drawn, which takes registers, so that more threads fit.
    at_once = max(1, min(4, (16 if codec.is_random else 32) // triton.next_power_of_2(rows)))
    extras, flag = numel % p.bucket != 0, flags.get(x)
    programs = triton.cdiv(numel // p.bucket, at_once) + extras
    with on(x):
        given = scale_of(codec, x, residual) if isinstance(codec, TernGrad) else None
        quantise[programs,](
            *(x, residual, data, flag, given, numel, signed(low), signed(high)),
            *(rows, p.kind, p.levels, p.top, p.bits, at_once, unroll, extras),
            num_warps=1,
            **LAUNCH,
        )
        return put(data, out), flags.is_unset(flag, x)


def add(codec: Codec, data: Tensor, into: Tensor, weight: float, fresh: bool) -> None:
    p, numel = plan_of(codec), into.numel()
    if not numel:
        return
    extras = numel % LANES != 0
    programs = triton.cdiv(numel // LANES, ADDED_AT_ONCE) + extras
    with on(into):
        add_quantised[programs,](
            *(aligned(data), into, float(weight), numel),
            *(p.bucket // LANES, p.kind == GIVEN.value, p.levels, p.top, p.parts, p.bits, ADDED_AT_ONCE, fresh, extras),
            num_warps=1,
            **LAUNCH,
        )
