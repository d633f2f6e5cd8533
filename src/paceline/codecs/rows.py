"""Units of values by the rows of a model's tensors, for codecs with a scale for each unit.

The values of one output row of a weight have about the same size, and other rows have another size.  So a row is a
better unit than a bucket of the flat vector.  A unit is a row of the tensor; short rows are joined, and long ones are
split into equal parts.  A tensor of one dimension, such as a bias, is one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from paceline.codecs.layout import LANES

SHORTEST = 64  # Shorter rows are joined, up to this many values at least: two means take as much as 64 bits.
LONGEST = 1024  # Longer rows are split.

Rows = tuple[tuple[int, int], ...]
"""Runs of equal rows in the order of the vector: how many rows, and how many values a row has."""


@dataclass(frozen=True, slots=True)
class Units:
    """Where each unit begins in the vector, and in a message with one bit for each value; both with the end added.

    A unit's bits begin a new word of 32 bits.
    """

    starts: Any
    words: Any

    @property
    def count(self) -> int:
        return len(self.starts) - 1


def rows_of(shapes: Sequence[torch.Size]) -> Rows:
    """The rows of tensors of these shapes.

    >>> rows_of([torch.Size([10, 64]), torch.Size([10]), torch.Size([8, 3, 3, 3])])
    ((10, 64), (1, 10), (8, 27))
    """
    runs = [(s[0], s.numel() // s[0]) if len(s) > 1 and s[0] else (1, s.numel()) for s in shapes]
    return tuple((count, length) for count, length in runs if count * length)


@lru_cache(maxsize=4096)
def rows_within(rows: Rows, first: int, last: int) -> Rows:
    """The rows of the values from `first` to `last`; a row that is cut is a shorter one.

    >>> rows_within(((3, 100), (1, 7)), 150, 305)
    ((1, 50), (1, 100), (1, 5))
    """
    found: list[tuple[int, int]] = []
    start = 0
    for count, length in rows:
        begin = max(first - start, 0)
        end = min(last - start, count * length)
        start += count * length
        if begin >= end:
            continue
        whole_from = -(-begin // length)
        whole_to = end // length
        if whole_from > whole_to:  # Both ends are within one row.
            found.append((1, end - begin))
            continue
        runs = ((1, whole_from * length - begin), (whole_to - whole_from, length), (1, end - whole_to * length))
        found += [(n, values) for n, values in runs if n * values]
    return tuple(found)


@lru_cache(maxsize=1024)
def units_of(rows: Rows) -> Units:
    """The units of these rows.

    >>> units_of(((5, 40), (1, 10), (2, 784), (1, 1500))).starts.tolist()
    [0, 80, 160, 200, 210, 994, 1778, 2546, 3278]
    """
    parts = [np.array(_lengths(count, length), np.int64) for count, length in rows]
    lengths = np.concatenate([np.zeros(1, np.int64), *parts])
    return Units(lengths.cumsum(), (-(-lengths // LANES)).cumsum())


def _lengths(count: int, length: int) -> list[int]:
    """The lengths of the units of equal rows."""
    if length < SHORTEST:
        joined = -(-SHORTEST // length)
        return [joined * length] * (count // joined) + [count % joined * length] * (count % joined > 0)
    pieces = -(-length // LONGEST)
    # Whole words, so that only the last piece of a row needs padding.
    each = -(-length // (pieces * LANES)) * LANES if pieces > 1 else length
    return [min(each, length - at) for at in range(0, length, each)] * count
