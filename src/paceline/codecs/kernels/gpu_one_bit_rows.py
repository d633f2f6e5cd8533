"""OneBit on a GPU, if its units are the rows of tensors: one program for each unit, with a warp that reads it again for
every pass over it."""

# Triton's language has Python's syntax but not its types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportMissingTypeStubs=false

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.codecs.kernels.gpu_parts import LAUNCH, flags, halved, is_finite, on, wanted
from paceline.codecs.layout import aligned, buffer_for, put
from paceline.codecs.one_bit import OneBit
from paceline.codecs.rows import Rows, units_of


@triton.jit
def place_of(starts, words, b):
    """Where a unit begins, how many values it has, and where its bits begin."""
    start = tl.load(starts + b)
    return start, (tl.load(starts + b + 1) - start).to(tl.int32), tl.load(words + b)


@triton.jit
def encode_rows(x, residual, data, starts, words, flag, units, BY_MEAN: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    start, real, word = place_of(starts, words, b)
    x += start
    if residual is not None:
        residual += start
    means = data.to(tl.pointer_type(tl.float32)) + 2 * b
    bits = (data + 8 * units.to(tl.int64)).to(tl.pointer_type(tl.int32)) + word
    lane = tl.arange(0, 32)[None, :]
    one = tl.zeros((1, 1), tl.int64)
    above = tl.zeros((1, 32), tl.float32)
    below = tl.zeros((1, 32), tl.float32)
    uppers = tl.zeros((1, 32), tl.int32)
    least = tl.zeros((1, 1), tl.float32)
    if BY_MEAN:
        sums = tl.zeros((1, 32), tl.float32)
        for at in range(0, real, 32):
            sums += wanted(x, residual, at + lane, at + lane < real)
        least = tl.div_rn(halved(sums, 1), real.to(tl.float32))
    for at in range(0, real, 32):
        is_real = at + lane < real
        u = wanted(x, residual, at + lane, is_real)
        upper = (u >= least) & is_real
        tl.store(bits + (one + at // 32), tl.sum(upper.to(tl.int32) << lane, axis=1, keep_dims=True))
        above += tl.where(upper, u, 0.0)
        below += tl.where(upper, 0.0, u)
        uppers += upper.to(tl.int32)
    high = halved(above, 1)
    low = halved(below, 1)
    count = tl.sum(uppers, axis=1, keep_dims=True)
    is_good = is_finite(high) & is_finite(low)
    high = tl.where(is_good, tl.div_rn(high, tl.maximum(count, 1).to(tl.float32)), float("nan"))
    low = tl.where(is_good, tl.div_rn(low, tl.maximum(real - count, 1).to(tl.float32)), float("nan"))
    tl.store(means + one, low)
    tl.store(means + (one + 1), high)
    tl.store(flag + one, 1, mask=is_good == 0)
    if residual is not None:
        for at in range(0, real, 32):
            is_real = at + lane < real
            u = wanted(x, residual, at + lane, is_real)
            tl.store(residual + (at + lane), u - tl.where(u >= least, high, low), mask=is_real & is_good)


@triton.jit
def add_rows(data, into, starts, words, weight, units, FRESH: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    start, real, word = place_of(starts, words, b)
    into += start
    means = data.to(tl.pointer_type(tl.float32)) + 2 * b
    bits = (data + 8 * units.to(tl.int64)).to(tl.pointer_type(tl.int32)) + word
    lane = tl.arange(0, 32)[None, :]
    low = tl.load(means) * weight
    high = tl.load(means + 1) * weight
    for at in range(0, real, 32):
        is_real = at + lane < real
        values = tl.where(((tl.load(bits + at // 32) >> lane) & 1) != 0, high, low)
        if not FRESH:
            values = tl.load(into + (at + lane), mask=is_real, other=0.0) + values
        tl.store(into + (at + lane), values, mask=is_real)


@lru_cache(maxsize=256)
def on_device(rows: Rows, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where units begin, in the vector and in the bits."""
    units = units_of(rows)
    return torch.from_numpy(units.starts).to(device), torch.from_numpy(units.words).to(device)


def encode(codec: OneBit, x: Tensor, residual: Tensor | None, out: Tensor | None) -> tuple[Tensor, bool]:
    assert codec.rows is not None
    units = codec.scales(x.numel())
    data = buffer_for(codec, x, out)
    if not units:
        return data, True
    flag = flags.get(x)
    with on(x):
        starts, words = on_device(codec.rows, x.device)
        by_mean = codec.threshold == "mean"
        encode_rows[units,](x, residual, data, starts, words, flag, units, by_mean, num_warps=1, **LAUNCH)
        return put(data, out), flags.is_unset(flag, x)


def add(codec: OneBit, data: Tensor, into: Tensor, weight: float, fresh: bool) -> None:
    assert codec.rows is not None
    if units := codec.scales(into.numel()):
        with on(into):
            starts, words = on_device(codec.rows, into.device)
            add_rows[units,](aligned(data), into, starts, words, float(weight), units, fresh, num_warps=1, **LAUNCH)
