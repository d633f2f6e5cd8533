"""CNTK's linear quantiser to 2, 4, 8 or 16 bits.

With sigma the standard deviation of a bucket about 0, the range from -4 sigma to 4 sigma is divided into an odd
number of equal slots, one of them centred on 0.  A value is decoded as the middle of its slot.  Values beyond are
clipped; error feedback sends the rest later.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.codecs.codec import Codec
from paceline.codecs.layout import (
    bucketed,
    check_bucket,
    check_scales,
    packed,
    reals,
    root,
    row_sums,
    scales_in,
    unpacked,
)


@dataclass(frozen=True)
class NBit(Codec):
    """2, 4, 8 or 16 bits per value and one fp32 scale per bucket: at 4 bits 7.9 times smaller than fp32."""

    bits: int = 4
    bucket: int = 512

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8, 16):
            raise ValueError(f"{self}: bits is 2, 4, 8 or 16; for 1 bit use OneBit")
        check_bucket(self, self.bucket)

    @property
    def unit(self) -> int:
        return self.bucket

    @property
    def centre(self) -> int:
        """The code of 0: there are as many slots below as above, and one more code for values of at least 4 sigma."""
        return 2 ** (self.bits - 1) - 1

    def buckets(self, numel: int) -> int:
        return -(-numel // self.bucket)

    def nbytes(self, numel: int) -> int:
        return 4 * self.buckets(numel) + -(-numel * self.bits // 8)

    def encode(self, x: Tensor, rng: torch.Generator | None = None) -> Tensor:
        rows = bucketed(x, self.bucket)
        sigma = root(row_sums(rows * rows) / reals(x.numel(), self.bucket, x.device))
        if not sigma.isfinite().all():
            self.refuse(x.reshape(-1))
        slot = sigma * (8 / (2 * self.centre + 1))
        per_slot = torch.where(slot > 0, slot, torch.inf).reciprocal()
        slots = (rows * per_slot[:, None] + 0.5).floor().clamp(-self.centre, self.centre + 1)
        codes = packed(slots.to(torch.int32) + self.centre, self.bits, x.numel())
        return torch.cat([slot.view(torch.uint8), codes])

    def decode(self, data: Tensor, numel: int) -> Tensor:
        self.check(data, numel)
        count = self.buckets(numel)
        slot = scales_in(data, count).repeat_interleave(self.bucket)[:numel]
        slots = unpacked(data[4 * count :], self.bits, numel) - self.centre
        return slots.to(torch.float32).clamp(max=self.centre + 0.5) * slot

    def check(self, data: Tensor, numel: int) -> None:
        super().check(data, numel)
        check_scales(self, data, self.buckets(numel))

    def refuse(self, x: Tensor, why: str = "") -> None:
        super().refuse(x, "the sum of a bucket's squares is beyond float32")
