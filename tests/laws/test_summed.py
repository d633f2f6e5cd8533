"""Laws of means of 16-bit floats that are summed on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.codecs import BFloat16, Codec, Entropy, Fp16, PerTensor, kernels
from paceline.codecs.codec import CodecState, ErrorFeedback, Unencodable
from paceline.collectives import SyncVote, groups_of, mean_by_groups, mean_by_sum, mean_encoded
from tests.laws.every import ENDPOINTS
from tests.laws.ranks import Ranks
from tests.laws.slots import Slots
from tests.laws.tasks import numbers, same

every_codec = pytest.mark.parametrize("codec", [Fp16(), BFloat16()], ids=str)
ROUNDOFF = {torch.float16: 2**-11, torch.bfloat16: 2**-8}
NUMEL = 1003


def state_of(codec: Codec, numel: int = NUMEL) -> CodecState:
    return codec.codec_state(Slots(), torch.zeros(numel))


def mine(rank: int, step: int = 0, numel: int = NUMEL) -> Tensor:
    return numbers(numel, seed=10 * step + rank, dtype=torch.float32)


def shares(weights: Sequence[float]) -> list[float]:
    return [w / sum(weights) for w in weights]


def exact(terms: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return torch.stack([s * x.double() for s, x in zip(shares(weights), terms, strict=True)]).sum(0)


def bound(terms: Sequence[Tensor], weights: Sequence[float], codec: Codec) -> Tensor:
    """One rounding of each term, and one of each partial sum, which is no larger than the sum of the magnitudes."""
    assert codec.wire is not None
    magnitude = exact([x.abs() for x in terms], weights)
    return 1.01 * len(terms) * ROUNDOFF[codec.wire] * magnitude


def reductions(endpoint: Any) -> int:
    return sum(span.kind == "all_reduce" for span in endpoint.trace.spans if span.rank == endpoint.rank)


@every_codec
@pytest.mark.parametrize("ranks", ENDPOINTS.values(), ids=ENDPOINTS)
def test_the_error_is_that_of_one_rounding_for_each_rank(ranks: Ranks, codec: Codec, tmp_path: Path):
    """With shares that change from step to step, of which some are zero."""
    steps = [[16.0, 16.0, 16.0, 16.0], [3.0, 5000.0, 0.0, 8.0], [1.0, 0.0, 0.0, 0.0], [7.0, 7.0, 7.0, 6.0]]

    async def law(endpoint: Any) -> Any:
        state = state_of(codec)
        results: list[Tensor] = []
        for step, weights in enumerate(steps):
            x = mine(endpoint.rank, step)
            total = await mean_by_sum(endpoint, x, SyncVote(weights[endpoint.rank], going_on=1.0), state)
            assert (total.weight, total.going_on, total.bad) == (sum(weights), 4.0, 0.0)
            results.append(x)
        return results

    results = ranks(tmp_path, 4, law)
    assert all(same(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    for step, (x, weights) in enumerate(zip(results[0], steps, strict=True)):
        terms = [mine(rank, step) for rank in range(4)]
        least = 4 * 2.0**-25 if codec.wire == torch.float16 else 0.0  # Half the distance of the smallest numbers.
        assert ((x.double() - exact(terms, weights)).abs() <= bound(terms, weights, codec) + least).all()
    if ranks.is_ordered:
        expected = ENDPOINTS["simulator"](tmp_path, 4, law)[0]
        assert all(same(a, b) for a, b in zip(results[0], expected, strict=True))


@every_codec
def test_a_mean_is_one_all_reduce_of_two_bytes_a_value(codec: Codec, tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        state = state_of(codec)
        for step in range(3):
            await mean_encoded(endpoint, mine(endpoint.rank, step), SyncVote(48.0), state)
        return reductions(endpoint), endpoint.trace.bytes_sent(rank=endpoint.rank)

    assert ENDPOINTS["simulator"](tmp_path, 4, law) == [(3, 3 * (2 * 3 * (2 * NUMEL + 64) // 4))] * 4


def test_unequal_weights_need_a_second_all_reduce_only_the_first_time(tmp_path: Path):
    weights = [100.0, 3.0, 20.0]

    async def law(endpoint: Any) -> Any:
        state = state_of(Fp16())
        counts = []
        for step in range(4):
            x = mine(endpoint.rank, step)
            await mean_by_sum(endpoint, x, SyncVote(weights[endpoint.rank]), state)
            counts.append(reductions(endpoint))
        return counts, x

    for counts, x in ENDPOINTS["simulator"](tmp_path, 3, law):
        assert counts == [2, 3, 4, 5]
        terms = [mine(rank, 3) for rank in range(3)]
        assert ((x.double() - exact(terms, weights)).abs() <= bound(terms, weights, Fp16()) + 2.0**-24).all()


def test_a_rank_that_has_forgotten_the_exponent_is_noticed(tmp_path: Path):
    """Such as a worker that has just joined.  All ranks see that exponents differ, and repeat the exchange."""

    async def law(endpoint: Any) -> Any:
        state = state_of(Fp16())
        for step in range(2):
            await mean_by_sum(endpoint, 1e-3 * mine(endpoint.rank, step), SyncVote(64.0), state)
        if endpoint.rank == 1:
            state = state_of(Fp16())
        before = reductions(endpoint)
        x = 1e-3 * mine(endpoint.rank, 2)
        await mean_by_sum(endpoint, x, SyncVote(64.0), state)
        return x, reductions(endpoint) - before

    results = ENDPOINTS["simulator"](tmp_path, 3, law)
    terms = [1e-3 * mine(rank, 2) for rank in range(3)]
    for x, count in results:
        assert same(x, results[0][0]) and count == 2
        assert ((x.double() - exact(terms, [64.0] * 3)).abs() <= bound(terms, [64.0] * 3, Fp16()) + 2.0**-24).all()


@pytest.mark.parametrize("size", [1e-3, 1e-6, 1e-9])
def test_small_values_keep_their_precision_after_the_first_exchanges(size: float, tmp_path: Path):
    """fp16 ends at 6e-8.  After the first exchange values are sent times a power of two, more if all have vanished."""

    async def law(endpoint: Any) -> Any:
        state = state_of(Fp16())
        for step in range(4):
            x = size * mine(endpoint.rank, step)
            await mean_by_sum(endpoint, x, SyncVote(32.0), state)
        return x

    terms = [size * mine(rank, 3) for rank in range(4)]
    expected = exact(terms, [32.0] * 4)
    for x in ENDPOINTS["simulator"](tmp_path, 4, law):
        assert (x.double() - expected).norm() <= 5e-4 * expected.norm()


def test_values_that_cancel_each_other_are_not_sent_twice(tmp_path: Path):
    """The power of two follows the size of what is sent, not of the mean: near an optimum the mean is much smaller."""

    async def law(endpoint: Any) -> Any:
        state = state_of(Fp16())
        for step in range(5):
            x = mine(7, step) * (1 if endpoint.rank else -1) + 1e-6
            await mean_by_sum(endpoint, x, SyncVote(8.0), state)
        return reductions(endpoint), float(x.abs().max())

    for count, largest in ENDPOINTS["simulator"](tmp_path, 2, law):
        assert count == 5 and largest < 1e-3


@every_codec
def test_values_that_grow_beyond_the_range_are_sent_again(codec: Codec, tmp_path: Path):
    """Fp16 was used to small values; and the weights are a thousand times as large as before."""
    sizes = [(1e-6, 1.0), (6e4, 1000.0), (6e4, 1000.0)]

    async def law(endpoint: Any) -> Any:
        state = state_of(codec)
        means = []
        counts = []
        for size, weight in sizes:
            x = torch.full((NUMEL,), size)
            total = await mean_by_sum(endpoint, x, SyncVote(weight), state)
            assert not total.bad
            means.append(float(x[5]))
            counts.append(reductions(endpoint))
        return means, counts

    counts = [1, 3, 4] if codec == Fp16() else [1, 2, 3]
    for means, counted in ENDPOINTS["simulator"](tmp_path, 4, law):
        assert counted == counts
        assert means[1:] == pytest.approx([6e4, 6e4], rel=4e-3)


@pytest.mark.parametrize("ranks", [ENDPOINTS["simulator"], ENDPOINTS["gloo, in a thread"]], ids=["simulator", "gloo"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e5])
def test_a_value_that_cannot_be_encoded_is_known_to_all_and_spoils_one_mean(ranks: Ranks, bad: float, tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        state = state_of(Fp16())
        rank = endpoint.rank
        x, vote = mine(rank), SyncVote(4.0, rank=rank)
        if rank == 2:
            x[17] = bad
        total = await mean_by_sum(endpoint, x, vote, state)
        said = "" if vote.complaint is None else str(vote.complaint)
        y = mine(rank, 1)
        after = await mean_by_sum(endpoint, y, SyncVote(4.0, rank=rank), state)
        return bool(x.isnan().all()), total.culprit(), said, bool(y.isfinite().all()), after.bad

    for rank, (void, culprit, said, recovers, after) in enumerate(ranks(tmp_path, 3, law)):
        assert (void, culprit, recovers, after) == (True, "rank 2", True, 0.0)
        assert said == (f"Fp16() cannot encode {bad:g} at index 17: fp16 ends at 65504" if rank == 2 else "")


def test_a_sum_beyond_the_range_is_bad_on_all_ranks(tmp_path: Path):
    """Each value rounds to 65504.  But the weighted values round up to 24576 and 40960, together 65536."""

    async def law(endpoint: Any) -> Any:
        x = torch.full((8,), 65519.0)
        total = await mean_by_sum(
            endpoint, x, SyncVote([3.0, 5.0][endpoint.rank], rank=endpoint.rank), state_of(Fp16())
        )
        return bool(x.isnan().all()), total.bad

    assert ENDPOINTS["simulator"](tmp_path, 2, law) == [(True, 2.0)] * 2


def test_a_mean_of_nothing_leaves_everything_as_it_was(tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        x = mine(endpoint.rank)
        total = await mean_by_sum(endpoint, x, SyncVote(0.0), state_of(Fp16()))
        empty = torch.empty(0)
        await mean_by_sum(endpoint, empty, SyncVote(1.0), state_of(Fp16(), 0))
        return total.weight, same(x, mine(endpoint.rank))

    assert ENDPOINTS["simulator"](tmp_path, 2, law) == [(0.0, True)] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_values_of_any_dtype_are_summed(dtype: torch.dtype, tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        x = mine(endpoint.rank).to(dtype)
        await mean_by_sum(endpoint, x, SyncVote(5.0), state_of(BFloat16()))
        return x.double()

    expected = exact([mine(rank) for rank in range(2)], [5.0, 5.0])
    for x in ENDPOINTS["simulator"](tmp_path, 2, law):
        assert (x - expected).norm() <= 0.01 * expected.norm()


def test_groups_sum_in_full_precision_within_and_in_16_bits_between(tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        x = mine(endpoint.rank)
        state = state_of(Fp16())
        total = await mean_by_groups(endpoint, x, SyncVote(2.0 + endpoint.rank), state, groups_of(endpoint.ranks, 2))
        return x, total.weight

    weights = [2.0, 3.0, 4.0, 5.0]
    terms = [mine(rank) for rank in range(4)]
    results = ENDPOINTS["shared memory"](tmp_path, 4, law)
    for x, total in results:
        assert total == 14.0 and same(x, results[0][0])
        # Two terms are rounded, and one sum.
        assert ((x.double() - exact(terms, weights)).abs() <= bound(terms, weights, Fp16()) + 2.0**-22).all()


def test_a_residual_goes_by_stripes_and_so_does_a_wrapped_codec(tmp_path: Path):
    assert Entropy(Fp16()).reduction == PerTensor(Fp16()).reduction == "stripes"

    async def law(endpoint: Any) -> Any:
        state = ErrorFeedback(Fp16(), torch.zeros(NUMEL), torch.zeros(NUMEL))
        x = mine(endpoint.rank)
        await mean_encoded(endpoint, x, SyncVote(1.0), state)
        assert state.residual is not None
        return reductions(endpoint), bool(state.residual.any())

    assert ENDPOINTS["simulator"](tmp_path, 2, law) == [(0, True)] * 2


def test_buckets_remember_their_own_exponents():
    """They are saved with the state, and a resumed sender continues with them."""
    slots = Slots()
    state = Fp16().codec_state(slots, torch.zeros(100))
    first, second = state[slice(0, 40)], state[slice(40, 100)]
    first.exponent = -3  # pyright: ignore
    again = Fp16().codec_state(Slots(slots.slots), torch.zeros(100))
    assert again[slice(0, 40)].exponent == -3 and second.exponent is None  # pyright: ignore


# The kernel.


@every_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, 0.25, 0.3, 2.0**-20, 2.0**40])
def test_the_kernel_scales_and_rounds_as_defined(codec: Codec, dtype: torch.dtype, factor: float):
    for numel in (0, 1, 511, 512, 2000):
        x = (numbers(numel, dtype=torch.float32) * torch.logspace(-8, 2, numel)).to(dtype)
        data = kernels.encode_scaled(codec, x, factor)
        with kernels.plain():
            defined = kernels.encode_scaled(codec, x, factor)
        assert data.dtype == codec.wire and torch.equal(data, defined)


@every_codec
@pytest.mark.parametrize("place", [0, 600])
def test_the_kernel_refuses_what_the_codec_cannot_encode(codec: Codec, place: int):
    for value in (torch.nan, torch.inf, -66000.0 if codec == Fp16() else -3.4e38):
        x = torch.ones(700)
        x[place] = value
        errors = []
        for way in (kernels.plain, torch.no_grad):  # Something else than plain.
            with way(), pytest.raises(Unencodable) as error:
                kernels.encode_scaled(codec, x, 1e-3)
            errors.append(str(error.value))
        assert errors[0] == errors[1]
