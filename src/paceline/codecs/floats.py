"""Plain floating-point formats: fp32 as the identity, fp16 and bfloat16 as cheap compression, fp8 with scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from paceline.codecs.codec import Codec, Unencodable
from paceline.codecs.layout import aligned, bucketed, check_bucket, check_scales, copied, scales_in


@dataclass(frozen=True)
class Fp32(Codec):
    """The values in float32, 4 bytes each: lossless for float32."""

    wire: ClassVar[torch.dtype | None] = torch.float32

    def nbytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, x: Tensor, rng: torch.Generator | None = None) -> Tensor:
        values = copied(x, torch.float32)
        # A NaN would stay in the residual for ever.  A finite sum proves that there is none; but a sum can overflow.
        if not values.sum().isfinite() and not values.isfinite().all():
            self.refuse(x.reshape(-1), "they are beyond float32")
        return values.view(torch.uint8)

    def decode(self, data: Tensor, numel: int) -> Tensor:
        self.check(data, numel)
        return aligned(data).view(torch.float32)


class Cast(Codec):
    """Values rounded to a 16-bit dtype."""

    feedback: ClassVar[bool] = False
    reduction: ClassVar[str] = "sum"
    dtype: ClassVar[torch.dtype]

    def nbytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, x: Tensor, rng: torch.Generator | None = None) -> Tensor:
        short = copied(x, self.dtype)
        # A finite sum proves that all values are finite; but a sum can overflow, and then each value is checked.
        if not short.sum(dtype=torch.float32).isfinite() and not short.isfinite().all():
            self.refuse(x.reshape(-1))
        return short.view(torch.uint8)

    def decode(self, data: Tensor, numel: int) -> Tensor:
        self.check(data, numel)
        return aligned(data).view(self.dtype).to(torch.float32)

    def refuse(self, x: Tensor, why: str = "") -> None:
        at = int(x.to(self.dtype).isfinite().logical_not().nonzero()[0])
        raise Unencodable(
            f"{self} cannot encode {x[at].item():g} at index {at}: {type(self).__name__.lower()} ends at "
            f"{torch.finfo(self.dtype).max:g}",
            None if x[at].isfinite() else at,
        )


@dataclass(frozen=True)
class Fp16(Cast):
    """Half precision, 2 bytes each; raises Unencodable for values beyond 65504."""

    dtype: ClassVar[torch.dtype] = torch.float16
    wire: ClassVar[torch.dtype | None] = torch.float16


@dataclass(frozen=True)
class BFloat16(Cast):
    """The upper half of fp32, 2 bytes each: fp32's range, and 8 significant bits."""

    dtype: ClassVar[torch.dtype] = torch.bfloat16
    wire: ClassVar[torch.dtype | None] = torch.bfloat16


FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Fp8(Codec):
    """One byte per value, with 3 (e4m3) or 2 (e5m2) mantissa bits, and one fp32 scale per bucket: a quarter of fp32.

    The scale maps the largest value of a bucket to the largest value of the format.
    """

    format: Literal["e4m3", "e5m2"] = "e4m3"
    bucket: int = 512

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"{self}: the format is 'e4m3' or 'e5m2'")
        check_bucket(self, self.bucket)

    @property
    def unit(self) -> int:
        return self.bucket

    @property
    def top(self) -> float:
        """The largest value of the format."""
        return torch.finfo(FORMATS[self.format]).max

    def buckets(self, numel: int) -> int:
        return -(-numel // self.bucket)

    def nbytes(self, numel: int) -> int:
        return 4 * self.buckets(numel) + numel

    def encode(self, x: Tensor, rng: torch.Generator | None = None) -> Tensor:
        rows = bucketed(x, self.bucket)
        largest = rows.abs().amax(1)
        tops = torch.full_like(largest, self.top)
        scales, factors = largest / tops, tops / largest
        if not (scales * self.top).isfinite().all():  # The decoded largest value must be finite too.
            self.refuse(x.reshape(-1), "the largest is beyond float32")
        # If the largest value is 0, or too small to divide by, the bucket is sent as zeros.
        scales, factors = (torch.where(factors.isfinite(), v, 0.0) for v in (scales, factors))
        codes = (rows * factors[:, None]).clamp(-self.top, self.top).to(FORMATS[self.format]).view(torch.uint8).view(-1)
        return torch.cat([scales.view(torch.uint8), codes[: x.numel()]])

    def decode(self, data: Tensor, numel: int) -> Tensor:
        self.check(data, numel)
        count = self.buckets(numel)
        scales = scales_in(data, count).repeat_interleave(self.bucket)[:numel]
        return data[4 * count :].view(FORMATS[self.format]).to(torch.float32) * scales

    def check(self, data: Tensor, numel: int) -> None:
        super().check(data, numel)
        check_scales(self, data, self.buckets(numel))
