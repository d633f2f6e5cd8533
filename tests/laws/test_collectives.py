"""Sums by a ring and by groups, and sums of encoded values, on every kind of endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import Cluster, Task, codecs, simulate
from paceline.codecs import Codec, ErrorFeedback, Fp16, Fp32, OneBit
from paceline.collectives import (
    REDUCTIONS,
    SyncVote,
    groups_of,
    mean,
    mean_by_groups,
    mean_by_stripes,
    mean_encoded,
    reduction,
    ring_sum,
    sum_by_groups,
)
from paceline.strategy import Strategy
from paceline.stripes import stripe_of
from tests.laws.every import ENDPOINTS
from tests.laws.ranks import Ranks
from tests.laws.tasks import numbers, same

every_endpoint = pytest.mark.parametrize("ranks", ENDPOINTS.values(), ids=ENDPOINTS)
SIZES = (0, 1, 3, 4, 1000, 1003)


def mine(rank: int, numel: int) -> Tensor:
    return numbers(numel, seed=rank, dtype=torch.float32)


def summed(workers: int, numel: int) -> Tensor:
    return torch.stack([mine(rank, numel).double() for rank in range(workers)]).sum(0)


def agree(results: list[Any]) -> bool:
    return all(same(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@every_endpoint
def test_a_ring_sums_any_size_and_gives_all_ranks_the_same_bits(ranks: Ranks, tmp_path: Path):
    """Fewer values than ranks give empty chunks; other sizes give unequal chunks."""

    async def law(endpoint: Any) -> Any:
        return [await ring_sum(endpoint, mine(endpoint.rank, numel)) for numel in SIZES]

    results = ranks(tmp_path, 4, law)
    assert agree(results)
    for x, numel in zip(results[0], SIZES, strict=True):
        assert torch.allclose(x.double(), summed(4, numel), rtol=1e-6, atol=1e-6)


@every_endpoint
def test_one_rank_is_a_ring_without_messages(ranks: Ranks, tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        x = await ring_sum(endpoint, mine(0, 10))
        return x, endpoint.trace.bytes_sent(rank=0)

    [(x, nbytes)] = ranks(tmp_path, 1, law)
    assert same(x, mine(0, 10)) and nbytes == 0


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 8])
def test_a_ring_sends_the_bytes_of_its_formula(workers: int, tmp_path: Path):
    numel = 840  # which all of these divide

    async def law(endpoint: Any) -> Any:
        await ring_sum(endpoint, mine(endpoint.rank, numel))
        return endpoint.trace.bytes_sent(rank=endpoint.rank)

    assert set(ENDPOINTS["simulator"](tmp_path, workers, law)) == {2 * (workers - 1) * numel * 4 // workers}


@every_endpoint
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sums_by_groups_equal_flat_sums_and_have_the_same_bits_on_all_ranks(ranks: Ranks, size: int, tmp_path: Path):
    """Groups of 1 are a flat all-reduce; one group is a reduction and a broadcast; with 3 of 4 the last is smaller."""

    async def law(endpoint: Any) -> Any:
        groups = groups_of(endpoint.ranks, size)
        results: list[Tensor] = []
        for numel in (1, 1003):
            x, extras = mine(endpoint.rank, numel), torch.tensor([1.0, float(endpoint.rank)], dtype=torch.float64)
            await sum_by_groups(endpoint, x, extras, groups)
            results += [x, extras]
        return results

    results = ranks(tmp_path, 4, law)
    assert agree(results)
    for x, extras, numel in zip(results[0][::2], results[0][1::2], (1, 1003), strict=True):
        assert torch.allclose(x.double(), summed(4, numel), rtol=1e-6, atol=1e-6)
        assert extras.tolist() == [4.0, 6.0]


def test_uneven_groups_have_the_true_mean_and_not_the_mean_of_means(tmp_path: Path):
    """Seven ranks in groups of 4: if means were sent, those of the smaller group would count for more."""

    async def law(endpoint: Any) -> Any:
        x = torch.full((3,), float(endpoint.rank**2))
        total = await mean(endpoint, x, SyncVote(1.0 + endpoint.rank), groups=groups_of(endpoint.ranks, 4))
        assert total.weight == 28.0
        return x

    results = ENDPOINTS["simulator"](tmp_path, 7, law)
    assert all(same(x, results[0]) for x in results)
    true = sum((1 + r) * r**2 for r in range(7)) / 28
    of_means = sum(sum((1 + r) * r**2 for r in g) / sum(1 + r for r in g) for g in groups_of(range(7), 4)) / 2
    assert torch.allclose(results[0], torch.tensor(true)) and abs(true - of_means) > 1


class Grouped(Strategy):
    """One sum by groups."""

    def __init__(self, groups: list[list[int]], numel: int) -> None:
        self.groups, self.numel = groups, numel

    async def worker(self, w: Any) -> None:
        await sum_by_groups(w.endpoint, torch.ones(self.numel), torch.zeros(0, dtype=torch.float64), self.groups)


@pytest.mark.parametrize(("workers", "size"), [(8, 4), (6, 2), (7, 4)])
def test_groups_exchange_the_bytes_of_a_ring_of_their_leaders(workers: int, size: int):
    """A member sends its values once; a leader sends them to its members and takes part in the ring of leaders."""
    numel, groups = 840, groups_of(range(workers), size)
    task = Task(
        lambda: torch.nn.Linear(1, 1), lambda m, b: m(b[0]).sum(), [torch.ones(8, 1)], 8, torch.optim.SGD, steps=1
    )
    run = simulate(task, Grouped(groups, numel), Cluster(workers=workers, collective="star"))
    for group in groups:
        # A star's all-reduce: to its first member and back.
        ring = 4 * numel * (len(groups) - 1 if group[0] == 0 else 1)
        assert run.trace.bytes_sent(rank=group[0]) == (len(group) - 1) * 4 * numel + ring
        assert all(run.trace.bytes_sent(rank=r) == 4 * numel for r in group[1:])


def test_groups_must_contain_every_rank_once(tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        for wrong in ([[0, 1]], [[0, 1], [1, 2]], [[0], [1], [2], [3]]):
            with pytest.raises(ValueError, match=r"exactly one"):
                await sum_by_groups(endpoint, torch.ones(1), torch.zeros(0), wrong)
            with pytest.raises(ValueError, match=r"exactly one"):
                await mean_by_groups(endpoint, torch.ones(1), SyncVote(1.0), ErrorFeedback(OneBit(), None), wrong)

    ENDPOINTS["simulator"](tmp_path, 3, law)
    with pytest.raises(ValueError, match="groups of 0"):
        groups_of(range(4), 0)


@every_endpoint
@pytest.mark.parametrize("codec", [Fp32(), OneBit()], ids=str)
def test_nothing_is_encoded_within_groups(ranks: Ranks, codec: Codec, tmp_path: Path):
    """Only the first ranks of groups have residuals, and with these the sum is conserved."""
    weights, rounds, numel = [3.0, 5.0, 0.0, 8.0], 5, 1030

    async def law(endpoint: Any) -> Any:
        codec_state = ErrorFeedback(codec, torch.zeros(numel), torch.zeros(numel))
        received = torch.zeros(numel)
        for t in range(rounds):
            x = mine(endpoint.rank + 10 * t, numel)
            total = await mean_by_groups(
                endpoint, x, SyncVote(weights[endpoint.rank], going_on=1.0), codec_state, groups_of(endpoint.ranks, 3)
            )
            assert (total.weight, total.going_on, total.bad) == (16.0, 4.0, 0.0)
            received += x
        return received, codec_state.residual, codec_state.owner_residual

    results = ranks(tmp_path, 4, law)
    assert all(same(results[0][0], received) for received, _, _ in results)
    assert not any(residual.count_nonzero() for _, residual, _ in results[1:3])
    expected = sum(w * mine(r + 10 * t, numel).double() for r, w in enumerate(weights) for t in range(rounds)) / 16
    owner_residuals = results[0][2] + results[3][2]
    residuals = (8 * results[0][1].double() + 8 * results[3][1].double()) / 16 + owner_residuals
    assert torch.allclose(results[0][0] + residuals, expected, atol=1e-5)


@every_endpoint
def test_groups_handle_a_nan_and_a_total_weight_of_0(ranks: Ranks, tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        codec_state, groups = ErrorFeedback(OneBit(), torch.zeros(70), torch.zeros(70)), groups_of(endpoint.ranks, 2)
        x, y = mine(endpoint.rank, 70), mine(endpoint.rank, 70)
        total = await mean_by_groups(endpoint, x, SyncVote(0.0), codec_state, groups)
        bad = float(endpoint.rank == 3)
        spoiled = await mean_by_groups(endpoint, y, SyncVote(1.0, 0.0, bad, 3 * bad), codec_state, groups)
        return (
            same(x, mine(endpoint.rank, 70)),
            total.weight,
            bool(y.isnan().all()),
            spoiled.culprit(),
            bool(codec_state.residual.abs().max() < 1e-6),
        )

    assert [list(r) for r in ranks(tmp_path, 4, law)] == [[True, 0.0, True, "rank 3", True]] * 4


@pytest.mark.parametrize("codec", [Fp32(), OneBit(), Fp16()], ids=str)
def test_the_rank_with_a_nan_is_known_across_groups(codec: Codec, tmp_path: Path):
    """The first rank of its group finds it in the sum, but the vote names the rank that had it."""

    async def law(endpoint: Any) -> Any:
        codec_state = ErrorFeedback(codec, torch.zeros(70), torch.zeros(70))
        x, vote = mine(endpoint.rank, 70), SyncVote(1.0, rank=endpoint.rank)
        if endpoint.rank == 3:
            x[11] = torch.inf
        total = await mean_by_groups(endpoint, x, vote, codec_state, groups_of(endpoint.ranks, 2))
        at = None if vote.complaint is None else vote.complaint.at
        return bool(x.isnan().all()), total.culprit(), at, bool(codec_state.residual.abs().max() < 1e-6)

    assert ENDPOINTS["simulator"](tmp_path, 4, law) == [
        (True, "rank 3", 11 if r == 3 else None, True) for r in range(4)
    ]


def test_a_ring_rejects_dtypes_that_it_cannot_sum(tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        with pytest.raises(ValueError, match="encoded values cannot be summed"):
            await ring_sum(endpoint, torch.full((4,), 200, dtype=torch.uint8))

    ENDPOINTS["simulator"](tmp_path, 2, law)


# Linear means of encoded values.

LINEAR = [c() for c in codecs.CODECS if c.wire is not None]


@every_endpoint
@pytest.mark.parametrize("codec", LINEAR, ids=str)
def test_a_codec_with_a_wire_dtype_is_summed_on_the_wire(ranks: Ranks, codec: Codec, tmp_path: Path):
    weights = [3.0, 5000.0, 0.0, 8.0]

    async def law(endpoint: Any) -> Any:
        x = mine(endpoint.rank, 1003) * 100
        total = await mean(endpoint, x, SyncVote(weights[endpoint.rank], going_on=1.0), codec)
        assert (total.weight, total.going_on) == (5011.0, 4.0)
        return [x]

    results = ranks(tmp_path, 4, law)
    assert agree(results)
    expected = sum(w * mine(r, 1003).double() * 100 for r, w in enumerate(weights)) / 5011
    step = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}[codec.wire or torch.float32]
    assert ((results[0][0].double() - expected).abs() <= 4 * step * expected.abs().max()).all()


@pytest.mark.parametrize("codec", [c() for c in codecs.CODECS if c.wire is None and c.__name__ != "Threshold"], ids=str)
def test_a_codec_without_a_wire_dtype_cannot_be_summed(codec: Codec, tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        x = mine(endpoint.rank, 64)
        with pytest.raises(
            ValueError, match=r"mean: what .* encodes cannot be summed; use mean_by_stripes or mean_by_gather"
        ):
            await mean(endpoint, x, SyncVote(1.0), codec)
        assert same(x, mine(endpoint.rank, 64))

    ENDPOINTS["simulator"](tmp_path, 2, law)


def test_a_value_beyond_16_bits_voids_the_mean_on_all_ranks(tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        x = torch.full((4,), 1e5 if endpoint.rank else 1.0)
        total = await mean(endpoint, x, SyncVote(1.0, rank=endpoint.rank), Fp16())
        return x, total.culprit()

    for x, culprit in ENDPOINTS["simulator"](tmp_path, 2, law):
        assert x.isnan().all() and culprit == "rank 1"


def test_a_mean_beyond_the_format_is_bad_on_all_ranks(tmp_path: Path):
    """Owners encode means plus residuals: the sum may be out of the format's range though each part is within it."""

    async def law(endpoint: Any) -> Any:
        x = torch.full((2000,), 6e4)
        codec_state = ErrorFeedback(Fp16(), torch.zeros(2000), torch.zeros(2000))
        if endpoint.rank == 1:
            codec_state.owner_residual[:] = 2e4
        total = await mean_by_stripes(endpoint, x, SyncVote(1.0, rank=endpoint.rank), codec_state)
        return x, total.culprit()

    for x, culprit in ENDPOINTS["simulator"](tmp_path, 2, law):
        assert x.isnan().all() and culprit == "rank 1"


