"""Entropy coding: compresses any codec's bytes if some byte values are more frequent than others.

Bytes are coded by their frequencies with asymmetric numeral systems (Duda, 2009), in the range variant (rANS).  A
state of 32 bits holds the bytes coded so far, and emits 16 bits when the next byte would not fit.  Four states take
turns, so that a processor can work on them in parallel.  The frequencies travel in Elias's gamma code (1975).  A
message is

    bytes 0-3   1; or 0 if the bytes follow uncompressed, because that is shorter
    bytes 4-7   the number of uncompressed bytes
    the frequencies, 4096 in all: for each byte value that occurs, its distance from the one before and its frequency
    the four states, 32 bits each, and the 16-bit words that they emitted, in the order in which the decoder reads them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.codecs import kernels
from paceline.codecs.codec import Codec, CodecState, Remember, Unencodable
from paceline.codecs.layout import aligned
from paceline.codecs.qsgd import QSGD
from paceline.codecs.wrapper import Wrapper

HEADER = 8
RAW = 0
CODED = 1
STATES = 4
PRECISION = 12
TOTAL = 1 << PRECISION
LOW = 1 << 16  # The initial state, and the lower bound of every state.
LONGEST_TABLE = 1024  # No table of frequencies takes more bytes.


def gamma(number: int) -> str:
    """Elias's gamma code of a positive number, as 2 * floor(log2(number)) + 1 bits.

    >>> [gamma(n) for n in (1, 2, 3, 4, 9)]
    ['1', '010', '011', '00100', '0001001']
    """
    if number < 1:
        raise ValueError(f"gamma({number}): only positive numbers have a gamma code")
    return "0" * (number.bit_length() - 1) + f"{number:b}"


def from_gamma(bits: str, at: int = 0) -> tuple[int, int]:
    """The number whose gamma code begins at bit `at`, and the index of the bit after the code.

    >>> from_gamma("0100001001", 3)
    (9, 10)
    """
    one = bits.find("1", at)
    end = 2 * one - at + 1
    if one < 0 or end > len(bits):
        raise ValueError("a gamma code ends before its last bit")
    return int(bits[one:end], 2), end


def frequencies(counts: Sequence[int]) -> list[int]:
    """Counts scaled to add up to 4096, with at least 1 for each byte value that occurs."""
    total = sum(counts)
    scaled = [max(1, TOTAL * c // total) if c else 0 for c in counts]
    # Rounding down gives too small a sum, rounding up to 1 too large a one: the most frequent value takes the
    # difference.
    while (over := sum(scaled) - TOTAL) != 0:
        most = scaled.index(max(scaled))
        scaled[most] -= over if over < 0 else 1
    return scaled


def written(table: Sequence[int]) -> bytes:
    """Frequencies in the wire format, an even number of bytes."""
    bits = ""
    last = -1
    for symbol, f in enumerate(table):
        if f:
            bits += gamma(symbol - last) + gamma(f)
            last = symbol
    bits += "0" * (-len(bits) % 16)
    return int(bits, 2).to_bytes(len(bits) // 8, "big")


def read(data: bytes) -> tuple[list[int], int]:
    """The frequencies that `written` encoded, and how many bytes they take."""
    bits = f"{int.from_bytes(data, 'big'):0{8 * len(data)}b}"
    table = [0] * 256
    symbol = -1
    at = 0
    left = TOTAL
    while left:
        distance, at = from_gamma(bits, at)
        f, at = from_gamma(bits, at)
        symbol += distance
        left -= f
        if symbol > 255 or left < 0:
            raise ValueError(f"its frequencies go beyond byte value 255, or do not add up to {TOTAL}")
        table[symbol] = f
    end = at + -at % 16
    if end > len(bits) or "1" in bits[at:end]:
        raise ValueError("its frequencies are not padded with zeros")
    return table, end // 8


def starts(table: Sequence[int]) -> list[int]:
    """The sum of the frequencies before each byte value."""
    return [sum(table[:symbol]) for symbol in range(256)]


def compress(data: bytes) -> bytes | None:
    """The compressed bytes, without the header; None if they are not fewer."""
    table = frequencies([data.count(symbol) for symbol in range(256)])
    first = starts(table)
    states = [LOW] * STATES
    words: list[int] = []
    for i in reversed(range(len(data))):
        state = states[i % STATES]
        f = table[data[i]]
        if state >= f << (32 - PRECISION):
            words.append(state & 0xFFFF)
            state >>= 16
        states[i % STATES] = (state // f << PRECISION) + state % f + first[data[i]]
    coded = written(table) + b"".join(s.to_bytes(4, "little") for s in states)
    coded += b"".join(w.to_bytes(2, "little") for w in reversed(words))
    return coded if len(coded) < len(data) else None


def expand(coded: bytes, nbytes: int) -> bytes:
    """The `nbytes` bytes that `compress` was given.  Raises ValueError if `coded` is not its result."""
    table, at = read(coded[:LONGEST_TABLE])
    first = starts(table)
    symbols = [s for s in range(256) for _ in range(table[s])]
    words = [int.from_bytes(coded[i : i + 2], "little") for i in range(at + 4 * STATES, len(coded), 2)]
    states = [int.from_bytes(coded[at + 4 * i : at + 4 * i + 4], "little") for i in range(STATES)]
    if len(coded) % 2 or len(coded) < at + 4 * STATES or min(states) < LOW:
        raise ValueError("its states are missing or too small")
    data = bytearray(nbytes)
    taken = 0
    for i in range(nbytes):
        state = states[i % STATES]
        symbol = symbols[state % TOTAL]
        state = table[symbol] * (state >> PRECISION) + state % TOTAL - first[symbol]
        if state < LOW:
            if taken == len(words):
                raise ValueError("it has too few words")
            state = state << 16 | words[taken]
            taken += 1
        states[i % STATES] = state
        data[i] = symbol
    if taken < len(words) or states != [LOW] * STATES:
        raise ValueError("it has words left over, or wrong final states")
    return bytes(data)


@dataclass(frozen=True)
class Entropy(Wrapper):
    """Another codec's bytes, compressed by their frequencies: lossless, and never more than 8 bytes larger."""

    codec: Codec = field(default=QSGD())

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.codec, Entropy):
            raise ValueError(f"{self}: compressing twice gains nothing; use {self.codec}")

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
            self.malformed(data, numel, str(error))

    def wrapped(self, inner: Tensor) -> Tensor:
        """The message for the inner codec's bytes."""
        if inner.numel() >= 2**32:
            raise ValueError(
                f"{self} was given {inner.numel()} bytes: the most is 2**32 - 1, so encode parts of the vector"
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
        """The inner codec's bytes in a message."""
        self.check(data, numel)
        if data.numel() < HEADER or bytes(data[:4].tolist()) not in (b"\0\0\0\0", b"\1\0\0\0"):
            self.malformed(data, numel, f"the header has {HEADER} bytes and starts with 0 or 1")
        nbytes = int.from_bytes(bytes(data[4:HEADER].tolist()), "little")
        wanted = self.codec.nbytes(numel)
        # Checked before that many bytes are allocated.
        if nbytes != wanted if wanted is not None else nbytes > self.codec.most_nbytes(numel):
            self.malformed(data, numel, f"its header announces {nbytes} bytes of {self.codec}")
        if not data[0]:
            if data.numel() != HEADER + nbytes:
                self.malformed(data, numel, f"its header announces {nbytes} uncompressed bytes")
            return aligned(data[HEADER:])
        body = data[HEADER:].cpu()
        try:
            if (fast := _fast(self)) is not None:
                inner = fast.expand(body, nbytes)
            else:
                inner = torch.tensor(list(expand(bytes(body.tolist()), nbytes)), dtype=torch.uint8)
        except ValueError as error:
            self.malformed(data, numel, str(error))
        return inner.to(data.device)

    def part(self, where: slice) -> Codec:
        return _over(self, self.codec.part(where))

    def fitted(self, shapes: Sequence[torch.Size]) -> Codec:
        return _over(self, self.codec.fitted(shapes))

    def adapted(self, data: Tensor, numel: int) -> Codec:
        if type(self.codec).adapted is Codec.adapted:
            return self
        return _over(self, self.codec.adapted(self.unwrapped(data, numel), numel))

    def codec_state(self, remember: Remember, like: Tensor, key: int = 0) -> CodecState:
        return EntropyState(self, self.codec.codec_state(remember, like, key))


class EntropyState:
    """Entropy with the state of one sender: the inner codec's state, and its bytes compressed."""

    def __init__(self, codec: Entropy, inner: CodecState) -> None:
        self.codec: Codec = codec
        self.coder = codec
        self.inner = inner

    def __getitem__(self, where: slice) -> EntropyState:
        return self._around(self.inner[where])

    def owned(self, where: slice) -> EntropyState:
        """The second level of `mean_by_stripes`: the state for sending the mean of the stripe that this rank owns."""
        return self._around(self.inner.owned(where))

    def _around(self, inner: CodecState) -> EntropyState:
        return EntropyState(_over(self.coder, inner.codec), inner)

    def encode(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The bytes to send for `x`, in `out` if given; updates the inner state."""
        try:
            data = self.coder.wrapped(self.inner.encode(x))
        except Unencodable as error:
            raise Unencodable(f"{self.codec}: {error}", error.at) from error
        return data if out is None else out.copy_(data)

    def encode_zero(self, numel: int, device: torch.device) -> Tensor:
        """A message of zeros; leaves the state as it is."""
        return self.coder.wrapped(self.inner.encode_zero(numel, device))

    def undo(self, x: Tensor, data: Tensor) -> None:
        """Restore the state, up to rounding, from before `encode(x)` gave `data`: the message was not used."""
        self.inner.undo(x, self.coder.unwrapped(data, x.numel()))

    def undelivered(self, share: float) -> Tensor | None:
        """What this rank has still to deliver, in units of the mean; see `CodecState`."""
        return self.inner.undelivered(share)

    def weigh(self, weight: float) -> None:
        """Bring what is kept to the weight that the receiver gives to the next message, which is above 0."""
        self.inner.weigh(weight)

    def is_settled(self, share: float) -> bool:
        """Whether `settle` with this share would change nothing."""
        return self.inner.is_settled(share)

    def settle(self, x: Tensor, data: Tensor, share: float) -> None:
        """Keep what a mean did not deliver, in which `data`, the message for `x`, had this share of the weights."""
        self.inner.settle(x, self.coder.unwrapped(data, x.numel()), share)

    def add(self, data: Tensor, into: Tensor, weight: float = 1.0, *, fresh: bool = False) -> None:
        """Add the decoded bytes, times `weight`, to `into`; overwrite it if `fresh`."""
        self.inner.add(self.coder.unwrapped(data, into.numel()), into, weight, fresh=fresh)


def _over(codec: Entropy, inner: Codec) -> Entropy:
    return codec if inner is codec.codec else Entropy(inner)


def _fast(codec: Entropy) -> Any:
    """The compiled `compress` and `expand`; None if they are not available."""
    if kernels.find(codec, torch.device("cpu")) is None:
        return None
    from paceline.codecs.kernels import coding

    return coding
