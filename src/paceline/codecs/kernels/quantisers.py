"""CPU kernels of the codecs that send a scale and a code of 2, 4, 8 or 16 bits per value: NBit, QSGD and TernGrad.

They differ in the scale and in how a value is rounded; decoding is the same for all.  A message is a float32 scale
per bucket and then the codes, which have an offset so that they are positive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from paceline.codecs.kernels import Kernel
from paceline.codecs.kernels.cpu_parts import NAN, ZERO, compiled, in_buckets, wanted
from paceline.codecs.kernels.lanes import (
    LANES,
    add_up,
    bits_of,
    floor,
    full,
    full_int,
    larger,
    larger_int,
    largest,
    less,
    load,
    load_2,
    load_4,
    load_8,
    load_16,
    numbered,
    select,
    smaller,
    store,
    store_2,
    store_4,
    store_8,
    store_16,
    to_floats,
    to_ints,
    with_bits,
)
from paceline.codecs.layout import aligned, buffer_for, put
from paceline.codecs.n_bit import NBit
from paceline.codecs.noise import FIRST, SECOND, halves
from paceline.codecs.qsgd import QSGD, TernGrad

if TYPE_CHECKING:
    from paceline.codecs.codec import Codec

# What the scale is: a statistic of the bucket, or GIVEN for the whole vector.
SIGMA = 0
L2 = 1
MAX = 2
GIVEN = 3
HALF = np.float32(0.5)
ONE = np.float32(1)
STEP = np.float32(2.0**-24)
UNSIGNED = 0x7FFFFFFF
SIGN = 0x80000000
BLOCK = 512
NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Plan:
    """A codec's parameters: its codes are from -levels to levels, and are decoded as at most `top` units."""

    bucket: int
    bits: int
    scale: int
    levels: int
    top: float
    parts: int  # How many units make a scale.


def plan_of(codec: Codec) -> Plan:
    if isinstance(codec, NBit):
        return Plan(codec.bucket, codec.bits, SIGMA, codec.centre, codec.centre + 0.5, 1)
    if isinstance(codec, QSGD):
        return Plan(
            codec.bucket, codec.bits, L2 if codec.norm == "l2" else MAX, codec.levels, codec.levels, codec.levels
        )
    return Plan(BLOCK, 2, GIVEN, 1, 1, 1)


@compiled
def mixed(words: Any) -> Any:
    words = words ^ (words >> 16)
    words = words * FIRST
    words = words ^ (words >> 15)
    words = words * SECOND
    return words ^ (words >> 16)


@compiled
def uniform(low: int, high: int, index: int) -> Any:
    """32 numbers of `noise.uniform`, from `index` on."""
    words = mixed(mixed(numbered() + full_int(index + low)) ^ high)
    return to_floats(words >> 8) * full(STEP)


