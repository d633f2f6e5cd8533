"""Entropy coding: any codec's bytes in fewer, where some bytes are more frequent than others.

Bytes are coded by their frequencies with asymmetric numeral systems (Duda, 2009), in the range variant: a state of 32 bits holds
what was coded so far, and gives 16 bits away whenever the next byte would not fit.  Four states take turns, so that a processor
can work on them at once.  The frequencies travel in Elias's gamma code (1975).  A message is

    bytes 0-3   1, or 0 if the bytes follow as they are because that is shorter
    bytes 4-7   the number of bytes coded
    the frequencies of bytes, of 4096 in all: for each that occurs, its distance from the one before and its frequency
    the four states, 32 bits each, and the 16-bit words that they gave away, as the reader needs them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from paceline.codecs import kernels
from paceline.codecs.codec import Codec, CodecState, Reduction, Remember, Unencodable
from paceline.codecs.layout import aligned
from paceline.codecs.qsgd import QSGD

HEADER = 8
RAW, CODED = 0, 1
STATES = 4
PRECISION = 12
TOTAL = 1 << PRECISION
LOW = 1 << 16  # Where states begin, and what they never fall below.
LONGEST_TABLE = 1024  # Bytes that hold any table.


def gamma(number: int) -> str:
    """Elias's gamma code of a positive number, as 2 * floor(log2(number)) + 1 bits.

    >>> [gamma(n) for n in (1, 2, 3, 4, 9)]
    ['1', '010', '011', '00100', '0001001']
    """
    if number < 1:
        raise ValueError(f"gamma({number}): the code is of positive numbers")
    return "0" * (number.bit_length() - 1) + f"{number:b}"


def from_gamma(bits: str, at: int = 0) -> tuple[int, int]:
    """The number whose gamma code begins at a place, and the place where it ends.

    >>> from_gamma("0100001001", 3)
    (9, 10)
    """
    one = bits.find("1", at)
    end = 2 * one - at + 1
    if one < 0 or end > len(bits):
        raise ValueError("a gamma code ends before its number")
    return int(bits[one:end], 2), end


def frequencies(counts: Sequence[int]) -> list[int]:
    """Counts scaled to add up to 4096, with at least 1 for whatever occurs."""
    total = sum(counts)
    scaled = [max(1, TOTAL * c // total) if c else 0 for c in counts]
    # Rounding down leaves some over, rounding up to 1 takes too many: the most frequent one bears it best.
    while (over := sum(scaled) - TOTAL) != 0:
        most = scaled.index(max(scaled))
        scaled[most] -= over if over < 0 else 1
    return scaled


def written(table: Sequence[int]) -> bytes:
    """Frequencies as they travel, in an even number of bytes."""
    bits, last = "", -1
    for symbol, f in enumerate(table):
        if f:
            bits += gamma(symbol - last) + gamma(f)
            last = symbol
    bits += "0" * (-len(bits) % 16)
    return int(bits, 2).to_bytes(len(bits) // 8, "big")


def read(data: bytes) -> tuple[list[int], int]:
    """What `written` was given, and how many bytes it took."""
    bits = f"{int.from_bytes(data, 'big'):0{8 * len(data)}b}"
    table, symbol, at, left = [0] * 256, -1, 0, TOTAL
    while left:
        distance, at = from_gamma(bits, at)
        f, at = from_gamma(bits, at)
        symbol += distance
        left -= f
        if symbol > 255 or left < 0:
            raise ValueError(f"frequencies of bytes end at 255 and add up to {TOTAL}")
        table[symbol] = f
    end = at + -at % 16
    if end > len(bits) or "1" in bits[at:end]:
        raise ValueError("frequencies of bytes are followed by zeros")
    return table, end // 8


def starts(table: Sequence[int]) -> list[int]:
    return [sum(table[:symbol]) for symbol in range(256)]


def compress(data: bytes) -> bytes | None:
    """Bytes in fewer, without the header; None if these are not fewer."""
    table = frequencies([data.count(symbol) for symbol in range(256)])
    first, states, words = starts(table), [LOW] * STATES, list[int]()
    for i in reversed(range(len(data))):
        state, f = states[i % STATES], table[data[i]]
        if state >= f << (32 - PRECISION):
            words.append(state & 0xFFFF)
            state >>= 16
        states[i % STATES] = (state // f << PRECISION) + state % f + first[data[i]]
    coded = written(table) + b"".join(s.to_bytes(4, "little") for s in states)
    coded += b"".join(w.to_bytes(2, "little") for w in reversed(words))
    return coded if len(coded) < len(data) else None


def expand(coded: bytes, nbytes: int) -> bytes:
    """So many bytes that `compress` was given; a ValueError if it cannot have been."""
    table, at = read(coded[:LONGEST_TABLE])
    first, symbols = starts(table), [s for s in range(256) for _ in range(table[s])]
    words = [int.from_bytes(coded[i : i + 2], "little") for i in range(at + 4 * STATES, len(coded), 2)]
    states = [int.from_bytes(coded[at + 4 * i : at + 4 * i + 4], "little") for i in range(STATES)]
    if len(coded) % 2 or len(coded) < at + 4 * STATES or min(states) < LOW:
        raise ValueError("its states are none")
    data, taken = bytearray(nbytes), 0
    for i in range(nbytes):
        state = states[i % STATES]
        symbol = symbols[state % TOTAL]
        state = table[symbol] * (state >> PRECISION) + state % TOTAL - first[symbol]
        if state < LOW:
            if taken == len(words):
                raise ValueError("its words end too early")
            state = state << 16 | words[taken]
            taken += 1
        states[i % STATES], data[i] = state, symbol
    if taken < len(words) or states != [LOW] * STATES:
        raise ValueError("its bytes do not come to an end")
    return bytes(data)


@dataclass(frozen=True)
class Entropy(Codec):
    """Another codec's bytes in as many bits as their frequencies warrant: what that loses, and no more; never larger by over 8 bytes."""

    codec: Codec = field(default=QSGD())

    def __post_init__(self) -> None:
        if isinstance(self.codec, Entropy):
            raise ValueError(f"{self}: what is coded by its entropy once gains nothing from it twice")
        if self.codec.reduction == "factors":
            raise ValueError(
                f"{self}: {type(self.codec).__name__}'s factors are summed as they are, and have no bytes to code"
            )

    @property
    def feedback(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.codec.feedback

    @property
    def is_random(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.codec.is_random

    @property
    def reduction(self) -> Reduction:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.codec.reduction

    @property
    def unit(self) -> int:
        return self.codec.unit

    def nbytes(self, numel: int) -> None:
        return None

    def most_nbytes(self, numel: int) -> int:
        return HEADER + self.codec.most_nbytes(numel)

    def encode(self, x: Tensor, rng: torch.Generator | None = None) -> Tensor:
        try:
            return self.wrapped(self.codec.encode(x, rng))
        except Unencodable as error:
            raise Unencodable(f"{self}: {error}", error.at) from error

    def decode(self, data: Tensor, numel: int) -> Tensor:
        inner = self.unwrapped(data, numel)
        try:
            return self.codec.decode(inner, numel)
        except ValueError as error:
            self.no_message(data, numel, str(error))

    def wrapped(self, inner: Tensor) -> Tensor:
        """The message for the other codec's bytes."""
        if inner.numel() >= 2**32:
            raise ValueError(
                f"{self} was given {inner.numel()} bytes: it codes less than 2**32, so encode parts of the vector"
            )
        compressed: Tensor | None = None
        if inner.numel():
            if (fast := _fast(self)) is not None:
                compressed = fast.compress(inner.cpu())
            elif (coded := compress(bytes(inner.tolist()))) is not None:
                compressed = torch.tensor(list(coded), dtype=torch.uint8)
        body = inner if compressed is None else compressed.to(inner.device)
        header = [RAW if compressed is None else CODED, 0, 0, 0, *inner.numel().to_bytes(4, "little")]
        return torch.cat([torch.tensor(header, dtype=torch.uint8, device=inner.device), body])

    def unwrapped(self, data: Tensor, numel: int) -> Tensor:
        """The other codec's bytes in a message."""
        self.check(data, numel)
        if data.numel() < HEADER or bytes(data[:4].tolist()) not in (b"\0\0\0\0", b"\1\0\0\0"):
            self.no_message(data, numel, f"a header has {HEADER} bytes, and begins with 0 or 1")
        nbytes, wanted = int.from_bytes(bytes(data[4:HEADER].tolist()), "little"), self.codec.nbytes(numel)
        # What the header asks for is made only if it can be right.
        if nbytes != wanted if wanted is not None else nbytes > self.codec.most_nbytes(numel):
            self.no_message(data, numel, f"its header tells {nbytes} bytes of {self.codec}")
        if not data[0]:
            if data.numel() != HEADER + nbytes:
                self.no_message(data, numel, f"its header tells {nbytes} bytes to follow")
            return aligned(data[HEADER:])
        body = data[HEADER:].cpu()
        try:
            if (fast := _fast(self)) is not None:
                inner = fast.expand(body, nbytes)
            else:
                inner = torch.tensor(list(expand(bytes(body.tolist()), nbytes)), dtype=torch.uint8)
        except ValueError as error:
            self.no_message(data, numel, str(error))
        return inner.to(data.device)

    def no_message(self, data: Tensor, numel: int, why: str) -> NoReturn:
        raise ValueError(f"{self} decodes no {numel} values from the given {data.numel()} bytes: {why}")

    def part(self, where: slice) -> Codec:
        return _over(self, self.codec.part(where))

    def fitted(self, shapes: Sequence[torch.Size]) -> Codec:
        return _over(self, self.codec.fitted(shapes))

    def adapted(self, data: Tensor, numel: int) -> Codec:
        if type(self.codec).adapted is Codec.adapted:
            return self
        return _over(self, self.codec.adapted(self.unwrapped(data, numel), numel))

    def codec_state(self, remember: Remember, like: Tensor, key: int = 0) -> CodecState:
        return Wrapping(self, self.codec.codec_state(remember, like, key))


class Wrapping:
    """Entropy as one sender uses it: the other codec's link, and its bytes in fewer."""

    def __init__(self, codec: Entropy, inner: CodecState) -> None:
        self.codec: Codec = codec
        self.coder = codec
        self.inner = inner

    def __getitem__(self, where: slice) -> Wrapping:
        return self._around(self.inner[where])

    def owned(self, where: slice) -> Wrapping:
        """The second level: how this rank sends the sum over all of the stripe that it owns."""
        return self._around(self.inner.owned(where))

    def _around(self, inner: CodecState) -> Wrapping:
        return Wrapping(_over(self.coder, inner.codec), inner)

    def encode(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The bytes to send for `x`, in `out` if given; what they leave out is now remembered."""
        try:
            data = self.coder.wrapped(self.inner.encode(x))
        except Unencodable as error:
            raise Unencodable(f"{self.codec}: {error}", error.at) from error
        return data if out is None else out.copy_(data)

    def encode_zero(self, numel: int, device: torch.device) -> Tensor:
        """A message that says nothing."""
        return self.coder.wrapped(self.inner.encode_zero(numel, device))

    def undo(self, x: Tensor, data: Tensor) -> None:
        """What `encode` said for `x` was not heard: remember again, up to rounding, what was remembered before."""
        self.inner.undo(x, self.coder.unwrapped(data, x.numel()))

    def add(self, data: Tensor, into: Tensor, weight: float = 1.0, *, fresh: bool = False) -> None:
        """Add what the bytes say, times `weight`, to `into`; put it there instead if `fresh`."""
        self.inner.add(self.coder.unwrapped(data, into.numel()), into, weight, fresh=fresh)


def _over(codec: Entropy, inner: Codec) -> Entropy:
    return codec if inner is codec.codec else Entropy(inner)


def _fast(codec: Entropy) -> Any:
    """The compiled `compress` and `expand`; None where there are none."""
    if kernels.find(codec, torch.device("cpu")) is None:
        return None
    from paceline.codecs.kernels import coding

    return coding
