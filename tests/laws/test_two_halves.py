"""A worker that dies between two messages of one update, to several shards: each sample is applied once in each."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from paceline import ASGD, Cluster, Downpour, Faults, ParameterServer, Run, StaleSynchronous, Strategy
from paceline import simulate as simulated
from paceline.server.gates import RoundRobin
from paceline.server.rules import Sgd
from paceline.server.work_queue import Lease, WorkItem, WorkQueue
from tests.laws.test_membership import BATCH, STEPS, counting

WORKERS = 3
SHORT = 6  # Steps, of the 14 for which there are samples.
ONCE = {0.0: (STEPS - SHORT) * BATCH, 1.0: SHORT * BATCH}

# Each counts how often a sample was used; a value and the samples' number of uses differ by this factor.
EXACT: dict[str, tuple[Strategy, float]] = {
    "parameter server": (ParameterServer(rule=Sgd(lr=1.0), servers=2), 1.0),
    "three shards": (ParameterServer(rule=Sgd(lr=1.0), servers=3), 1.0),
    "round robin": (ParameterServer(rule=Sgd(lr=1.0), gate=RoundRobin(), servers=2), 1.0),
    "bounded": (StaleSynchronous(lr=1.0, bound=1, servers=2), 1.0),
    "downpour": (Downpour(rule=Sgd(lr=1.0), push=3, fetch=2, servers=2), 1.0),
    "asgd": (ASGD(period=3, servers=2), 1.0),
    "asgd, pipelined": (ASGD(period=2, pipeline=True, servers=2), 1.0),
}
exact = pytest.mark.parametrize(("strategy", "factor"), EXACT.values(), ids=EXACT)


def simulate(strategy: Strategy, faults: Faults) -> Run:
    # A network so slow that the messages of an update leave one after the other.
    cluster = Cluster(workers=WORKERS, compute=["4ms", "5ms", "7ms"], bandwidth="10Mbit/s", latency="1ms", seed=0)
    return simulated(replace(counting(), steps=SHORT), strategy, cluster, faults=faults)


def between_halves(run: Run, worker: int) -> list[float]:
    """The times between the first and the last message of each update, from the trace of a run without faults."""
    spans = [s for s in run.trace.spans if s.rank == worker and s.kind == "send" and s.nbytes > 100]
    return [(one.stop + other.stop) / 2 for one, other in itertools.pairwise(spans) if other.start - one.stop < 1e-6]


def uses(run: Run, factor: float) -> Counter[float]:
    """How many samples were applied how often."""
    return Counter(round(x / factor, 6) for x in run.params.tolist())


@exact
def test_a_worker_that_dies_between_two_halves_leaves_each_sample_applied_once(strategy: Strategy, factor: float):
    whole = simulate(strategy, Faults())
    assert uses(whole, factor) == ONCE
    halves = 0
    for worker in range(WORKERS):
        for time in between_halves(whole, worker):
            halves += 1
            run = simulate(strategy, Faults({worker: time}))
            assert uses(run, factor) == ONCE, f"worker {worker} dies at {time}"
    assert halves >= 4


@exact
def test_workers_that_are_suspected_between_two_halves_and_live_leave_each_sample_applied_once(
    strategy: Strategy, factor: float
):
    whole = simulate(strategy, Faults())
    for worker in range(WORKERS):
        for time in between_halves(whole, worker)[::2]:
            run = simulate(strategy, Faults(suspicions=[(worker, time), (worker, time + 0.03)]))
            assert uses(run, factor) == ONCE, f"worker {worker} is suspected at {time}"


def test_the_last_update_of_a_run_is_in_all_shards_before_the_others_may_leave():
    """The worker with the last item dies when one shard has its half, and the others have nothing else to do."""
    strategy, factor = EXACT["parameter server"]
    whole = simulate(strategy, Faults())
    for worker in range(WORKERS):
        last = between_halves(whole, worker)[-1]
        run = simulate(strategy, Faults({worker: last}, notice=0.5))
        assert uses(run, factor) == ONCE


# The queue.


def queue_with(taken: int, **more: Any) -> WorkQueue:
    queue = WorkQueue(0, 4, data_shards=1, shards=3)
    queue.take(7, taken)
    return queue


def test_items_that_some_shards_have_are_free_again_and_say_which():
    queue = queue_with(4)
    queue.do(7, 3)
    lost = queue.lose(7)
    assert lost is not None
    assert not queue.left
    assert not queue.is_over
    queue.settle(lost[0], [3, 1, 2])
    assert queue.take(1, 9) == [WorkItem(1, 0, had=0b101), WorkItem(2, 0, had=0b001), WorkItem(3, 0)]


def test_an_item_that_the_second_worker_brings_to_the_rest_of_the_shards_is_done():
    queue = queue_with(4)
    queue.do(7, 4)
    lost = queue.lose(7)
    assert lost is not None
    queue.settle(lost[0], [4, 3, 4])
    assert queue.take(1) == [WorkItem(3, 0, had=0b101)]
    again = queue.lose(1)
    assert again is not None
    queue.settle(again[0], [0, 1, 0])
    assert queue.is_over


def test_items_are_kept_until_they_are_in_all_shards():
    queue = queue_with(4)
    queue.do(7, 4)
    assert queue.is_done_here
    assert not queue.is_over
    lease = queue.leases[7]
    lease.land(3)
    assert list(lease.items) == [WorkItem(3, 0)]
    lease.land(4)
    assert queue.is_over
    assert Lease.of(lease.plain()) == lease
