"""Quantisers, beyond the laws for every codec: error bounds of the linear ones, mean and noise of the random ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor

from paceline.codecs import QSGD, BFloat16, Codec, ErrorFeedback, Fp8, Fp16, Fp32, NBit, TernGrad, Unencodable
from paceline.collectives import SyncVote, mean_encoded
from tests.laws.ranks import Ranks, on_simulator
from tests.laws.slots import Slots
from tests.laws.tasks import numbers

EPS = 2.0**-23


def random(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def decoded(codec: Codec, x: Tensor, seed: int = 5) -> Tensor:
    return codec.decode(codec.encode(x, random(seed)), x.numel())


def values(least: int = 1, most: int = 600) -> st.SearchStrategy[list[float]]:
    """Values like gradients; none so small that its square underflows."""
    return st.lists(
        st.floats(-1000, 1000, width=32).map(lambda v: v if abs(v) > 1e-15 else 0.0), min_size=least, max_size=most
    )


def deviation(rows: Tensor) -> Tensor:
    return rows.double().square().mean(-1).sqrt()


# B3: n bits.


def slots(codec: NBit) -> int:
    return 2**codec.bits - 1


every_width = pytest.mark.parametrize("bits", [2, 4, 8, 16])


def test_n_bit_sends_codes_and_one_scale_per_bucket():
    assert [NBit(bits).nbytes(512) for bits in (2, 4, 8, 16)] == [4 + 128, 4 + 256, 4 + 512, 4 + 1024]
    assert [NBit(2).nbytes(n) for n in (0, 1, 4, 5, 513)] == [0, 5, 5, 6, 8 + 129]
    assert NBit(16, bucket=64).nbytes(65) == 8 + 130


@every_width
@given(numbers=values())
def test_n_bit_has_an_error_of_at_most_half_a_slot(bits: int, numbers: list[float]):
    """Within 4 sigma, up to float32's rounding of sigma, of the slot's index, and of the decoded value."""
    x = torch.tensor(numbers)
    codec = NBit(bits, bucket=64)
    for row in x.split(64):
        sigma = deviation(row).item()
        inside = row.abs() < 4 * sigma * (1 - 1e-5)
        error = (decoded(codec, row) - row).abs()[inside]
        assert (error <= 4 * sigma / slots(codec) * (1 + 1e-5) + 8 * EPS * 4 * sigma).all()


@every_width
@given(numbers=values(most=40), zeros=st.integers(1, 40))
def test_n_bit_decodes_zero_as_zero(bits: int, numbers: list[float], zeros: int):
    x = torch.tensor([*numbers, *[0.0] * zeros, *[-0.0] * zeros])
    assert not decoded(NBit(bits), x)[len(numbers) :].count_nonzero()


@every_width
def test_n_bit_clips_values_beyond_four_deviations(bits: int):
    """To 4 sigma above; to the middle of the lowest slot below, because there is no lower code."""
    x = torch.zeros(512)
    for sign in (1, -1):
        x[7] = 100.0 * sign
        hi = 4 * deviation(x).item()
        clipped = hi if sign > 0 else -(hi - hi / slots(NBit(bits)))
        assert decoded(NBit(bits), x)[7].item() == pytest.approx(clipped, rel=1e-6)


def test_n_bit_errs_half_as_much_with_every_further_bit():
    """Proportional to the size of slots, while they are small compared with sigma and nothing is clipped."""
    x = numbers(2**16, dtype=torch.float32).clamp(-3, 3)
    errors = {bits: (decoded(NBit(bits), x).double() - x).square().mean().sqrt().item() for bits in (4, 8, 16)}
    assert errors[4] / errors[8] == pytest.approx(255 / 15, rel=0.03)
    assert errors[8] / errors[16] == pytest.approx(65535 / 255, rel=0.03)
    assert errors[4] < (decoded(NBit(2), x) - x).square().mean().sqrt().item() / 2


@every_width
@given(numbers=values(most=80), power=st.integers(-6, 6))
def test_n_bit_is_equivariant_to_powers_of_two(bits: int, numbers: list[float], power: int):
    x = torch.tensor(numbers)
    assert torch.equal(decoded(NBit(bits), x * 2.0**power), decoded(NBit(bits), x) * 2.0**power)


def test_n_bit_keeps_tiny_values_in_the_residual_and_raises_for_too_large_ones():
    codec_state = ErrorFeedback(NBit(), torch.zeros(40), None)
    tiny = torch.full((40,), 1e-30)
    assert not NBit().decode(codec_state.encode(tiny), 40).count_nonzero()
    assert torch.equal(codec_state.residual, tiny)
    with pytest.raises(
        Unencodable, match=r"NBit\(bits=4, bucket=512\) cannot encode 40 values up to 1e\+25: .*squares"
    ):
        NBit().encode(torch.full((40,), 1e25))


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (lambda: NBit(3), "NBit(bits=3, bucket=512): "),
        (lambda: NBit(1), "OneBit"),
        (lambda: NBit(4, bucket=0), "NBit(bits=4, bucket=0): "),
        (lambda: QSGD(levels=0), "QSGD(levels=0, "),
        (lambda: QSGD(levels=32768), "QSGD(levels=32768, "),
        (lambda: QSGD(bucket=-32), "bucket=-32"),
        (lambda: QSGD(norm="l1"), "norm='l1'"),
        (lambda: QSGD(reduction="factors"), "reduction='factors'"),
        (lambda: TernGrad(reduction=2), "TernGrad(reduction=2)"),
        (lambda: TernGrad(clip=0.0), "TernGrad(clip=0.0, "),
        (lambda: TernGrad(clip=math.nan), "TernGrad(clip=nan, "),
        (lambda: TernGrad(clip=math.inf), "TernGrad(clip=inf, "),
        (lambda: TernGrad(clip=1e-60), "TernGrad(clip=1e-60, "),
        (lambda: Fp8(format="e3m4"), "Fp8(format='e3m4', "),
        (lambda: Fp8(bucket=20), "bucket=20"),
    ],
)
def test_invalid_settings_raise(make: Any, shown: str):
    with pytest.raises(ValueError) as refused:
        make()
    assert shown in str(refused.value)


# B4 and B7: random rounding.

RANDOM = {
    "qsgd": (QSGD(bucket=64), 127),
    "qsgd, 7 levels": (QSGD(levels=7, bucket=64), 7),
    "qsgd, 1 level": (QSGD(levels=1, bucket=64), 1),
    "qsgd, 1000 levels of the largest": (QSGD(levels=1000, bucket=64, norm="max"), 1000),
}
every_random = pytest.mark.parametrize(("codec", "levels"), RANDOM.values(), ids=RANDOM)
DRAWS = 4096


def norm_of(codec: Codec, v: Tensor) -> float:
    return v.double().norm().item() if isinstance(codec, QSGD) and codec.norm == "l2" else v.double().abs().max().item()


def noise(v: Tensor, norm: float, levels: int) -> Tensor:
    """The exact variance of each value: of a coin flip between two levels."""
    part = (v.double().abs() * levels / norm).frac()
    return (norm / levels) ** 2 * part * (1 - part)


def assert_unbiased(draws: Tensor, v: Tensor, variance: Tensor) -> None:
    """All means at once: the squares of n normal deviates add up to n, give or take 4 standard errors of sqrt(2n)."""
    settled = variance < 1e-12 * v.square().max()
    assert torch.allclose(draws[:, settled].double(), v[settled].double(), rtol=1e-5)
    deviates = (draws.double().mean(0) - v)[~settled] / (variance[~settled] / len(draws)).sqrt()
    n = deviates.numel()
    assert n > 9 and abs(deviates.square().sum().item() - n) < 4 * math.sqrt(2 * n)


def assert_noise(draws: Tensor, v: Tensor, variance: Tensor) -> None:
    squares = (draws.double() - v).square().sum(1)
    assert abs(squares.mean().item() - variance.sum().item()) < 4 * squares.std().item() / math.sqrt(len(draws))


@every_random
def test_random_rounding_is_unbiased_and_has_the_variance_of_a_coin(codec: Codec, levels: int):
    v = numbers(64, dtype=torch.float32)
    draws = decoded(codec, v.repeat(DRAWS)).view(DRAWS, 64)
    variance = noise(v, norm_of(codec, v), levels)
    assert_unbiased(draws, v, variance)
    assert_noise(draws, v, variance)


def test_random_rounding_draws_new_numbers_for_each_message():
    """As within one message: over messages from one generator."""
    v, rng, codec = numbers(64, dtype=torch.float32), random(), QSGD(levels=7)
    draws = torch.stack([codec.decode(codec.encode(v, rng), 64) for _ in range(800)])
    variance = noise(v, v.norm().item(), 7)
    assert_unbiased(draws, v, variance)
    assert_noise(draws, v, variance)


@pytest.mark.parametrize("bucket", [64, 512])
@pytest.mark.parametrize("levels", [1, 4, 16, 127])
def test_qsgd_keeps_its_bounds_on_noise_and_density(levels: int, bucket: int):
    """On average over draws, with a margin: the bounds are for the worst vector."""
    codec, v = QSGD(levels=levels, bucket=bucket), numbers(bucket, dtype=torch.float32)
    draws = decoded(codec, v.repeat(500)).view(500, bucket)
    error = (draws.double() - v).square().sum(1).mean().item()
    assert 0 < error <= min(bucket / levels**2, math.sqrt(bucket) / levels) * v.double().square().sum().item()
    assert draws.count_nonzero().item() / 500 <= levels * (levels + math.sqrt(bucket))


@given(
    numbers=values(),
    levels=st.sampled_from([1, 2, 7, 100, 127, 128, 32767]),
    norm=st.sampled_from(["l2", "max"]),
    seed=st.integers(0, 99),
)
@example([3e38] * 3, 127, "max", 0)
def test_qsgd_keeps_signs_and_never_leaves_its_levels(numbers: list[float], levels: int, norm: Any, seed: int):
    x, codec = torch.tensor(numbers), QSGD(levels=levels, bucket=64, norm=norm)
    for row in x.split(64):
        level = decoded(codec, row, seed).double() * levels / max(norm_of(codec, row), 1e-300)
        assert (level.abs() <= levels * (1 + 4 * EPS)).all()
        assert torch.allclose(level, level.round(), rtol=4 * EPS, atol=0)
        assert (level * row >= 0).all()
        assert (
            (level.abs() - row.double().abs() * levels / max(norm_of(codec, row), 1e-300)).abs() <= 1 + levels * 8 * EPS
        ).all()


@given(grid=st.lists(st.integers(-127, 127), max_size=63), power=st.integers(-9, 9), seed=st.integers(0, 999))
def test_qsgd_is_exact_on_its_grid_for_any_seed(grid: list[int], power: int, seed: int):
    x = torch.tensor([127.0, *grid]) * 2.0**power
    assert torch.equal(decoded(QSGD(norm="max", bucket=64), x, seed), x)
    triangle = torch.tensor([3.0, 0.0, -4.0]) * 2.0**power
    assert torch.equal(decoded(QSGD(levels=5), triangle, seed), triangle)


def test_qsgd_uses_the_fewest_bits_that_hold_its_levels():
    bits = {1: 2, 2: 4, 7: 4, 8: 8, 127: 8, 128: 16, 32767: 16}
    assert {levels: QSGD(levels=levels).bits for levels in bits} == bits
    assert [QSGD().nbytes(n) for n in (0, 1, 512, 513)] == [0, 5, 516, 521]


@pytest.mark.parametrize("tiny", [0.0, -0.0, 1e-45, -1e-40])
def test_a_norm_too_small_to_divide_by_is_sent_as_zeros(tiny: float):
    for codec in (QSGD(norm="max"), QSGD(), TernGrad(clip=None), TernGrad(), Fp8()):
        assert not decoded(codec, torch.full((40,), tiny)).count_nonzero()


@pytest.mark.parametrize("codec", [QSGD(norm="max"), QSGD(levels=100, norm="max"), Fp8(), Fp8("e5m2")], ids=str)
def test_the_largest_float_decodes_as_finite_or_raises(codec: Codec):
    """A norm divided by the levels and multiplied again may be a bit larger."""
    top, verdicts = torch.finfo(torch.float32).max, set[bool]()
    for ulps in range(40):
        x = torch.tensor([top * (1 - ulps * 2**-24), 1.0])
        try:
            assert decoded(codec, x).isfinite().all()
            verdicts.add(True)
        except Unencodable:
            verdicts.add(False)
    assert True in verdicts


def worker(codec: Codec, key: int, count: int = 0) -> ErrorFeedback:
    return ErrorFeedback(codec, None, key=key, count=torch.tensor([count]))


def means_of(path: Path, codec: Codec, ranks: int, draws: int) -> tuple[Tensor, Tensor]:
    """Means over ranks of the same buckets of 64 values, encoded `draws` times; and the variance of one rounding each.

    The variance is that of the mean of independent roundings, one for each rank, by the formula of a coin.
    """
    vectors = [numbers(64, seed=rank, dtype=torch.float32) for rank in range(ranks)]

    async def law(endpoint: Any) -> Any:
        x = vectors[endpoint.rank].repeat(draws)
        await mean_encoded(endpoint, x, SyncVote(1.0), codec.codec_state(Slots(), x, key=endpoint.rank))
        return x.view(draws, 64)

    exact = [v.double().abs() * 7 / v.double().norm() for v in vectors]
    coins = [
        (e - e.floor()) * (1 - e + e.floor()) * (v.double().norm() / 7) ** 2
        for e, v in zip(exact, vectors, strict=True)
    ]
    return Ranks(on_simulator, is_ordered=True, is_real=False)(path, ranks, law)[0].double(), sum(coins) / ranks**2


@pytest.mark.parametrize(("ranks", "reduction"), [(2, "auto"), (4, "gather"), (4, "auto"), (4, "stripes")])
def test_a_mean_is_unbiased_and_has_the_noise_of_one_rounding_or_of_two(ranks: int, reduction: Any, tmp_path: Path):
    """The mean of 2000 draws lies within 5 standard errors; the variance of all 64 values within 5 %."""
    got, once = means_of(tmp_path, QSGD(levels=7, bucket=64, reduction=reduction), ranks, 2000)
    exact = sum(numbers(64, seed=rank) for rank in range(ranks)) / ranks
    variance = got.var(0)
    assert ((got.mean(0) - exact).abs() <= 5 * (variance / 2000).sqrt() + 1e-6).all()
    ratio = float(variance.sum() / once.sum())
    if ranks == 2 or reduction == "gather":
        assert ratio == pytest.approx(1.0, rel=0.05)
    else:
        # The second rounding is of a vector that is half as long, and not divided by 4 ranks.
        assert 1.6 < ratio < 2.4


@pytest.mark.parametrize("codec", [QSGD(levels=7, bucket=64), TernGrad(clip=None)], ids=str)
def test_the_noise_of_workers_is_independent_and_averages_out(codec: Codec):
    """The average of N workers has 1/N of the noise; with the same random numbers it would have all of it."""
    workers, v = 8, numbers(64, dtype=torch.float32).repeat(512)
    levels = codec.levels if isinstance(codec, QSGD) else 1
    variance = noise(v, norm_of(codec, v[:64]), levels).sum().item()

    def noise_of_mean(keys: list[int]) -> float:
        mean = sum(codec.decode(worker(codec, key).encode(v), v.numel()).double() for key in keys) / len(keys)
        return (mean - v).square().sum().item() / variance

    slack = 4 * math.sqrt(2 / v.numel()) * 2  # A coin's fourth moment is below 5 times its squared variance here.
    assert noise_of_mean([*range(workers)]) == pytest.approx(1 / workers, rel=slack)
    assert noise_of_mean([3] * workers) == pytest.approx(1, rel=slack)


def test_messages_of_a_worker_are_independent_and_can_be_repeated():
    v, codec_state = numbers(2000, dtype=torch.float32), worker(QSGD(), 4)
    first, second = codec_state.encode(v), codec_state.encode(v)
    assert not torch.equal(first, second)
    assert torch.equal(worker(QSGD(), 4, count=1).encode(v), second), (
        "message 1 follows from the key and its number alone"
    )
    assert torch.equal(codec_state[:].encode(v), worker(QSGD(), 4, count=2).encode(v)), "slices count on"


@given(numbers=values(most=200), seed=st.integers(0, 2**31))
def test_terngrad_without_clipping_is_qsgd_with_one_level_of_the_largest(numbers: list[float], seed: int):
    x = torch.tensor(numbers)
    other = QSGD(levels=1, bucket=512, norm="max")
    assert torch.equal(TernGrad(clip=None).encode(x, random(seed)), other.encode(x, random(seed)))


def test_terngrad_sends_two_bits_per_value_and_one_scale():
    assert [TernGrad().nbytes(n) for n in (0, 1, 4, 5, 10_000)] == [0, 5, 5, 6, 2504]


def test_terngrad_is_unbiased_unless_it_clips():
    """Clipped values decode as at most the scale, which is too small; the others stay unbiased."""
    v = numbers(64, dtype=torch.float32)
    v[:2] = torch.tensor([8.0, -9.0])
    draws = torch.stack([decoded(TernGrad(clip=None), v, seed) for seed in range(800)])
    assert_unbiased(draws, v, noise(v, 9.0, 1))
    assert_noise(draws, v, noise(v, 9.0, 1))
    hits = draws.count_nonzero().item() / 800
    expected, spread = v.abs().sum().item() / 9, (noise(v, 9.0, 1) / 81).sum().sqrt().item()
    assert abs(hits - expected) < 4 * spread / math.sqrt(800)

    clipped = torch.stack([decoded(TernGrad(clip=2.5), v, seed) for seed in range(800)])
    scale = 2.5 * deviation(v).item()
    assert scale < 8 and torch.allclose(clipped[:, :2], torch.tensor([scale, -scale]), rtol=1e-5)
    assert_unbiased(clipped[:, 2:], v[2:], noise(v[2:], scale, 1))


@given(value=st.floats(-1000, 1000, width=32), numel=st.integers(1, 9), seed=st.integers(0, 99))
def test_terngrad_is_exact_for_equal_values(value: float, numel: int, seed: int):
    """A single value too: its deviation is about 0, or it would be clipped to 0."""
    assume(value == 0 or abs(value) > 1e-15)
    x = torch.full((numel,), value)
    assert torch.allclose(decoded(TernGrad(), x, seed), x, rtol=1e-6, atol=0)


# B9: casts.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@given(
    numbers=st.lists(st.floats(2.0**-100, 2.0**100, width=32), min_size=1, max_size=100), sign=st.sampled_from([-1, 1])
)
def test_bfloat16_has_an_error_of_at_most_half_an_ulp(dtype: torch.dtype, numbers: list[float], sign: int):
    x = sign * torch.tensor(numbers, dtype=dtype)
    assert ((decoded(BFloat16(), x) - x).abs() <= 2**-8 * x.abs()).all()


FP8 = {"e4m3": (2**-4, 448 / 2**-6), "e5m2": (2**-3, 57344 / 2**-14)}


@pytest.mark.parametrize("format", FP8)
@given(numbers=values(most=200))
def test_fp8_has_an_error_of_at_most_half_an_ulp(format: Any, numbers: list[float]):
    """Of the value if it is normal after scaling by the bucket's largest; otherwise of the smallest normal."""
    relative, span = FP8[format]
    x = torch.tensor(numbers)
    for row in x.split(64):
        error = (decoded(Fp8(format, bucket=64), row) - row).abs()
        assert (error <= (relative + 4 * EPS) * row.abs().clamp(min=row.abs().max() / span)).all()


