"""PowerSGD (Vogels, Karimireddy, Jaggi 2019): a matrix M as the product of two thin ones, found by power iteration.

P = orth(M Q) and Q = M^T P are sent.  The receiver computes P Q^T, which is M's projection onto the columns of P.
Both factors are linear in M, so workers can sum them instead of sending them to each other:
`collectives.mean_by_factors` does that.  This module has the message format for one vector, and the arithmetic of
both uses.  Each rank adds in the same order, so that all get the same bits.  Factors are stored as rows, `rank` x
rows and `rank` x columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.codecs import kernels
from paceline.codecs.codec import Codec, ErrorFeedback, Remember
from paceline.codecs.layout import aligned
from paceline.codecs.one_bit import OneBit
from paceline.codecs.resizing import resize_by_mean, resize_residuals
from paceline.codecs.shares import Shares

Block = tuple[int, int]
CACHED = 1 << 17  # Values of a product that a CPU works on at once, so that they stay in its cache.
NEGLIGIBLE = 1e-6  # After orthogonalising a float32 vector of norm 1, a rest below this norm is a rounding error.
SEED = 1234


@dataclass(frozen=True, slots=True)
class Matrix:
    """A part of the vector that is sent as two factors."""

    where: slice
    rows: int
    cols: int

    def of(self, x: Tensor) -> Tensor:
        return x[self.where].view(self.rows, self.cols)


@dataclass(frozen=True, slots=True)
class Plan:
    """Which parts of a vector are sent as factors, and which as plain values."""

    rank: int
    matrices: tuple[Matrix, ...]
    raw: tuple[slice, ...]

    @property
    def left_numel(self) -> int:
        return self.rank * sum(m.rows for m in self.matrices)

    @property
    def right_numel(self) -> int:
        return self.rank * sum(m.cols for m in self.matrices)

    @property
    def raw_numel(self) -> int:
        return sum(s.stop - s.start for s in self.raw)

    def left(self, flat: Tensor) -> list[Tensor]:
        """The P of each matrix, as views of the vector of all."""
        return self._cut(flat, [m.rows for m in self.matrices])

    def right(self, flat: Tensor) -> list[Tensor]:
        """The Q of each matrix, as views of the vector of all."""
        return self._cut(flat, [m.cols for m in self.matrices])

    def _cut(self, flat: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        parts = flat[: self.rank * sum(lengths)].split([self.rank * n for n in lengths])
        return [part.view(self.rank, n) for part, n in zip(parts, lengths, strict=True)]

    def put_raw(self, x: Tensor, into: Tensor) -> None:
        """Copy the plain values from the vector."""
        for part, s in zip(self._raw_parts(into), self.raw, strict=True):
            part.copy_(x[s])

    def take_raw(self, data: Tensor, into: Tensor) -> None:
        """Copy the plain values back into the vector."""
        for part, s in zip(self._raw_parts(data), self.raw, strict=True):
            into[s] = part

    def _raw_parts(self, flat: Tensor) -> tuple[Tensor, ...]:
        return flat.split([s.stop - s.start for s in self.raw]) if self.raw else ()


@dataclass(frozen=True)
class PowerSGD(Codec):
    """Two thin fp32 factors per matrix, rank x (rows + columns) values for rows x columns; small tensors in fp32.

    `fitted` sets the tensors.  Each with two or more dimensions is a matrix, with as many rows as its first
    dimension.  Before, the whole vector is a nearly square matrix, and an incomplete last row is sent as plain
    values.  A slice through a matrix keeps its whole rows as a matrix, and sends the rest as plain values.  So is a
    matrix that its factors would not make smaller, such as one of `rank` rows or columns or fewer.
    """

    reduction: ClassVar[str] = "factors"
    needs_group: ClassVar[bool] = True

    rank: int = 4
    # Rows and columns of each tensor; None: not fitted.
    blocks: tuple[Block, ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"{self}: factors have rank 1 or more")
        if self.blocks is not None:
            object.__setattr__(self, "blocks", tuple((int(rows), int(cols)) for rows, cols in self.blocks))

    @property
    def unit(self) -> int:
        return 1

    def fitted(self, shapes: Sequence[torch.Size]) -> PowerSGD:
        return replace(
            self,
            blocks=tuple((s[0], s.numel() // s[0]) if len(s) > 1 and s.numel() else (s.numel(), 1) for s in shapes),
        )

    def part(self, where: slice) -> PowerSGD:
        if self.blocks is None:
            return self
        first, last, _ = where.indices(sum(rows * cols for rows, cols in self.blocks))
        blocks: list[Block] = []
        start = 0
        for rows, cols in self.blocks:
            a, b = max(first - start, 0), min(last - start, rows * cols)
            if a < b:
                above, below = min(-(-a // cols) * cols, b), max(b // cols * cols, a)
                pieces = (
                    [(above - a, 1), ((below - above) // cols, cols), (b - below, 1)]
                    if above <= below
                    else [(b - a, 1)]
                )
                blocks += [piece for piece in pieces if piece[0]]
            start += rows * cols
        return replace(self, blocks=tuple(blocks))

    def plan(self, numel: int) -> Plan:
        """How a vector of `numel` values is sent."""
        if self.blocks is None:
            cols = max(math.isqrt(numel), 1)
            return planned(self.rank, ((numel // cols, cols), (numel % cols, 1)))
        if (known := sum(rows * cols for rows, cols in self.blocks)) != numel:
            raise ValueError(f"{self} was fitted to tensors of {known} values in all, but was given {numel} values")
        return planned(self.rank, self.blocks)

    def nbytes(self, numel: int) -> int:
        plan = self.plan(numel)
        return 4 * (plan.left_numel + plan.right_numel + plan.raw_numel)

    def encode(self, x: Tensor, rng: torch.Generator | None = None) -> Tensor:
        given = x.detach().reshape(-1)
        x = x.detach().to(torch.float32).reshape(-1).contiguous()
        plan = self.plan(x.numel())
        message = torch.empty(self.nbytes(x.numel()) // 4, device=x.device)
        ps = plan.left(message)
        qs = plan.right(message[plan.left_numel :])
        plan.put_raw(x, message[plan.left_numel + plan.right_numel :])
        for m, q in zip(plan.matrices, qs, strict=True):
            q.copy_(first_guess(self.rank, m.cols, x.device))
        # Two iterations: what P leaves out of M is orthogonal to the first guess, so one would never send the residual.
        for _ in range(2):
            for m, p, q in zip(plan.matrices, ps, qs, strict=True):
                torch.mm(q, m.of(x).T, out=p)
            orthonormalise(ps)
            for m, p, q in zip(plan.matrices, ps, qs, strict=True):
                torch.mm(p, m.of(x), out=q)
            if not message.isfinite().all():
                self.refuse(given, "their products are beyond float32")
        most = torch.finfo(torch.float32).max / (2 * self.rank)
        if plan.matrices and message[plan.left_numel :].abs().max().item() > most:
            self.refuse(given, "their products are beyond float32")
        return message.view(torch.uint8)

    def decode(self, data: Tensor, numel: int) -> Tensor:
        self.check(data, numel)
        plan = self.plan(numel)
        message = aligned(data).view(torch.float32)
        thin = message[: plan.left_numel + plan.right_numel]
        if not thin.isfinite().all():
            raise ValueError(f"{self} was given bytes to decode with {thin[~thin.isfinite()][0].item():g} in a factor")
        x = torch.empty(numel, device=data.device)
        plan.take_raw(message[plan.left_numel + plan.right_numel :], x)
        for m, p, q in zip(plan.matrices, plan.left(message), plan.right(message[plan.left_numel :]), strict=True):
            multiply(p, q, m.of(x))
        return x

    def codec_state(self, remember: Remember, like: Tensor, key: int = 0) -> FactorState:
        codec = self
        if self.blocks is None:  # So that its slices have the same matrix.
            cols = max(math.isqrt(like.numel()), 1)
            codec = replace(self, blocks=((like.numel() // cols, cols), (like.numel() % cols, 1)))
        wide = torch.promote_types(like.dtype, torch.float32)
        guesses = [first_guess(self.rank, m.cols, like.device).view(-1) for m in codec.plan(like.numel()).matrices]
        zeros = torch.zeros(like.numel(), dtype=wide, device=like.device)
        slot = remember("residuals", rule=resize_residuals, version=2, residual=zeros, shares=[])
        first = torch.cat([torch.zeros(0, device=like.device), *guesses]).to(wide)
        factors = remember("factors", rule=resize_by_mean, factors=first).factors
        return FactorState(codec, slot.residual, codec.plan(like.numel()).right(factors), Shares(slot.shares))


class FactorState(ErrorFeedback):
    """A rank's state for `mean_by_factors`: the residual, and the Q of each matrix to start with.

    Slices share both.  Slices with different rows of one matrix share its Q, and must not be used at the same time.
    """

    residual: Tensor

    def __init__(
        self,
        codec: PowerSGD,
        residual: Tensor,
        factors: list[Tensor],
        shares: Shares | None = None,
        start: int = 0,
    ) -> None:
        super().__init__(codec, residual, shares=shares, start=start)
        self.plan = codec.plan(residual.numel())
        self.factors = factors
        self._parts: dict[tuple[int, int], FactorState] = {}

    def __getitem__(self, where: slice) -> FactorState:
        start, stop, _ = where.indices(self.residual.numel())
        if (part := self._parts.get((start, stop))) is None:
            codec = self.codec.part(slice(start, stop))
            assert isinstance(codec, PowerSGD)
            places = [start + m.where.start for m in codec.plan(max(stop - start, 0)).matrices]
            whole = list(zip(self.plan.matrices, self.factors, strict=True))
            factors = [q for place in places for m, q in whole if m.where.start <= place < m.where.stop]
            part = FactorState(codec, self.residual[start:stop], factors, self.shares, self.start + start)
            self._parts[start, stop] = part
        return part

    def add_rounding(self, error: Tensor, share: float) -> None:
        """Remember this share of what the last mean lost by rounding."""
        for first, stop, unit in self.units():
            part = slice(first - self.start, stop - self.start)
            self.residual[part].add_(error[part], alpha=share / unit if unit else 1.0)


@lru_cache(maxsize=1024)
def planned(rank: int, blocks: tuple[Block, ...]) -> Plan:
    """Find the matrices that factors make smaller; the rest is sent as plain values."""
    matrices: list[Matrix] = []
    raw: list[slice] = []
    start = 0
    for rows, cols in blocks:
        stop = start + rows * cols
        if rank * (rows + cols) < rows * cols:
            matrices.append(Matrix(slice(start, stop), rows, cols))
        elif raw and raw[-1].stop == start:
            raw[-1] = slice(raw[-1].start, stop)
        elif start < stop:
            raw.append(slice(start, stop))
        start = stop
    return Plan(rank, tuple(matrices), tuple(raw))


@lru_cache(maxsize=256)
def first_guess(rank: int, cols: int, device: torch.device) -> Tensor:
    """The first Q, the same on all ranks.  Uniform numbers are the same on every processor; normal ones are not."""
    return (2 * torch.rand(rank, cols, generator=torch.Generator().manual_seed(SEED)) - 1).to(device)


def orthonormalise(factors: Sequence[Tensor], spares: Sequence[Tensor] | None = None) -> None:
    """Make the rows of each factor orthonormal, in place, by the Gram-Schmidt method, applied twice.

    A row that depends on those before is replaced by that of `spares`, or by zeros.  This is in double precision,
    where no square of a float32 overflows or underflows, and for all factors of about the same length together.
    """
    if factors and (fast := compiled_for(factors[0].device)) is not None:
        for i, f in enumerate(factors):
            fast.orthonormalise(f, None if spares is None else spares[i])
        return
    by_length: dict[int, list[int]] = {}
    for i, f in enumerate(factors):
        by_length.setdefault(max(f.shape[1] - 1, 0).bit_length(), []).append(i)
    for bits, members in by_length.items():
        a = torch.stack([F.pad(factors[i].double(), (0, (1 << bits) - factors[i].shape[1])) for i in members])
        b = None
        if spares is not None:
            b = torch.stack([F.pad(spares[i].double(), (0, (1 << bits) - spares[i].shape[1])) for i in members])
        for k in range(a.shape[1]):
            row, dead = _unit_beside(a[:, k], a[:, :k])
            if b is not None:
                row = torch.where(dead, _unit_beside(b[:, k], a[:, :k])[0], row)
            a[:, k] = row
        for f, i in zip(a, members, strict=True):
            factors[i].copy_(f[:, : factors[i].shape[1]])


def _unit_beside(rows: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's part orthogonal to the rows before, normalised, or zeros if it has none; and whether it has none."""
    norms = _roots(_sums(rows.square()))
    rest = rows / torch.where(norms == 0, 1.0, norms)
    for _ in range(2):
        for shares, other in zip(_sums(rest[:, None] * before).unbind(1), before.unbind(1), strict=True):
            rest = rest - shares * other
    lengths = _roots(_sums(rest.square()))
    dead = lengths <= NEGLIGIBLE  # False for NaN, which stays.
    return torch.where(dead, 0.0, rest / lengths), dead


