"""Thresholds and top-k: what they guarantee beyond the laws for every codec."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.codecs import DGC, AdaptiveThreshold, Codec, ErrorFeedback, Threshold, TopK, kernels
from paceline.codecs.threshold import (
    BITMAP,
    HEADER,
    RICE,
    WORDS,
    Header,
    Overloaded,
    rice_decode,
    rice_encode,
    words_decode,
    words_encode,
)
from tests.laws.tasks import numbers, same

LARGE = 2**16 + 3  # So many that kernels look for bounds, and more than 16 bits tell.
VALUES = st.lists(
    st.sampled_from([0.0, -0.0, 0.25, -0.25, 0.5, -0.5, 0.75, -1.0, 2.0, -40.0]), min_size=1, max_size=200
)
SPARSE: list[Codec] = [Threshold(tau=0.5, limit=math.inf), Threshold(tau=0.5, entropy=True, limit=math.inf), TopK(0.1)]


def feedback(codec: Codec, numel: int, dtype: torch.dtype = torch.float32) -> ErrorFeedback:
    return ErrorFeedback(codec, torch.zeros(numel, dtype=dtype))


def received(codec_state: Any, data: Tensor, numel: int) -> Tensor:
    values = torch.zeros(numel)
    codec_state.add(data, values, fresh=True)
    return values


def hits(numel: int, count: int, seed: int = 0) -> Tensor:
    """`count` values of 1 or -1 at random indices among zeros."""
    x = torch.zeros(numel)
    places = torch.randperm(numel, generator=torch.Generator().manual_seed(seed))[:count]
    x[places] = numbers(count, seed=seed, dtype=torch.float32).sign()
    return x


@pytest.mark.parametrize("codec", [TopK(ratio=0.5), Threshold(tau=5.0, limit=math.inf)], ids=str)
def test_small_values_beside_large_ones_are_sent_only_with_feedback(codec: Codec):
    """The mean of (10, 1) and (-10, 1) is (0, 1); without feedback only the values that cancel are sent."""
    for remembers in (False, True):
        states = [ErrorFeedback(codec, torch.zeros(2) if remembers else None) for _ in range(2)]
        total = torch.zeros(2)
        for _ in range(40):
            for codec_state, g in zip(states, ([10.0, 1.0], [-10.0, 1.0]), strict=True):
                codec_state.add(codec_state.encode(torch.tensor(g)), total)
        assert total[0] == 0
        assert (total[1] > 40) == remembers and (total[1] == 0) != remembers


# Thresholds.


@given(values=VALUES, entropy=st.booleans(), steps=st.integers(1, 5))
def test_decoded_values_are_tau_or_zero_and_the_residual_is_exact(values: list[float], entropy: bool, steps: int):
    """Multiples of a quarter add up exactly, so no mass is lost, to the bit."""
    x, codec = torch.tensor(values), Threshold(tau=0.5, entropy=entropy, limit=math.inf)
    codec_state, total = feedback(codec, len(values)), torch.zeros(len(values))
    for _ in range(steps):
        decoded = codec.decode(codec_state.encode(x), len(values))
        assert set(decoded.tolist()) <= {-0.5, 0.0, 0.5}
        total += decoded
    assert torch.equal(total + codec_state.residual, x * steps)


@given(values=VALUES)
def test_each_message_of_zeros_drains_tau_from_the_residual(values: list[float]):
    codec_state = feedback(Threshold(tau=0.5, limit=math.inf), len(values))
    codec_state.residual.copy_(torch.tensor(values))
    for _ in range(math.ceil(max(abs(v) for v in values) / 0.5)):
        codec_state.encode(torch.zeros(len(values)))
    assert codec_state.residual.abs().max() < 0.5


def test_values_of_many_tau_take_as_many_messages_and_arrive_exactly():
    codec_state, x = (
        feedback(Threshold(tau=2.0**-10, limit=math.inf), 3),
        torch.tensor([7 * 2.0**-10, -(2.0**-10), 0.0]),
    )
    total = received(codec_state, codec_state.encode(x), 3)
    for _ in range(6):
        assert not torch.equal(total, x)
        codec_state.add(codec_state.encode(torch.zeros(3)), total)
    assert torch.equal(total, x) and not codec_state.residual.count_nonzero()


def test_a_larger_tau_never_sends_more():
    sent = [
        Header.of(Threshold(tau=t).encode(numbers(1000, dtype=torch.float32))).sent
        for t in (1e-3, 0.1, 0.5, 1.0, 2.0, 3.0, 9.0)
    ]
    assert sent == sorted(sent, reverse=True) and sent[0] > 990 and sent[-1] == 0


@pytest.mark.parametrize("numel", [1, 15, 16, 17, 160, 1000, 1023])
def test_a_message_is_a_header_and_words_or_bitmaps_from_one_value_in_16_on(numel: int):
    for count in (0, 1, numel // 16, -(-numel // 16), numel // 2, numel):
        data = Threshold(tau=1.0).encode(hits(numel, count))
        bitmap = count >= numel / 16
        assert data.numel() == 16 + (2 * math.ceil(numel / 8) if bitmap else 4 * count)
        assert Header.of(data)[:2] == (count, BITMAP if bitmap else WORDS)
    for codec in (Threshold(tau=1.0), Threshold(tau=1.0, entropy=True)):
        assert codec.encode(torch.ones(numel)).numel() == codec.most_nbytes(numel), "and no message is larger"


def test_all_formats_of_the_same_values_decode_equally():
    x = numbers(100, dtype=torch.float32)
    data = {
        BITMAP: Threshold(tau=1.0).encode(x),
        WORDS: Threshold(tau=1.0).encode(torch.cat([x, torch.zeros(10_000)])),
        RICE: Threshold(tau=1.0, entropy=True).encode(torch.cat([x, torch.zeros(10_000)])),
    }
    for form, message in data.items():
        assert Header.of(message).format == form
        numel = 100 if form == BITMAP else 10_100
        for values in (
            Threshold(tau=7.0).decode(message, numel),
            received(feedback(Threshold(tau=7.0), 1), message, numel),
        ):
            assert torch.equal(values[:100], x.sign() * (x.abs() >= 1.0)) and not values[100:].count_nonzero()


@pytest.mark.parametrize("density", [0.005, 0.02, 0.05, 0.3])
def test_gaps_take_little_more_than_their_entropy(density: float):
    """Geometric gaps have -log2(p) - (1-p)/p log2(1-p) bits each, signs 1; a Rice code has at most 0.15 more."""
    count = int(200_000 * density)
    data = Threshold(tau=1.0, entropy=True).encode(hits(200_000, count))
    bits = 1 - math.log2(density) - (1 - density) / density * math.log2(1 - density)
    assert Header.of(data).format == RICE
    assert bits - 0.1 < (data.numel() - HEADER) * 8 / count < bits + 0.15


@given(count=st.integers(0, 300), seed=st.integers(0, 99))
def test_a_code_of_gaps_is_sent_only_if_it_is_the_smallest(count: int, seed: int):
    x = hits(300, count, seed)
    assert Threshold(tau=1.0, entropy=True).encode(x).numel() <= Threshold(tau=1.0).encode(x).numel()


@given(
    indices=st.sets(st.integers(0, 2**31 - 1), min_size=1, max_size=50), k=st.integers(0, 30), seed=st.integers(0, 99)
)
def test_indices_up_to_31_bits_come_back_from_words_and_from_gaps(indices: set[int], k: int, seed: int):
    places = torch.tensor(sorted(indices | {2**31 - 1}))
    negative = (numbers(len(places), seed=seed) < 0).to(torch.int64)
    assert all(
        torch.equal(a, b) for a, b in zip(words_decode(words_encode(places, negative)), (places, negative), strict=True)
    )
    k = max(k, 12)  # Quotients are in unary: no test has room for 2**31 bits.
    read = rice_decode(rice_encode(places, negative, k), len(places), k)
    assert not isinstance(read, str) and torch.equal(read[0], places) and torch.equal(read[1], negative)


@pytest.mark.parametrize("codec", [Threshold(tau=1.0), TopK()], ids=str)
def test_a_vector_too_long_for_31_bit_indices_raises(codec: Codec):
    with pytest.raises(ValueError, match=rf"{type(codec).__name__}.*{2**31 + 1} values"):
        codec.encode(torch.zeros(1).expand(2**31 + 1))


def test_a_residual_that_grows_beyond_tau_warns():
    """With a constant gradient of 4 tau the residual gains 3 tau per step."""
    codec_state = feedback(Threshold(tau=0.5), 100)
    x = torch.zeros(100)
    x[33] = 2.0
    with warnings.catch_warnings():
        for t in range(1, 4):
            data = codec_state.encode(x)
            assert codec_state.residual[33].item() == 1.5 * t
            assert codec_state.codec.overload(data) == 3.0 * t  # type: ignore[attr-defined]
    with pytest.warns(Overloaded, match=r"Threshold\(tau=0.5.*12 times tau"):
        codec_state.encode(x)
    with warnings.catch_warnings():  # Once is enough.
        for _ in range(5):
            codec_state.encode(x)


@pytest.mark.parametrize("entropy", [False, True])
def test_values_below_tau_are_no_overload(entropy: bool):
    codec = Threshold(tau=5.0, entropy=entropy)
    assert codec.overload(codec.encode(numbers(500, dtype=torch.float32))) == 0.0


@pytest.mark.parametrize("numel", [640, 320])
def test_tau_doubles_in_20_messages_above_the_band_halves_below_and_stays_inside(numel: int):
    codec: Any = AdaptiveThreshold(tau=1.0, high=0.05, low=0.02, limit=math.inf)
    for count, factor in ((numel // 10, 2.0), (numel // 32, 1.0), (0, 0.5)):
        after = codec
        for _ in range(20):
            after = after.adapted(after.encode(hits(numel, count) * 100), numel)
        assert after.tau == codec.tau if factor == 1.0 else after.tau == pytest.approx(codec.tau * factor, rel=1e-12)


def test_tau_adapts_to_dense_messages():
    codec = AdaptiveThreshold(tau=1.0, low=0.1, high=0.3, limit=math.inf)
    for count, factor in ((1000, 1 / codec.decay), (200, 1.0), (70, codec.decay)):
        data = codec.encode(hits(1000, count))
        assert Header.of(data).format == BITMAP
        after = codec.adapted(data, 1000)
        assert isinstance(after, AdaptiveThreshold) and after.tau == factor
    assert codec.adapted(codec.encode(torch.empty(0)), 0) is codec


def test_tau_adapts_separately_for_each_part_and_receivers_need_not_know():
    codec_state = feedback(AdaptiveThreshold(tau=1.0, limit=math.inf), 2000)
    reader = AdaptiveThreshold(tau=123.0)
    for _ in range(20):
        dense, empty = (
            codec_state[s].encode(100 * torch.ones(1000) * f) for s, f in ((slice(0, 1000), 1), (slice(1000, 2000), 0))
        )
    assert reader.decode(dense, 1000)[0].item() == pytest.approx(2 ** (19 / 20), rel=1e-6)
    assert Header.of(empty).tau == pytest.approx(2 ** (-19 / 20), rel=1e-6)
    assert not reader.decode(empty, 1000).count_nonzero()


def test_a_band_is_reached_and_kept():
    codec_state, densities = feedback(AdaptiveThreshold(limit=math.inf), 20_000), list[float]()
    for t in range(400):
        densities.append(Header.of(codec_state.encode(numbers(20_000, seed=t, dtype=torch.float32))).sent / 20_000)
    assert densities[0] > 0.9
    assert all(1e-4 / 2 < d < 2 * 1e-2 for d in densities[-50:])


def test_tau_stays_finite_when_nothing_is_sent():
    codec: Any = AdaptiveThreshold()
    for _ in range(5000):
        codec = codec.adapted(b := codec.encode(torch.zeros(8)), 8)
    assert codec.tau > 0 and b.numel() == HEADER


@pytest.mark.parametrize(
    "settings",
    [{"tau": 0.0}, {"tau": -1.0}, {"tau": math.nan}, {"tau": math.inf}, {"tau": 1e-60}, {"tau": 1.0, "limit": 0.0}],
    ids=str,
)
def test_an_invalid_threshold_raises(settings: dict[str, float]):
    for cls in (Threshold, AdaptiveThreshold):
        with pytest.raises(ValueError, match=rf"{cls.__name__}\(tau={settings['tau']}.*\): "):
            cls(**settings)


@pytest.mark.parametrize(
    "settings", [{"low": 0.5}, {"high": 2.0}, {"low": -1.0}, {"decay": 1.0}, {"decay": 0.1}], ids=str
)
def test_an_invalid_band_raises(settings: dict[str, float]):
    with pytest.raises(ValueError, match=r"AdaptiveThreshold\(.*\): "):
        AdaptiveThreshold(**settings)


def forged(count: int, form: int, rice: int, numel: int, tau: float, body: list[int]) -> Tensor:
    return torch.tensor([*struct.pack("<IBBHff", count, form, rice, numel % 2**16, tau, 0.0), *body], dtype=torch.uint8)


FORGED = {
    "an index beyond the end": forged(1, WORDS, 0, 100, 1.0, [200, 0, 0, 0]),
    "the same index twice": forged(2, WORDS, 0, 100, 1.0, [8, 0, 0, 0, 9, 0, 0, 0]),
    "indices that descend": forged(2, WORDS, 0, 100, 1.0, [8, 0, 0, 0, 2, 0, 0, 0]),
    "more words than there are": forged(2, WORDS, 0, 100, 1.0, [8, 0, 0, 0]),
    "gigabytes of words": forged(2**32 - 1, WORDS, 0, 100, 1.0, [8, 0, 0, 0]),
    "gigabytes of gaps": forged(2**32 - 1, RICE, 4, 100, 1.0, [8, 0, 0, 0]),
    "another vector's length": forged(1, WORDS, 0, 101, 1.0, [8, 0, 0, 0]),
    "no such format": forged(1, 3, 0, 100, 1.0, [8, 0, 0, 0]),
    "tau of NaN": forged(1, WORDS, 0, 100, math.nan, [8, 0, 0, 0]),
    "tau of 0": forged(1, WORDS, 0, 100, 0.0, [8, 0, 0, 0]),
    "bits beyond the end": forged(1, BITMAP, 0, 100, 1.0, [0] * 12 + [128] + [0] * 13),
    "another count of bits": forged(2, BITMAP, 0, 100, 1.0, [1] + [0] * 25),
    "a sign of nothing": forged(1, BITMAP, 0, 100, 1.0, [1] + [0] * 12 + [2] + [0] * 12),
    "gaps beyond the end": forged(1, RICE, 7, 100, 1.0, [255, 1]),
    "gaps in part": forged(3, RICE, 7, 100, 1.0, [1, 1, 1, 3]),
    "an endless gap": forged(1, RICE, 30, 100, 1.0, [0, 0, 0, 0, 0, 0, 0, 128]),
    "no gaps": forged(0, RICE, 0, 100, 1.0, []),
    "a wide parameter": forged(1, RICE, 255, 100, 1.0, [1] * 20),
    "half a header": forged(1, WORDS, 0, 100, 1.0, [])[:8],
}


@pytest.mark.parametrize("data", FORGED.values(), ids=FORGED)
def test_what_no_threshold_sends_is_refused_and_adds_nothing(data: Tensor):
    into = torch.ones(100)
    for read in (lambda: Threshold(tau=1.0).decode(data, 100), lambda: kernels.add(Threshold(tau=1.0), data, into)):
        with pytest.raises(ValueError, match=rf"Threshold\(tau=1.0.* 100 values .*given {data.numel()} bytes"):
            read()
    assert torch.equal(into, torch.ones(100))


# Top-k.


def largest(x: Tensor, k: int) -> list[int]:
    """The k of largest magnitude, the first ones among equals."""
    return sorted(sorted(range(x.numel()), key=lambda i: (-abs(x[i].item()), i))[:k])


@given(values=VALUES, ratio=st.sampled_from([0.01, 0.1, 0.3, 0.9, 1.0]), plain=st.booleans())
def test_top_k_is_the_largest_and_the_first_among_equals(values: list[float], ratio: float, plain: bool):
    x, k = torch.tensor(values), max(1, int(ratio * len(values)))
    residual = torch.zeros(len(values))
    if plain:
        with kernels.plain():
            data = kernels.encode(TopK(ratio), x, residual)
    else:
        data = kernels.encode(TopK(ratio), x, residual)
    indices = data[: 4 * k].view(torch.int32).tolist()
    assert data.numel() == 8 * k == TopK(ratio).nbytes(len(values))
    assert indices == largest(x, k)
    assert same(data[4 * k :].view(torch.float32), (x + 0.0)[indices])  # -0.0 + 0.0 is 0.0.
    assert torch.equal(residual, torch.where(torch.isin(torch.arange(len(values)), torch.tensor(indices)), 0.0, x))


@pytest.mark.parametrize("ratio", [1e-9, 0.001, 0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["normal", "ascending", "descending", "few values", "equal", "tiny and huge"])
def test_the_kernel_chooses_as_the_definition_does_for_any_distribution(ratio: float, kind: str):
    x = numbers(LARGE, dtype=torch.float32)
    x = {
        "normal": x,
        "ascending": x.sort().values,
        "descending": x.sort(descending=True).values,
        "few values": (2 * x).round(),
        "equal": torch.full((LARGE,), 0.7),
        "tiny and huge": x.sign() * torch.exp(25 * x).clamp(1e-44, 3e38),
    }[kind]
    fast, slow = (
        numbers(LARGE, seed=1, dtype=torch.float32) if kind == "normal" else torch.zeros(LARGE) for _ in range(2)
    )
    data = kernels.encode(TopK(ratio), x, fast)
    with kernels.plain():
        assert torch.equal(data, kernels.encode(TopK(ratio), x, slow))
    assert same(fast, slow)


@pytest.mark.slow
def test_top_k_stays_within_its_buffers_when_denormals_count_as_zeros():
    """In a separate process, which a write out of bounds may crash."""
    program = """
