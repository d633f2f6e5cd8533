"""simulate(elastic=True): synchronous methods outlive deaths in collectives, by the code of real runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paceline as pl
from paceline.sim.faults import Cut, Faults, Pause
from paceline.study.elastic_ordeal import ElasticOrdeal, shares_task
from paceline.study.elastic_plans import with_survivor
from tests.laws.test_outliving import METHODS, regression

TASK = shares_task()
SLOW = pl.Cluster(4, latency="1ms")
SYNCHRONOUS = pl.AllReduceSGD()


def losses(run: pl.Run) -> list[dict[str, Any]]:
    return [d.values for d in run.trace.decisions if d.kind == "lost"]


def changes(run: pl.Run) -> list[tuple[int, int]]:
    """How many workers took part before and after each change."""
    return [(d.values["before"], d.values["workers"]) for d in run.trace.decisions if d.kind == "workers"]


def shares(run: pl.Run, task: pl.Task = TASK) -> list[list[float]]:
    """For each step: by how much each sample of its minibatch counts, times the learning rate."""
    return [run.params[task.part(k, 0, 1)[0].argmax(1)].tolist() for k in range(task.total_steps)]


def test_without_faults_an_elastic_run_is_the_plain_one_to_the_bit():
    for strategy in METHODS[::3]:
        plain = pl.simulate(regression(), strategy, SLOW)
        elastic = pl.simulate(regression(), strategy, SLOW, elastic=True)
        assert torch.equal(plain.params, elastic.params), strategy
        assert not losses(elastic) and not changes(elastic), strategy


def test_a_worker_that_dies_takes_one_period_of_its_work_with_it():
    run = pl.simulate(TASK, pl.AllReduceSGD(), SLOW, elastic=True, faults=Faults({1: 0.04}))
    assert [(one["before"], one["workers"]) for one in losses(run)] == [(4, 3)]
    assert "rank 1 is dead" in losses(run)[0]["cause"]
    counted = shares(run)
    assert all(sum(step) == pytest.approx(0.5) for step in counted), "each minibatch counts once"
    [missing] = [step for step in counted if 0.0 in step]
    assert sorted(missing) == pytest.approx([0.0] * 2 + [0.5 / 6] * 6), "the others count for the lost part"
    assert changes(run)[0] == (3, 3)


def test_a_newcomer_takes_part_from_the_next_commit_on():
    run = pl.simulate(TASK, pl.AllReduceSGD(), SLOW, elastic=True, faults=Faults(joins=[0.03]))
    assert changes(run) == [(4, 5)]
    first, last = (states["slots"]["model"]["values"]["params"] for states in run.states[::4])
    assert torch.equal(first, last)
    assert all(step == pytest.approx([0.5 / 8] * 8) for step in shares(run))


@pytest.mark.parametrize("kind", ["stopped", "cut off"])
def test_a_silent_worker_counts_as_dead_and_comes_back(kind: str):
    faults = Faults(pauses=[Pause(2, 0.03, 0.06)], silent_s=0.02)
    if kind == "cut off":
        faults = Faults(cuts=[Cut([2], [0, 1, 3], 0.03, 0.06, holds=True)], silent_s=0.02)
    run = pl.simulate(TASK, pl.AllReduceSGD(), SLOW, elastic=True, faults=faults)
    first = losses(run)[0]
    assert first["workers"] == 3 and "silent" in first["cause"], "the others went on"
    assert (3, 4) in changes(run), "and then it was back"
    models = {tuple(state["slots"]["model"]["values"]["params"].tolist()) for state in run.states}
    assert len(models) == 1


def test_what_does_not_go_together_is_refused_by_name():
    def refused(match: str, strategy: pl.Strategy = SYNCHRONOUS, **given: Any) -> None:
        with pytest.raises(ValueError, match=match):
            pl.simulate(TASK, strategy, given.pop("cluster", SLOW), elastic=True, **given)

    refused("with Gossip: its workers do not wait for each other", pl.Gossip())
    refused("with ParameterServer: its workers do not wait", pl.ParameterServer())
    refused(r"collectives run on TCP.*give `delayed` or `cuts`", faults=Faults(lost=0.1))
    refused(r"simulate\(resume or stop_at=..., elastic=True\)", stop_at=3)
    refused("rank 9 is not a worker", faults=Faults({9: 1.0}))
    with pytest.raises(ValueError, match="use a method with servers or peers"):
        pl.simulate(TASK, pl.AllReduceSGD(), SLOW, faults=Faults({1: 0.04}))


# Plans that torture has found, with what they have broken.
FIXED: dict[str, tuple[pl.Strategy, int, Faults]] = {
    "counted out between its arrival and its connection, a worker waited for the others": (
        pl.AllReduceSGD(),
        50,
        Faults(suspicions=[(3, 0.14)]),
    ),
}


@pytest.mark.parametrize("what", FIXED)
def test_what_torture_has_found_stays_fixed(what: str):
    strategy, seed, faults = FIXED[what]
    ElasticOrdeal(strategy, None, 4).check(seed, with_survivor(faults, 4))
