"""Unbiased random quantisers: QSGD (Alistarh et al., NIPS 2017) and TernGrad (Wen et al., NIPS 2017).

A value lies between two levels, which are fractions of its bucket's norm.  It is rounded to one of them at random, so
that its expectation is exact.  The error is noise and not bias, so a sender needs no residual; error feedback is
possible too.

Both papers round each worker's gradient once.  That is the reduction "gather": a worker receives N - 1 messages.
"stripes" rounds the mean again, which adds at least as much variance as the first rounding has, but a worker receives
only 2 (N - 1) / N messages.  "auto" is "gather" between two workers and "stripes" among more: from 4 workers on, twice
the bits by "stripes" are no more bytes than "gather", and have a hundredth of its error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from paceline.codecs import kernels
from paceline.codecs.codec import Codec
from paceline.codecs.layout import (
    bucketed,
    check_bucket,
    check_scales,
    packed,
    root,
    row_sums,
    scales_in,
    total,
    unpacked,
)
from paceline.codecs.noise import uniform


def rounded(rows: Tensor, norms: Tensor, levels: int, seed: int) -> Tensor:
    """The signed levels of each row: `levels` means its norm.  If the norm is too small to divide by, all are 0."""
    per_level = torch.full_like(norms, levels) / norms
    per_level = torch.where(per_level.isfinite(), per_level, 0.0)
    exact = rows.abs() * per_level[:, None]
    below = exact.floor()
    up = uniform(seed, rows.numel(), rows.device).view(rows.shape) < exact - below
    return ((below + up).clamp(max=levels) * rows.sign()).to(torch.int32)


def sent(norms: Tensor, levels: int) -> Tensor:
    """The norms on the wire: 0 where `rounded` gives only zeros."""
    return torch.where((torch.full_like(norms, levels) / norms).isfinite(), norms, 0.0)


def read(norms: Tensor, signed: Tensor, levels: int) -> Tensor:
    """The values of signed levels, each with its bucket's norm."""
    return signed.clamp(max=levels).to(torch.float32) * (norms / torch.full_like(norms, levels))


Reduction = Literal["auto", "stripes", "gather"]


def check_reduction(codec: QSGD | TernGrad) -> None:
    """Raise ValueError unless the reduction is one that decodes messages."""
    if codec.reduction not in ("auto", "stripes", "gather"):
        raise ValueError(f"{codec}: the reduction is 'auto', 'stripes' or 'gather'")


@dataclass(frozen=True)
class QSGD(Codec):
    """Unbiased random rounding to `levels` parts of each bucket's norm: at 127 one byte per value, 1/4 of fp32."""

    feedback: ClassVar[bool] = False
    is_random: ClassVar[bool] = True

    levels: int = 127
    bucket: int = 512
    norm: Literal["l2", "max"] = "l2"
    reduction: Reduction = "auto"  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        check_reduction(self)
        if not 1 <= self.levels <= 32767:
            raise ValueError(f"{self}: levels is from 1 to 32767, so that signed levels fit into 16 bits")
        if self.norm not in ("l2", "max"):
            raise ValueError(f"{self}: the norm is 'l2' or 'max'")
        check_bucket(self, self.bucket)

    @property
    def unit(self) -> int:
        return self.bucket

    @property
    def bits(self) -> int:
        """The bits per value: the smallest of 2, 4, 8 and 16 that can hold all signed levels."""
        return next(bits for bits in (2, 4, 8, 16) if 2 * self.levels + 1 <= 2**bits)

    def buckets(self, numel: int) -> int:
        return -(-numel // self.bucket)

    def nbytes(self, numel: int) -> int:
        return 4 * self.buckets(numel) + -(-numel * self.bits // 8)

    def quantised(self, x: Tensor, rng: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """The norms of all buckets, and the signed levels of all values, the last bucket padded with zeros."""
        rows = bucketed(x, self.bucket)
        norms = root(row_sums(rows * rows)) if self.norm == "l2" else rows.abs().amax(1)
        # The decoded norm must be finite too.
        if not (norms / torch.full_like(norms, self.levels) * self.levels).isfinite().all():
            self.refuse(x.reshape(-1))
        return sent(norms, self.levels), rounded(rows, norms, self.levels, kernels.draw(rng)).view(-1)

    def encode(self, x: Tensor, rng: torch.Generator | None = None) -> Tensor:
        norms, signed = self.quantised(x, rng)
        return torch.cat([norms.view(torch.uint8), packed(signed + self.levels, self.bits, x.numel())])

    def decode(self, data: Tensor, numel: int) -> Tensor:
        self.check(data, numel)
        count = self.buckets(numel)
        signed = unpacked(data[4 * count :], self.bits, numel) - self.levels
        return read(scales_in(data, count).repeat_interleave(self.bucket)[:numel], signed, self.levels)

    def check(self, data: Tensor, numel: int) -> None:
        super().check(data, numel)
        check_scales(self, data, self.buckets(numel))

    def refuse(self, x: Tensor, why: str = "") -> None:
        super().refuse(x, "a bucket's norm is beyond float32")


@dataclass(frozen=True)
class TernGrad(Codec):
    """Random rounding to -s, 0 or s, one s for the whole vector: 2 bits per value, 16 times smaller than fp32.

    s is at most `clip` times the standard deviation: larger values are decoded as s, which is too small, and the
    others with less noise.  The deviation is about 0, not about the mean, or else a vector of one value would always
    be clipped to 0.  With `clip=None`, s is the largest magnitude, and all values are unbiased.
    """

    feedback: ClassVar[bool] = False
    is_random: ClassVar[bool] = True

    clip: float | None = 2.5
    reduction: Reduction = "auto"  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        check_reduction(self)
        if self.clip is not None and not 0 < torch.tensor(self.clip, dtype=torch.float32).item() < math.inf:
            raise ValueError(
                f"{self}: clip is a positive number of standard deviations within float32's range, or None"
            )

    def nbytes(self, numel: int) -> int:
        return 4 + -(-numel // 4) if numel else 0

    def scale(self, largest: Tensor, squares: Tensor, numel: int) -> Tensor:
        """s, from the maxima of |x| and the sums of squares of rows of 512."""
        most = largest.amax()
        return (
            most
            if self.clip is None
            else torch.minimum(most, root(total(squares) / torch.full_like(most, numel)) * self.clip)
        )

    def encode(self, x: Tensor, rng: torch.Generator | None = None) -> Tensor:
        seed = kernels.draw(rng)
        if not x.numel():
            return torch.empty(0, dtype=torch.uint8, device=x.device)
        rows = bucketed(x, 512)
        scale = self.scale(rows.abs().amax(1), row_sums(rows * rows), x.numel()).view(1)
        if not scale.isfinite().all():
            self.refuse(x.reshape(-1))
        signed = rounded(rows, scale, 1, seed)
        return torch.cat([sent(scale, 1).view(torch.uint8), packed(signed + 1, 2, x.numel())])

    def decode(self, data: Tensor, numel: int) -> Tensor:
        self.check(data, numel)
        if not numel:
            return torch.empty(0, device=data.device)
        return read(scales_in(data, 1), unpacked(data[4:], 2, numel) - 1, 1)

    def check(self, data: Tensor, numel: int) -> None:
        super().check(data, numel)
        check_scales(self, data, min(numel, 1))

    def refuse(self, x: Tensor, why: str = "") -> None:
        super().refuse(x, "the largest is beyond float32")