@compiled
def pack(codes: Any, at: int, values: Any, bits: int) -> None:
    if bits == 8:
        store_8(codes, at, values)
    elif bits == 4:
        store_4(codes, at // 2, values)
    elif bits == 2:
        store_2(codes, at // 4, values)
    else:
        store_16(codes, 2 * at, values)


@compiled
def unpack(codes: Any, at: int, bits: int) -> Any:
    if bits == 8:
        return load_8(codes, at)
    if bits == 4:
        return load_4(codes, at // 2)
    if bits == 2:
        return load_2(codes, at // 4)
    return load_16(codes, 2 * at)


@compiled
def squares(x: Any, residual: Any, start: int, bucket: int) -> Any:
    sums = full(ZERO)
    for at in range(start, start + bucket, LANES):
        u = wanted(x, residual, at)
        sums = sums + u * u
    return add_up(sums)


@compiled
def most(x: Any, residual: Any, start: int, bucket: int) -> Any:
    """The largest |u|; NaN if there is one, because as an integer NaN is larger than infinity and all numbers."""
    found = full_int(0)
    for at in range(start, start + bucket, LANES):
        found = larger_int(found, bits_of(wanted(x, residual, at)) & UNSIGNED)
    return largest(found)


@compiled
def encode_units(
    x: Any, residual: Any, bucket: int, real: int, bits: int, kind: int, levels: int, top: Any, low: int, high: int,
    begin: int, given: Any, scales: Any, codes: Any, first: int, last: int,
) -> bool:  # fmt: skip
    """Encode whole buckets, with `real` values each; `begin` is the index of the first value in the vector."""
    is_good = True
    tops = full(top)
    lows = full(np.float32(-levels))
    highs = full(np.float32(levels + 1 if kind == SIGMA else levels))
    ones = full(ONE)
    zeros = full(ZERO)
    nearest = full(HALF)
    for b in range(first, last):
        start = b * bucket
        if kind == SIGMA:
            unit = np.sqrt(squares(x, residual, start, bucket) / np.float32(real)) * np.float32(8 / (2 * levels + 1))
            scale = unit
            per_unit = ONE / unit
        else:
            if kind == L2:
                scale = np.sqrt(squares(x, residual, start, bucket))
            elif kind == MAX:
                scale = most(x, residual, start, bucket)
            else:
                scale = given
            unit = scale / np.float32(levels)
            per_unit = np.float32(levels) / scale
        if not np.isfinite(unit * np.float32(levels)):
            scales[b if kind != GIVEN else 0] = NAN
            is_good = False
            continue
        if not np.isfinite(per_unit):
            scale = unit = per_unit = ZERO
        if kind != GIVEN:
            scales[b] = scale
        units, factors = full(unit), full(per_unit)
        for at in range(start, start + bucket, LANES):
            u = wanted(x, residual, at)
            if kind == SIGMA:
                level = smaller(larger(floor(u * factors + nearest), lows), highs)
            else:
                exact = with_bits(bits_of(u) & UNSIGNED) * factors
                below = floor(exact)
                up = less(uniform(low, high, begin + at), exact - below)
                level = smaller(below + select(up, ones, zeros), highs)
                level = with_bits(bits_of(level) | (bits_of(u) & SIGN))
            number = to_ints(level)
            pack(codes, at, number + levels, bits)
            if residual is not None:
                store(residual, at, u - smaller(to_floats(number), tops) * units)
    return is_good


@compiled
def add_units(
    scales: Any, codes: Any, bucket: int, bits: int, kind: int, levels: int, top: Any, parts: Any, into: Any,
    weight: Any, fresh: bool, first: int, last: int,
) -> bool:  # fmt: skip
    tops, weights = full(top), full(weight)
    for b in range(first, last):
        units = full(scales[b if kind != GIVEN else 0] / parts)
        for at in range(b * bucket, (b + 1) * bucket, LANES):
            values = smaller(to_floats(unpack(codes, at, bits) - levels), tops) * units * weights
            store(into, at, values if fresh else load(into, at) + values)
    return True


@compiled
def measure(x: Any, residual: Any, maxima: Any, sums: Any, first: int, last: int) -> bool:
    for b in range(first, last):
        maxima[b] = most(x, residual, b * BLOCK, BLOCK)
        sums[b] = squares(x, residual, b * BLOCK, BLOCK)
    return True


def parts(data: Tensor, plan: Plan, numel: int) -> tuple[Any, Tensor]:
    """The scales and the codes of a message."""
    count = min(numel, 1) if plan.scale == GIVEN else -(-numel // plan.bucket)
    return data[: 4 * count].view(torch.float32).numpy(), data[4 * count :]


def encode(codec: Codec, x: Tensor, residual: Tensor | None, seed: int, out: Tensor | None) -> tuple[Tensor, bool]:
    p = plan_of(codec)
    data = buffer_for(codec, x, out)
    scales, codes = parts(data, p, x.numel())
    low, high = halves(seed)
    given = NAN
    if isinstance(codec, TernGrad) and x.numel():
        given, scales[0] = scale_of(codec, x, residual)

    def run(values: Any, rest: Any, words: Any, begin: int, real: int, first: int, last: int) -> bool:
        return encode_units(
            values, rest, p.bucket, real, p.bits, p.scale, p.levels, np.float32(p.top), low, high,
            begin, given, scales[begin // p.bucket :] if p.scale != GIVEN else scales, words, first, last,
        )  # fmt: skip

    is_good = in_buckets(p.bucket, p.bits, x, residual, codes, run, packs=True)
    return put(data, out), is_good


@compiled
def total(x: Any) -> Any:
    """As `layout.total`."""
    while len(x) > 1:
        rows = -(-len(x) // BLOCK)
        more = np.zeros(rows * BLOCK, np.float32)
        more[: len(x)] = x
        x = np.empty(rows, np.float32)
        for b in range(rows):
            sums = full(ZERO)
            for at in range(b * BLOCK, (b + 1) * BLOCK, LANES):
                sums = sums + load(more, at)
            x[b] = add_up(sums)
    return x[0]


@compiled
def scale_from(maxima: Any, sums: Any, numel: int, clip: Any) -> Any:
    """As `TernGrad.scale`, and the scale on the wire; a clip of 0 means None."""
    scale = maxima[0]
    for b in range(1, len(maxima)):
        if maxima[b] > scale or np.isnan(maxima[b]):
            scale = maxima[b]
    if clip > 0:
        limit = np.sqrt(total(sums) / np.float32(numel)) * clip
        if limit < scale:
            scale = limit
    return scale, scale if np.isfinite(ONE / scale) else ZERO


def scale_of(codec: TernGrad, x: Tensor, residual: Tensor | None) -> tuple[Any, Any]:
    rows = -(-x.numel() // BLOCK)
    maxima, sums = np.empty(rows, np.float32), np.empty(rows, np.float32)

    def run(values: Any, rest: Any, _: Any, begin: int, real: int, first: int, last: int) -> bool:
        return measure(values, rest, maxima[begin // BLOCK :], sums[begin // BLOCK :], first, last)

    in_buckets(BLOCK, 0, x, residual, NOTHING, run, packs=False)
    scale, sent = scale_from(maxima, sums, x.numel(), np.float32(codec.clip or 0))
    return np.float32(scale), np.float32(sent)  # numba returns Python floats, which are double.


def add(codec: Codec, data: Tensor, into: Tensor, weight: float, fresh: bool) -> None:
    p = plan_of(codec)
    scales, codes = parts(aligned(data), p, into.numel())
    top = np.float32(p.top)
    divisor = np.float32(p.parts)
    scaled = np.float32(weight)

    def run(_: Any, values: Any, words: Any, begin: int, real: int, first: int, last: int) -> bool:
        of = scales[begin // p.bucket :] if p.scale != GIVEN else scales
        return add_units(
            of, words, p.bucket, p.bits, p.scale, p.levels, top, divisor, values, scaled, fresh, first, last
        )

    in_buckets(p.bucket, p.bits, None, into, codes, run, packs=False)


KERNELS: dict[type[Codec], Kernel] = {
    NBit: Kernel(encode, add),
    QSGD: Kernel(encode, add),
    TernGrad: Kernel(encode, add),
}
