"""Workers that die, join or lose messages, in the simulator: no worker waits for a dead one, and no update is lost or
applied twice."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

from paceline import (
    ASGD,
    AllReduceSGD,
    AsyncDiLoCo,
    Cluster,
    Downpour,
    Faults,
    ParameterServer,
    PeriodicAveraging,
    Run,
    SoftSync,
    StaleSynchronous,
    Strategy,
    Task,
    simulate,
)
from paceline.endpoint import Layout
from paceline.errors import ClusterError
from paceline.server.gates import RoundRobin
from paceline.server.membership import Membership
from paceline.server.messages import Join, Leave
from paceline.server.rules import Sgd
from paceline.sim.faults import Pause
from tests.laws.tasks import close, quadratic, regression, values

STEPS, BATCH, WORKERS = 14, 8, 4

METHODS: dict[str, Strategy] = {
    "parameter server": ParameterServer(rule=Sgd(lr=0.01), servers=2),
    "round robin": ParameterServer(rule=Sgd(lr=0.01), gate=RoundRobin(), servers=2),
    "soft sync": SoftSync(lr=0.01, updates=3),
    "in step": StaleSynchronous(lr=0.01, bound=0),
    "bounded": StaleSynchronous(lr=0.01, bound=2),
    "downpour": Downpour(push=2, fetch=3),
    "asgd": ASGD(period=3),
    "asgd, pipelined": ASGD(period=2, pipeline=True),
    "async diloco": AsyncDiLoCo(period=3, grace=0.02),
    "async diloco, delayed": AsyncDiLoCo(period=4, delay=2, grace=0.02),
}
every_method = pytest.mark.parametrize("strategy", METHODS.values(), ids=METHODS)


def counting(numel: int = 3) -> Task:
    """Every sample is a one-hot vector, so a gradient shows which samples it is of."""
    samples = STEPS * BATCH

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total = nn.Parameter(torch.zeros(samples, dtype=torch.float64))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        assert isinstance(model, Sum)
        return -(batch[0] @ model.total).sum()

    return Task(
        model=Sum,
        loss=loss,
        data=[torch.eye(samples, dtype=torch.float64)],
        batch=BATCH,
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        steps=STEPS,
    )


def cluster(seed: int, **more: Any) -> Cluster:
    chance = Random(seed)
    return Cluster(
        workers=WORKERS, compute=[f"{chance.uniform(2, 20):.2f}ms" for _ in range(WORKERS)], seed=seed, **more
    )


def random_faults(seed: int, servers: int, **more: Any) -> Faults:
    """Up to all workers die. Others join, and some of those die too."""
    chance = Random(seed)
    joins = [chance.uniform(0, 0.2) for _ in range(chance.randrange(1, 4))]
    ranks = [*range(WORKERS), *range(WORKERS + servers, WORKERS + servers + len(joins))]
    mortal = chance.sample(ranks, chance.randrange(1, len(ranks)))
    return Faults(
        {rank: chance.uniform(0, 0.3) for rank in mortal}, joins, notice=chance.choice([0.0, 0.001, 0.05]), **more
    )


def visits(run: Run, lr: float) -> list[float]:
    """How often each sample's gradient was applied."""
    return (run.params / lr).round().tolist()


def test_without_faults_every_sample_is_applied_once():
    run = simulate(counting(), ParameterServer(rule=Sgd(lr=1.0), servers=2), cluster(0))
    assert visits(run, 1.0) == [1.0] * (STEPS * BATCH)


@pytest.mark.parametrize("seed", range(60))
def test_every_sample_is_applied_once_when_workers_die(seed: int):
    servers = 1 + seed % 3
    faults = random_faults(seed, servers)
    run = simulate(counting(), ParameterServer(rule=Sgd(lr=1.0), servers=servers), cluster(seed), faults=faults)
    assert visits(run, 1.0) == [1.0] * (STEPS * BATCH)


@pytest.mark.parametrize("seed", range(60))
def test_every_sample_is_applied_once_when_workers_are_suspected(seed: int):
    chance = Random(seed)
    suspicions = [(chance.randrange(WORKERS), chance.uniform(0, 0.2)) for _ in range(chance.randrange(1, 6))]
    run = simulate(
        counting(),
        ParameterServer(rule=Sgd(lr=1.0), servers=1 + seed % 2),
        cluster(seed),
        faults=Faults(suspicions=suspicions),
    )
    assert visits(run, 1.0) == [1.0] * (STEPS * BATCH)
    assert {p.rank for p in run.trace.points} >= set(range(WORKERS)), "they come back"


