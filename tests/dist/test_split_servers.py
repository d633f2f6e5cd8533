"""A split model on parameter servers, on real processes: each stage exchanges its own parameters with its own shards,
and the stages of a replica work on the same minibatches."""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline as pl
from paceline.server import Adagrad, RoundRobin
from tests.dist.test_pipeline import stumbling, task, whole
from tests.laws.tasks import close, numbers, same, squared_error, vector

pytestmark = pytest.mark.dist


def warmed(step: int) -> float:
    """A warm-up, and a drop to a third from step 20 on."""
    return min(1.0, (step + 1) / 4) / (3 if step >= 20 else 1)


# With fewer pushes than steps, the last push happens when a replica has no more work.
ALONE: dict[str, tuple[pl.Strategy, dict[str, Any]]] = {
    "downpour, seldom, scheduled": (
        pl.Downpour(servers=3, push=3, fetch=2, local_lr=0.02, rule=Adagrad(lr=0.1)),
        {"steps": 23, "schedule": warmed},
    ),
    "asgd, pipelined": (pl.ASGD(period=3, pipeline=True), {}),
}


@pytest.mark.parametrize("name", ALONE)
def test_one_replica_of_two_stages_equals_one_worker(name: str):
    strategy, more = ALONE[name]
    split, other = pl.train(task(**more), strategy, 1, stages=2), whole(task(**more), strategy, 1)
    assert close(split.params, other.params)
    if "schedule" in more:
        constant = whole(task(**more | {"schedule": None}), strategy, 1)
        assert not close(split.params, constant.params, rtol=1e-2), "the schedule has an effect"
    assert sorted(p.loss for p in split.trace.points if p.loss) == pytest.approx(
        sorted(p.loss for p in other.trace.points if p.loss)
    )


@pytest.mark.filterwarnings("ignore::paceline.NonFiniteGradient")
def test_nan_in_one_stage_voids_the_push_of_all_stages_of_a_replica():
    """With its own data for each worker, and updates in the order of ranks, the run does not depend on timing."""

    def own(rank: int, workers: int) -> list[Tensor]:
        x = numbers(15, 6, seed=rank).clamp(-2, 2)
        if rank:
            x[11, 3] = 7.0
        return [x, numbers(15, 3, seed=10 + rank)]

    strategy = pl.ParameterServer(gate=RoundRobin())
    job = replace(stumbling(), data=own)
    split, other = pl.train(job, strategy, 2, stages=2), whole(job, strategy, 2)
    assert split.params.isfinite().all() and close(split.params, other.params)
    assert not close(split.params, whole(replace(stumbling(over=1.0), data=own), strategy, 2).params, rtol=1e-3), (
        "there was something to skip"
    )


def test_two_replicas_of_two_stages_train_by_downpour_with_a_schedule():
    """Each part of each minibatch is computed by one replica, and each replica pushes once for it, to every shard."""

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"loss": float(squared_error(model, task().data))}

    strategy = pl.Downpour(servers=3, rule=Adagrad(lr=0.1), local_lr=0.02)
    job = task(steps=40, schedule=warmed, evaluate=evaluate)
    with torch.no_grad():
        before = evaluate(job.build())["loss"]
    run = pl.train(job, strategy, 2, stages=2)
    assert run.final["loss"] < 0.8 * before
    steps = Counter(p.step for p in run.trace.points if p.loss is not None)
    assert steps == dict.fromkeys(range(40), 2)
    pushes = Counter(p.rank for p in run.trace.points if p.staleness is not None)
    assert pushes == dict.fromkeys((4, 5, 6), 80)
    still = pl.train(task(steps=4, schedule=lambda step: 0.0), strategy, 2, stages=2)
    assert same(still.params, vector(job.build())), "the schedule reaches every replica, stage and shard"


def test_sandblaster_with_two_replicas_of_two_stages_equals_the_whole_model():
    job = task(epochs=6, steps=None)
    strategy = pl.Sandblaster(shards=1, search="wolfe", push=2)
    assert close(pl.train(job, strategy, 2, stages=2).params, whole(job, strategy, 2).params, rtol=1e-7)


def test_an_error_names_a_killed_stage():
    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        if dist.is_initialized() and dist.get_rank() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return squared_error(model, batch)

    with pytest.raises(pl.ClusterError, match=r"rank 3 \(process \d+\) was killed by SIGKILL"):
        pl.train(replace(task(), loss=loss), pl.Downpour(), 2, stages=2)


REFUSED: dict[str, Any] = {
    "Gossip": pl.Gossip(),
    "Hogwild": pl.Hogwild(),
    "EAWild": pl.EAWild(beta=0.9, servers=1),
    "Then": pl.Then(pl.Replicated(), pl.Downpour(), steps=2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_methods_that_need_the_whole_model_are_refused(name: str):
    with pytest.raises(
        ValueError, match=rf"^train\({name}\): it needs the whole model .*use a method on servers such as"
    ):
        pl.train(task(), REFUSED[name], 2, stages=2)
