"""Passes over whole vectors: the bits of plain torch, for any length, dtype and number of threads."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch

from paceline.codecs.kernels.vectors import BLOCK, compute_delta, merge, squared_distance


def vectors(numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(numel)
    params, start, mean = (torch.randn(numel, generator=generator) for _ in range(3))
    return [params.to(dtype), start, mean]


every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
every_length = pytest.mark.parametrize("numel", [0, 1, 31, 32, 33, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77])


@every_dtype
@every_length
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_delta_has_the_bits_of_a_subtraction(numel: int, dtype: torch.dtype, is_kept: bool) -> None:
    params, start, _ = vectors(numel, dtype)
    delta, sent = torch.full((numel,), torch.nan), torch.full((numel,), torch.nan) if is_kept else None
    assert compute_delta(params, start, delta, sent)
    assert torch.equal(delta, params.float() - start)
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
def test_a_delta_finds_nonfinite_values(numel: int, bad: float, at: int) -> None:
    params, start, _ = vectors(numel, torch.float32)
    params[at] = bad
    assert not compute_delta(params, start, torch.empty(numel), None)


@every_dtype
@every_length
def test_distance_equals_that_in_double_precision(numel: int, dtype: torch.dtype) -> None:
    params, start, mean = vectors(numel, dtype)
    exact = (params.double() - start.double() - mean.double()).square().sum()
    assert squared_distance(params, start, mean) == pytest.approx(float(exact), rel=1e-5)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Generator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


LONG = 1_000_003  # Long enough to be divided between threads.


def test_a_delta_does_not_depend_on_the_number_of_threads(threads: int) -> None:
    params, start, _ = vectors(LONG, torch.float32)
    delta, sent = torch.full((2, LONG), torch.nan)
    assert compute_delta(params, start, delta, sent)
    assert torch.equal(delta, params - start) and torch.equal(sent, params)
    params[LONG // 2] = torch.nan
    assert not compute_delta(params, start, delta, sent)


def test_merging_does_not_depend_on_the_number_of_threads(threads: int) -> None:
    params, start, mean = vectors(LONG, torch.float32)
    sent = params.roll(1)
    expected = (start + mean) + (params - sent)
    merge(start, mean, params, sent)
    assert torch.equal(params, expected)


def test_distance_does_not_depend_on_the_number_of_threads(threads: int) -> None:
    given = vectors(LONG, torch.float32)
    found = squared_distance(*given)
    torch.set_num_threads(1)
    assert found == squared_distance(*given)


def test_distance_of_a_part_reads_only_that_part() -> None:
    params, start, mean = vectors(10_000, torch.float32)
    whole = [t.clone() for t in (params, start, mean)]
    for t in whole:
        t[:100], t[-100:] = torch.nan, torch.inf
    inner = slice(100, -100)
    assert squared_distance(*(t[inner] for t in whole)) == squared_distance(
        *(t[inner].clone() for t in (params, start, mean))
    )
