"""Deep gradient compression and entropy coding, beyond the laws for every codec, and both in training."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline import AllReduceSGD, Cluster, simulate
from paceline.codecs import DGC, QSGD, AdaptiveThreshold, Codec, Entropy, Fp16, Fp32, OneBit, Threshold, TopK, kernels
from paceline.codecs import entropy as coder
from tests.laws.tasks import OPTIMIZERS, close, numbers, regression, same
from tests.laws.test_codecs import with_slots
from tests.laws.test_sparse import LARGE, largest, received

# Deep gradient compression.


def momentum_steps(nesterov: bool) -> list[Tensor]:
    """What SGD with momentum subtracts, step by step."""
    w = torch.nn.Parameter(torch.zeros(50))
    optimizer = torch.optim.SGD([w], lr=1.0, momentum=0.9, nesterov=nesterov)
    steps: list[Tensor] = []
    for t in range(10):
        w.data.zero_()
        w.grad = numbers(50, seed=t, dtype=torch.float32)
        optimizer.step()
        steps.append(-w.detach().clone())
    return steps


@pytest.mark.parametrize("masking", [False, True])
def test_with_all_values_sent_dgc_is_sgd_with_momentum(masking: bool):
    """Masking would remove all momentum, so it is off then."""
    codec_state, _ = with_slots(DGC(ratio=1.0, masking=masking), 50)
    for t, step in enumerate(momentum_steps(nesterov=False)):
        assert torch.equal(
            received(codec_state, codec_state.encode(numbers(50, seed=t, dtype=torch.float32)), 50), step
        )


def test_with_all_values_sent_nesterov_dgc_is_sgd_with_nesterov_momentum():
    codec_state, _ = with_slots(DGC(ratio=1.0, nesterov=True), 50)
    for t, step in enumerate(momentum_steps(nesterov=True)):
        decoded = received(codec_state, codec_state.encode(numbers(50, seed=t, dtype=torch.float32)), 50)
        assert torch.allclose(decoded, step, rtol=1e-5, atol=1e-6)


def test_without_momentum_dgc_is_top_k():
    dgc, top_k = with_slots(DGC(ratio=0.1, momentum=0.0), 200)[0], with_slots(TopK(ratio=0.1), 200)[0]
    for t in range(20):
        x = numbers(200, seed=t, dtype=torch.float32)
        assert torch.equal(dgc.encode(x), top_k.encode(x))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("masking", [False, True])
def test_dgc_equals_the_loop_of_the_paper(masking: bool, nesterov: bool):
    """The paper's loop, on lists."""
    codec, numel = DGC(ratio=0.05, masking=masking, nesterov=nesterov), 100
    codec_state, _ = with_slots(codec, numel)
    u, v = torch.zeros(numel), torch.zeros(numel)
    for t in range(30):
        g = numbers(numel, seed=t, dtype=torch.float32)
        u = 0.9 * (u + g) if nesterov else 0.9 * u + g
        v = v + (u + g if nesterov else u)
        kept = torch.zeros(numel, dtype=torch.bool)
        kept[largest(v, 5)] = True
        decoded = received(codec_state, codec_state.encode(g), numel)
        assert torch.allclose(decoded, torch.where(kept, v, 0.0), rtol=1e-5) and torch.equal(decoded != 0, kept)
        v = torch.where(kept, 0.0, v)
        u = torch.where(kept & masking, 0.0, u)


def test_a_sender_clips_its_own_gradient_to_its_share_of_the_norm():
    codec_state, _ = with_slots(DGC(ratio=1.0, momentum=0.0, clip=2.0, workers=4), 50)
    x = numbers(50, dtype=torch.float32)
    assert received(codec_state, codec_state.encode(x), 50).norm().item() == pytest.approx(1.0, rel=1e-6)
    assert torch.equal(received(codec_state, codec_state.encode(x * 1e-3), 50), x * 1e-3)


def test_a_gradient_whose_squares_overflow_float32_is_clipped():
    codec_state, _ = with_slots(DGC(ratio=1.0, momentum=0.0, clip=2.0, workers=4), 50)
    assert received(codec_state, codec_state.encode(torch.full((50,), 1e30)), 50).norm().item() == pytest.approx(
        1.0, rel=1e-6
    )
    with pytest.raises(ValueError, match="cannot encode inf at index 7"):
        codec_state.encode(torch.where(torch.arange(50) == 7, math.inf, 1.0))


