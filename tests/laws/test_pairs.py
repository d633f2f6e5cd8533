"""Reduced tables of cases: every two values of different parameters are still in one row."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.laws.pairs import pairwise


@pytest.mark.parametrize(
    ("sizes", "rows"), [((5, 7), 35), ((70, 4, 3), 280), ((3, 4, 70), 280), ((3, 3, 3, 3), 12), ((2,) * 8, 12)], ids=str
)
def test_every_two_values_are_together_in_one_of_few_rows(sizes: tuple[int, ...], rows: int):
    found = pairwise(*(range(size) for size in sizes))
    for a, b in combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in found} == set(product(range(sizes[a]), range(sizes[b])))
    assert len(found) <= rows and len(found) == len(set(found))
    assert found == pairwise(*(range(size) for size in sizes))
