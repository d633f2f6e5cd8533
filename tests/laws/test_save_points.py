"""Methods with servers that are stopped, saved and resumed: each sample is applied exactly once."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from torch import Tensor

from paceline import (
    ASGD,
    AllReduceSGD,
    Cluster,
    Downpour,
    EAWild,
    Faults,
    Hogwild,
    Link,
    LogNormal,
    ParameterServer,
    StaleSynchronous,
    Strategy,
    Task,
    Then,
    resized,
    simulate,
)
from paceline.codecs import OneBit
from paceline.server.gates import RoundRobin, Turns
from paceline.server.rules import Adagrad, Momentum, Sgd
from paceline.state import resized_for
from tests.laws.every import STRATEGIES, Case
from tests.laws.tasks import OPTIMIZERS, Point, close, numbers, regression, same

SERVED = {name: case for name, case in STRATEGIES.items() if case.strategy.servers and case.strategy.needs.resumable}
STEPS, BATCH = 14, 12


def constant_gradients(steps: int = STEPS) -> Task:
    """The gradient of a sample is the sample, wherever the model is, so the order of updates does not matter."""
    return Task(
        lambda: Point(7),
        lambda model, batch: (model.w * batch[0]).sum(1).sum() / BATCH,
        [numbers(STEPS * BATCH, 7, seed=3)],
        BATCH,
        OPTIMIZERS["sgd"],
        steps=steps,
    )


def once(task: Task, lr: float) -> Tensor:
    """The model after every sample was applied exactly once."""
    total = sum(task.part(k, 0, 1)[0].sum(0) for k in range(task.total_steps))
    return Point(7).w.detach() - lr * total / BATCH


def uneven(workers: int, seed: int) -> Cluster:
    """Workers of very different speeds; one has a slow link to a shard."""
    return Cluster(workers, compute=LogNormal("10ms", 1.0), links={(0, workers): Link("1MB/s", "7ms")}, seed=seed)


# Of these the shards' value is the sum of all gradients, whatever the order.
SUMMED: dict[str, tuple[Strategy, float]] = {
    "free": (ParameterServer(rule=Sgd(lr=0.05)), 0.05),
    "one shard": (ParameterServer(rule=Sgd(lr=0.05), servers=1), 0.05),
    "three shards": (ParameterServer(rule=Sgd(lr=0.05), servers=3), 0.05),
    "bound of 0": (StaleSynchronous(lr=0.05, bound=0), 0.05),
    "bound of 2": (StaleSynchronous(lr=0.05, bound=2, servers=3), 0.05),
    "in turn": (ParameterServer(rule=Sgd(lr=0.05), gate=RoundRobin()), 0.05),
    "by turns": (ParameterServer(rule=Sgd(lr=0.05), gate=Turns()), 0.05),
    "asgd": (ASGD(period=3), 0.05),
    "asgd, pipelined": (ASGD(period=2, pipeline=True), 0.05),
    "downpour": (Downpour(push=3, fetch=2, rule=Sgd(lr=0.05)), 0.05),
    "downpour in turn": (Downpour(rule=Sgd(lr=0.05), local_lr=0.0), 0.05),
}


@pytest.mark.parametrize("name", SUMMED)
def test_each_sample_is_applied_once_whatever_the_numbers_of_workers_and_shards_are(name: str):
    strategy, lr = SUMMED[name]
    task = constant_gradients()
    expected = once(task, lr)
    for seed in range(4):
        chance = Random(f"{name}/{seed}")
        workers = chance.randrange(1, 5)
        first = simulate(task, strategy, uneven(workers, seed), stop_at=chance.randrange(1, STEPS))
        for others in (workers, chance.randrange(1, 6)):
            rest = simulate(task, strategy, uneven(others, seed + 50), resume=resized(first.states, others))
            assert close(rest.params, expected), (seed, workers, others)


@pytest.mark.parametrize("name", SUMMED)
def test_a_run_that_is_stopped_again_and_again_applies_each_sample_once(name: str):
    strategy, lr = SUMMED[name]
    task = constant_gradients()
    states = None
    for step in (2, 3, 7, 11):
        states = simulate(task, strategy, uneven(3, step), stop_at=step, resume=states).states
    assert close(simulate(task, strategy, uneven(3, 1), resume=states).params, once(task, lr))


@pytest.mark.parametrize("case", SERVED.values(), ids=SERVED)
def test_one_worker_continues_to_the_bit(case: Case):
    task = regression(steps=9, batch=8)
    whole = simulate(task, case.strategy, Cluster(workers=1))
    for stop in (1, 4, 8):
        first = simulate(task, case.strategy, Cluster(workers=1), stop_at=stop)
        assert same(simulate(task, case.strategy, Cluster(workers=1), resume=first.states).params, whole.params)


IN_ORDER = {
    "in turn": ParameterServer(rule=Momentum(lr=0.05), gate=RoundRobin()),
    "in turn by one-bit": ParameterServer(rule=Adagrad(lr=0.05), gate=RoundRobin(), codec=OneBit()),
}


@pytest.mark.parametrize("strategy", IN_ORDER.values(), ids=IN_ORDER)
def test_where_the_order_of_updates_is_fixed_several_workers_continue_to_the_bit(strategy: Strategy):
    """Workers of equal speed have the same parts in both runs."""
    task = regression(steps=9, batch=9)
    cluster = Cluster(workers=3, compute=1.0)
    whole = simulate(task, strategy, cluster)
    for stop in (1, 2, 5, 8):
        first = simulate(task, strategy, cluster, stop_at=stop)
        assert same(simulate(task, strategy, cluster, resume=first.states).params, whole.params), stop


@pytest.mark.parametrize("name", ["one shard", "asgd", "by turns"])
def test_a_worker_that_dies_while_the_run_is_saved_is_not_waited_for(name: str):
    """With one shard, each sample is applied once all the same."""
    strategy, lr = replace(SUMMED[name][0], servers=1), SUMMED[name][1]
    task = constant_gradients()
    for seed in range(12):
        chance = Random(seed)
        stop = chance.randrange(2, STEPS - 2)
        dead = chance.randrange(1, 4)
        faults = Faults(deaths={dead: 0.01 * stop * chance.uniform(0.5, 3)})
        first = simulate(task, strategy, uneven(4, seed), stop_at=stop, faults=faults)
        *workers, shard = first.states
        workers[dead] = resized_for([state for state in workers if state["rank"] != dead], 4, dead)
        rest = simulate(task, strategy, uneven(4, seed + 50), resume=[*workers, shard])
        assert close(rest.params, once(task, lr)), seed


def test_a_warm_start_and_the_servers_after_it_are_saved():
    strategy = Then(AllReduceSGD(), ParameterServer(rule=Momentum(lr=0.05)), steps=4)
    task = regression(steps=9, batch=8)
    whole = simulate(task, strategy, Cluster(workers=1))
    for stop in (2, 3, 4, 5, 8):
        first = simulate(task, strategy, Cluster(workers=1), stop_at=stop)
        assert same(simulate(task, strategy, Cluster(workers=1), resume=first.states).params, whole.params)


@pytest.mark.parametrize("strategy", [Hogwild(), EAWild(), EAWild(period=3)], ids=repr)
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_that_share_memory_continue_to_the_bit_if_nobody_overtakes(strategy: Strategy, workers: int):
    task = regression(steps=9, batch=9)
    cluster = Cluster(workers, compute=1.0)
    whole = simulate(task, strategy, cluster)
    for stop in (1, 4, 8):
        first = simulate(task, strategy, cluster, stop_at=stop)
        assert same(simulate(task, strategy, cluster, resume=first.states).params, whole.params)


def test_under_hogwild_each_sample_is_applied_once_if_writes_do_not_overlap():
    """Workers of different speeds stop at different steps."""
    task = constant_gradients()
    for seed in range(4):
        stop = Random(seed).randrange(1, STEPS)
        first = simulate(task, Hogwild(), Cluster(3, compute=LogNormal("10ms", 1.0), seed=seed), stop_at=stop)
        models = [state["slots"]["model"]["values"]["params"] for state in first.states]
        assert all(same(model, models[0]) for model in models)
        positions = [state["step"] for state in first.states]
        total = sum(task.part(k, rank, 3)[0].sum(0) for rank in range(3) for k in range(positions[rank]))
        assert close(models[0], Point(7).w.detach() - 0.05 * total / BATCH), seed
