"""OneBit on a CPU, if its units are the rows of tensors: units of any length, each beginning a new word of bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from paceline.codecs.kernels.cpu_parts import NAN, ZERO, as_array, compiled, share_out, wanted, wanted_some
from paceline.codecs.kernels.lanes import (
    LANES,
    add_up,
    at_least,
    count,
    full,
    load,
    load_some,
    select,
    store,
    store_some,
)
from paceline.codecs.layout import aligned, buffer_for, put
from paceline.codecs.one_bit import OneBit
from paceline.codecs.rows import Units


@compiled
def mask_of(lanes: int) -> Any:
    """A mask of the first lanes, of which there are less than 32."""
    return np.uint32((1 << lanes) - 1)


@compiled
def mean_of(x: Any, residual: Any, start: int, real: int) -> Any:
    whole = start + real // LANES * LANES
    tail = mask_of(real % LANES)
    total = full(ZERO)
    for at in range(start, whole, LANES):
        total = total + wanted(x, residual, at)
    if tail:
        total = total + wanted_some(x, residual, whole, tail)
    return add_up(total) / np.float32(real)


@compiled
def encode_rows(
    x: Any,
    residual: Any,
    by_mean: bool,
    starts: Any,
    first_words: Any,
    means: Any,
    words: Any,
    first: int,
    last: int,
) -> bool:
    is_good = True
    zero = full(ZERO)
    for b in range(first, last):
        start = starts[b]
        real = starts[b + 1] - start
        whole = start + real // LANES * LANES
        word = first_words[b]
        tail = mask_of(real % LANES)
        least = full(mean_of(x, residual, start, real)) if by_mean else zero
        above = zero
        below = zero
        uppers = 0
        for at in range(start, whole, LANES):
            u = wanted(x, residual, at)
            mask = at_least(u, least)
            words[word] = mask
            word += 1
            uppers += count(mask)
            above = above + select(mask, u, zero)
            below = below + select(mask, zero, u)
        if tail:
            u = wanted_some(x, residual, whole, tail)
            mask = np.uint32(at_least(u, least) & tail)
            words[word] = mask
            uppers += count(mask)
            above = above + select(mask, u, zero)
            below = below + select(mask, zero, u)
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
            word = first_words[b]
            for at in range(start, whole, LANES):
                store(residual, at, wanted(x, residual, at) - select(words[word], highs, lows))
                word += 1
            if tail:
                left = wanted_some(x, residual, whole, tail) - select(words[word], highs, lows)
                store_some(residual, whole, left, tail)
    return is_good


@compiled
def add_rows(
    means: Any, words: Any, starts: Any, first_words: Any, into: Any, weight: Any, fresh: bool, first: int, last: int
) -> bool:
    for b in range(first, last):
        start = starts[b]
        real = starts[b + 1] - start
        whole = start + real // LANES * LANES
        word = first_words[b]
        tail = mask_of(real % LANES)
        lows, highs = full(weight * means[2 * b]), full(weight * means[2 * b + 1])
        for at in range(start, whole, LANES):
            values = select(words[word], highs, lows)
            store(into, at, values if fresh else load(into, at) + values)
            word += 1
        if tail:
            values = select(words[word], highs, lows)
            store_some(into, whole, values if fresh else load_some(into, whole, tail) + values, tail)
    return True


def encode(codec: OneBit, units: Units, x: Tensor, residual: Tensor | None, out: Tensor | None) -> tuple[Tensor, bool]:
    data = buffer_for(codec, x, out)
    means, words = _parts(data, units)
    values = as_array(x)
    rest = None if residual is None else as_array(residual)
    by_mean = codec.threshold == "mean"

    def run(first: int, last: int) -> bool:
        return encode_rows(values, rest, by_mean, units.starts, units.words, means, words, first, last)

    is_good = share_out(run, units.count, x.numel())
    return put(data, out), is_good


def add(units: Units, data: Tensor, into: Tensor, weight: float, fresh: bool) -> None:
    means, words = _parts(aligned(data), units)
    values = as_array(into)
    scaled = np.float32(weight)

    def run(first: int, last: int) -> bool:
        return add_rows(means, words, units.starts, units.words, values, scaled, fresh, first, last)

    share_out(run, units.count, into.numel())


def _parts(data: Tensor, units: Units) -> tuple[Any, Any]:
    """The means and the words of a message."""
    numbers = data.numpy()
    return numbers[: 8 * units.count].view(np.float32), numbers[8 * units.count :].view(np.uint32)
