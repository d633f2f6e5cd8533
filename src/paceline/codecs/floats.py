"""Plain floating-point formats: fp32 as the identity, fp16 as the cheapest compression."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.codecs.codec import Codec, Unencodable


@dataclass(frozen=True)
class Fp32(Codec):
    """The values as they are, 4 bytes each: the codec that loses nothing."""

    def nbytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, x: Tensor, rng: torch.Generator | None = None) -> Tensor:
        return copied(x, torch.float32).view(torch.uint8)

    def decode(self, data: Tensor, numel: int) -> Tensor:
        self.check(data, numel)
        return aligned(data).view(torch.float32)


@dataclass(frozen=True)
class Fp16(Codec):
    """Half precision, 2 bytes each; values beyond 65504 are refused, not sent as infinity."""

    def nbytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, x: Tensor, rng: torch.Generator | None = None) -> Tensor:
        half = copied(x, torch.float16)
        # One pass tells almost always; only a hit is looked at closely, because a large sum may overflow by itself.
        if not half.sum(dtype=torch.float32).isfinite() and not (finite := half.isfinite()).all():
            at = int(finite.logical_not().nonzero()[0])
            raise Unencodable(f"{self} cannot encode {x.reshape(-1)[at].item():g} at index {at}: fp16 ends at 65504")
        return half.view(torch.uint8)

    def decode(self, data: Tensor, numel: int) -> Tensor:
        self.check(data, numel)
        return aligned(data).view(torch.float16).to(torch.float32)


def copied(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The values in memory of their own, one after the other."""
    return torch.empty(x.numel(), dtype=dtype, device=x.device).copy_(x.detach().reshape(-1))


def aligned(data: Tensor) -> Tensor:
    """`data` at an address where wider types may be read; a copy only where it lies askew inside a longer message."""
    is_straight = data.data_ptr() % 8 == 0 and data.storage_offset() % 8 == 0 and data.is_contiguous()
    return data if is_straight else data.clone()
