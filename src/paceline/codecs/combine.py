"""Codecs that cut a vector into pieces and encode each with another codec: PerTensor and Chunked.

A message is the pieces' messages one after the other, each at a multiple of 8 bytes, so that wider types can be read
in place.  If their sizes depend on the values, a table of the sizes comes first, 8 bytes each.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor

from paceline.codecs import kernels
from paceline.codecs.codec import Codec, Unencodable
from paceline.codecs.floats import Fp32
from paceline.codecs.layout import aligned, check_out
from paceline.codecs.qsgd import TernGrad
from paceline.codecs.wrapper import Wrapper

ALIGNED = 8


class Piece(NamedTuple):
    """A part of the vector that is encoded separately."""

    codec: Codec
    where: slice
    nbytes: int | None

    @property
    def numel(self) -> int:
        return self.where.stop - self.where.start


@dataclass(frozen=True)
class Combinator(Wrapper):
    """The base of codecs that encode pieces: a subclass defines the pieces."""

    codec: Codec
    # Each piece's codec, after it has adapted.
    each: tuple[Codec, ...] | None = field(default=None, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.codec, Combinator) and type(self.codec).codec_state is not Codec.codec_state:
            name = type(self.codec).__name__
            inner = getattr(self.codec, "codec", None)
            hint = f"; use {name}({type(self).__name__}({inner}))" if isinstance(inner, Codec) else ""
            raise ValueError(f"{self}: {name} keeps state for the whole vector, not for pieces of it{hint}")
        if self.each is not None:
            object.__setattr__(self, "each", tuple(self.each))

    @abstractmethod
    def pieces(self, numel: int) -> Sequence[Piece]:
        """The pieces of a vector of `numel` values, in order and without gaps."""

    def nbytes(self, numel: int) -> int | None:
        sizes = [p.nbytes for p in self.pieces(numel)]
        return None if None in sizes else _length([s for s in sizes if s is not None])

    def most_nbytes(self, numel: int) -> int:
        pieces = self.pieces(numel)
        return ALIGNED * sum(p.nbytes is None for p in pieces) + _length([p.codec.most_nbytes(p.numel) for p in pieces])

    def encode(self, x: Tensor, rng: torch.Generator | None = None) -> Tensor:
        x = x.detach().reshape(-1)
        pieces = self.pieces(x.numel())
        rng = _started(kernels.draw(rng)) if self.is_random else None
        parts: list[Tensor] = []
        for codec, piece in zip(self.senders(x.numel()), pieces, strict=True):
            try:
                parts.append(codec.encode(x[piece.where], rng))
            except Unencodable as error:
                self.refuse_for(error, x, piece)
        return self.joined(parts, pieces, x.device)

    def decode(self, data: Tensor, numel: int) -> Tensor:
        self.check(data, numel)
        data = aligned(data)
        x = torch.empty(numel, device=data.device)
        for piece, part in self.read(data, numel):
            x[piece.where] = piece.codec.decode(part, piece.numel)
        return x

    def fitted(self, shapes: Sequence[torch.Size]) -> Self:
        return self._with(self.codec.fitted(shapes))

    def part(self, where: slice) -> Self:
        return self._with(self.codec.part(where))

    def _with(self, codec: Codec) -> Self:
        return self if codec is self.codec and self.each is None else replace(self, codec=codec, each=None)

    def adapted(self, data: Tensor, numel: int) -> Self:
        if type(self.codec).adapted is Codec.adapted:
            return self
        before = self.senders(numel)
        after = tuple(c.adapted(part, p.numel) for c, (p, part) in zip(before, self.read(data, numel), strict=True))
        return self if all(a is b for a, b in zip(before, after, strict=True)) else replace(self, each=after)

    def restored(self, settings: dict[str, Any]) -> Codec:
        each = settings["each"]
        # Only Fp32, for pieces below `raw_below`, has no settings.
        pieces = None if each is None else tuple(self.codec.restored(s) if s else Fp32() for s in each)
        return super().restored(settings | {"each": pieces})

    def senders(self, numel: int) -> Sequence[Codec]:
        """The codec that encodes each piece, as adapted; decoding needs only the piece's initial codec."""
        pieces = self.pieces(numel)
        if self.each is None:
            return [p.codec for p in pieces]
        if len(self.each) != len(pieces):
            raise ValueError(
                f"{self} has adapted to messages of {len(self.each)} pieces, but {numel} values are {len(pieces)}"
            )
        return self.each

    def joined(self, parts: Sequence[Tensor], pieces: Sequence[Piece], device: torch.device) -> Tensor:
        """The message made of these parts."""
        table = [part.numel() for part, piece in zip(parts, pieces, strict=True) if piece.nbytes is None]
        message = torch.zeros(
            ALIGNED * len(table) + _length([part.numel() for part in parts]), dtype=torch.uint8, device=device
        )
        message[: ALIGNED * len(table)] = torch.tensor(table, dtype=torch.int64).view(torch.uint8).to(device)
        start = ALIGNED * len(table)
        for part in parts:
            message[start : start + part.numel()] = part
            start += _up(part.numel())
        return message

    def refuse_for(self, error: Unencodable, x: Tensor, piece: Piece) -> NoReturn:
        """Raise Unencodable with the index in the whole vector of a value that a piece cannot encode."""
        self.refuse(x, f"in the piece from index {piece.where.start} on, {error}")
        raise error

    def read(self, data: Tensor, numel: int) -> list[tuple[Piece, Tensor]]:
        """The pieces and their bytes.  Raises ValueError for a wrong table of sizes."""
        pieces = self.pieces(numel)
        unknown = sum(p.nbytes is None for p in pieces)
        start = ALIGNED * unknown
        if data.numel() < start:
            raise ValueError(
                f"{self} encodes {numel} values in at least {start} bytes, but was given {data.numel()} bytes to decode"
            )
        table = iter(data[:start].cpu().clone().view(torch.int64).tolist())
        sizes = [next(table) if p.nbytes is None else p.nbytes for p in pieces]
        for piece, size in zip(pieces, sizes, strict=True):
            if not 0 <= size <= piece.codec.most_nbytes(piece.numel):
                raise ValueError(
                    f"{self} was given bytes to decode whose table has {size} bytes for the {piece.numel} values "
                    f"from index {piece.where.start} on; they take at most {piece.codec.most_nbytes(piece.numel)}"
                )
        if start + _length(sizes) != data.numel():
            raise ValueError(
                f"{self} encodes {numel} values in {start + _length(sizes)} bytes by their table, "
                f"but was given {data.numel()} bytes to decode"
            )
        parts: list[tuple[Piece, Tensor]] = []
        for piece, size in zip(pieces, sizes, strict=True):
            parts.append((piece, data[start : start + size]))
            start += _up(size)
        return parts


