"""OneBit on a GPU, if its units are the rows of tensors: one program of one warp for each unit."""

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

from paceline.codecs.kernels.gpu_one_bit_units import encode_kept
from paceline.codecs.kernels.gpu_parts import LAUNCH, flags, on
from paceline.codecs.layout import aligned, buffer_for, put
from paceline.codecs.one_bit import OneBit
from paceline.codecs.rows import LONGEST, Rows, units_of

ADDED_AT_ONCE = 8  # Words of 32 values.

assert LONGEST <= 32 * 32  # A unit is kept in the registers of a warp.


@triton.jit
def place_of(starts, words, b):
    """Where a unit begins, how many values it has, and where its bits begin."""
    start = tl.load(starts + b)
    return start, (tl.load(starts + b + 1) - start).to(tl.int32), tl.load(words + b)


@triton.jit(do_not_specialize=["units"])
def encode_rows(x, residual, data, starts, words, flag, units, BY_MEAN: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    start, real, word = place_of(starts, words, b)
    x += start
    if residual is not None:
        residual += start
    means = data.to(tl.pointer_type(tl.float32)) + 2 * b
    bits = data + (8 * units.to(tl.int64) + 4 * word)
    each = real + tl.zeros((1, 1), tl.int32)
    # A short unit would take as long as the longest one if it had as many registers.
    if real <= 256:
        encode_kept(x, residual, means, bits, flag, each, BY_MEAN, 8, 1, True)
    elif real <= 512:
        encode_kept(x, residual, means, bits, flag, each, BY_MEAN, 16, 1, True)
    else:
        encode_kept(x, residual, means, bits, flag, each, BY_MEAN, 32, 1, True)


@triton.jit(do_not_specialize=["units"])
def add_rows(data, into, starts, words, weight, units, FRESH: tl.constexpr, W: tl.constexpr):
    """`W` words of 32 values at once."""
    b = tl.program_id(0).to(tl.int64)
    start, real, word = place_of(starts, words, b)
    into += start
    means = data.to(tl.pointer_type(tl.float32)) + 2 * b
    bits = (data + (8 * units.to(tl.int64) + 4 * word)).to(tl.pointer_type(tl.int32))
    w, lane = tl.arange(0, W)[:, None], tl.arange(0, 32)[None, :]
    low = tl.load(means) * weight
    high = tl.load(means + 1) * weight
    for first in range(0, real, 32 * W):
        at = first + 32 * w + lane
        mask = at < real
        values = tl.load(bits + (first // 32 + w), mask=first + 32 * w < real, other=0)
        values = tl.where(((values >> lane) & 1) != 0, high, low)
        if not FRESH:
            values = tl.load(into + at, mask=mask, other=0.0) + values
        tl.store(into + at, values, mask=mask)


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
            add_rows[units,](
                *(aligned(data), into, starts, words, float(weight), units),
                *(fresh, ADDED_AT_ONCE),
                num_warps=1,
                **LAUNCH,
            )
