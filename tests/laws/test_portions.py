"""Portions of the data: each counts exactly once in every pass, when workers die or are slow and when messages are lost
or repeated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline import (
    Cluster,
    ClusterError,
    Faults,
    Link,
    Replica,
    Run,
    Sandblaster,
    Shard,
    Task,
    simulate,
)
from paceline.protocol.messages import Request
from paceline.protocol.requests import Refusal, Requests
from paceline.server.messages import End, Enlist, PushSum, Report, RunProgram, SetValue, Value
from paceline.server.portions import Portions
from paceline.server.vectors import Vectors
from tests.laws.tasks import instant, numbers, same
from tests.messages import Dance

WORKERS, STEPS, BATCH, PASSES = 4, 5, 8, 4
SAMPLES = STEPS * BATCH


def counting() -> Task:
    """Every sample has its own parameter, and the loss is linear in it. So a direction shows how often each sample was
    counted."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        assert isinstance(model, Sum)
        return -(batch[0] @ model.total).mean()

    data = [torch.eye(SAMPLES, dtype=torch.float64)]
    return Task(Sum, loss, data, BATCH, lambda params: torch.optim.SGD(params, lr=1.0), epochs=PASSES)


def assert_each_was_counted_once(run: Run) -> None:
    """Without curvature, every pass except the first takes a step of length 1 along the mean gradient."""
    expected = torch.full((SAMPLES,), (PASSES - 1) / SAMPLES**0.5, dtype=torch.float64)
    assert torch.allclose(run.params, expected, rtol=1e-12)


def cluster(seed: int) -> Cluster:
    chance = Random(seed)
    return Cluster(workers=WORKERS, compute=[f"{chance.uniform(2, 20):.2f}ms" for _ in range(WORKERS)], seed=seed)


def method(seed: int) -> Sandblaster:
    chance = Random(seed)
    return Sandblaster(shards=chance.choice([1, 2, 3]), push=chance.choice([1, 2, 8]), backups=chance.choice([0, 1, 2]))


def random_faults(seed: int, servers: int, **more: Any) -> Faults:
    """Up to all but one die, and others join."""
    chance = Random(seed)
    joins = [chance.uniform(0, 0.4) for _ in range(chance.randrange(1, 4))]
    ranks = [*range(WORKERS), *range(WORKERS + servers, WORKERS + servers + len(joins))]
    mortal = chance.sample(ranks, chance.randrange(1, len(ranks)))
    return Faults(
        {rank: chance.uniform(0, 0.5) for rank in mortal}, joins, notice=chance.choice([0.0, 0.001, 0.05]), **more
    )


def suspicions(seed: int) -> list[tuple[int, float]]:
    chance = Random(seed)
    return [(chance.randrange(WORKERS), chance.uniform(0, 0.3)) for _ in range(chance.randrange(1, 6))]


