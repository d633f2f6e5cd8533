"""Codec: a wire format for vectors, and error feedback around it.

A codec is frozen and stateless: it turns a vector into the very bytes that travel and back.  What it loses is none of its
business: `ErrorFeedback` remembers what was not sent and adds it the next time, whatever the codec.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Unencodable(ValueError):
    """A value that a codec has no code for: NaN, infinity, or beyond its range."""


class Codec(ABC):
    """A frozen dataclass of settings with three functions; see `codecs/one_bit.py` for a whole one."""

    @abstractmethod
    def nbytes(self, numel: int) -> int | None:
        """The exact size of `numel` encoded values; None if it depends on the values."""

    @abstractmethod
    def encode(self, x: Tensor, rng: torch.Generator | None = None) -> Tensor:
        """A 1-D uint8 tensor: the bytes that travel."""

    @abstractmethod
    def decode(self, data: Tensor, numel: int) -> Tensor:
        """The float32 values that the receiver reads out of `data`."""

    def check(self, data: Tensor, numel: int) -> None:
        """Refuse bytes of the wrong length before anything is read out of them."""
        expected = self.nbytes(numel)
        if data.dtype != torch.uint8 or data.dim() != 1:
            raise ValueError(f"{self} decodes 1-D uint8 data, not {data.dtype} of shape {tuple(data.shape)}")
        if expected is not None and data.numel() != expected:
            raise ValueError(f"{self} encodes {numel} values in {expected} bytes, but was given {data.numel()} bytes to decode")


class ErrorFeedback:
    """A codec as one sender uses it: what could not be said is remembered and said later.

    `residual` belongs to what this rank sends of its own, `owner_residual` to the sums it sends on behalf of all (the second
    level of `mean_by_stripes`).  Slicing gives the same memory for a part of the vector.

    >>> from paceline.codecs import OneBit
    >>> link = ErrorFeedback(OneBit(), torch.zeros(4), torch.zeros(4))
    >>> x = torch.tensor([3.0, 1.0, -2.0, -2.0])
    >>> said = link.codec.decode(link.encode(x), 4)
    >>> said, link.residual
    (tensor([ 2.,  2., -2., -2.]), tensor([ 1., -1.,  0.,  0.]))
    """

    def __init__(self, codec: Codec, residual: Tensor, owner_residual: Tensor, rng: torch.Generator | None = None) -> None:
        self.codec = codec
        self.residual = residual
        self.owner_residual = owner_residual
        self.rng = rng

    def __getitem__(self, where: slice) -> ErrorFeedback:
        return ErrorFeedback(self.codec, self.residual[where], self.owner_residual[where], self.rng)

    def owned(self, where: slice) -> ErrorFeedback:
        """The second level: how this rank sends the sum over all of the stripe that it owns."""
        return ErrorFeedback(self.codec, self.owner_residual[where], self.owner_residual[where], self.rng)

    def encode(self, x: Tensor) -> Tensor:
        """The bytes to send for `x`; the residual now holds what they leave out."""
        # The residual is added before encoding, not after: a value that was rounded up last time must be able to flip.
        wanted = x + self.residual
        data = self.codec.encode(wanted, self.rng)
        torch.sub(wanted, self.codec.decode(data, x.numel()), out=self.residual)
        return data

    def silence(self, numel: int) -> Tensor:
        """A message that says nothing, for a sender whose values do not count; nothing that it remembers is lost by it."""
        return self.codec.encode(torch.zeros(numel, device=self.residual.device), self.rng)

    def take_back(self, x: Tensor, data: Tensor) -> None:
        """What `encode` said for `x` was not heard: remember again what was remembered before."""
        self.residual.add_(self.codec.decode(data, x.numel())).sub_(x)
