"""Laws for every codec, alone and with error feedback, and more for OneBit and Fp16."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline import codecs
from paceline.codecs import Codec, ErrorFeedback, Fp16, Fp32, OneBit
from paceline.server import RULES as KNOWN_RULES
from tests.in_turn import in_turn
from tests.laws.every import CODECS, RULES, SETTLES
from tests.laws.slots import Slots
from tests.laws.tasks import numbers, same

SIZES = [0, 1, 7, 8, 9, 31, 33, 511, 512, 513, 1023, 2**16 + 3]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

CPU = torch.device("cpu")
SETTLING = {name: (CODECS[name], steps) for name, steps in SETTLES.items() if steps is not None}

every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
every_settling_codec = pytest.mark.parametrize(("codec", "steps"), SETTLING.values(), ids=SETTLING)
every_size = in_turn(numel=SIZES)


few_examples = settings(max_examples=20)  # Of every codec.


def random(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def decoded(codec: Codec, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x, random()), x.numel())


def feedback(codec: Codec, numel: int, dtype: torch.dtype = torch.float64) -> ErrorFeedback:
    return ErrorFeedback(codec, torch.zeros(numel, dtype=dtype), torch.zeros(numel, dtype=dtype), random())


def moderate(width: int = 32, *, least: int = 0, most: int = 700) -> st.SearchStrategy[list[float]]:
    """Values like gradients: far from the end of any format, with zeros of both signs and denormals."""
    return st.lists(st.floats(-1000, 1000, width=width), min_size=least, max_size=most)


def test_every_codec_and_every_rule_is_tested_by_these_laws():
    assert {type(c) for c in CODECS.values()} == set(codecs.CODECS)
    assert {type(r) for r in RULES.values()} == set(KNOWN_RULES)


@every_codec
@every_size
def test_encoded_length_equals_nbytes(codec: Codec, numel: int):
    data = codec.encode(numbers(numel, dtype=torch.float32), random())
    assert data.dtype == torch.uint8 and data.dim() == 1
    assert data.numel() <= codec.most_nbytes(numel)
    assert codec.nbytes(numel) in (None, data.numel())
    values = codec.decode(data, numel)
    assert values.dtype == torch.float32 and values.shape == (numel,) and values.isfinite().all()


@every_codec
@every_size
def test_bytes_of_a_wrong_length_raise_an_error_with_the_codecs_name(codec: Codec, numel: int):
    data = codec.encode(numbers(numel, dtype=torch.float32), random())
    too_long = torch.cat([data, torch.zeros(1, dtype=torch.uint8)])
    for wrong in [too_long, data[:-1]] if numel else [too_long]:
        with pytest.raises(ValueError, match=f"{type(codec).__name__}.* {numel} values .*given {wrong.numel()} bytes"):
            codec.decode(wrong, numel)


@every_codec
def test_a_tensor_that_is_not_1d_uint8_raises_an_error_with_the_codecs_name(codec: Codec):
    data = codec.encode(torch.ones(8), random())
    for wrong in (data.to(torch.int8), data[None]):
        with pytest.raises(ValueError, match=f"{type(codec).__name__}.*uint8"):
            codec.decode(wrong, 8)


@every_codec
@every_size
def test_zeros_are_sent_as_zeros_and_leave_no_residual(codec: Codec, numel: int):
    codec_state = feedback(codec, numel)
    for _ in range(3):
        assert not codec.decode(codec_state.encode(torch.zeros(numel)), numel).count_nonzero()
    assert not codec_state.residual.count_nonzero()


@every_codec
@in_turn(dtype=[torch.float32, torch.float64], at=[0, 517, 1029], bad=[math.nan, math.inf, -math.inf])
def test_a_nonfinite_value_survives_or_raises_an_error_with_its_index(
    codec: Codec, bad: float, at: int, dtype: torch.dtype
):
    """A kernel restores its residual.  That rounds twice, by half an ulp of the largest number involved."""
    x = numbers(1030, dtype=torch.float32)
    largest = (x.abs() + numbers(1030, seed=1).abs()).max().item()
    x[at] = bad
    codec_state = feedback(codec, 1030, dtype)
    codec_state.residual.copy_(before := numbers(1030, seed=1, dtype=dtype))
    try:
        values = decoded(codec, x)
    except ValueError as error:
        assert type(codec).__name__ in str(error) and f"index {at}" in str(error) and f"{bad:g}" in str(error)
        with pytest.raises(ValueError, match=f"index {at}"):
            codec_state.encode(x)
        error = (codec_state.residual - before).abs().max().item()
        assert error <= 2 * torch.finfo(dtype).eps * largest, "a vector that raises must not change the residual"
    else:
        assert values[at].item() == bad or (math.isnan(bad) and values[at].isnan())
        assert same(values[torch.arange(1030) != at], x[torch.arange(1030) != at])


@every_codec
@few_examples
@given(values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=80))
@example([3e38, 3e38, -3e38, -3e38])  # Their sums overflow, their means do not.
def test_finite_values_decode_as_finite_or_raise_an_error_with_the_codecs_name(codec: Codec, values: list[float]):
    try:
        read = decoded(codec, torch.tensor(values))
    except ValueError as error:
        assert type(codec).__name__ in str(error)
    else:
        assert read.isfinite().all()


@every_codec
@few_examples
@given(values=moderate(most=80), seed=st.integers(0, 2**31))
def test_same_values_and_generator_give_the_same_bytes(codec: Codec, values: list[float], seed: int):
    x = torch.tensor(values)
    assert torch.equal(codec.encode(x, random(seed)), codec.encode(x.clone(), random(seed)))


@every_codec
@every_size
def test_memory_layout_does_not_matter(codec: Codec, numel: int):
    x = numbers(2 * numel, dtype=torch.float32)[::2]
    data = codec.encode(x, random())
    assert torch.equal(data, codec.encode(x.clone(), random()))
    for shift in (1, 2, 4, 8):  # Out of the middle of a longer message, as collectives read it.
        message = torch.cat(
            [torch.full((shift,), 255, dtype=torch.uint8), data, torch.full((3,), 255, dtype=torch.uint8)]
        )
        assert same(codec.decode(message[shift : shift + data.numel()], numel), codec.decode(data, numel))


@every_codec
@in_turn(dtype=DTYPES)
def test_any_floating_point_dtype_is_accepted_and_not_modified(codec: Codec, dtype: torch.dtype):
    x = numbers(1023, dtype=dtype)
    before = x.clone()
    data = codec.encode(x, random())
    codec_state = feedback(codec, 1023, dtype)
    codec_state.encode(x)
    assert same(x, before)
    assert codec_state.residual.dtype == dtype
    assert torch.equal(data, codec.encode(before.float(), random()))
    kept = data.clone()
    codec.decode(data, 1023)
    assert torch.equal(data, kept)


@every_codec
@in_turn(dtype=DTYPES)
def test_encoded_bytes_do_not_change_when_the_values_change(codec: Codec, dtype: torch.dtype):
    x = numbers(1023, dtype=dtype)
    data = codec.encode(x, random())
    before = data.clone()
    x.zero_()
    assert torch.equal(data, before)


@every_codec
def test_a_tensor_that_requires_grad_can_be_encoded(codec: Codec):
    x = numbers(9, dtype=torch.float32).requires_grad_()
    assert not codec.encode(x * 2, random()).requires_grad


# B0: error feedback.


@every_codec
@in_turn(numel=[1, 9, 1023], dtype=[torch.float32, torch.float64])
def test_sent_values_plus_residual_equal_the_given_values(codec: Codec, dtype: torch.dtype, numel: int):
    """Each of the T steps rounds twice, in u = g + r and in r = u - D(q), by half an ulp of the largest u."""
    codec_state, steps = feedback(codec, numel, dtype), 30
    codec_state.residual.copy_(start := numbers(numel, seed=99, dtype=dtype))
    expected, received, largest = start.double(), torch.zeros(numel, dtype=torch.float64), 0.0
    for t in range(steps):
        g = numbers(numel, seed=t, dtype=dtype)
        largest = max(largest, (g + codec_state.residual).abs().max().item())
        expected += g.double()
        received += codec.decode(codec_state.encode(g), numel).double()
    error = (received + codec_state.residual.double() - expected).abs().max().item()
    assert error <= steps * torch.finfo(dtype).eps * 2 * largest


@every_codec
@few_examples
@given(values=moderate(64, least=1, most=100), steps=st.integers(1, 8))
def test_the_average_of_sent_values_equals_a_constant_gradient_up_to_the_residual(
    codec: Codec, values: list[float], steps: int
):
    """The average of the sent values differs from g by r_T/T, up to float64's rounding of values below 1000 T."""
    g = torch.tensor(values, dtype=torch.float64)
    codec_state, received = feedback(codec, g.numel()), torch.zeros_like(g)
    for _ in range(steps):
        received += codec.decode(codec_state.encode(g), g.numel())
    assert torch.allclose(received / steps, g - codec_state.residual / steps, rtol=0, atol=1e-9)


