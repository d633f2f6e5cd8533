"""CPU kernels of the codecs that send shorter floating-point numbers: Fp16, BFloat16, and Fp8 with scales."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from paceline.codecs.floats import BFloat16, Cast, Fp8, Fp16
from paceline.codecs.kernels import Kernel
from paceline.codecs.kernels.cpu_parts import NAN, ZERO, compiled, in_buckets, wanted
from paceline.codecs.kernels.lanes import (
    LANES,
    at_least,
    bits_of,
    full,
    larger,
    less,
    load,
    load_8,
    select,
    smaller,
    store,
    store_8,
    to_floats,
    with_bits,
)
from paceline.codecs.kernels.quantisers import UNSIGNED, most
from paceline.codecs.layout import aligned, buffer_for, put

if TYPE_CHECKING:
    from paceline.codecs.codec import Codec

BLOCK = 512
ALL = 0xFFFFFFFF
EXPONENT = 0x7F800000

# The first magnitude that rounds to infinity: half a step beyond the largest.
LIMITS = {torch.float16: np.float32(65520.0), torch.bfloat16: np.array(0x7F7F8000, np.uint32).view(np.float32)[()]}


@compiled
def encode_cast(x: Any, residual: Any, words: Any, limit: Any, first: int, last: int) -> bool:
    """Values that cannot be encoded become NaN and keep their residuals."""
    is_good = True
    limits = full(limit)
    nans = full(NAN)
    for at in range(first * BLOCK, last * BLOCK, LANES):
        u = wanted(x, residual, at)
        good = less(with_bits(bits_of(u) & UNSIGNED), limits)
        is_good &= good == ALL
        store(words, at, select(good, u, nans))
        if residual is not None:
            store(residual, at, select(good, u - load(words, at), load(residual, at)))
    return is_good


@compiled
def encode_scaled_cast(x: Any, words: Any, limit: Any, factor: Any, first: int, last: int) -> bool:
    is_good = True
    limits = full(limit)
    factors = full(factor)
    for at in range(first * BLOCK, last * BLOCK, LANES):
        u = load(x, at)
        is_good &= less(with_bits(bits_of(u) & UNSIGNED), limits) == ALL
        store(words, at, u * factors)
    return is_good


@compiled
def add_cast(words: Any, into: Any, weight: Any, fresh: bool, first: int, last: int) -> bool:
    weights = full(weight)
    for at in range(first * BLOCK, last * BLOCK, LANES):
        values = load(words, at) * weights
        store(into, at, values if fresh else load(into, at) + values)
    return True


def as_words(codes: Any, codec: Cast) -> Any:
    return codes.view(np.uint16 if codec.dtype == torch.float16 else np.int16)


def cast_encode(codec: Codec, x: Tensor, residual: Tensor | None, seed: int, out: Tensor | None) -> tuple[Tensor, bool]:
    codec = cast(Cast, codec)
    data = buffer_for(codec, x, out)
    limit = LIMITS[codec.dtype]

    def run(values: Any, rest: Any, codes: Any, begin: int, real: int, first: int, last: int) -> bool:
        return encode_cast(values, rest, as_words(codes, codec), limit, first, last)

    is_good = in_buckets(BLOCK, 16, x, residual, data, run, packs=True)
    return put(data, out), is_good


def cast_encode_scaled(codec: Codec, x: Tensor, factor: float) -> tuple[Tensor, bool]:
    codec = cast(Cast, codec)
    data = torch.empty(x.numel(), dtype=codec.dtype)
    limit = LIMITS[codec.dtype]
    scale = np.float32(factor)

    def run(values: Any, _: Any, codes: Any, begin: int, real: int, first: int, last: int) -> bool:
        return encode_scaled_cast(values, as_words(codes, codec), limit, scale, first, last)

    return data, in_buckets(BLOCK, 16, x, None, data.view(torch.uint8), run, packs=True)


def cast_add(codec: Codec, data: Tensor, into: Tensor, weight: float, fresh: bool) -> None:
    codec = cast(Cast, codec)
    scaled = np.float32(weight)

    def run(_: Any, values: Any, codes: Any, begin: int, real: int, first: int, last: int) -> bool:
        return add_cast(as_words(codes, codec), values, scaled, fresh, first, last)

    in_buckets(BLOCK, 16, None, into, aligned(data), run, packs=False)


class Format(NamedTuple):
    """An 8-bit format in terms of float32 bits."""

    shift: int  # From a float32's bits to a code's.
    bias: int  # The difference of the exponents, in units of codes.
    normal: Any  # The smallest normal number.
    normal_code: Any  # Its code.
    step: Any  # The distance between subnormals.
    magic: Any  # A number near which float32 has the same step.
    special: Any  # The first code of a NaN or infinity.

    @classmethod
    def of(cls, mantissa: int, bias: int, special: int) -> Format:
        least = 1 - bias - mantissa
        numbers = (np.float32(v) for v in (2.0 ** (1 - bias), 2**mantissa, 2.0**least, 2.0 ** (23 + least), special))
        return cls(23 - mantissa, (127 - bias) << mantissa, *numbers)


FORMATS = {"e4m3": Format.of(3, 7, 0x7F), "e5m2": Format.of(2, 15, 0x7C)}


@compiled
def fp8_codes(q: Any, f: Any) -> Any:
    """The nearest codes, ties to even."""
    word = bits_of(q)
    size = word & UNSIGNED
    normal = ((size + ((size >> f.shift) & 1) + ((1 << (f.shift - 1)) - 1)) >> f.shift) - f.bias
    magics = full(f.magic)
    small = bits_of(with_bits(size) + magics) - bits_of(magics)
    return select(less(with_bits(size), full(f.normal)), small, normal) | ((word >> 24) & 0x80)


@compiled
def fp8_values(codes: Any, f: Any) -> Any:
    size = codes & 0x7F
    number = to_floats(size)
    normal = with_bits((size + f.bias) << f.shift)
    values = select(less(number, full(f.normal_code)), number * full(f.step), normal)
    values = select(at_least(number, full(f.special)), with_bits((size << f.shift) | EXPONENT), values)
    return with_bits(bits_of(values) | ((codes & 0x80) << 24))


@compiled
def encode_fp8(
    x: Any, residual: Any, bucket: int, f: Any, top: Any, scales: Any, codes: Any, first: int, last: int
) -> bool:
    is_good = True
    highs = full(top)
    lows = full(-top)
    for b in range(first, last):
        start = b * bucket
        size = most(x, residual, start, bucket)
        scale = size / top
        factor = top / size
        if not np.isfinite(scale * top):
            scales[b] = NAN
            is_good = False
            continue
        if not np.isfinite(factor):
            scale = factor = ZERO
        scales[b] = scale
        units, factors = full(scale), full(factor)
        for at in range(start, start + bucket, LANES):
            u = wanted(x, residual, at)
            code = fp8_codes(smaller(larger(u * factors, lows), highs), f)
            store_8(codes, at, code)
            if residual is not None:
                store(residual, at, u - fp8_values(code, f) * units)
    return is_good


@compiled
def add_fp8(
    scales: Any, codes: Any, bucket: int, f: Any, into: Any, weight: Any, fresh: bool, first: int, last: int
) -> bool:
    weights = full(weight)
    for b in range(first, last):
        units = full(scales[b])
        for at in range(b * bucket, (b + 1) * bucket, LANES):
            values = fp8_values(load_8(codes, at), f) * units * weights
            store(into, at, values if fresh else load(into, at) + values)
    return True


def fp8_encode(codec: Codec, x: Tensor, residual: Tensor | None, seed: int, out: Tensor | None) -> tuple[Tensor, bool]:
    codec = cast(Fp8, codec)
    data = buffer_for(codec, x, out)
    bucket = codec.bucket
    f = FORMATS[codec.format]
    top = np.float32(codec.top)
    count = codec.buckets(x.numel())
    scales = data[: 4 * count].view(torch.float32).numpy()
    codes = data[4 * count :]

    def run(values: Any, rest: Any, words: Any, begin: int, real: int, first: int, last: int) -> bool:
        return encode_fp8(values, rest, bucket, f, top, scales[begin // bucket :], words, first, last)

    is_good = in_buckets(bucket, 8, x, residual, codes, run, packs=True)
    return put(data, out), is_good


def fp8_add(codec: Codec, data: Tensor, into: Tensor, weight: float, fresh: bool) -> None:
    codec = cast(Fp8, codec)
    scaled = np.float32(weight)
    bucket = codec.bucket
    f = FORMATS[codec.format]
    count = codec.buckets(into.numel())
    data = aligned(data)
    scales = data[: 4 * count].view(torch.float32).numpy()
    codes = data[4 * count :]

    def run(_: Any, values: Any, words: Any, begin: int, real: int, first: int, last: int) -> bool:
        return add_fp8(scales[begin // bucket :], words, bucket, f, values, scaled, fresh, first, last)

    in_buckets(bucket, 8, None, into, codes, run, packs=False)


KERNELS: dict[type[Codec], Kernel] = {
    Fp16: Kernel(cast_encode, cast_add, cast_encode_scaled),
    BFloat16: Kernel(cast_encode, cast_add, cast_encode_scaled),
    Fp8: Kernel(fp8_encode, fp8_add),
}