@pytest.mark.parametrize("seed", range(60))
def test_every_sample_is_applied_once_when_messages_are_lost_or_doubled(seed: int):
    faults = Faults(lost=0.15, doubled=0.15, retransmit_s=0.05)
    run = simulate(counting(), ParameterServer(rule=Sgd(lr=1.0), servers=2), cluster(seed), faults=faults)
    assert visits(run, 1.0) == [1.0] * (STEPS * BATCH)


@pytest.mark.parametrize("seed", range(40))
def test_every_sample_is_applied_once_when_workers_die_and_messages_are_lost(seed: int):
    servers = 1 + seed % 3
    faults = random_faults(seed, servers, lost=0.1, doubled=0.1, retransmit_s=0.05)
    run = simulate(counting(), ParameterServer(rule=Sgd(lr=1.0), servers=servers), cluster(seed), faults=faults)
    assert visits(run, 1.0) == [1.0] * (STEPS * BATCH)


@every_method
@pytest.mark.parametrize("seed", range(12))
def test_every_method_ends_and_learns_when_workers_die(strategy: Strategy, seed: int):
    faults = random_faults(seed, strategy.servers)
    run = simulate(regression(steps=STEPS, batch=BATCH), strategy, cluster(seed), faults=faults)
    assert run.params.isfinite().all()
    worked = Counter(p.step for p in run.trace.points if p.staleness is None)
    assert all(worked[step] >= WORKERS for step in range(STEPS)), "every part of every minibatch was worked on"


@every_method
def test_every_method_gives_the_same_result_twice_with_the_same_faults(strategy: Strategy):
    faults = random_faults(3, strategy.servers)
    runs = [simulate(regression(steps=STEPS, batch=BATCH), strategy, cluster(3), faults=faults) for _ in range(2)]
    assert runs[0].trace.digest() == runs[1].trace.digest()


@every_method
def test_all_workers_end_with_the_values_of_the_shards(strategy: Strategy):
    run = simulate(regression(steps=STEPS, batch=BATCH), strategy, cluster(1))
    ends = [values(state, "model")["params"] for state in run.states]
    assert all(torch.equal(end, ends[0]) for end in ends)


def test_no_worker_waits_for_a_dead_one():
    """Four workers run in lockstep and one dies. The others continue as soon as the death is detected."""
    died, notice = 0.055, 0.004
    run = simulate(
        regression(steps=40, batch=BATCH),
        StaleSynchronous(lr=0.01, bound=0, servers=1),
        Cluster(workers=WORKERS, compute="10ms"),
        faults=Faults({2: died}, notice=notice),
    )
    starts = sorted(s.start for s in run.trace.spans if s.kind == "gradient" and s.rank == 0)
    assert max(b - a for a, b in pairwise(starts)) < 0.010 + notice + 0.002
    assert not [s for s in run.trace.spans if s.rank == 2 and s.start > died]


def test_a_joining_worker_starts_with_the_current_model_and_shares_the_work():
    task, strategy, two = (
        quadratic(steps=100, batch=4),
        ParameterServer(rule=Sgd(lr=0.05), servers=1),
        Cluster(workers=2, compute="10ms"),
    )
    alone, helped = simulate(task, strategy, two), simulate(task, strategy, two, faults=Faults(joins=[0.1, 0.1]))
    assert helped.seconds < 0.65 * alone.seconds
    first = min((p for p in helped.trace.points if p.rank == 3), key=lambda p: p.time)
    assert first.step >= 8 and first.loss is not None
    began = min(p.loss for p in helped.trace.points if p.rank == 0 and p.loss is not None and p.time < 0.02)
    assert first.loss < began


def test_if_the_first_worker_dies_at_once_another_sends_the_initial_model():
    task = regression(steps=10, batch=BATCH)
    run = simulate(task, ParameterServer(rule=Sgd(lr=0.01), servers=2), cluster(0), faults=Faults({0: 0.0}))
    assert values(run.states[1], "model")["params"].isfinite().all()
    assert not close(values(run.states[1], "model")["params"], values(run.states[0], "model")["params"], rtol=1e-6)


def test_if_all_workers_die_and_none_joins_the_run_ends():
    faults = Faults({r: 0.01 + r / 100 for r in range(4)})
    run = simulate(regression(steps=10, batch=BATCH), ParameterServer(), cluster(0), faults=faults)
    assert run.seconds < 10.1, "after the time in which somebody might have joined"