@every_settling_codec
def test_bias_vanishes_with_feedback_and_persists_without(codec: Codec, steps: int):
    g = numbers(1023)
    bias = (decoded(codec, g) - g).norm().item()
    codec_state, received = feedback(codec, 1023), torch.zeros_like(g)
    for _ in range(4 * steps):
        received += codec.decode(codec_state.encode(g), 1023)
    assert bias > 0  # Even fp32's: these are float64.
    assert (received / (4 * steps) - g).norm().item() < bias / 10


@every_settling_codec
def test_residual_stays_bounded_on_a_stationary_stream(codec: Codec, steps: int):
    """If it grew with the square root of time, as a sum of errors does, its median would increase 1.41 times."""
    codec_state, norms = feedback(codec, 1023), list[float]()
    for t in range(5 * steps):
        codec_state.encode(numbers(1023, seed=t))
        norms.append(codec_state.residual.norm().item())
    assert median(norms[3 * steps :]) < 1.2 * median(norms[steps : 3 * steps])


def with_slots(codec: Codec, numel: int) -> tuple[Any, Slots]:
    """A codec's state, and the slots that it is kept in."""
    slots = Slots()
    return codec.codec_state(slots, torch.zeros(numel)), slots


@every_codec
@pytest.mark.parametrize("where", [slice(0, 1030), slice(100, 700)], ids=str)
def test_undo_restores_the_state_before_encode(codec: Codec, where: slice):
    """Up to rounding: of x + r, of the residual, and of both undone; and of momentum divided by 0.9."""
    codec_state, slots = with_slots(codec, 1030)
    for t in range(3):
        codec_state[where].encode(numbers(1030, seed=t, dtype=torch.float32)[where])
    before, x = slots.vector().clone(), numbers(1030, seed=9, dtype=torch.float32)[where]
    data = codec_state[where].encode(x)
    decoded = torch.zeros(x.numel())
    codec_state[where].add(data, decoded)
    codec_state[where].undo(x, data)
    largest = before.abs().max().item() + x.abs().max().item() + decoded.abs().max().item() if before.numel() else 0.0
    assert ((slots.vector() - before).abs() <= 4 * 2**-23 * largest).all()