@pytest.mark.parametrize("format", FP8)
@given(numbers=values(most=90))
def test_fp8_keeps_signs_and_the_largest(format: Any, numbers: list[float]):
    x = torch.tensor(numbers)
    y = decoded(Fp8(format), x)
    assert (x * y >= 0).all()
    assert y.abs().max().item() == pytest.approx(x.abs().max().item(), rel=4 * EPS)


@pytest.mark.parametrize("large", [1e5, -65520.0])
def test_fp8_scales_values_for_which_fp16_raises(large: float):
    x = torch.tensor([1.0, large, 2.0])
    assert decoded(Fp8(), x)[1].item() == pytest.approx(large, rel=1e-6)
    with pytest.raises(Unencodable, match=rf"Fp16\(\) cannot encode {large:g} at index 1: fp16 ends at 65504"):
        Fp16().encode(x)


def test_bfloat16_raises_for_values_that_would_become_infinity():
    x = torch.tensor([1.0, 3.4e38])
    with pytest.raises(
        Unencodable, match=r"BFloat16\(\) cannot encode 3\.4e\+38 at index 1: bfloat16 ends at 3\.38953e\+38"
    ):
        BFloat16().encode(x)
    assert decoded(BFloat16(), torch.full((9,), 3.38e38)).isfinite().all()  # Though their sum is not.