@dataclass(frozen=True)
class PerTensor(Combinator):
    """Encodes each tensor separately with another codec, and small ones, such as biases, in fp32.

    `fitted` sets the tensors; before, the whole vector is one tensor.  A slice through a tensor makes two of it.
    """

    codec: Codec = field(default=TernGrad())
    raw_below: int = 1024
    # How many values each tensor has; None: not fitted.
    cuts: tuple[int, ...] | None = field(default=None, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.codec, PerTensor):
            raise ValueError(f"{self}: PerTensor inside PerTensor has no effect; use {self.codec}")
        if self.raw_below < 0:
            raise ValueError(f"{self}: raw_below is a number of values, 0 or more")
        if self.cuts is not None:
            object.__setattr__(self, "cuts", tuple(int(n) for n in self.cuts))

    def fitted(self, shapes: Sequence[torch.Size]) -> PerTensor:
        return replace(self, codec=self.codec.fitted(shapes), each=None, cuts=tuple(s.numel() for s in shapes))

    def part(self, where: slice) -> PerTensor:
        if self.cuts is None:
            return super().part(where)
        first, last, _ = where.indices(sum(self.cuts))
        cuts: list[int] = []
        start = 0
        for n in self.cuts:
            cuts.append(max(min(last, start + n) - max(first, start), 0))
            start += n
        return replace(self, codec=self.codec.part(where), each=None, cuts=tuple(n for n in cuts if n))

    def pieces(self, numel: int) -> Sequence[Piece]:
        cuts = (numel,) if self.cuts is None else self.cuts
        if sum(cuts) != numel:
            raise ValueError(f"{self} was fitted to tensors of {sum(cuts)} values in all, but was given {numel} values")
        return cut(self.codec, cuts, self.raw_below)