@pytest.mark.parametrize("strategy", [AllReduceSGD(), PeriodicAveraging(period=4)], ids=str)
def test_methods_with_collectives_refuse_faults(strategy: Strategy):
    with pytest.raises(ValueError, match=r"its workers wait for each other\), which a run with faults does not offer"):
        simulate(regression(steps=4, batch=6), strategy, Cluster(workers=3), faults=Faults({1: 0.1}))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Faults({1: -1.0}), "must be finite"),
        (lambda: Faults(lost=1.0), "`lost` must be from 0 to below 1"),
        (
            lambda: simulate(
                regression(steps=4, batch=6), ParameterServer(), Cluster(workers=2), faults=Faults({7: 0.1})
            ),
            "rank 7 is not a worker",
        ),
    ],
)
def test_impossible_faults_are_refused(make: Any, named: str):
    with pytest.raises(ValueError, match=named):
        make()


@every_method
@pytest.mark.parametrize("seed", range(6))
def test_every_method_ends_when_workers_are_suspected(strategy: Strategy, seed: int):
    chance = Random(seed)
    suspicions = [(chance.randrange(WORKERS), chance.uniform(0, 0.15)) for _ in range(chance.randrange(1, 6))]
    run = simulate(regression(steps=STEPS, batch=BATCH), strategy, cluster(seed), faults=Faults(suspicions=suspicions))
    assert run.params.isfinite().all()


def test_if_all_workers_are_suspected_they_rejoin():
    faults = Faults(suspicions=[(rank, 0.05) for rank in range(WORKERS)])
    run = simulate(counting(), ParameterServer(rule=Sgd(lr=1.0), servers=1), cluster(0), faults=faults)
    assert visits(run, 1.0) == [1.0] * (STEPS * BATCH)


@pytest.mark.parametrize("before_s", [0.0005 * i for i in range(1, 25)])
def test_no_worker_waits_for_one_that_dies_after_it_has_left(before_s: float):
    strategy = ParameterServer(rule=Sgd(lr=1.0), servers=1)
    whole = simulate(counting(), strategy, cluster(0))
    run = simulate(counting(), strategy, cluster(0), faults=Faults({1: whole.seconds - before_s}))
    assert run.seconds < whole.seconds + 0.1


def test_a_replacement_that_joins_before_the_death_is_noticed_is_not_awaited_again():
    """Otherwise the shard would outlive its workers by the time that it waits for a replacement."""
    members = Membership(range(2), grace_s=60.0)
    join = Join(0)
    join.src = 3
    members.admit(join)
    members.lose(0, 0, is_dead=True, now=1.0)
    for rank in (1, 3):
        leave = Leave(False)
        leave.src = rank
        members.leave(leave)
    assert not members.is_needed


def test_a_part_of_a_job_names_workers_that_joined_later():
    assert Layout(2, 1, numbers=(0, 1, 2)).name(4) == "worker 4"


@pytest.mark.parametrize("seconds", [2.0, 100.0])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_run_whose_workers_are_all_silent_for_a_while_goes_on_and_applies_every_sample_once(
    seconds: float, servers: int
):
    """However long they were stopped: a run that ends before its work is done would be a short one, without a word."""
    pauses = [Pause(rank, 0.05, seconds) for rank in range(WORKERS)]
    faults = Faults(pauses=pauses, silent_s=0.5)
    run = simulate(counting(), ParameterServer(rule=Sgd(lr=1.0), servers=servers), cluster(3), faults=faults)
    assert visits(run, 1.0)[: STEPS * BATCH // servers] == [1.0] * (STEPS * BATCH // servers)


def test_workers_that_stay_silent_are_named_once_no_other_is_left():
    members = Membership(range(2), grace_s=0.0, return_s=5.0)
    members.lose(0, 0, is_dead=True, now=1.0)
    members.lose(1, 0, is_dead=False, now=2.0)
    assert members.is_needed and members.waits_until() == 7.0
    members.stop_waiting(6.9)
    with pytest.raises(ClusterError, match=r"no worker has finished, and nothing was heard for 5 s .*\(ranks 1\)"):
        members.stop_waiting(7.0)


def test_the_end_of_a_run_does_not_wait_for_a_silent_worker_once_another_has_finished():
    members = Membership(range(2), grace_s=0.0, return_s=5.0)
    members.lose(1, 0, is_dead=False, now=2.0)
    leave = Leave()
    leave.src = 0
    members.leave(leave)
    assert not members.is_needed
