"""What the Triton kernels share: rows of 32 lanes, sums in one order, launching, and the flag that says whether all went well."""

# What Triton compiles is Python by its syntax only: its types say nothing.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportMissingTypeStubs=false

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.codecs.layout import LANES, is_straight

if TYPE_CHECKING:
    from paceline.codecs.codec import Codec

# No product is fused with a sum: the rounding between them is part of every definition.
LAUNCH: dict[str, Any] = {"enable_fp_fusion": False}

assert LANES == 32  # What Triton compiles cannot name a number of Python's.


@triton.jit
def halved(lanes, B: tl.constexpr):
    """The sum of each row of 32 lanes: the upper half is added to the lower one until one is left.  A sum of two has one order."""
    lanes = tl.sum(tl.reshape(lanes, (B, 2, 16)), axis=1)
    lanes = tl.sum(tl.reshape(lanes, (B, 2, 8)), axis=1)
    lanes = tl.sum(tl.reshape(lanes, (B, 2, 4)), axis=1)
    lanes = tl.sum(tl.reshape(lanes, (B, 2, 2)), axis=1)
    return tl.sum(lanes, axis=1, keep_dims=True)


@triton.jit
def halved_in_place(lanes, B: tl.constexpr):
    """The same sum, where `halved` would make the compiler move all that it is used with between threads.

    Each lane adds the one that is half of the lanes away, so that all end with the same sum; the maximum is any of them.
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
    """What is to be said: `x + residual`, or `x` alone; nothing is 0."""
    u = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        u += tl.load(residual + at, mask=mask, other=0.0)
    return u


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


def on(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the one of the vector."""
    return torch.cuda.device(x.device) if x.is_cuda and x.device.index != torch.cuda.current_device() else nullcontext()


class Flags(threading.local):
    """A number for each thread that a kernel sets when it meets what has no code.

    It lies in the host's memory, where a kernel reaches it too, so that to read it costs no copy.  One is enough, since who sets it
    going waits for its kernel before the next.
    """

    def __init__(self) -> None:
        self._flag: Tensor | None = None

    def get(self, x: Tensor) -> Tensor:
        if self._flag is None:
            self._flag = torch.zeros(1, dtype=torch.int32, pin_memory=x.is_cuda)
        return self._flag

    def is_unset(self, flag: Tensor, x: Tensor) -> bool:
        """Wait for the kernels so far, and say whether none has set the flag."""
        if x.is_cuda:
            torch.cuda.current_stream(x.device).synchronize()
        if flag.item() == 0:
            return True
        flag.zero_()
        return False


flags = Flags()


def room(codec: Codec, x: Tensor, out: Tensor | None) -> Tensor:
    """Where the bytes go: `out` if it lies straight, otherwise memory of its own."""
    nbytes = codec.nbytes(x.numel())
    assert nbytes is not None
    if out is not None and out.shape != (nbytes,):
        raise ValueError(
            f"{codec} encodes {x.numel()} values in {nbytes} bytes, but was given room of shape {tuple(out.shape)}"
        )
    return out if out is not None and is_straight(out) else torch.empty(nbytes, dtype=torch.uint8, device=x.device)


def put(data: Tensor, out: Tensor | None) -> Tensor:
    return data if out is None or out.data_ptr() == data.data_ptr() else out.copy_(data)


def unrolled(rows: int) -> int:
    """How many rows of a large bucket are read at once: what divides their number."""
    return next(n for n in (8, 4, 2, 1) if rows % n == 0)
