"""Fewer cases than the full product: every two values of different parameters are still together in one of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

Pair = tuple[tuple[int, int], tuple[int, int]]  # (parameter, index of its value), twice, the lower parameter first.


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows with a value for each parameter.  The same parameters always give the same rows."""
    sizes = [len(values) for values in parameters]
    left: dict[Pair, None] = {
        ((a, i), (b, j)): None
        for a, b in combinations(range(len(sizes)), 2)
        for i in range(sizes[a])
        for j in range(sizes[b])
    }
    uses = [[0] * size for size in sizes]
    rows: list[tuple[Any, ...]] = []
    while left:
        row: dict[int, int] = dict(next(iter(left)))
        for parameter in range(len(sizes)):
            if parameter not in row:
                row[parameter] = min(
                    range(sizes[parameter]),
                    key=lambda value, parameter=parameter: (
                        -sum(_pair((parameter, value), other) in left for other in row.items()),
                        uses[parameter][value],
                    ),
                )
        for parameter, value in row.items():
            uses[parameter][value] += 1
        for one, other in combinations(sorted(row.items()), 2):
            left.pop((one, other), None)
        rows.append(tuple(values[row[parameter]] for parameter, values in enumerate(parameters)))
    return rows


def _pair(one: tuple[int, int], other: tuple[int, int]) -> Pair:
    return (one, other) if one < other else (other, one)