FAULTS: dict[str, Callable[[int, int], Faults]] = {
    "deaths": lambda seed, servers: random_faults(seed, servers),
    "losses": lambda seed, servers: Faults(lost=0.15, doubled=0.15, retransmit_s=0.05),
    "deaths and losses": lambda seed, servers: random_faults(seed, servers, lost=0.1, doubled=0.1, retransmit_s=0.05),
    "suspicions": lambda seed, servers: Faults(suspicions=suspicions(seed)),
    "suspicions and losses": lambda seed, servers: Faults(
        suspicions=suspicions(seed), lost=0.1, doubled=0.1, retransmit_s=0.05
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("seed", range(24))
def test_each_portion_is_counted_once(kind: str, seed: int):
    strategy = method(seed)
    run = simulate(counting(), strategy, cluster(seed), faults=FAULTS[kind](seed, strategy.servers))
    assert_each_was_counted_once(run)


@pytest.mark.parametrize("before_s", [0.0002 * i for i in range(12)])
def test_a_worker_that_dies_during_a_push_is_counted_on_all_shards_or_on_none(before_s: float):
    """Over a slow link a push to three shards takes some time. The worker dies at every moment within it."""
    slow = Cluster(workers=2, compute="1ms", bandwidth="100kB/s", latency="1ms")
    strategy = Sandblaster(shards=3, push=2)
    whole = simulate(counting(), strategy, slow)
    run = simulate(counting(), strategy, slow, faults=Faults({1: whole.seconds / 2 - before_s}))
    assert_each_was_counted_once(run)


def test_if_all_workers_die_and_none_joins_the_run_ends():
    run = simulate(counting(), Sandblaster(), cluster(0), faults=Faults({r: 0.01 + r / 100 for r in range(WORKERS)}))
    assert run.seconds < 10.2, "after the time in which somebody might have joined"


def test_if_the_first_worker_dies_at_once_another_sends_the_initial_model():
    assert_each_was_counted_once(simulate(counting(), Sandblaster(), cluster(0), faults=Faults({0: 0.0})))


def test_a_joining_worker_shares_the_work():
    two = Cluster(workers=2, compute="10ms")
    alone, helped = (
        simulate(counting(), Sandblaster(), two, faults=Faults(joins=joins)) for joins in ([], [0.01, 0.01])
    )
    assert helped.seconds < 0.7 * alone.seconds
    assert_each_was_counted_once(helped)


@pytest.mark.parametrize("before_s", [0.0, 0.0001, 0.0004, 0.001, 0.002, 0.004])
@pytest.mark.parametrize("latency", ["50us", "2ms"])
def test_a_worker_that_joins_as_the_others_leave_has_nothing_to_do(before_s: float, latency: str):
    joining, coordinator = 5, 2
    two = Cluster(workers=2, compute="10ms", links={(joining, coordinator): Link("10Gbit/s", latency)})
    end = simulate(counting(), Sandblaster(), two).seconds
    assert_each_was_counted_once(simulate(counting(), Sandblaster(), two, faults=Faults(joins=[end - before_s])))


# Which worker has which portion.


@given(
    st.integers(1, 12),
    st.integers(0, 2),
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from("tbrrrhl")), max_size=200),
)
def test_in_any_order_of_events_each_portion_is_in_at_most_one_sum_and_none_is_lost(
    count: int, backups: int, events: list[tuple[int, str]]
):
    """Workers take portions, back up others, report, hand in and die in any order. Then one worker does the rest."""
    portions = Portions(count, backups)
    hands: dict[int, list[int]] = {}
    # By worker: the number of its sum, and the portions in it.
    sums: dict[int, tuple[int, list[int]]] = {}
    counted: list[int] = []

    def happen(worker: int, event: str) -> None:
        hand = hands.setdefault(worker, [])
        if event == "t" and (portion := portions.take(worker)) is not None:
            hand.append(portion)
        elif event == "b" and (portion := portions.back_up(worker)) is not None:
            assert portion not in hand
            hand.append(portion)
        elif event == "r" and hand:
            counts = portions.report(worker, portion := hand.pop(0))
            which, added = sums.get(worker, (0, []))
            if which != portions.sum_of(worker):
                added = []
            sums[worker] = portions.sum_of(worker), [*added, portion] if counts else added
        elif event == "h" and portions.claimed(worker):
            which, added = sums[worker]
            assert which == portions.sum_of(worker), "what is in a sum its worker knows of"
            counted.extend(added)
            portions.settle(worker)
        elif event == "l":
            portions.lose(worker)
            hands[worker] = []

    for worker, event in events:
        happen(worker, event)
    for worker in range(5):
        happen(worker, "l")
    while not portions.is_done:
        assert portions.free, "what nobody has is to be had"
        happen(9, "t")
        happen(9, "r")
        happen(9, "h")
    assert sorted(counted) == list(range(count))


def test_the_oldest_portion_is_backed_up_first_and_each_as_often_as_allowed():
    portions = Portions(3, backups=1)
    assert [portions.take(0), portions.take(1), portions.take(2)] == [0, 1, 2]
    assert portions.report(2, 2)
    portions.settle(2)
    assert [portions.back_up(2), portions.back_up(2), portions.back_up(2)] == [0, 1, None]


def test_without_backups_nothing_is_done_twice():
    portions = Portions(2, backups=0)
    assert [portions.take(0), portions.take(1), portions.back_up(2)] == [0, 1, None]


def test_portions_that_a_slow_worker_finished_but_did_not_hand_in_are_done_again():
    portions = Portions(3, backups=1)
    assert [portions.take(0), portions.take(1)] == [0, 1]
    assert portions.report(0, 0) and portions.take(0) == 2 and portions.report(1, 1)
    portions.settle(1)
    assert [portions.back_up(1), portions.back_up(1)] == [2, 0]
    before = portions.sum_of(0)
    assert portions.report(1, 2) and portions.report(1, 0)
    assert portions.sum_of(0) == before + 1 and not portions.claimed(0), "its sum is void"
    assert not portions.report(0, 2)
    portions.settle(1)
    assert portions.is_done


def test_a_backup_does_not_count_after_the_first_worker_has_reported():
    portions = Portions(2, backups=1)
    assert [portions.take(0), portions.take(1)] == [0, 1]
    assert portions.back_up(2) == 0 and portions.report(0, 0)
    assert not portions.report(2, 0)
    assert portions.claimed(0) == 1


# What shards compute, and what they refuse.


