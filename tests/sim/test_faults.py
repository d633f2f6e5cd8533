"""Pauses, cuts, slow links, delays and clock jumps in the simulator, and heartbeats that the real detector reads."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from paceline import (
    AllReduceSGD,
    Cluster,
    Faults,
    ParameterServer,
    PeriodicAveraging,
    StaleSynchronous,
    Strategy,
    simulate,
)
from paceline.errors import ClusterError
from paceline.server.rules import Sgd
from paceline.sim.faults import ClockJump, Cut, Pause, SlowLink
from tests.laws.tasks import regression

TASK = regression(steps=12, batch=9)
THREE = Cluster(workers=3, compute="10ms")
SERVED = ParameterServer(rule=Sgd(lr=0.01), servers=1)
EVERYONE = range(4)


def gradients(run: Any, rank: int) -> list[tuple[float, float]]:
    """When the gradients of a worker began and ended."""
    return sorted((s.start, s.stop) for s in run.trace.spans if s.rank == rank and s.kind == "gradient")


@pytest.mark.parametrize("strategy", [AllReduceSGD(), PeriodicAveraging(period=4, delay=1)], ids=str)
def test_synchronous_methods_wait_and_get_the_same_bits(strategy: Strategy):
    undisturbed = simulate(TASK, strategy, THREE)
    for faults in (
        Faults(pauses=[Pause(1, 0.05, 0.5)]),
        Faults(cuts=[Cut([0], [2], 0.05, 0.4)]),
        Faults(slow_links=[SlowLink([1], [0, 2], 0.0, 1.0, 0.05)]),
        Faults(delayed=0.5, delay_s=0.1),
        Faults(clock_jumps=[ClockJump(0, 0.05, -3.0), ClockJump(1, 0.06, 3.0)]),
    ):
        run = simulate(TASK, strategy, THREE, faults=faults)
        assert torch.equal(run.params, undisturbed.params), faults
        if not faults.clock_jumps:
            assert run.seconds > undisturbed.seconds + 0.03, faults


def test_a_paused_worker_begins_nothing_until_it_continues():
    run = simulate(TASK, SERVED, THREE, faults=Faults(pauses=[Pause(1, 0.025, 0.04)], retransmit_s=0.02))
    begun = [start for start, _ in gradients(run, 1)]
    assert not [start for start in begun if 0.025 < start < 0.065] and [start for start in begun if start >= 0.065]
    assert max(b - a for a, b in pairwise([start for start, _ in gradients(run, 0)])) < 0.012, "the others go on"


def test_a_silent_worker_is_suspected_by_its_heartbeats_and_comes_back():
    """Without a gate nothing else would tell the shard: the other workers of a gate of 0 would wait for 0.3 s."""
    faults = Faults(pauses=[Pause(2, 0.03, 0.3)], silent_s=0.05, retransmit_s=0.02)
    run = simulate(TASK, StaleSynchronous(lr=0.01, bound=0, servers=1), THREE, faults=faults)
    gaps = [b - a for a, b in pairwise([start for start, _ in gradients(run, 0)])]
    assert 0.05 < max(gaps) < 0.11
    faults = Faults(pauses=[Pause(2, 0.03, 0.06)], silent_s=0.04, retransmit_s=0.02)
    run = simulate(TASK, StaleSynchronous(lr=0.01, bound=0, servers=1), THREE, faults=faults)
    assert [start for start, _ in gradients(run, 2) if start > 0.09], "it works again"


def test_a_death_that_nobody_reports_is_noticed_by_missing_heartbeats():
    faults = Faults({2: 0.03}, notice=None, silent_s=0.05, retransmit_s=0.02)
    run = simulate(TASK, StaleSynchronous(lr=0.01, bound=0, servers=1), THREE, faults=faults)
    assert 0.05 < max(b - a for a, b in pairwise([start for start, _ in gradients(run, 0)])) < 0.11


def test_a_server_that_was_paused_suspects_nobody():
    """Heartbeats have waited for it."""
    faults = Faults(pauses=[Pause(3, 0.03, 0.2)], silent_s=0.05, retransmit_s=0.02)
    run = simulate(TASK, SERVED, THREE, faults=faults)
    steps = sorted((p.step, p.rank) for p in run.trace.points if p.staleness is None)
    assert len(steps) == 3 * 12, "no work was done twice"


def test_a_clock_that_jumps_back_does_not_stop_the_detector():
    faults = Faults({2: 0.06}, notice=None, silent_s=0.05, retransmit_s=0.02, clock_jumps=[ClockJump(3, 0.04, -1000.0)])
    run = simulate(TASK, StaleSynchronous(lr=0.01, bound=0, servers=1), THREE, faults=faults)
    assert run.seconds < 1


def test_a_cut_loses_or_holds_messages_in_one_direction():
    lost = Faults(cuts=[Cut([0], [3], 0.0, 0.1)], retransmit_s=0.03)
    held = Faults(cuts=[Cut([0], [3], 0.0, 0.1, holds=True)], retransmit_s=10.0)
    other_way = Faults(cuts=[Cut([3], [0], 0.0, 0.1)], retransmit_s=0.03)
    for faults in (lost, held, other_way):
        run = simulate(TASK, SERVED, THREE, faults=faults)
        assert gradients(run, 0)[0][0] >= 0.1
        assert run.params.isfinite().all()
    nobody = simulate(TASK, SERVED, THREE, faults=Faults(cuts=[Cut(EVERYONE, EVERYONE, 0.0, 0.1)], retransmit_s=0.03))
    assert min(gradients(nobody, rank)[0][0] for rank in range(3)) >= 0.1


def test_a_cut_that_outlasts_all_retries_is_an_error_that_names_the_server():
    faults = Faults(cuts=[Cut([1], [3], 0.02, 1.0)], retransmit_s=0.02)
    with pytest.raises(ClusterError, match=r"server 0 \(rank 3\) has not answered .* of worker 1"):
        simulate(TASK, SERVED, THREE, faults=faults)


def test_delayed_messages_overtake_each_other_and_each_update_counts_once():
    faults = Faults(delayed=0.3, delay_s=0.08, retransmit_s=0.05)
    run = simulate(TASK, SERVED, THREE, faults=faults)
    assert sum(p.samples for p in run.trace.points if p.staleness is not None) == 9 * 12


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        (lambda: Faults({1: 0.1}, notice=None), "no rank would notice these deaths"),
        (lambda: Faults(silent_s=0.0), "`silent_s` must be finite and above 0"),
        (lambda: Faults(delayed=1.5), "`delayed` from 0 to 1"),
        (lambda: Faults(pauses=[Pause(0, -1.0, 1.0)]), "finite and at least 0"),
        (lambda: Faults(clock_jumps=[ClockJump(0, 1.0, float("inf"))]), "a clock jumps by a finite time"),
        (lambda: simulate(TASK, SERVED, THREE, faults=Faults(pauses=[Pause(4, 0.0, 1.0)])), "there is no rank 4"),
        (lambda: simulate(TASK, AllReduceSGD(), THREE, faults=Faults(silent_s=1.0)), "its workers wait for each other"),
    ],
)
def test_impossible_faults_are_refused(faults: Any, said: str):
    with pytest.raises(ValueError, match=said):
        faults()
