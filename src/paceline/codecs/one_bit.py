"""1-bit SGD's quantiser (Seide et al., Interspeech 2014).

Of each value only this is sent: whether it is below the threshold of its unit.  The receiver reads a unit's values
below it as their mean, and the others as theirs.  A unit is an output row of a tensor, or a bucket of the vector.  Use
it with ErrorFeedback: alone it loses accuracy.  For a unit of two different values it is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.codecs.codec import Codec
from paceline.codecs.layout import (
    FEW,
    LANES,
    aligned,
    bucketed,
    check_bucket,
    check_scales,
    halved,
    packed,
    reals,
    row_sums,
)
from paceline.codecs.rows import Rows, Units, rows_of, rows_within, units_of

BUCKET = 512


@dataclass(frozen=True)
class OneBit(Codec):
    """One bit per value and two fp32 means per unit: about 28 times smaller than fp32.

    By default a unit is an output row of a tensor, if the codec is fitted to tensors.  `bucket` makes each bucket of
    this many values a unit.  A vector of unknown tensors has buckets of 512.

    The threshold is the "mean" of the unit, or "zero" as in CNTK.  The gradients of one row are often all of one sign,
    since the activations of a ReLU are; then zero tells none of them apart.
    """

    bucket: int | None = None
    threshold: Literal["mean", "zero"] = "mean"
    # The rows of the tensors; None: not fitted, or `bucket` was given.
    rows: Rows | None = field(default=None, repr=False, kw_only=True)

    is_coarse: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.bucket is not None:
            check_bucket(self, self.bucket)
        if self.threshold not in ("mean", "zero"):
            raise ValueError(f"OneBit(threshold={self.threshold!r}): the threshold of a unit is 'mean' or 'zero'")
        if self.rows is not None:
            object.__setattr__(self, "rows", tuple((int(count), int(length)) for count, length in self.rows))

    @property
    def unit(self) -> int:
        # A row may be cut at any word: its two parts are two units.
        return self.bucket_size if self.rows is None else LANES

    @property
    def bucket_size(self) -> int:
        """How many values a unit has if units are not rows."""
        return BUCKET if self.bucket is None else self.bucket

    def fitted(self, shapes: Sequence[torch.Size]) -> OneBit:
        return self if self.bucket is not None else replace(self, rows=rows_of(shapes))

    def part(self, where: slice) -> OneBit:
        if self.rows is None:
            return self
        first, last, _ = where.indices(sum(count * length for count, length in self.rows))
        return _part(self, first, last)

    def units(self, numel: int) -> Units | None:
        """The units of a vector of `numel` values, if they are rows; None if they are buckets."""
        if self.rows is None:
            return None
        units = units_of(self.rows)
        if units.starts[-1] != numel:
            raise ValueError(
                f"{self} was fitted to tensors of {units.starts[-1]} values in all, but was given {numel} values"
            )
        return units

    def scales(self, numel: int) -> int:
        """How many pairs of means a message has."""
        units = self.units(numel)
        return -(-numel // self.bucket_size) if units is None else units.count

    def nbytes(self, numel: int) -> int:
        units = self.units(numel)
        if units is not None:
            return 8 * units.count + LANES // 8 * int(units.words[-1])
        return 8 * self.scales(numel) + -(-numel // 8)

    def encode(self, x: Tensor, rng: torch.Generator | None = None) -> Tensor:
        units = self.units(x.numel())
        return self._encode_buckets(x) if units is None else self._encode_rows(x, self.rows or (), units)

    def _encode_buckets(self, x: Tensor) -> Tensor:
        rows = bucketed(x, self.bucket_size)
        real = reals(x.numel(), self.bucket_size, x.device)
        zero = rows.new_zeros(())
        threshold = row_sums(rows) / real if self.threshold == "mean" else zero.expand(len(rows))
        upper = rows >= threshold[:, None]
        above = row_sums(torch.where(upper, rows, zero))
        below = row_sums(torch.where(upper, zero, rows))
        # Padding is zero.  It must not be counted.
        uppers = upper.sum(1) - (self.bucket_size - real) * (threshold <= 0)
        means = self._means(x, above, below, uppers, real - uppers)
        return torch.cat([means, packed(upper, 1, x.numel())])

    def _encode_rows(self, x: Tensor, rows: Rows, units: Units) -> Tensor:
        place, first = _places(rows, x.device)
        words = x.new_zeros(int(units.words[-1]) * LANES, dtype=torch.float32)
        words[place] = x.detach().to(torch.float32).reshape(-1)
        real = torch.zeros_like(words, dtype=torch.bool)
        real[place] = True
        lengths = torch.from_numpy(units.starts).to(x.device).diff()
        zero = words.new_zeros(())
        mean = _unit_sums(words, first) / lengths if self.threshold == "mean" else zero.expand(units.count)
        upper = (words >= mean.repeat_interleave(LANES * first.diff())) & real
        above = _unit_sums(torch.where(upper, words, zero), first)
        below = _unit_sums(torch.where(upper, zero, words), first)
        uppers = F.pad(upper.view(-1, LANES).sum(1).cumsum(0), (1, 0))[first].diff()
        means = self._means(x, above, below, uppers, lengths - uppers)
        return torch.cat([means, packed(upper, 1, upper.numel())])

    def _means(self, x: Tensor, above: Tensor, below: Tensor, uppers: Tensor, lowers: Tensor) -> Tensor:
        if not (above.isfinite().all() and below.isfinite().all()):
            self.refuse(x.reshape(-1), "their sum is beyond float32")
        means = torch.stack([below / lowers.clamp(min=1), above / uppers.clamp(min=1)], dim=1)
        return means.view(-1).view(torch.uint8)

    def decode(self, data: Tensor, numel: int) -> Tensor:
        self.check(data, numel)
        data = aligned(data)
        scales = self.scales(numel)
        means = data[: 8 * scales].view(torch.float32).view(-1, 2)
        shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
        upper = ((data[8 * scales :, None] >> shifts) & 1).view(-1).bool()
        units = self.units(numel)
        if units is None:
            low, high = means.repeat_interleave(self.bucket_size, dim=0)[:numel].unbind(1)
            return torch.where(upper[:numel], high, low)
        lengths = torch.from_numpy(units.starts).to(data.device).diff()
        low, high = means.repeat_interleave(lengths, dim=0).unbind(1)
        return torch.where(upper[_places(self.rows or (), data.device)[0]], high, low)

    def check(self, data: Tensor, numel: int) -> None:
        super().check(data, numel)
        check_scales(self, data, 2 * self.scales(numel))


@lru_cache(maxsize=1024)
def _part(codec: OneBit, first: int, last: int) -> OneBit:
    """The codec for the values from `first` to `last`: the same ones are asked for in every step."""
    assert codec.rows is not None
    return replace(codec, rows=rows_within(codec.rows, first, last))


def _places(rows: Rows, device: torch.device) -> tuple[Tensor, Tensor]:
    """The place of each value if every unit begins a new word; and the first word of each unit, with the end added."""
    is_few = sum(count * length for count, length in rows) <= FEW
    return _few_places(rows, device) if is_few else _found_places(rows, device)


def _found_places(rows: Rows, device: torch.device) -> tuple[Tensor, Tensor]:
    units = units_of(rows)
    starts = torch.from_numpy(units.starts).to(device)
    first = torch.from_numpy(units.words).to(device)
    gaps = (LANES * first[:-1] - starts[:-1]).repeat_interleave(starts.diff())
    return torch.arange(int(units.starts[-1]), device=device) + gaps, first


_few_places = lru_cache(maxsize=256)(_found_places)


def _unit_sums(values: Tensor, first: Tensor) -> Tensor:
    """The sum of each unit's words, in the order of `row_sums`."""
    words = values.view(-1, LANES)
    counts = first.diff()
    if len(words) == len(counts) and bool((counts == 1).all()):
        return halved(words + 0.0)
    lanes = words.new_zeros(len(counts), LANES)
    for j in range(int(counts.max()) if len(counts) else 0):
        has = (counts > j).nonzero()[:, 0]
        lanes[has] += words[first[has] + j]
    return halved(lanes)