def test_stripes_are_whole_buckets():
    """A bucket that is cut in two would have two pairs of means."""
    for unit in (32, 512, OneBit().unit):
        stripes = [stripe_of(j, 10_000, 3, unit=unit) for j in range(3)]
        assert all(s.start % unit == 0 for s in stripes) and stripes[-1].stop == 10_000
        assert Fp32().unit % 32 == 0


# Reductions.


def test_a_reduction_is_found_by_the_name_that_a_codec_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Mine(Fp32):
        reduction = "mine"

    async def law(endpoint: Any) -> Any:
        x = torch.full((4,), float(endpoint.rank))
        with pytest.raises(
            ValueError, match=r"Mine\(\) has the reduction 'mine', which is none of \['factors', 'gather'"
        ):
            await mean_encoded(endpoint, x, SyncVote(1.0), ErrorFeedback(Mine(), None))
        with monkeypatch.context() as patch:
            patch.setitem(REDUCTIONS, "mine", REDUCTIONS["gather"])
            await mean_encoded(endpoint, x, SyncVote(1.0), ErrorFeedback(Mine(), None))
        return x.tolist()

    with pytest.raises(ValueError, match=r"reduction\('gather'\)"):
        reduction("gather")
    assert ENDPOINTS["simulator"](tmp_path, 1, law) == [[0.0] * 4]