@dataclass(frozen=True)
class Chunked(Combinator):
    """Encodes each chunk of the vector separately with another codec: each has its own scale, or its own top k."""

    codec: Codec = field(default=TernGrad())
    chunk: int = 65536

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.codec, Combinator):
            inner = (
                Chunked(self.codec.codec, chunk=self.chunk) if isinstance(self.codec, PerTensor) else self.codec.codec
            )
            better = (
                replace(self.codec, codec=inner) if isinstance(self.codec, PerTensor) else replace(self, codec=inner)
            )
            raise ValueError(f"{self}: Chunked cannot contain {type(self.codec).__name__}; use {better}")
        if self.chunk < 1:
            raise ValueError(f"{self}: a chunk has at least 1 value")

    @property
    def unit(self) -> int:
        return self.chunk

    def pieces(self, numel: int) -> Sequence[Piece]:
        whole, rest = divmod(numel, self.chunk)
        return cut(self.codec, (self.chunk,) * whole + (rest,), 0)


@lru_cache(maxsize=256)
def cut(codec: Codec, cuts: tuple[int, ...], raw_below: int) -> Sequence[Piece]:
    """Pieces of these lengths."""
    pieces: list[Piece] = []
    start = 0
    for n in cuts:
        if n:
            where = slice(start, start + n)
            own = Fp32() if n < raw_below else codec.part(where)
            pieces.append(Piece(own, where, own.nbytes(n)))
        start += n
    return pieces


def _up(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


def _length(sizes: Sequence[int]) -> int:
    """The size of pieces one after the other, all but the last padded."""
    return sum(map(_up, sizes[:-1])) + sum(sizes[-1:])


def _started(seed: int) -> torch.Generator:
    """The generator of the pieces' seeds, from the seed of the message."""
    return torch.Generator().manual_seed(seed)


def _encode(codec: Codec, x: Tensor, residual: Tensor | None, seed: int, out: Tensor | None) -> tuple[Tensor, bool]:
    assert isinstance(codec, Combinator)
    pieces = codec.pieces(x.numel())
    nbytes = codec.nbytes(x.numel())
    if nbytes is not None:
        check_out(codec, x.numel(), nbytes, out)
    message = torch.empty(nbytes, dtype=torch.uint8, device=x.device) if out is None and nbytes is not None else out
    rng = _started(seed) if codec.is_random else None
    parts: list[Tensor] = []
    start = 0
    for sender, piece in zip(codec.senders(x.numel()), pieces, strict=True):
        buffer = (
            message[start : start + piece.nbytes]
            if message is not None and nbytes is not None and piece.nbytes is not None
            else None
        )
        try:
            part = kernels.encode(
                sender, x[piece.where], None if residual is None else residual[piece.where], rng, buffer
            )
        except Unencodable as error:
            if residual is not None:  # The pieces before it will not be sent either.
                for p, data in zip(pieces, parts, strict=False):
                    kernels.add(p.codec, data, residual[p.where])
                    residual[p.where].sub_(x[p.where])
            codec.refuse_for(error, x if residual is None else x + residual, piece)
        parts.append(part)
        if buffer is not None and message is not None:
            message[start + part.numel() : start + _up(part.numel())] = 0
        start += _up(part.numel())
    if nbytes is not None and message is not None:
        return message, True
    message = codec.joined(parts, pieces, x.device)
    return message if out is None else out.copy_(message), True


def _add(codec: Codec, data: Tensor, into: Tensor, weight: float, fresh: bool) -> None:
    assert isinstance(codec, Combinator)
    for piece, part in codec.read(aligned(data), into.numel()):
        kernels.add(piece.codec, part, into[piece.where], weight, fresh)


kernels.EVERYWHERE[PerTensor] = kernels.EVERYWHERE[Chunked] = kernels.Kernel(_encode, _add)
