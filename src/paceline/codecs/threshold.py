"""Threshold compression (Strom, Interspeech 2015), and a threshold that adapts to a target density (DL4J).

Only values that reach the threshold tau are sent, as an index and a sign: each is decoded as +tau or -tau, once per
message.  The rest stays in the sender's residual, so use it with ErrorFeedback.  tau has the units of the encoded
vector: of gradients where gradients are exchanged, of updates where updates are.  If tau is smaller than what a value
gains at every step, the residual grows without bound: `overload` measures that, and senders warn.

A message is a header of 16 bytes and the smallest of three bodies: words of 32 bits (an index and a sign), two
bitmaps (which values, and which of them are negative), or the gaps between indices in a Golomb-Rice code.

    bytes 0-3   how many values are sent        bytes 8-11    tau, fp32
    byte 4      the body's format               bytes 12-15   the largest magnitude sent in units of tau, fp32
    byte 5      the Rice code's parameter
    bytes 6-7   the vector's length modulo 2**16
"""

from __future__ import annotations

import dataclasses
import math
import struct
import warnings
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.codecs.codec import Codec
from paceline.codecs.layout import aligned, check_indexable, packed, unpacked

HEADER = 16
# Formats of the body.
WORDS = 0
BITMAP = 1
RICE = 2
SMALLEST_TAU = 2.0**-100  # An adaptive tau does not fall below this, as it would with a vector of zeros.


class Overloaded(RuntimeWarning):
    """A residual grows faster than messages of +tau and -tau can send it."""


class Header(NamedTuple):
    """The first 16 bytes of a message."""

    sent: int
    format: int
    rice: int
    numel: int
    tau: float
    peak: float

    @staticmethod
    def made(count: int, form: int, k: int, numel: int, tau: float, largest: float) -> Header:
        """The header of a message with values up to `largest`."""
        return Header(count, form, k if form == RICE else 0, numel, tau, min(largest / tau, 2.0**126))

    def packed(self) -> bytes:
        return struct.pack("<IBBHff", self.sent, self.format, self.rice, self.numel % 2**16, self.tau, self.peak)

    @staticmethod
    def of(data: Tensor) -> Header:
        return Header(*struct.unpack("<IBBHff", bytes(data[:HEADER].tolist())))


