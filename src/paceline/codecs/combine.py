"""Codecs made of others: each tensor on its own, or each chunk.

A message is the pieces' messages one after the other, each beginning at a multiple of 8 bytes, where wider types may be read.
If their sizes depend on the values, a table of them comes first, 8 bytes each.
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
from paceline.codecs.codec import Codec, Reduction, Unencodable
from paceline.codecs.floats import Fp32
from paceline.codecs.layout import aligned
from paceline.codecs.qsgd import TernGrad

ALIGNED = 8


class Piece(NamedTuple):
    """A stretch of the vector that is encoded on its own."""

    codec: Codec
    where: slice
    nbytes: int | None

    @property
    def numel(self) -> int:
        return self.where.stop - self.where.start


@dataclass(frozen=True)
class Combinator(Codec):
    """What codecs made of others have in common: each says where the pieces are, and the rest follows."""

    codec: Codec
    each: tuple[Codec, ...] | None = field(
        default=None, repr=False, kw_only=True
    )  # The pieces' own, once they have adapted.

    def __post_init__(self) -> None:
        if self.codec.reduction == "factors":
            raise ValueError(
                f"{self}: {type(self.codec).__name__} takes every tensor on its own as it is, and sums factors of all at once"
            )
        if not isinstance(self.codec, Combinator) and type(self.codec).codec_state is not Codec.codec_state:
            name, inner = type(self.codec).__name__, getattr(self.codec, "codec", None)
            hint = f"; take {name}({type(self).__name__}({inner}))" if isinstance(inner, Codec) else ""
            raise ValueError(
                f"{self}: {name} has a sender's memory of its own, for the whole vector and not for pieces{hint}"
            )
        if self.each is not None:
            object.__setattr__(self, "each", tuple(self.each))

    @abstractmethod
    def pieces(self, numel: int) -> Sequence[Piece]:
        """What a vector of so many values is cut into, in order and without gaps."""

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
        data, x = aligned(data), torch.empty(numel, device=data.device)
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
        # Of the codecs that pieces may have, once they have adapted, only the one that sends them as they are has no settings.
        pieces = None if each is None else tuple(self.codec.restored(s) if s else Fp32() for s in each)
        return super().restored(settings | {"each": pieces})

    def senders(self, numel: int) -> Sequence[Codec]:
        """The codec that encodes each piece; any other of the same settings at first decodes it."""
        pieces = self.pieces(numel)
        if self.each is None:
            return [p.codec for p in pieces]
        if len(self.each) != len(pieces):
            raise ValueError(
                f"{self} has adapted to messages of {len(self.each)} pieces, but {numel} values are {len(pieces)}"
            )
        return self.each

    def joined(self, parts: Sequence[Tensor], pieces: Sequence[Piece], device: torch.device) -> Tensor:
        """The message that these parts make up."""
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
        """Raise Unencodable with the place in the whole vector of what cannot be encoded in a piece of it."""
        self.refuse(x, f"of those from index {piece.where.start} on, {error}")
        raise error

    def read(self, data: Tensor, numel: int) -> list[tuple[Piece, Tensor]]:
        """The pieces and their bytes.  Raises ValueError for a table of sizes that cannot be true."""
        pieces = self.pieces(numel)
        unknown = sum(p.nbytes is None for p in pieces)
        start = ALIGNED * unknown
        if data.numel() < start:
            raise ValueError(
                f"{self} encodes {numel} values in {start} bytes and more, but was given {data.numel()} bytes to decode"
            )
        table = iter(data[:start].cpu().clone().view(torch.int64).tolist())
        sizes = [next(table) if p.nbytes is None else p.nbytes for p in pieces]
        for piece, size in zip(pieces, sizes, strict=True):
            if not 0 <= size <= piece.codec.most_nbytes(piece.numel):
                raise ValueError(
                    f"{self} was given bytes to decode whose table says {size} bytes for the {piece.numel} values from index "
                    f"{piece.where.start} on, which take {piece.codec.most_nbytes(piece.numel)} at most"
                )
        if start + _length(sizes) != data.numel():
            raise ValueError(
                f"{self} encodes {numel} values in {start + _length(sizes)} bytes, as their table says, "
                f"but was given {data.numel()} bytes to decode"
            )
        parts: list[tuple[Piece, Tensor]] = []
        for piece, size in zip(pieces, sizes, strict=True):
            parts.append((piece, data[start : start + size]))
            start += _up(size)
        return parts


@dataclass(frozen=True)
class PerTensor(Combinator):
    """Each tensor on its own by another codec, and those of few values, such as biases, in fp32.

    `fitted` tells it the tensors; until then the vector is one.  Of a tensor that is cut by a slice each part is one.
    """

    codec: Codec = field(default=TernGrad())
    raw_below: int = 1024
    cuts: tuple[int, ...] | None = field(
        default=None, repr=False, kw_only=True
    )  # How many values each tensor has, once it is known.

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.codec, PerTensor):
            raise ValueError(f"{self}: what is a tensor already cannot be cut into tensors; {self.codec} is enough")
        if self.raw_below < 0:
            raise ValueError(f"{self}: tensors of fewer values than that are sent in fp32, and none has fewer than 0")
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
    """Each chunk of so many values on its own by another codec: a scale or a choice of the largest for every chunk."""

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
            raise ValueError(
                f"{self}: chunks are cut out of tensors or the whole vector, not {type(self.codec).__name__} out of chunks: {better}"
            )
        if self.chunk < 1:
            raise ValueError(f"{self}: a chunk holds at least 1 value")

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
    """The bytes of pieces one after the other, where only the last is not filled up."""
    return sum(map(_up, sizes[:-1])) + sum(sizes[-1:])


def _started(seed: int) -> torch.Generator:
    """Where the pieces' seeds come from, which a message's one seed decides."""
    return torch.Generator().manual_seed(seed)


def _encode(codec: Codec, x: Tensor, residual: Tensor | None, seed: int, out: Tensor | None) -> tuple[Tensor, bool]:
    assert isinstance(codec, Combinator)
    pieces, nbytes = codec.pieces(x.numel()), codec.nbytes(x.numel())
    if out is not None and nbytes is not None and out.shape != (nbytes,):
        raise ValueError(
            f"{codec} encodes {x.numel()} values in {nbytes} bytes, but was given room of shape {tuple(out.shape)}"
        )
    message = torch.empty(nbytes, dtype=torch.uint8, device=x.device) if out is None and nbytes is not None else out
    rng = _started(seed) if codec.is_random else None
    parts: list[Tensor] = []
    start = 0
    for sender, piece in zip(codec.senders(x.numel()), pieces, strict=True):
        room = (
            message[start : start + piece.nbytes]
            if message is not None and nbytes is not None and piece.nbytes is not None
            else None
        )
        try:
            part = kernels.encode(
                sender, x[piece.where], None if residual is None else residual[piece.where], rng, room
            )
        except Unencodable as error:
            if residual is not None:  # The pieces before it were not heard, either.
                for p, said in zip(pieces, parts, strict=False):
                    kernels.add(p.codec, said, residual[p.where])
                    residual[p.where].sub_(x[p.where])
            codec.refuse_for(error, x if residual is None else x + residual, piece)
        parts.append(part)
        if room is not None and message is not None:
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