@every_codec
def test_a_zero_message_adds_nothing_and_keeps_the_state(codec: Codec):
    codec_state, slots = with_slots(codec, 1030)
    codec_state.encode(numbers(1030, dtype=torch.float32))
    before, received = slots.vector().clone(), numbers(1030, dtype=torch.float32)
    codec_state.add(codec_state.encode_zero(1030, CPU), received, 0.5)
    assert torch.equal(received, numbers(1030, dtype=torch.float32)) and torch.equal(slots.vector(), before)


@every_codec
def test_two_senders_with_the_same_slots_send_the_same_bytes(codec: Codec):
    """A sender's slots are all its state; random numbers depend only on its key and the count of messages."""
    first, second = with_slots(codec, 1030), with_slots(codec, 1030)
    for t in range(4):
        x = numbers(1030, seed=t, dtype=torch.float32)
        assert torch.equal(first[0].encode(x), second[0].encode(x))
    assert torch.equal(first[1].vector(), second[1].vector())


@every_codec
def test_slots_are_resized_without_loss(codec: Codec):
    """The next mean delivers the mean of residuals and the sum of owners' residuals, for any number of workers."""
    workers = [with_slots(codec, 1030) for _ in range(3)]
    for rank, (codec_state, _) in enumerate(workers):
        codec_state.encode(numbers(1030, seed=rank, dtype=torch.float32))
        if codec.reduction_among(3) == "stripes":
            codec_state.owned(slice(0, 1030)).encode(numbers(1030, seed=9 + rank, dtype=torch.float32))
    for name, rule in workers[0][1].rules.items():
        old = [dict(vars(slots.slots[name])) for _, slots in workers]
        new = rule(old, 2)
        assert new.keys() == old[0].keys()
        if name == "residuals":
            before = sum(v["residual"].double() for v in old) / 3 + sum(v.get("owner_residual", 0.0) for v in old)
            after = new["residual"].double() + 2 * new.get("owner_residual", torch.zeros(1))
            assert torch.allclose(after, before, rtol=0, atol=1e-5)
        elif name == "messages":
            assert new["count"].item() == max(v["count"].item() for v in old)
        elif name == "settings":
            assert new["adapted"] == {}