def bitmap_nbytes(numel: int) -> int:
    return 2 * -(-numel // 8)


def rice_parameter(numel: int, count: int) -> int:
    """How many low bits of a gap are sent uncoded: the optimum for geometrically distributed gaps of this mean.

    >>> [rice_parameter(1_000_000, count) for count in (1, 100, 5_000, 250_000, 500_000)]
    [19, 13, 7, 1, 0]
    """
    return max(0, (77 * (2 * (numel - count) + count) // (160 * count)).bit_length() - 1) if count else 0


def rice_nbytes(count: int, k: int, quotients: int) -> int:
    """The size of a Rice code: a sign and k low bits of each gap, then all quotients in unary."""
    return -(-count * (k + 1) // 8) + -(-(quotients + count) // 8)


def chosen(numel: int, count: int, rice: int | None) -> int:
    """The smallest format for `count` of `numel` values; a Rice code takes `rice` bytes, None: it is not allowed."""
    if rice is not None and rice < min(4 * count, bitmap_nbytes(numel)):
        return RICE
    return WORDS if 4 * count < bitmap_nbytes(numel) else BITMAP


def bits_packed(bits: Tensor) -> Tensor:
    """Bits as bytes, the first bit lowest, the last byte padded with zeros."""
    return packed(F.pad(bits, (0, -bits.numel() % 8)), 1, bits.numel())


def bits_of(data: Tensor) -> Tensor:
    """Bytes as bits, 0 or 1."""
    return unpacked(data, 1, 8 * data.numel())


def words_encode(indices: Tensor, negative: Tensor) -> Tensor:
    """Indices and signs as words of 32 bits, the sign in the lowest bit."""
    return (indices << 1 | negative).to(torch.uint32).view(torch.uint8)


def words_decode(body: Tensor) -> tuple[Tensor, Tensor]:
    words = body.view(torch.uint32).to(torch.int64)
    return words >> 1, words & 1


def gaps(indices: Tensor) -> Tensor:
    """How many values are not sent before each index."""
    return indices - torch.cat([indices.new_full((1,), -1), indices[:-1]]) - 1 if indices.numel() else indices


def rice_encode(indices: Tensor, negative: Tensor, k: int) -> Tensor:
    """Ascending indices, each with a sign, as a Golomb-Rice code of their gaps."""
    left_out = gaps(indices)
    fields = (left_out & (2**k - 1)) << 1 | negative
    shifts = torch.arange(k + 1, device=indices.device)
    ends = ((left_out >> k) + 1).cumsum(0)
    unary = torch.zeros(int(ends[-1]), dtype=torch.uint8, device=indices.device)
    unary[ends - 1] = 1
    return torch.cat([bits_packed((fields[:, None] >> shifts & 1).view(-1)), bits_packed(unary)])


def rice_decode(body: Tensor, count: int, k: int) -> tuple[Tensor, Tensor] | str:
    """The indices and signs that `rice_encode` was given; an error text if the body is malformed."""
    split = -(-count * (k + 1) // 8)
    if body.numel() < split:
        return f"its {count} values take at least {split} bytes"
    low, unary = bits_of(body[:split]), bits_of(body[split:])
    ends = unary.nonzero()[:, 0]
    if ends.numel() != count or low[count * (k + 1) :].any() or -(-(int(ends[-1]) + 1) // 8) != body.numel() - split:
        return f"it is not a Rice code of {count} values"
    shifts = torch.arange(k + 1, device=body.device)
    fields = (low[: count * (k + 1)].view(count, k + 1).to(torch.int64) << shifts).sum(1)
    # The quotients add up to at most 8 per byte of unary code, so no sum of gaps overflows 64 bits.
    return ((gaps(ends) << k | fields >> 1) + 1).cumsum(0) - 1, fields & 1


@dataclass(frozen=True)
class Threshold(Codec):
    """Sends only values that reach tau, as +tau or -tau, in 4 bytes each; with entropy=True in about 10 bits."""

    tau: float
    entropy: bool = False  # Whether the gaps between indices may be sent as a Golomb-Rice code.
    limit: float = 10.0  # A sender warns above this overload.

    is_coarse: ClassVar[bool] = True
    reduction: ClassVar[str] = "gather"

    def __post_init__(self) -> None:
        if not 0 < self.tau32 < math.inf:
            raise ValueError(f"{self}: tau is a positive number within float32's range")
        if not self.limit > 0:
            raise ValueError(f"{self}: limit, of max|residual|/tau, is a positive number")

    @property
    def tau32(self) -> float:
        """tau on the wire."""
        return torch.tensor(self.tau, dtype=torch.float32).item()

    def nbytes(self, numel: int) -> None:
        return None

    def most_nbytes(self, numel: int) -> int:
        return HEADER + bitmap_nbytes(numel)

    def encode(self, x: Tensor, rng: torch.Generator | None = None) -> Tensor:
        check_indexable(self, x.numel())
        u = x.detach().to(torch.float32).reshape(-1)
        # Not `>= tau`: NaN must be among the hits, to be found.
        hits = (u.abs() < self.tau32).logical_not().nonzero()[:, 0]
        values = u[hits]
        if not values.isfinite().all():
            self.refuse(u, "among the magnitudes beyond tau")
        negative = (values < 0).to(torch.int64)
        count = hits.numel()
        k = rice_parameter(x.numel(), count)
        rice = rice_nbytes(count, k, int((gaps(hits) >> k).sum())) if self.entropy and count else None
        form = chosen(x.numel(), count, rice)
        if form == WORDS:
            body = words_encode(hits, negative)
        elif form == RICE:
            body = rice_encode(hits, negative, k)
        else:
            planes = torch.zeros(2, x.numel(), dtype=torch.uint8, device=x.device)
            planes[0, hits] = 1
            planes[1, hits] = negative.to(torch.uint8)
            body = torch.cat([bits_packed(planes[0]), bits_packed(planes[1])])
        header = Header.made(count, form, k, x.numel(), self.tau32, values.abs().max().item() if count else 0.0)
        return torch.cat([torch.tensor(list(header.packed()), dtype=torch.uint8, device=x.device), body])

    def decode(self, data: Tensor, numel: int) -> Tensor:
        header = self.read(data, numel)
        body = aligned(data[HEADER:])
        count = header.sent
        if header.format == WORDS:
            indices, negative = words_decode(body)
        elif header.format == BITMAP:
            hit, minus = bits_of(body).view(2, -1)
            if int(hit.sum()) != count or hit[numel:].any() or (minus > hit).any():
                self.malformed(data, numel, f"its bitmaps do not hold {count} values and their signs")
            indices = hit.nonzero()[:, 0]
            negative = minus[indices]
        else:
            read = rice_decode(body, count, header.rice)
            if isinstance(read, str):
                self.malformed(data, numel, read)
            indices, negative = read
        if count and (int(indices[-1]) >= numel or int(indices[0]) < 0 or (indices.diff() <= 0).any()):
            self.malformed(data, numel, "its indices do not ascend within the vector")
        values = torch.zeros(numel, dtype=torch.float32, device=data.device)
        tau = values.new_tensor(header.tau)
        values[indices] = torch.where(negative > 0, -tau, tau)
        return values

    def read(self, data: Tensor, numel: int) -> Header:
        """The header, checked against the size of the message."""
        self.check(data, numel)
        if data.numel() < HEADER:
            self.malformed(data, numel, f"the header has {HEADER} bytes")
        header = Header.of(data)
        if header.numel != numel % 2**16:
            self.malformed(data, numel, f"it has {header.numel} values, modulo 2**16")
        if not 0 < header.tau < math.inf:
            self.malformed(data, numel, f"its tau is {header.tau:g}")
        sizes = {WORDS: 4 * header.sent, BITMAP: bitmap_nbytes(numel)}
        is_right = data.numel() - HEADER == sizes.get(header.format, -1)
        if header.format == RICE:  # A byte of unary code holds at most 8 values.
            is_right = 0 < header.sent <= 8 * data.numel() and header.rice < 31
        if not is_right or header.sent > numel or data.numel() > self.most_nbytes(numel):
            self.malformed(data, numel, f"its header announces {header.sent} values in format {header.format}")
        return header

    def overload(self, data: Tensor) -> float:
        """max|residual|/tau after a message: above 1 only for values that were sent, and then tau is too small."""
        return max(0.0, Header.of(data).peak - 1.0)

    def adapted(self, data: Tensor, numel: int) -> Codec:
        """This codec; after it has warned, one that does not warn again."""
        if (overload := self.overload(data)) <= self.limit:
            return self
        text = f"{self}: the residual has a value of {overload:.3g} times tau, and a message sends 1 tau; increase tau"
        warnings.warn(Overloaded(text), stacklevel=3)
        return dataclasses.replace(self, limit=math.inf)


@dataclass(frozen=True)
class AdaptiveThreshold(Threshold):
    """A threshold that adapts to the fraction of values sent: with the defaults 0.4 to 40 bytes per 1000 values."""

    tau: float = 1e-3  # For the first message.
    low: float = 1e-4  # If a smaller fraction is sent, tau is multiplied by `decay`.
    high: float = 1e-2  # If a larger fraction is sent, tau is divided by `decay`.
    decay: float = 0.5 ** (1 / 20)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.low < self.high <= 1:
            raise ValueError(f"{self}: the fractions low and high satisfy 0 <= low < high <= 1")
        if not 0.5 <= self.decay < 1:
            raise ValueError(f"{self}: decay is from 0.5 to below 1")

    def adapted(self, data: Tensor, numel: int) -> Codec:
        header = Header.of(data)
        after = super().adapted(data, numel)
        assert isinstance(after, AdaptiveThreshold)
        density = header.sent / numel if numel else self.low  # An empty vector changes nothing.
        tau = (
            self.tau * self.decay if density < self.low else self.tau / self.decay if density > self.high else self.tau
        )
        if tau == self.tau or not SMALLEST_TAU <= tau <= 1 / SMALLEST_TAU:
            return after
        return dataclasses.replace(after, tau=tau)
