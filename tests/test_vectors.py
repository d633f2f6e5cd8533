"""Passes over whole vectors: the kernel against float64, on any length, in every type, with any number of threads."""

from __future__ import annotations

import pytest
import torch

from paceline.codecs.kernels.vectors import BLOCK, squared_distance


def vectors(numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(numel)
    params, start, mean = (torch.randn(numel, generator=generator) for _ in range(3))
    return [params.to(dtype), start, mean]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("numel", [0, 1, 31, 32, 33, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77])
def test_distance_is_that_of_double_precision(numel: int, dtype: torch.dtype) -> None:
    params, start, mean = vectors(numel, dtype)
    exact = (params.double() - start.double() - mean.double()).square().sum()
    assert squared_distance(params, start, mean) == pytest.approx(float(exact), rel=1e-5)


def test_distance_has_the_same_bits_with_any_number_of_threads() -> None:
    given = vectors(1_000_003, torch.float32)
    before, found = torch.get_num_threads(), set[float]()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.add(squared_distance(*given))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


def test_distance_of_a_part_reads_only_that_part() -> None:
    params, start, mean = vectors(10_000, torch.float32)
    whole = [t.clone() for t in (params, start, mean)]
    for t in whole:
        t[:100], t[-100:] = torch.nan, torch.inf
    inner = slice(100, -100)
    assert squared_distance(*(t[inner] for t in whole)) == squared_distance(*(t[inner].clone() for t in (params, start, mean)))
