"""Shared parts of the Triton kernels: rows of 32 lanes, sums in a fixed order, launching, and the error flag."""

# Triton's language has Python's syntax but not its types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportMissingTypeStubs=false

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.codecs.layout import LANES

# No fused multiply-add: the definitions round the product before the sum.
LAUNCH: dict[str, Any] = {"enable_fp_fusion": False}

assert LANES == 32  # Triton code cannot use a Python constant.


@triton.jit
def halved(lanes, B: tl.constexpr):
    """The sum of each row of 32 lanes: the upper half is added to the lower one until one is left."""
    lanes = tl.sum(tl.reshape(lanes, (B, 2, 16)), axis=1)
    lanes = tl.sum(tl.reshape(lanes, (B, 2, 8)), axis=1)
    lanes = tl.sum(tl.reshape(lanes, (B, 2, 4)), axis=1)
    lanes = tl.sum(tl.reshape(lanes, (B, 2, 2)), axis=1)
    return tl.sum(lanes, axis=1, keep_dims=True)


@triton.jit
def halved_in_place(lanes, B: tl.constexpr):
    """The same sum as `halved`, which would make the compiler move all values used with it between threads.

    Each lane adds the lane that is half of the lanes away, so that all have the same sum in the end; the maximum is
    any.
    """
    lane = tl.arange(0, 32)[None, :] + tl.zeros((B, 1), tl.int32)
    lanes += tl.gather(lanes, lane ^ 16, axis=1)
    lanes += tl.gather(lanes, lane ^ 8, axis=1)
    lanes += tl.gather(lanes, lane ^ 4, axis=1)
    lanes += tl.gather(lanes, lane ^ 2, axis=1)
    lanes += tl.gather(lanes, lane ^ 1, axis=1)
    return tl.max(lanes.to(tl.int32, bitcast=True), axis=1, keep_dims=True).to(tl.float32, bitcast=True)


@triton.jit
def wanted(x, residual, at, mask):
    """The values to encode: `x + residual`, or `x`; 0 where masked."""
    u = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        u += tl.load(residual + at, mask=mask, other=0.0)
    return u


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


def on(x: Tensor) -> AbstractContextManager[Any]:
    """Make the vector's device the current one, on which Triton launches."""
    return torch.cuda.device(x.device) if x.is_cuda and x.device.index != torch.cuda.current_device() else nullcontext()


class Flags(threading.local):
    """A number per thread that a kernel sets if a value cannot be encoded.

    It is in pinned host memory, which a kernel can write, so that reading it needs no copy.  One per thread is enough,
    because a thread waits for its kernel before it launches the next.
    """

    def __init__(self) -> None:
        self._flag: Tensor | None = None

    def get(self, x: Tensor) -> Tensor:
        if self._flag is None:
            self._flag = torch.zeros(1, dtype=torch.int32, pin_memory=x.is_cuda)
        return self._flag

    def is_unset(self, flag: Tensor, x: Tensor) -> bool:
        """Wait for the kernels so far; whether none has set the flag."""
        if x.is_cuda:
            torch.cuda.current_stream(x.device).synchronize()
        if flag.item() == 0:
            return True
        flag.zero_()
        return False


flags = Flags()


def unrolled(rows: int) -> int:
    """How many rows of a large bucket are read at once: a divisor of their number."""
    return next(n for n in (8, 4, 2, 1) if rows % n == 0)