def test_casts_have_the_length_of_nbytes():
    million = 14_600_000
    assert (Fp32().nbytes(million), Fp16().nbytes(million), BFloat16().nbytes(million)) == (
        58_400_000,
        29_200_000,
        29_200_000,
    )
    assert [Fp8().nbytes(n) for n in (0, 1, 512, 513)] == [0, 5, 516, 521]


@pytest.mark.parametrize("codec", [Fp32(), Fp16(), BFloat16()], ids=str)
def test_encoded_vectors_can_be_summed_in_their_wire_dtype(codec: Codec):
    x, y = (torch.randint(-100, 100, (99,), generator=random(seed)).float() for seed in (1, 2))
    assert codec.wire is not None
    total_of_both = codec.encode(x).view(codec.wire) + codec.encode(y).view(codec.wire)
    assert torch.equal(codec.decode(total_of_both.view(torch.uint8), 99), x + y)


def test_only_biased_and_coarse_codecs_use_feedback():
    assert {type(c).__name__ for c in (NBit(), QSGD(), TernGrad(), Fp16(), BFloat16(), Fp8()) if c.feedback} == {
        "NBit",
        "Fp8",
    }
    assert {type(c).__name__ for c in (NBit(), QSGD(), TernGrad(), Fp16(), BFloat16(), Fp8()) if c.is_random} == {
        "QSGD",
        "TernGrad",
    }
