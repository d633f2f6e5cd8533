"""Kernels for the CPU, compiled by numba: they run without the GIL, and large vectors on several threads.

Each bucket is read, encoded, and its residual written, before the next one, so that it crosses the memory bus once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from paceline.codecs.kernels import Kernel, casts, coding, one_bit_rows, quantisers, sparse
from paceline.codecs.kernels.cpu_parts import NAN, ZERO, compiled, in_buckets, wanted
from paceline.codecs.kernels.lanes import LANES, add_up, at_least, count, full, load, select, store
from paceline.codecs.layout import aligned, buffer_for, put
from paceline.codecs.one_bit import OneBit

if TYPE_CHECKING:
    from paceline.codecs.codec import Codec


@compiled
def one_bit_encode(
    x: Any, residual: Any, by_mean: bool, bucket: int, real: int, means: Any, words: Any, first: int, last: int
) -> bool:
    is_good = True
    zero = full(ZERO)
    for b in range(first, last):
        threshold = ZERO
        if by_mean:
            total = zero
            for at in range(b * bucket, (b + 1) * bucket, LANES):
                total = total + wanted(x, residual, at)
            threshold = add_up(total) / np.float32(real)
        least = full(threshold)
        above = zero
        below = zero
        uppers = 0
        for at in range(b * bucket, (b + 1) * bucket, LANES):
            u = wanted(x, residual, at)
            mask = at_least(u, least)
            words[at // LANES] = mask
            uppers += count(mask)
            above = above + select(mask, u, zero)
            below = below + select(mask, zero, u)
        if threshold <= ZERO:
            uppers -= bucket - real  # Padding is zero.
        high = add_up(above)
        low = add_up(below)
        if not (np.isfinite(high) and np.isfinite(low)):
            means[2 * b] = means[2 * b + 1] = NAN
            is_good = False
            continue
        high = high / np.float32(max(uppers, 1))
        low = low / np.float32(max(real - uppers, 1))
        means[2 * b] = low
        means[2 * b + 1] = high
        if residual is not None:
            lows, highs = full(low), full(high)
            for at in range(b * bucket, (b + 1) * bucket, LANES):
                store(residual, at, wanted(x, residual, at) - select(words[at // LANES], highs, lows))
    return is_good


@compiled
def one_bit_add(
    means: Any, words: Any, bucket: int, into: Any, weight: Any, fresh: bool, first: int, last: int
) -> bool:
    for b in range(first, last):
        lows, highs = full(weight * means[2 * b]), full(weight * means[2 * b + 1])
        for at in range(b * bucket, (b + 1) * bucket, LANES):
            values = select(words[at // LANES], highs, lows)
            store(into, at, values if fresh else load(into, at) + values)
    return True


def as_words(bits: Any) -> Any:
    return bits[: len(bits) // 4 * 4].view(np.uint32)


def encode_one_bit(
    codec: Codec, x: Tensor, residual: Tensor | None, seed: int, out: Tensor | None
) -> tuple[Tensor, bool]:
    codec = cast(OneBit, codec)
    if (units := codec.units(x.numel())) is not None:
        return one_bit_rows.encode(codec, units, x, residual, out)
    by_mean = codec.threshold == "mean"
    bucket = codec.bucket_size
    data = buffer_for(codec, x, out)
    buckets = codec.scales(x.numel())
    means = data[: 8 * buckets].view(torch.float32).numpy()
    bits = data[8 * buckets :]

    def run(values: Any, rest: Any, some: Any, begin: int, real: int, first: int, last: int) -> bool:
        scales = means[2 * (begin // bucket) :]
        return one_bit_encode(values, rest, by_mean, bucket, real, scales, as_words(some), first, last)

    is_good = in_buckets(bucket, 1, x, residual, bits, run, packs=True)
    return put(data, out), is_good


def add_one_bit(codec: Codec, data: Tensor, into: Tensor, weight: float, fresh: bool) -> None:
    codec = cast(OneBit, codec)
    if (units := codec.units(into.numel())) is not None:
        return one_bit_rows.add(units, data, into, weight, fresh)
    scaled = np.float32(weight)
    data = aligned(data)
    bucket = codec.bucket_size
    buckets = codec.scales(into.numel())
    means = data[: 8 * buckets].view(torch.float32).numpy()
    bits = data[8 * buckets :]

    def run(_: Any, values: Any, some: Any, begin: int, real: int, first: int, last: int) -> bool:
        return one_bit_add(means[2 * (begin // bucket) :], as_words(some), bucket, values, scaled, fresh, first, last)

    in_buckets(bucket, 1, None, into, bits, run, packs=False)


KERNELS: dict[type[Codec], Kernel] = {
    OneBit: Kernel(encode_one_bit, add_one_bit),
    **quantisers.KERNELS,
    **casts.KERNELS,
    **sparse.KERNELS,
    **coding.KERNELS,
}