def slices(numel: int = 6) -> Vectors:
    found: list[Vectors] = []

    @dataclass(frozen=True)
    class Holding(Sandblaster):
        async def server(self, s: Shard) -> None:
            found.append(Vectors(s.endpoint, takes_nonfinite=False))

        async def worker(self, w: Replica) -> None:
            pass

    simulate(counting(), Holding(), instant(1))
    found[0].begin(numbers(numel))
    return found[0]


def test_operations_do_what_they_say():
    v, x = slices(), numbers(6)
    assert v.run("copy w x\nscale 2.0 x\naxpy -0.5 w x") == []
    assert torch.allclose(v["x"], 1.5 * x)
    assert v.run("mul w x y\nadd w y z\nzero x\ndot w w\ndot x z") == pytest.approx([float(x @ x), 0.0])
    assert torch.allclose(v["z"], x + 1.5 * x * x) and not v["x"].any() and same(v["w"], x)


def test_a_push_counts_once_and_only_when_it_is_accepted():
    v, update = slices(), numbers(6, seed=1)
    v.run("zero g")
    v.hold(PushSum(update, 1, 3, src=7))
    assert not v["g"].any()
    v.run("take 7 1 3 g")
    assert same(v["g"], update)
    with pytest.raises(Refusal, match="'take 7 1 3 g': worker 7 has pushed no such sum"):
        v.run("take 7 1 3 g")


@pytest.mark.parametrize(
    ("program", "named"),
    [
        ("zero x\nrun w", "'run w': there is no operation 'run', only zero, copy"),
        ("zero x\ncopy q y", "there is no vector 'q' here, only"),
        ("zero x\naxpy nan w x", "'nan' is no finite number"),
        ("zero x\naxpy one w x", "'one' is no finite number"),
        ("zero x\naxpy w x", "axpy takes 3 words, number, vector, vector"),
        ("zero x\ntake -1 0 0 x", "'-1' is no count"),
        ("zero x\n\n", "there is no operation ''"),
    ],
)
def test_a_program_with_an_error_is_not_started(program: str, named: str):
    v = slices()
    with pytest.raises(Refusal, match=named):
        v.run(program)
    with pytest.raises(Refusal, match="there is no vector 'x'"):
        v["x"]


GARBAGE: list[tuple[int, Request, str]] = [  # The server, the message, and why it is refused.
    (1, RunProgram(torch.zeros(3, dtype=torch.uint8)), "only the coordinator says what to do"),
    (1, End(), "only the coordinator says what to do"),
    (1, SetValue(torch.zeros(2, 2)), "a value is one vector of real numbers"),
    (1, Dance(), "there is no request of the type 'dance'"),
    (0, Dance(), "there is no request of the type 'dance'"),
    (0, Report(torch.zeros(2)), "it must hold 2 numbers of torch.int64, not torch.float32"),
    (0, Enlist(torch.tensor([0, 0, 5, 4])), "epochs 0 to 0 of 5 minibatches in 4 parts, and there is none"),
    (1, PushSum(torch.zeros(3, dtype=torch.float64), 0, 0), "for a shard of torch.float64"),
    (1, PushSum(torch.zeros(SAMPLES // 2), 0, 0), "for a shard of torch.float64"),
    (1, PushSum(torch.full((SAMPLES // 2,), torch.nan, dtype=torch.float64), 0, 0), "it holds NaN or infinity"),
    (0, Enlist(torch.tensor([0, 9, 5, 4])), "and they are"),
]


@dataclass(frozen=True)
class Provoked(Sandblaster):
    """A worker that sends an invalid message after the others have started, and then works as they do."""

    said: list[str] = field(default_factory=list[str], compare=False)
    refused: list[int] = field(default_factory=list[int], compare=False)

    async def worker(self, w: Replica) -> None:
        if w.rank == 1:
            await w.endpoint.busy(1.0)  # pyright: ignore
            requests = Requests(w.endpoint)
            for server, request, _ in GARBAGE:
                with pytest.raises(ClusterError) as told:
                    await requests.ask(w.endpoint.layout.server_ranks[server], request, Value)
                self.said.append(str(told.value))
        await super().worker(w)

    async def server(self, s: Shard) -> None:
        await super().server(s)
        self.refused.append(s.refused)


def test_an_invalid_message_is_refused_by_name_counted_and_survived():
    strategy = Provoked()
    run = simulate(counting(), strategy, instant(WORKERS))
    assert_each_was_counted_once(run)
    assert len(strategy.said) == len(GARBAGE)
    for said, (_, _, named) in zip(strategy.said, GARBAGE, strict=True):
        assert named in said
    assert sorted(strategy.refused) == [0, 4, 7]