@given(values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=50))
def test_fp32_leaves_no_residual(values: list[float]):
    x = torch.tensor(values)
    codec_state = feedback(Fp32(), len(values), torch.float32)
    for _ in range(3):
        assert same(Fp32().decode(codec_state.encode(x), len(values)), x + 0.0)  # -0.0 + 0.0 is 0.0.
        assert not codec_state.residual.count_nonzero()


def test_slices_of_a_codec_state_share_its_residuals():
    codec_state = feedback(OneBit(), 1024)
    codec_state[512:].encode(numbers(512))
    assert not codec_state.residual[:512].count_nonzero() and codec_state.residual[512:].count_nonzero()
    codec_state.owned(slice(0, 512)).encode(numbers(512))
    assert codec_state.owner_residual[:512].count_nonzero() and not codec_state.owner_residual[512:].count_nonzero()
    assert not codec_state.residual[:512].count_nonzero()


# B1: one bit.


def test_one_bit_sends_one_bit_per_value_and_two_means_per_bucket():
    sizes = {
        0: 0,
        1: 9,
        7: 9,
        8: 9,
        9: 10,
        31: 12,
        33: 13,
        511: 72,
        512: 72,
        513: 81,
        1023: 144,
        2**16 + 3: 129 * 8 + 8193,
    }
    assert {n: OneBit().nbytes(n) for n in sizes} == sizes
    assert OneBit(bucket=64).nbytes(512) == 64 + 64


@pytest.mark.parametrize("bucket", [0, 8, -32, 48])
def test_one_bit_rejects_a_bucket_that_is_not_a_multiple_of_32(bucket: int):
    with pytest.raises(ValueError, match=rf"OneBit\(bucket={bucket}, "):
        OneBit(bucket=bucket)


@pytest.mark.parametrize("numel", [1, 7, 33, 512, 513, 1023, 1536])
def test_one_bit_keeps_the_sum_of_every_bucket(numel: int):
    """The means are rounded to float32, after sums of at most 512 float32: each is off by some ulps of its mean."""
    codec_state = feedback(OneBit(), numel)
    for t in range(20):
        codec_state.encode(numbers(numel, seed=t))
        for start in range(0, numel, 512):
            part = codec_state.residual[start : start + 512]
            assert abs(part.sum().item()) < 512 * 8 * 2**-24


@given(values=moderate(least=2, most=64), factor=st.floats(0.5, 1.5))
def test_no_other_pair_of_values_has_a_smaller_squared_error(values: list[float], factor: float):
    """Up to the rounding of the means to float32; the squared error is quadratic in it."""
    x = torch.tensor(values, dtype=torch.float64)
    data = OneBit().encode(x)
    best = (OneBit().decode(data, len(values)).double() - x).square().sum().item()
    for level in (0, 1):
        other = data.clone()
        other[:8].view(torch.float32)[level] *= factor
        assert (OneBit().decode(other, len(values)).double() - x).square().sum().item() >= best * (1 - 1e-6) - 1e-6


