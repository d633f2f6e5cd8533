"""Passes over whole vectors: the bits of plain torch, on any length, in every type, with any number of threads."""

from __future__ import annotations

import pytest
import torch

from paceline.codecs.kernels.vectors import BLOCK, merge, set_out, squared_distance


def vectors(numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(numel)
    params, start, mean = (torch.randn(numel, generator=generator) for _ in range(3))
    return [params.to(dtype), start, mean]


every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
every_length = pytest.mark.parametrize("numel", [0, 1, 31, 32, 33, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77])


@every_dtype
@every_length
@pytest.mark.parametrize("is_kept", [False, True])
def test_setting_out_has_the_bits_of_a_subtraction(numel: int, dtype: torch.dtype, is_kept: bool) -> None:
    params, start, _ = vectors(numel, dtype)
    way, sent = torch.full((numel,), torch.nan), torch.full((numel,), torch.nan) if is_kept else None
    assert set_out(params, start, way, sent)
    assert torch.equal(way, params.float() - start)
    assert sent is None or torch.equal(sent, params.float())


@every_dtype
@every_length
@pytest.mark.parametrize("is_kept", [False, True])
def test_merging_has_the_bits_of_the_sums(numel: int, dtype: torch.dtype, is_kept: bool) -> None:
    params, start, mean = vectors(numel, dtype)
    sent = torch.randn(numel) if is_kept else None
    there = start + mean
    expected = (there if sent is None else there + (params.float() - sent)).to(dtype)
    merge(start, mean, params, sent)
    assert torch.equal(start, there) and torch.equal(params, expected)


@pytest.mark.parametrize("numel", [7, BLOCK + 3])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, -1])
def test_setting_out_finds_what_is_not_finite(numel: int, bad: float, at: int) -> None:
    params, start, _ = vectors(numel, torch.float32)
    params[at] = bad
    assert not set_out(params, start, torch.empty(numel), None)


@every_dtype
@every_length
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
