"""Random numbers, packing and sums, which the quantisers use."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.codecs.layout import bucketed, packed, root, row_sums, total, unpacked
from paceline.codecs.noise import seed_of, uniform


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Random numbers.


def test_uniform_numbers_are_multiples_of_a_step_from_0_to_below_1():
    u = uniform(1234567890123456789, 100_000)
    assert u.dtype == torch.float32 and u.min() >= 0 and u.max() < 1
    assert torch.equal((u * 2**24).round() / 2**24, u)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32, 2**63 - 1])
def test_uniform_numbers_are_uniform(seed: int):
    """Within 4 standard errors: the mean, the square, each bit, neighbours, and a histogram of 256 bins."""
    n = 2**17
    u = uniform(seed, n).double()
    assert abs(u.mean().item() - 1 / 2) < 4 * math.sqrt(1 / 12 / n)
    assert abs(u.square().mean().item() - 1 / 3) < 4 * math.sqrt(4 / 45 / n)
    words = (u * 2**24).long()
    for bit in range(24):
        assert abs((words >> bit & 1).double().mean().item() - 1 / 2) < 4 * math.sqrt(1 / 4 / n)
    for lag in (1, 2, 16, 32, 512):
        assert abs(((u[lag:] - 0.5) * (u[:-lag] - 0.5)).mean().item()) < 4 / 12 / math.sqrt(n - lag)
    counts = torch.bincount((u * 256).long(), minlength=256).double()
    chi2 = ((counts - n / 256).square() / (n / 256)).sum().item()
    assert abs(chi2 - 255) < 4 * math.sqrt(2 * 255)


@pytest.mark.parametrize("other", [1, 2**31, 2**32, 2**40])
def test_uniform_numbers_of_two_seeds_are_uncorrelated(other: int):
    n = 2**17
    a, b = uniform(0, n).double() - 0.5, uniform(other, n).double() - 0.5
    assert abs((a * b).mean().item()) < 4 / 12 / math.sqrt(n)


@given(start=st.integers(0, 2**33), seed=st.integers(0, 2**63 - 1))
def test_a_number_depends_only_on_its_seed_and_index(start: int, seed: int):
    assert torch.equal(uniform(seed, 8, start=start)[5:], uniform(seed, 3, start=start + 5))


def test_seeds_of_different_keys_and_counts_differ():
    """torch uses only the lower 32 bits of a seed: a key in the upper bits would have no effect."""
    assert len({seed_of(key, count) for key in range(200) for count in range(200)}) == 200 * 200
    assert all(0 <= seed_of(key, 2**40) < 2**32 for key in range(9))
    assert not torch.equal(
        torch.rand(9, generator=random(seed_of(1, 0))), torch.rand(9, generator=random(seed_of(2, 0)))
    )


# Layout.


@given(bits=st.sampled_from([2, 4, 8, 16]), codes=st.lists(st.integers(0, 2**16 - 1), max_size=90))
def test_packed_codes_round_trip_in_order(bits: int, codes: list[int]):
    padded = torch.tensor([c % 2**bits for c in codes] + [0] * (-len(codes) % 32), dtype=torch.int32)
    data = packed(padded, bits, len(codes))
    assert data.numel() == -(-len(codes) * bits // 8)
    assert unpacked(data, bits, len(codes)).tolist() == padded[: len(codes)].tolist()


@pytest.mark.parametrize("numel", [0, 1, 2, 511, 513, 512 * 512 + 1])
def test_totals_are_sums(numel: int):
    x = torch.arange(numel, dtype=torch.float32) % 8
    assert total(x).item() == x.sum().item()
    assert row_sums(bucketed(x, 32)).sum().item() == x.sum().item()


def test_roots_are_correctly_rounded():
    """On some processors torch's own are not."""
    x = uniform(1, 100_000) * 1000
    near = root(x)
    step = torch.nextafter(near, torch.tensor(torch.inf)).double() - near
    assert ((near - x.double().sqrt()).abs() <= step / 2).all()