@given(values=moderate(least=1, most=700))
def test_one_bit_keeps_every_sign(values: list[float]):
    """The bits keep their order, for any length."""
    x = torch.tensor(
        [v if abs(v) > 1e-30 else 0.0 for v in values]
    )  # The mean of smaller ones may vanish, and their sign with it.
    assert torch.equal(decoded(OneBit(threshold="zero"), x) >= 0, x >= 0)


@given(numel=st.integers(2, 512), values=moderate(least=2, most=2), seed=st.integers(0, 9))
def test_one_bit_is_exact_for_two_different_values_of_any_sign(numel: int, values: list[float], seed: int):
    """Up to the rounding of sums.  A threshold of zero gives two values of one sign the same mean."""
    chosen = torch.rand(numel, generator=torch.Generator().manual_seed(seed)) < 0.5
    low, high = sorted(values)
    assume(high - low > 1e-3 * max(abs(low), abs(high)) and chosen.any() and not chosen.all())
    x = torch.where(chosen, low, high)
    assert torch.allclose(decoded(OneBit(), x), x, rtol=1e-5, atol=1e-5 * max(abs(low), abs(high)))


def test_a_threshold_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match=r"threshold='median'\): the threshold of a unit is 'mean' or 'zero'"):
        OneBit(threshold="median")


@every_size
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_a_bucket_of_one_sign_leaves_the_other_level_unused(numel: int, sign: float):
    """All decode as their mean; padding does not change it."""
    x = sign * (numbers(numel, dtype=torch.float32).abs() + 0.5)
    codec = OneBit(threshold="zero")
    data = codec.encode(x)
    means = data[: 8 * codec.scales(numel)].view(torch.float32).view(-1, 2)
    assert not means[:, 0 if sign > 0 else 1].count_nonzero()
    for b, part in enumerate(x.split(512) if numel else ()):
        assert means[b, int(sign > 0)].item() == pytest.approx(part.double().mean().item(), rel=1e-5)


@given(values=moderate(least=1, most=100), power=st.integers(-8, 8))
def test_one_bit_is_equivariant_to_scale(values: list[float], power: int):
    """To the bit for powers of two, unless something underflows; up to rounding for any other factor."""
    x = torch.tensor([v if abs(v) > 1e-30 else 0.0 for v in values])
    assert same(decoded(OneBit(), x * 2.0**power), decoded(OneBit(), x) * 2.0**power)
    assert torch.allclose(decoded(OneBit(), x * 0.3), decoded(OneBit(), x) * 0.3, rtol=1e-5)


@given(signs=st.lists(st.booleans(), min_size=1, max_size=600), level=st.integers(1, 1000))
def test_one_bit_is_exact_for_two_opposite_values(signs: list[bool], level: int):
    """Multiples of 1/64 up to 16 add up exactly."""
    x = torch.tensor([level / 64 if s else -level / 64 for s in signs])
    codec_state = feedback(OneBit(), len(signs))
    assert torch.equal(OneBit().decode(codec_state.encode(x), len(signs)), x)
    assert not codec_state.residual.count_nonzero()


# B9: casts.


@given(values=st.lists(st.floats(2**-14, 65504.0, width=32), min_size=1, max_size=100), sign=st.sampled_from([-1, 1]))
def test_fp16_has_an_error_of_at_most_half_an_ulp(values: list[float], sign: int):
    """In the normal range."""
    x = sign * torch.tensor(values)
    assert ((decoded(Fp16(), x) - x).abs() <= 2**-11 * x.abs()).all()


@pytest.mark.parametrize("large", [1e5, -1e5, 65520.0])
def test_fp16_raises_for_values_that_would_become_infinity(large: float):
    x = torch.zeros(10)
    x[7] = large
    with pytest.raises(ValueError, match=rf"Fp16\(\) cannot encode {large:g} at index 7"):
        Fp16().encode(x)


def test_fp16_sends_large_values_whose_sum_overflows_half_precision():
    x = torch.full((2**16,), 65504.0)
    assert torch.equal(decoded(Fp16(), x), x)