def test_warm_up_has_four_equal_stages():
    codec_state, _ = with_slots(DGC(ratio=0.001, warmup=8), 4000)
    sizes = [codec_state.encode(numbers(4000, seed=t, dtype=torch.float32)).numel() // 8 for t in range(10)]
    assert sizes == [1000, 1000, 250, 250, 62, 62, 16, 16, 4, 4]
    assert DGC(ratio=0.1, warmup=8).ratio_at(3) == 0.1, "never less than at the end"
    assert DGC(ratio=0.001, warmup=8).most_nbytes(4000) == 8000


def test_a_message_of_another_stage_is_decoded():
    x = numbers(4000, dtype=torch.float32)
    early, late = DGC(ratio=0.001, warmup=8), DGC(ratio=0.001, warmup=8, sent=8)
    assert late.decode(early.encode(x), 4000).count_nonzero() == 1000
    assert early.decode(late.encode(x), 4000).count_nonzero() == 4


@pytest.mark.parametrize(
    "settings", [{"momentum": 1.0}, {"momentum": -0.1}, {"clip": 0.0}, {"workers": 0}, {"warmup": -1}], ids=str
)
def test_invalid_settings_of_dgc_raise(settings: dict[str, Any]):
    with pytest.raises(ValueError, match=r"DGC\(ratio=0.001, .*\): "):
        DGC(**settings)


def test_a_gradient_that_dgc_cannot_encode_does_not_change_its_state():
    codec_state, slots = with_slots(DGC(ratio=0.1), 64)
    codec_state.encode(numbers(64, dtype=torch.float32))
    before = [{n: v.clone() for n, v in vars(m).items() if isinstance(v, Tensor)} for m in slots.slots.values()]
    with pytest.raises(ValueError, match="nan at index 5"):
        codec_state.encode(torch.where(torch.arange(64) == 5, math.nan, 1.0))
    for was, now in zip(before, slots.slots.values(), strict=True):
        assert all(torch.allclose(v, vars(now)[n], rtol=1e-6, atol=1e-6) for n, v in was.items())


# Entropy coding.


@given(number=st.integers(1, 2**40), rest=st.text("01", max_size=9))
def test_gamma_codes_round_trip_and_have_two_bits_for_each_doubling(number: int, rest: str):
    bits = coder.gamma(number)
    assert len(bits) == 2 * math.floor(math.log2(number)) + 1
    assert coder.from_gamma("1" + bits + rest, 1) == (number, 1 + len(bits))


@pytest.mark.parametrize("bits", ["", "0", "000", "0001", "00100"[:-1]])
def test_truncated_gamma_codes_raise(bits: str):
    with pytest.raises(ValueError, match="ends before"):
        coder.from_gamma(bits)
    with pytest.raises(ValueError, match="positive"):
        coder.gamma(0)


@given(counts=st.lists(st.integers(0, 10**6), min_size=256, max_size=256).filter(any), most=st.integers(0, 10**9))
def test_frequencies_add_up_cover_all_bytes_and_round_trip(counts: list[int], most: int):
    counts[0] += most
    table = coder.frequencies(counts)
    assert sum(table) == coder.TOTAL and all((f > 0) == (c > 0) for f, c in zip(table, counts, strict=True))
    assert coder.read(coder.written(table) + b"\xff\xff") == (table, len(coder.written(table)))


skewed = st.tuples(st.integers(1, 256), st.integers(1, 3000), st.integers(0, 99), st.floats(0.01, 3))


@given(kind=skewed)
def test_any_bytes_round_trip_and_kernels_write_the_same(kind: tuple[int, int, int, float]):
    symbols, length, seed, skew = kind
    weights = torch.arange(1, symbols + 1, dtype=torch.float64) ** -skew
    data = torch.multinomial(weights, length, replacement=True, generator=torch.Generator().manual_seed(seed)).to(
        torch.uint8
    )
    codec = Entropy(OneBit())
    message = codec.wrapped(data)
    with kernels.plain():
        assert torch.equal(codec.wrapped(data), message)
    assert message.numel() <= length + coder.HEADER
    if message[0]:
        nbytes, coded = length, bytes(message[coder.HEADER :].tolist())
        assert coder.expand(coded, nbytes) == bytes(data.tolist())


def expanded(expand: Any, coded: Any, nbytes: int) -> list[int] | None:
    try:
        return list(expand(coded, nbytes))
    except ValueError:
        return None


@given(seed=st.integers(0, 10**6), symbols=st.sampled_from([1, 2, 20, 200]))
def test_corrupt_codes_raise_or_decode_equally_with_and_without_kernels(seed: int, symbols: int):
    coding = pytest.importorskip("paceline.codecs.kernels.coding")
    rng = random.Random(seed)
    data = bytes(rng.randrange(rng.randint(1, symbols)) for _ in range(rng.choice([60, 61, 400])))
    coded = coder.compress(data)
    for _ in range(5 if coded else 0):
        spoiled = bytearray(coded or b"")
        for _ in range(rng.choice([1, 1, 4])):
            spoiled[rng.randrange(len(spoiled))] ^= 1 << rng.randrange(8)
        spoiled = spoiled[: rng.choice([len(spoiled), rng.randrange(1, len(spoiled))])]
        plain = expanded(coder.expand, bytes(spoiled), len(data))
        assert plain is None or len(plain) == len(data)
        assert plain == expanded(
            lambda c, n: coding.expand(c, n).tolist(), torch.frombuffer(spoiled, dtype=torch.uint8), len(data)
        )


@pytest.mark.parametrize("spread", [0.3, 2.0, 10.0, 1000.0])
def test_coded_bytes_are_as_long_as_their_entropy(spread: float):
    """Within a percent, plus the table."""
    data = (numbers(100_000) * spread).round().to(torch.int64).remainder(256).to(torch.uint8)
    p = torch.bincount(data.int(), minlength=256).double() / data.numel()
    bits = -(p * torch.where(p > 0, p, 1).log2()).sum().item()
    message = Entropy(OneBit()).wrapped(data)
    assert message.numel() <= data.numel() + coder.HEADER
    assert bits * data.numel() / 8 <= message.numel() <= 1.01 * bits * data.numel() / 8 + 500


def test_entropy_coding_of_gaussian_levels_saves_almost_half():
    x = numbers(LARGE, dtype=torch.float32)
    data = Entropy(QSGD()).encode(x, torch.Generator().manual_seed(1))
    assert data.numel() < 0.65 * QSGD().nbytes(LARGE)
    assert torch.equal(
        Entropy(QSGD()).decode(data, LARGE), QSGD().decode(QSGD().encode(x, torch.Generator().manual_seed(1)), LARGE)
    )


@pytest.mark.parametrize(
    "inner", [Fp16(), QSGD(), DGC(ratio=0.1, warmup=4), Threshold(tau=0.5, limit=math.inf)], ids=str
)
def test_entropy_sends_and_keeps_what_the_inner_codec_does(inner: Codec):
    over, under = with_slots(Entropy(inner), 1030), with_slots(inner, 1030)
    for t in range(6):
        x = numbers(1030, seed=t, dtype=torch.float32)
        messages = [codec_state.encode(x) for codec_state, _ in (over, under)]
        assert torch.equal(received(over[0], messages[0], 1030), received(under[0], messages[1], 1030))
        assert torch.equal(Entropy(inner).unwrapped(messages[0], 1030), messages[1])
    assert (
        # The sum of two compressed messages is no message.
        Entropy(inner).reduction == ("stripes" if inner.reduction == "sum" else inner.reduction)
        and Entropy(inner).feedback == inner.feedback
        and Entropy(inner).unit == inner.unit
    )


def test_entropy_of_entropy_raises():
    with pytest.raises(ValueError, match=r"Entropy\(codec=Entropy\(.*twice"):
        Entropy(Entropy())


def test_a_header_that_announces_gigabytes_raises():
    data = Entropy(Fp16()).encode(torch.zeros(1000))
    assert data[0] == 1
    for nbytes in (2**32 - 1, 1999, 2001, 0):
        data[4:8] = torch.tensor(list(nbytes.to_bytes(4, "little")), dtype=torch.uint8)
        with pytest.raises(ValueError, match=rf"Entropy\(codec=Fp16\(\)\).*{nbytes} bytes"):
            Entropy(Fp16()).decode(data, 1000)


# In training.


@pytest.mark.parametrize("codec", [TopK(1.0), Entropy(Fp32()), Entropy(TopK(1.0))], ids=str)
def test_training_with_all_values_sent_equals_training_without_a_codec(codec: Codec):
    """Up to float32's rounding."""
    task = regression(steps=15, batch=8)
    plain, sent = (simulate(task, AllReduceSGD(codec=c), Cluster(workers=3)).params for c in (None, codec))
    assert close(plain, sent, rtol=1e-6)


def test_training_by_dgc_with_all_values_sent_equals_training_with_momentum():
    with_momentum, without = (
        regression(steps=15, batch=8, optimizer=lambda params, m=m: torch.optim.SGD(params, lr=0.05, momentum=m))
        for m in (0.9, 0.0)
    )
    plain = simulate(with_momentum, AllReduceSGD(), Cluster(workers=3)).params
    assert close(simulate(without, AllReduceSGD(codec=DGC(ratio=1.0)), Cluster(workers=3)).params, plain, rtol=1e-6)


STATEFUL: list[Codec] = [
    AdaptiveThreshold(limit=math.inf),
    DGC(ratio=0.1, warmup=10),
    Entropy(),
    Entropy(DGC(ratio=0.1, warmup=10)),
]


@pytest.mark.parametrize("codec", STATEFUL, ids=str)
def test_a_sender_that_adapts_resumes_where_it_stopped(codec: Codec):
    task = regression(steps=12, batch=8, optimizer=OPTIMIZERS["sgd"])
    strategy = AllReduceSGD(codec=codec)
    unbroken = simulate(task, strategy, Cluster(workers=3))
    stopped = simulate(task, strategy, Cluster(workers=3), stop_at=5)
    assert same(simulate(task, strategy, Cluster(workers=3), resume=stopped.states).params, unbroken.params)


@pytest.mark.parametrize("codec", [DGC(ratio=0.1), Entropy(DGC(ratio=0.1))], ids=str)
@pytest.mark.parametrize("workers", [1, 3])
def test_dgc_refuses_an_optimizer_that_adds_the_momentum_again(codec: Codec, workers: int):
    task = regression(steps=2, batch=8, optimizer=OPTIMIZERS["momentum"])
    with pytest.raises(
        ValueError, match=r"DGC\(ratio=0.1, .*\) with an optimizer of momentum 0.9: DGC adds the momentum"
    ):
        simulate(task, AllReduceSGD(codec=codec), Cluster(workers=workers))
    simulate(task, AllReduceSGD(codec=DGC(ratio=0.1, momentum=0.0)), Cluster(workers=workers))
