"""Top-k sparsification: only the values of largest magnitude are sent, each with its index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.codecs.codec import Codec
from paceline.codecs.layout import aligned, check_indexable


@dataclass(frozen=True)
class TopK(Codec):
    """The largest values and their indices, 8 bytes each: at 1 % of the values 50 times smaller than fp32."""

    ratio: float = 0.01

    is_coarse: ClassVar[bool] = True
    reduction: ClassVar[str] = "gather"

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"{self}: ratio, of values that are sent, is above 0 and at most 1")

    def kept(self, numel: int) -> int:
        """How many of `numel` values are sent."""
        return min(numel, max(1, int(self.ratio * numel)))

    def nbytes(self, numel: int) -> int | None:
        return 8 * self.kept(numel)

    def encode(self, x: Tensor, rng: torch.Generator | None = None) -> Tensor:
        check_indexable(self, x.numel())
        u = x.detach().to(torch.float32).reshape(-1).contiguous()
        if not (k := self.kept(u.numel())):
            return torch.empty(0, dtype=torch.uint8, device=u.device)
        # The bits of magnitudes, as integers, have the order of the magnitudes; infinity and NaN are the largest.
        magnitudes = u.view(torch.int32) & 0x7FFFFFFF
        least = magnitudes.topk(k, sorted=True).values[-1]
        above = (magnitudes > least).nonzero()[:, 0]
        equal = (magnitudes == least).nonzero()[:, 0]
        indices = torch.cat([above, equal[: k - above.numel()]]).sort().values
        values = u[indices]
        if not values.isfinite().all():
            self.refuse(u, "they are among the largest")
        return torch.cat([indices.to(torch.int32).view(torch.uint8), values.view(torch.uint8)])

    def decode(self, data: Tensor, numel: int) -> Tensor:
        self.check(data, numel)
        data = aligned(data)
        k = data.numel() // 8
        indices = data[: 4 * k].view(torch.int32).to(torch.int64)
        kept = data[4 * k :].view(torch.float32)
        if k and (int(indices[0]) < 0 or int(indices[-1]) >= numel or (indices.diff() <= 0).any()):
            self.malformed(data, numel, "its indices do not ascend within the vector")
        if not kept.isfinite().all():
            self.malformed(data, numel, "some of its values are not finite")
        values = torch.zeros(numel, dtype=torch.float32, device=data.device)
        values[indices] = kept
        return values