import torch
from paceline.codecs import TopK, kernels
x = torch.zeros(640_000)
x[::64_000] = 5e-39
if torch.set_flush_denormal(True):
    data = kernels.encode(TopK(10 / x.numel()), x)
    assert data[:40].view(torch.int32).tolist() == list(range(0, 640_000, 64_000))
    torch.randn(100_000).sort()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def test_a_ratio_of_1_is_lossless():
    x = numbers(777, dtype=torch.float32)
    assert same(TopK(1.0).decode(TopK(1.0).encode(x), 777), x)


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.1, math.nan])
def test_an_invalid_ratio_raises(ratio: float):
    for cls in (TopK, DGC):
        with pytest.raises(ValueError, match=rf"{cls.__name__}\(ratio={ratio}"):
            cls(ratio)


@pytest.mark.parametrize("wrong", [[5, 5], [6, 5], [-1, 5], [5, 20]], ids=str)
def test_wrong_indices_raise_and_add_nothing(wrong: list[int]):
    data = torch.cat([torch.tensor(wrong, dtype=torch.int32).view(torch.uint8), torch.ones(2).view(torch.uint8)])
    into = torch.ones(20)
    for read in (lambda: TopK(0.1).decode(data, 20), lambda: kernels.add(TopK(0.1), data, into)):
        with pytest.raises(ValueError, match=r"TopK\(ratio=0.1\).* 20 values .*indices"):
            read()
    assert torch.equal(into, torch.ones(20))


@pytest.mark.parametrize("codec", SPARSE, ids=str)
@pytest.mark.parametrize("threads", [2, 3])
def test_the_number_of_threads_does_not_change_the_result(codec: Codec, threads: int):
    numel, before = 3 * 2**18 + 5, torch.get_num_threads()
    x, one, more = numbers(numel, dtype=torch.float32), torch.zeros(numel), torch.zeros(numel)
    expected = kernels.encode(codec, x, one)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(kernels.encode(codec, x, more), expected) and same(more, one)
        x[numel - 9] = math.nan
        with pytest.raises(ValueError, match=f"nan at index {numel - 9}"):
            kernels.encode(codec, x, more)
    finally:
        torch.set_num_threads(before)
    assert ((more - one).abs() <= 2 * 2**-23 * (x.nan_to_num().abs().max() + one.abs().max())).all()