def _sums(x: Tensor) -> Tensor:
    """The sums over the last dimension, a power of two, by halves: the same order on every processor."""
    while (half := x.shape[-1] // 2) > 0:
        x = x[..., :half] + x[..., half:]
    return x


def _roots(x: Tensor) -> Tensor:
    """Correctly rounded square roots; torch's own on a CPU are not always."""
    return torch.from_numpy(np.sqrt(x.numpy())) if x.device.type == "cpu" else x.sqrt()


def multiply(p: Tensor, q: Tensor, out: Tensor) -> None:
    """P Q^T into `out`.

    A library's product may round differently on another processor; adding the products of one row at a time does not.
    """
    if (fast := compiled_for(out.device)) is not None:
        return fast.multiply(p, q, out)
    rows = len(out) if out.device.type != "cpu" else max(CACHED // max(out.shape[1], 1), 1)
    p = p[:, :, None]
    for start in range(0, len(out), rows):
        here = slice(start, start + rows)
        product = torch.mul(p[0, here], q[0], out=out[here])
        for k in range(1, len(q)):
            product += p[k, here] * q[k]


def compiled_for(device: torch.device) -> Any:
    """Compiled `orthonormalise` and `multiply`; None if they are not available, or switched off."""
    has_kernels = device.type == "cpu" and kernels.find(OneBit(), device) is not None
    return import_module("paceline.codecs.kernels.factors") if has_kernels else None
