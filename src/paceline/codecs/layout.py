"""Memory and message layout: copies, alignment, buckets, packed codes, and sums in the same order on every device.

The test for NaN and infinity is here too: codecs, collectives, workers and servers all need it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from paceline.codecs.codec import Codec

LANES = 32  # Every device adds in this many lanes.
FEW = 4096  # Up to so many values a tensor takes less time than a call of torch.
MOST_INDEXED = 2**31  # An index has 31 bits.


def copied(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy of the values."""
    return torch.empty(x.numel(), dtype=dtype, device=x.device).copy_(x.detach().reshape(-1))


def is_finite(x: Tensor) -> bool:
    """Whether the tensor holds no NaN and no infinity."""
    # The sum is 20 times faster than a test of every value.  Only a sum that is not finite needs the slow test: finite
    # values can overflow when they are added.
    return math.isfinite(x.sum()) or bool(x.isfinite().all())


def is_aligned(data: Tensor) -> bool:
    """Whether wider types can be read from `data` in place."""
    return data.data_ptr() % 8 == 0 and data.storage_offset() % 8 == 0 and data.is_contiguous()


def aligned(data: Tensor) -> Tensor:
    """`data` at an address where wider types can be read; a copy if it is not aligned inside a longer message."""
    return data if is_aligned(data) else data.clone()


def bucketed(x: Tensor, bucket: int) -> Tensor:
    """The values as float32 in rows of `bucket`, the last one padded with zeros."""
    x = x.detach().to(torch.float32).reshape(-1)
    return F.pad(x, (0, -x.numel() % bucket)).view(-1, bucket)


def row_sums(x: Tensor) -> Tensor:
    """The sum of each row: value i is added to lane i % 32, and then the upper half of the lanes to the lower one.

    >>> row_sums(torch.arange(64.0).view(1, 64))
    tensor([2016.])
    """
    lanes = torch.zeros(len(x), LANES, dtype=x.dtype, device=x.device)
    for values in x.split(LANES, dim=1):
        lanes += values
    return halved(lanes)


def halved(lanes: Tensor) -> Tensor:
    """The sum of each row: the upper half is added to the lower one until one value is left."""
    if lanes.device.type == "cpu" and lanes.numel() <= FEW and lanes.dtype in (torch.float32, torch.float64):
        few = lanes.detach().numpy()  # For so few values numpy is several times as fast, and rounds in the same way.
        with np.errstate(all="ignore"):
            while (half := few.shape[1] // 2) > 0:
                few = few[:, :half] + few[:, half:]
        return torch.from_numpy(few[:, 0])
    while (half := lanes.shape[1] // 2) > 0:
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def check_bucket(owner: object, bucket: int) -> None:
    """Raise ValueError for a bucket size that is not a positive multiple of 32."""
    if not isinstance(bucket, int) or bucket < LANES or bucket % LANES:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{owner}: the bucket size is a multiple of {LANES}, at least {LANES}")


def total(x: Tensor) -> Tensor:
    """The sum of a vector: of rows of 512, then of rows of their sums, until one is left."""
    while x.numel() > 1:
        x = row_sums(bucketed(x, 512))
    return x.sum()


def root(x: Tensor) -> Tensor:
    """The square root, rounded to the nearest float32; on some processors torch's own is off by a bit."""
    return x.to(torch.float64).sqrt().to(torch.float32)


def reals(numel: int, bucket: int, device: torch.device) -> Tensor:
    """How many values each bucket has: all but the last are full."""
    counts = torch.full((-(-numel // bucket),), bucket, device=device)
    if numel % bucket:
        counts[-1] = numel % bucket
    return counts


def packed(codes: Tensor, bits: int, numel: int) -> Tensor:
    """The first `numel` codes as bytes, the first code in the lowest bits.

    `codes` are integers below 2**bits, enough to fill whole bytes.

    >>> packed(torch.tensor([1, 2, 3, 0, 2, 0, 0, 0]), 2, 5)
    tensor([57,  2], dtype=torch.uint8)
    """
    if bits == 16:
        return codes.to(torch.uint16).view(-1)[:numel].view(torch.uint8)
    together = 8 // bits
    weights = torch.tensor([1 << bits * i for i in range(together)], dtype=torch.uint8, device=codes.device)
    return (codes.view(-1, together).to(torch.uint8) * weights).sum(1, dtype=torch.uint8)[: -(-numel // together)]


def unpacked(data: Tensor, bits: int, numel: int) -> Tensor:
    """The int32 codes that `packed` was given."""
    if bits == 16:
        return aligned(data).view(torch.uint16).to(torch.int32)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)
    return ((data[:, None] >> shifts) & (1 << bits) - 1).view(-1)[:numel].to(torch.int32)


def scales_in(data: Tensor, count: int) -> Tensor:
    """The float32 scales at the start of a message."""
    return aligned(data[: 4 * count]).view(torch.float32)


def check_scales(owner: object, data: Tensor, count: int) -> None:
    """Raise ValueError for a message with a scale that is not finite: it would corrupt a bucket of every receiver.

    Not on a GPU, where reading the scales means to wait for them.
    """
    if data.device.type == "cpu":
        scales = scales_in(data, count).numpy()  # For so few values numpy is much faster than torch.
        if not (finite := np.isfinite(scales)).all():
            at = int(finite.argmin())
            raise ValueError(f"{owner} was given bytes to decode whose scale {at} is {scales[at]:g}: scales are finite")


def check_indexable(owner: object, numel: int) -> None:
    """Raise ValueError for a vector too long for indices of 31 bits."""
    if numel > MOST_INDEXED:
        raise ValueError(
            f"{owner} was given {numel} values: its indices end at 2**31 - 1, so encode parts of the vector"
        )


def check_out(codec: Codec, numel: int, nbytes: int, out: Tensor | None) -> None:
    """Raise ValueError for an output buffer of the wrong size."""
    if out is not None and out.shape != (nbytes,):
        raise ValueError(
            f"{codec} encodes {numel} values in {nbytes} bytes, but was given a buffer of shape {tuple(out.shape)}"
        )


def buffer_for(codec: Codec, x: Tensor, out: Tensor | None) -> Tensor:
    """The buffer to encode `x` into: `out` if it is aligned, otherwise a new one."""
    nbytes = codec.nbytes(x.numel())
    assert nbytes is not None
    check_out(codec, x.numel(), nbytes, out)
    return out if out is not None and is_aligned(out) else torch.empty(nbytes, dtype=torch.uint8, device=x.device)


def put(data: Tensor, out: Tensor | None) -> Tensor:
    """`data`, copied into `out` if that is given and another tensor."""
    return data if out is None or out.data_ptr() == data.data_ptr() else out.copy_(data)
