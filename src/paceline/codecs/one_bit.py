"""1-bit SGD's quantiser (Seide et al., Interspeech 2014), in CNTK's zero-threshold form.

Only the sign of each value is sent.  The receiver reads a bucket's negative values as their mean, and the others as
theirs.  Use it with ErrorFeedback: alone it loses accuracy.  For a bucket of values in {-x, +x} it is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.codecs.codec import Codec
from paceline.codecs.layout import aligned, bucketed, check_bucket, check_scales, reals, row_sums


@dataclass(frozen=True)
class OneBit(Codec):
    """One bit per value and two fp32 means per bucket: 72 bytes for 512 values, 28 times smaller than fp32."""

    bucket: int = 512

    def __post_init__(self) -> None:
        check_bucket(self, self.bucket)

    @property
    def unit(self) -> int:
        return self.bucket

    def buckets(self, numel: int) -> int:
        return -(-numel // self.bucket)

    def nbytes(self, numel: int) -> int:
        return 8 * self.buckets(numel) + -(-numel // 8)

    def encode(self, x: Tensor, rng: torch.Generator | None = None) -> Tensor:
        rows = bucketed(x, self.bucket)
        positive = rows >= 0
        zero = rows.new_zeros(())
        above, below = row_sums(torch.where(positive, rows, zero)), row_sums(torch.where(positive, zero, rows))
        if not (above.isfinite().all() and below.isfinite().all()):
            self.refuse(x.reshape(-1), "their sum is beyond float32")
        real = reals(x.numel(), self.bucket, x.device)
        # Padding is zero, so it is non-negative, but must not be counted.
        positives = positive.sum(1) - (self.bucket - real)
        means = torch.stack([below / (real - positives).clamp(min=1), above / positives.clamp(min=1)], dim=1)
        weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=x.device)
        bits = (positive.view(-1, 8).to(torch.uint8) * weights).sum(1, dtype=torch.uint8)[: -(-x.numel() // 8)]
        return torch.cat([means.view(-1).view(torch.uint8), bits])

    def decode(self, data: Tensor, numel: int) -> Tensor:
        self.check(data, numel)
        data = aligned(data)
        means = data[: 8 * self.buckets(numel)].view(torch.float32).view(-1, 2)
        shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
        positive = ((data[8 * self.buckets(numel) :, None] >> shifts) & 1).view(-1)[:numel].bool()
        low, high = means.repeat_interleave(self.bucket, dim=0)[:numel].unbind(1)
        return torch.where(positive, high, low)

    def check(self, data: Tensor, numel: int) -> None:
        super().check(data, numel)
        check_scales(self, data, 2 * self.buckets(numel))
