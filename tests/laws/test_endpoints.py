"""Laws of every endpoint, whether its ranks are coroutines in virtual time or real processes."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.codecs import Fp32, OneBit
from paceline.codecs.codec import ErrorFeedback
from paceline.collectives import SyncVote, mean, mean_by_gather, mean_by_stripes
from paceline.endpoint import SUMMABLE
from paceline.stripes import stripe_of
from tests.laws.every import ENDPOINTS
from tests.laws.ranks import Ranks
from tests.laws.tasks import close, numbers, same
from tests.messages import Note

KINDS = [
    pytest.param(ranks, marks=pytest.mark.dist if ranks.is_real else (), id=name) for name, ranks in ENDPOINTS.items()
]
every_endpoint = pytest.mark.parametrize("ranks", KINDS)
every_size = pytest.mark.parametrize("workers", [1, 2, 4])

WEIGHTS = [3.0, 5.0, 0.0, 8.0]
SIZES = [0, 1, 7, 513, 2000]


def mine(rank: int, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Values whose sum depends on the order of addition."""
    return (numbers(numel, seed=100 * seed + rank) * 10.0 ** (rank % 3)).to(dtype)


def in_order(workers: int, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    total = mine(0, numel, dtype, seed)
    for rank in range(1, workers):
        total = total + mine(rank, numel, dtype, seed)
    return total


def agree(results: list[Any]) -> bool:
    return all(same(a, b) for result in results[1:] for a, b in zip(results[0], result, strict=True))


@every_endpoint
@every_size
def test_all_reduce_leaves_the_sum_on_every_rank(ranks: Ranks, workers: int, tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        sums: list[Tensor] = []
        for dtype in SUMMABLE:
            for numel in SIZES:
                x = mine(endpoint.rank, numel, dtype)
                assert await endpoint.all_reduce(x) is x
                sums.append(x)
        return sums

    results = ranks(tmp_path, workers, law)
    assert agree(results)
    expected = [in_order(workers, numel, dtype) for dtype in SUMMABLE for numel in SIZES]
    for x, total in zip(results[0], expected, strict=True):
        if ranks.is_ordered or not x.dtype.is_floating_point or workers < 3:
            assert same(x, total), f"{x.dtype} of {x.numel()}"
        else:
            # A ring adds in another order: each of its additions rounds by half an ulp of at most 3 numbers up to 400.
            assert (
                (x.double() - total.double()).abs().max().item() <= 400 * workers * torch.finfo(x.dtype).eps
                if x.numel()
                else True
            )


@every_endpoint
@every_size
def test_a_matrix_is_summed_in_its_shape(ranks: Ranks, workers: int, tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        x = torch.full((2, 3), endpoint.rank + 1.0)
        return await endpoint.all_reduce(x)

    for x in ranks(tmp_path, workers, law):
        assert x.tolist() == [[workers * (workers + 1) / 2] * 3] * 2


@every_endpoint
@every_size
def test_the_extras_are_summed_too(ranks: Ranks, workers: int, tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        x, extras = mine(endpoint.rank, 9), torch.tensor([1.0, endpoint.rank, 2.0**-30], dtype=torch.float64)
        await endpoint.all_reduce(x, extras)
        return x, extras

    for x, extras in ranks(tmp_path, workers, law):
        assert extras.tolist() == [workers, workers * (workers - 1) / 2, workers * 2.0**-30]
        assert torch.allclose(x, in_order(workers, 9))


@every_endpoint
@every_size
def test_all_gather_returns_the_data_of_all_ranks_in_their_order(ranks: Ranks, workers: int, tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        data = torch.tensor([[endpoint.rank, 7], [250, endpoint.rank]], dtype=torch.uint8)
        parts = await endpoint.all_gather(data)
        parts[endpoint.rank][0, 1] = (
            9  # The results are this rank's own: neither its input nor another rank's result changes.
        )
        assert data.tolist() == [[endpoint.rank, 7], [250, endpoint.rank]]
        return [*parts, *await endpoint.all_gather(torch.zeros(0))]

    for rank, result in enumerate(ranks(tmp_path, workers, law)):
        expected = [[[r, 9 if r == rank else 7], [250, r]] for r in range(workers)]
        assert [part.tolist() for part in result] == expected + [[]] * workers


@every_endpoint
@every_size
def test_all_to_all_delivers_parts_of_any_size(ranks: Ranks, workers: int, tmp_path: Path):
    """Rank i sends (i + 2j) % 4 bytes of value 10i + j to rank j: some are empty, and no rank knows the sizes."""

    async def law(endpoint: Any) -> Any:
        i = endpoint.rank
        parts = [torch.full(((i + 2 * j) % 4,), 10 * i + j, dtype=torch.uint8) for j in range(workers)]
        received = await endpoint.all_to_all(parts)
        nothing = await endpoint.all_to_all([torch.zeros(0, dtype=torch.uint8)] * workers)
        return received + nothing

    for j, result in enumerate(ranks(tmp_path, workers, law)):
        expected = [[10 * i + j] * ((i + 2 * j) % 4) for i in range(workers)]
        assert [part.tolist() for part in result] == expected + [[]] * workers


@every_endpoint
def test_all_to_all_needs_a_part_for_every_rank(ranks: Ranks, tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        with pytest.raises(ValueError, match="3 parts"):
            endpoint.all_to_all([torch.zeros(1, dtype=torch.uint8)] * 3)

    ranks(tmp_path, 2, law)


@every_endpoint
@every_size
def test_broadcast_gives_every_rank_the_values_of_the_source(ranks: Ranks, workers: int, tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        copies: list[Tensor] = []
        for src in range(workers):
            x = mine(endpoint.rank, 600, seed=src)
            assert await endpoint.broadcast(x, src) is x
            copies.append(x)
        return copies

    results = ranks(tmp_path, workers, law)
    assert agree(results)
    assert all(same(x, mine(src, 600, seed=src)) for src, x in enumerate(results[0]))


@every_endpoint
@pytest.mark.parametrize("order", ["first started first", "last started first", "different on every rank"])
def test_several_collectives_may_be_in_flight_and_awaited_in_any_order(ranks: Ranks, order: str, tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        rank = endpoint.rank
        xs = [mine(rank, numel, seed=numel) for numel in (5, 700, 1)]
        tails = [torch.tensor([float(rank + i)], dtype=torch.float64) for i in range(3)]
        parts = [torch.full((rank + j,), rank, dtype=torch.uint8) for j in range(3)]
        ops = [endpoint.all_reduce(x, extras) for x, extras in zip(xs, tails, strict=True)]
        ops += [endpoint.all_to_all(parts), endpoint.all_gather(mine(rank, 3)), endpoint.broadcast(mine(rank, 4), 1)]
        places = list(range(len(ops)))
        if order == "last started first" or (order == "different on every rank" and rank == 1):
            places.reverse()
        elif order == "different on every rank" and rank == 2:
            places = places[3:] + places[:3]
        results: list[Any] = [None] * len(ops)
        for place in places:
            results[place] = await ops[place]
        return [*results, tails]

    for rank, (a, b, c, parts, gathered, spread, tails) in enumerate(ranks(tmp_path, 3, law)):
        for x, numel in ((a, 5), (b, 700), (c, 1)):
            assert torch.allclose(x, in_order(3, numel, seed=numel), atol=1e-4)
        assert [t.item() for t in tails] == [3.0, 6.0, 9.0]
        assert [p.tolist() for p in parts] == [[i] * (i + rank) for i in range(3)]
        assert all(same(x, mine(i, 3)) for i, x in enumerate(gathered))
        assert same(spread, mine(1, 4))


@every_endpoint
def test_ranks_may_await_at_different_moments_what_they_start_in_the_same_order(ranks: Ranks, tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        xs = [torch.full((numel,), endpoint.rank + 1.0) for numel in (5, 6, 7)]
        tails = [torch.full((numel,), endpoint.rank + 1.0, dtype=torch.float64) for numel in (1, 2, 3)]
        first, second = (endpoint.all_reduce(x, extras) for x, extras in zip(xs[:2], tails[:2], strict=True))
        await (second if endpoint.rank else first)
        third = endpoint.all_reduce(xs[2], tails[2])
        for op in (first, third) if endpoint.rank else (second, third):
            await op
        return [*xs, *tails]

    for result in ranks(tmp_path, 2, law):
        assert [set(x.tolist()) for x in result] == [{3.0}] * 6


@every_endpoint
def test_encoded_bytes_are_not_summed(ranks: Ranks, tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        for wrong in (torch.uint8, torch.bool):
            with pytest.raises(ValueError, match=f"all_reduce of {wrong}.*mean_by_gather"):
                endpoint.all_reduce(torch.zeros(4, dtype=wrong))
        with pytest.raises(ValueError, match="contiguous"):
            endpoint.all_reduce(torch.zeros(4, 4)[:, 1])

    ranks(tmp_path, 2, law)


# Means.


def link_for(codec: Any, numel: int) -> ErrorFeedback:
    return ErrorFeedback(codec, torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64))


async def any_mean(name: str, endpoint: Any, x: Tensor, vote: SyncVote, codec: Any) -> SyncVote:
    if name == "mean":
        return await mean(endpoint, x, vote)
    by = mean_by_gather if name == "mean_by_gather" else mean_by_stripes
    return await by(endpoint, x, vote, link_for(codec, x.numel()))


every_mean = pytest.mark.parametrize("name", ["mean", "mean_by_gather", "mean_by_stripes"])


@every_endpoint
@every_mean
def test_a_mean_is_weighted_and_the_same_on_every_rank(ranks: Ranks, name: str, tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        results: list[Tensor] = []
        for numel in (1, 7, 513, 2000):
            x = mine(endpoint.rank, numel)
            total = await any_mean(
                name, endpoint, x, SyncVote(WEIGHTS[endpoint.rank], going_on=float(endpoint.rank < 3)), Fp32()
            )
            assert (total.weight, total.going_on, total.bad) == (16.0, 3.0, 0.0)
            results.append(x)
        return results

    results = ranks(tmp_path, 4, law)
    assert agree(results)
    for x, numel in zip(results[0], (1, 7, 513, 2000), strict=True):
        expected = sum(w * mine(rank, numel, torch.float64) for rank, w in enumerate(WEIGHTS)) / 16
        assert torch.allclose(x.double(), expected, rtol=1e-5, atol=1e-5)


@every_endpoint
@pytest.mark.parametrize("name", ["mean_by_gather", "mean_by_stripes"])
def test_a_mean_of_lossy_codes_is_the_same_on_every_rank(ranks: Ranks, name: str, tmp_path: Path):

    async def law(endpoint: Any) -> Any:
        x = mine(endpoint.rank, 2000)
        await any_mean(name, endpoint, x, SyncVote(WEIGHTS[endpoint.rank]), OneBit())
        return [x]

    assert agree(ranks(tmp_path, 4, law))


@every_endpoint
@every_mean
def test_without_any_weight_nothing_changes(ranks: Ranks, name: str, tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        x = mine(endpoint.rank, 1025)
        total = await any_mean(name, endpoint, x, SyncVote(0.0), OneBit())
        assert total.weight == 0.0
        return x

    assert all(same(x, mine(rank, 1025)) for rank, x in enumerate(ranks(tmp_path, 4, law)))


@every_endpoint
@pytest.mark.parametrize("name", ["mean_by_gather", "mean_by_stripes"])
def test_a_nan_makes_the_mean_nan_and_changes_no_residual(ranks: Ranks, name: str, tmp_path: Path):
    """Up to the rounding of float64: the encoded values are subtracted again."""

    async def law(endpoint: Any) -> Any:
        by = mean_by_gather if name == "mean_by_gather" else mean_by_stripes
        link, bad = link_for(OneBit(), 1500), float(endpoint.rank == 2)
        await by(endpoint, mine(endpoint.rank, 1500, torch.float64), SyncVote(1.0), link)
        before = [link.residual.clone(), link.owner_residual.clone()]
        x = mine(endpoint.rank, 1500, torch.float64, seed=1)
        x[3] = torch.nan if bad else x[3]
        total = await by(endpoint, x, SyncVote(1.0, bad=bad, bad_rank=2.0 * bad), link)
        assert (total.bad, total.culprit()) == (1.0, "rank 2") and x.isnan().all()
        return close(link.residual, before[0]), close(link.owner_residual, before[1])

    assert [list(kept) for kept in ranks(tmp_path, 4, law)] == [[True, True]] * 4


@every_endpoint
def test_decoded_stripes_plus_residuals_equal_the_exact_means(ranks: Ranks, tmp_path: Path):
    """For the weighted mean, over 20 rounds of 1 bit; float64 throughout, but for codes that are float32 exactly."""
    numel, rounds = 1500, 20

    async def law(endpoint: Any) -> Any:
        link, heard = link_for(OneBit(), numel), torch.zeros(numel, dtype=torch.float64)
        for t in range(rounds):
            x = mine(endpoint.rank, numel, torch.float64, seed=t)
            await mean_by_stripes(endpoint, x, SyncVote(WEIGHTS[endpoint.rank]), link)
            heard += x
        return heard, link.residual, link.owner_residual

    results = ranks(tmp_path, 4, law)
    heard = results[0][0]
    owners = torch.zeros(numel, dtype=torch.float64)
    for rank, (_, _, owner) in enumerate(results):
        own = stripe_of(rank, numel, 4, unit=512)
        owners[own] = owner[own]
        assert owner.count_nonzero() == owner[own].count_nonzero(), "only its own stripe has residuals of sums"
    # Residuals may be of gradients (weighted as those are) or of gradients times weights (as CNTK does): both conserve.
    of_means = sum(w * residual for w, (_, residual, _) in zip(WEIGHTS, results, strict=True)) / 16 + owners
    of_sums = (sum(residual for _, residual, _ in results) + owners) / 16
    meant = sum(w * mine(r, numel, torch.float64, seed=t) for r, w in enumerate(WEIGHTS) for t in range(rounds)) / 16
    assert close(heard + of_means, meant) or close(heard + of_sums, meant)
    assert not close(heard, meant, rtol=1e-2), "1 bit loses enough for the residuals to matter"


@every_endpoint
def test_a_rank_without_data_loses_nothing_of_its_residual(ranks: Ranks, tmp_path: Path):
    """Delayed, not lost: in a round in which its weight is 0 a rank's residual is either kept or counted.

    Two of four ranks have data in each round, with weight 1; x is 0 for the others, as gradients are.  Every round has
    the weight 2.
    """
    numel, rounds = 600, 12

    def given(rank: int, t: int) -> Tensor:
        return mine(rank, numel, torch.float64, seed=t) * float((rank + t) % 2)

    async def law(endpoint: Any) -> Any:
        link, heard = link_for(OneBit(), numel), torch.zeros(numel, dtype=torch.float64)
        for t in range(rounds):
            x = given(endpoint.rank, t)
            total = await mean_by_gather(endpoint, x, SyncVote(float((endpoint.rank + t) % 2)), link)
            heard += x * total.weight
        return heard, link.residual

    results = ranks(tmp_path, 4, law)
    meant = sum(given(rank, t) for rank in range(4) for t in range(rounds))
    assert close(results[0][0] + sum(residual for _, residual in results), meant)


# Messages.


@every_endpoint
def test_messages_between_two_ranks_keep_their_order(ranks: Ranks, tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        if endpoint.rank == 0:
            sends = [endpoint.send(1, Note(i, -i, values=(torch.full((3,), float(i)),))) for i in range(20)]
            for send in sends:
                await send
            return None
        came = [await endpoint.recv() for _ in range(20)]
        return [[m.tag, m.src, m.number, m.other, m.values[0].tolist()] for m in came]

    assert ranks(tmp_path, 2, law)[1] == [["note", 0, i, -i, [i, i, i]] for i in range(20)]


@every_endpoint
def test_a_receiver_may_choose_which_sender_to_receive_from_first(ranks: Ranks, tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        if endpoint.rank > 0:
            for i in range(3):
                await endpoint.send(0, Note(i))
            return None
        last = [await endpoint.recv(src=2) for _ in range(3)]
        first = [await endpoint.recv(src=1) for _ in range(2)]
        rest = await endpoint.recv()
        return [f"{m.number} from {m.src}" for m in [*last, *first, rest]]

    assert ranks(tmp_path, 3, law)[0] == ["0 from 2", "1 from 2", "2 from 2", "0 from 1", "1 from 1", "2 from 1"]


@every_endpoint
def test_waiting_for_a_message_ends_at_the_timeout(ranks: Ranks, tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        if endpoint.rank == 0:
            with pytest.raises(TimeoutError, match=r"rank 0 waited 0\.01 s for a message from .*1"):
                await endpoint.recv(src=1, timeout=0.01)
            await endpoint.send(1, Note())
            return (await endpoint.recv(src=1)).number
        await endpoint.recv(src=0)
        await endpoint.send(0, Note(7))
        return None

    assert ranks(tmp_path, 2, law)[0] == 7


@every_endpoint
def test_a_sent_tensor_may_be_overwritten_once_it_was_awaited(ranks: Ranks, tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        if endpoint.rank == 0:
            for numel in (5, 300_000):  # Small ones are copied, large ones are read from the sender's memory.
                x = torch.ones(numel)
                await endpoint.send(1, Note(values=(x,)))
                x.zero_()
            return None
        return [bool((await endpoint.recv()).values[0].all()) for _ in range(2)]

    assert ranks(tmp_path, 2, law)[1] == [True, True]


@every_endpoint
def test_bytes_and_spans_are_in_the_trace(ranks: Ranks, tmp_path: Path):
    """A ring all-reduce of 100 float32 and 32 bytes of extras over 4 ranks: 2 * 3/4 of 432 bytes; gathered, 3 * 432."""
    summed = 1296 if ranks is ENDPOINTS["gloo, ordered"] else 648

    async def law(endpoint: Any) -> Any:
        await endpoint.all_reduce(torch.ones(100), torch.zeros(4, dtype=torch.float64))
        await endpoint.all_gather(torch.ones(10, dtype=torch.uint8))
        await endpoint.all_to_all([torch.ones(5 + j, dtype=torch.uint8) for j in range(4)])
        spans = [s for s in endpoint.trace.spans if s.rank == endpoint.rank]
        assert all(s.start <= s.stop <= endpoint.now() for s in spans)
        return [f"{s.kind} of {s.nbytes}" for s in spans]

    for rank, spans in enumerate(ranks(tmp_path, 4, law)):
        assert spans == [f"all_reduce of {summed}", "all_gather of 30", f"all_to_all of {26 - 5 - rank}"]


@every_endpoint
def test_routines_of_one_collective_mix_with_routines_of_several(ranks: Ranks, tmp_path: Path):
    """Ranks start them at different moments and await them in another order; a single one may turn out to be two."""

    async def once(endpoint: Any, x: Tensor) -> Tensor:
        return await endpoint.all_reduce(x)

    async def twice(endpoint: Any, x: Tensor) -> Tensor:
        await endpoint.all_reduce(x)
        return await endpoint.all_reduce(x)

    plan = [(once, True), (twice, False), (once, True), (twice, True), (once, False), (twice, True)]

    async def law(endpoint: Any) -> Any:
        ops: list[Any] = []
        for i, (routine, is_single) in enumerate(plan):
            if ranks.is_real:
                time.sleep(0.004 * ((5 * endpoint.rank + 3 * i) % 4))
            x = torch.full((100 * i + 1,), float(endpoint.rank + i))
            ops.append(endpoint.run_collectives(partial(routine, x=x), is_single=is_single))
        return [float((await ops[i]).unique()) for i in (5, 0, 1, 4, 3, 2)]

    sums = [3.0 + 3 * i for i in range(6)]
    expected = [sums[i] * (3 if plan[i][0] is twice else 1) for i in (5, 0, 1, 4, 3, 2)]
    assert ranks(tmp_path, 3, law) == [expected] * 3


@pytest.mark.dist
def test_the_next_routine_starts_although_nobody_has_awaited_the_last(tmp_path: Path):
    """In the communication thread, so that the network is never idle between two buckets."""

    async def once(endpoint: Any, x: Tensor) -> str:
        await endpoint.all_reduce(x)
        return threading.current_thread().name

    async def law(endpoint: Any) -> Any:
        ops = [
            endpoint.run_collectives(partial(once, x=torch.ones(1000)), is_single=is_single)
            for is_single in (True, True, False)
        ]
        last = await ops.pop()
        return last, [await op for op in ops]

    assert ENDPOINTS["gloo, in a thread"](tmp_path, 2, law) == [["paceline-comm", ["MainThread"] * 2]] * 2
