"""Strom: all workers apply the same messages, each once, and no gradient is lost except the residuals."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import (
    AllReduceSGD,
    Cluster,
    Faults,
    Gossip,
    Link,
    LogNormal,
    Replicated,
    Run,
    Strategy,
    Strom,
    Task,
    Then,
    simulate,
)
from paceline.codecs import Codec, OneBit, PowerSGD, Threshold, TopK
from paceline.families.broadcast import BroadcastLog
from paceline.families.topology import RandomPairs
from paceline.study.demo import CLUSTER, Demo
from tests.laws.tasks import OPTIMIZERS, close, instant, params, quadratic, regression, same, trained_alone, values

NUMEL, STEPS, BATCH, LR, TAU = 24, 12, 16, 2.0**-5, 2.0
LOSSY = Faults(lost=0.15, doubled=0.15, retransmit_s=0.05)


class Sum(nn.Module):
    """Its gradients are the data."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(float(NUMEL)))


def slope(model: nn.Module, batch: Any) -> Tensor:
    return (model.w * batch[0]).sum(1).mean()


def dyadic(steps: int = STEPS, numbers: int = 12, **more: Any) -> Task:
    """Gradients that do not depend on the model, in float32, with few bits: all sums of them are exact."""
    generator = torch.Generator().manual_seed(5)
    data = [torch.randint(-numbers, numbers, (64, NUMEL), generator=generator) / 4]
    return Task(Sum, slope, data, BATCH, lambda p: torch.optim.SGD(p, lr=LR), steps=steps, **more)


def gradients(task: Task, workers: int) -> Tensor:
    """The sum of all workers' gradients of the linear loss."""
    parts = [task.part(k, rank, workers)[0] for k in range(task.total_steps) for rank in range(workers)]
    return torch.stack([part.mean(0) for part in parts if len(part)]).sum(0)


def uneven(workers: int, seed: int) -> Cluster:
    return Cluster(workers, compute=LogNormal("10ms", 1.0), links={(0, workers - 1): Link("1MB/s", "30ms")}, seed=seed)


def residuals(run: Run) -> Tensor:
    return torch.stack([values(state, "codec.residuals")["residual"] for state in run.states]).sum(0)


# The lattice.


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("lr", [0.02, None], ids=["gradients", "steps of sgd"])
def test_dense_and_synchronous_it_equals_all_reduce_sgd_with_the_sum(workers: int, lr: float | None):
    """The sum of N means over equal shards is N times the mean: N times the learning rate."""
    task = regression(steps=20, batch=3 * workers, optimizer=lambda p: torch.optim.SGD(p, lr=0.02))
    summed = regression(steps=20, batch=3 * workers, optimizer=lambda p: torch.optim.SGD(p, lr=0.02 * workers))
    run = simulate(task, Strom(None, lr), instant(workers))
    assert close(run.params, simulate(summed, AllReduceSGD(), Cluster(workers)).params)


def test_with_local_steps_each_worker_keeps_its_own_momentum():
    """Momentum is linear: synchronous and dense, the sum of all steps is the step of the sum of all gradients."""
    task = regression(steps=20, batch=8, optimizer=OPTIMIZERS["nesterov"])
    summed = regression(steps=20, batch=8, optimizer=lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, nesterov=True))
    assert close(simulate(task, Strom(None), instant(4)).params, simulate(summed, AllReduceSGD(), Cluster(4)).params)


# F1.1 and F1.2


@pytest.mark.parametrize(
    "codec", [Threshold(TAU, limit=math.inf), Threshold(TAU, entropy=True, limit=math.inf), None], ids=str
)
@pytest.mark.parametrize("lr", [LR, None], ids=["gradients", "local steps"])
@pytest.mark.parametrize("seed", range(6))
def test_all_apply_the_same_messages_and_no_gradient_is_lost(codec: Codec | None, lr: float | None, seed: int):
    """On every worker w = w_0 - lr * (all gradients - all residuals).

    To the bit, because all numbers have few bits.  At any speeds, and with messages that are lost and doubled.
    """
    task = dyadic()
    if lr is None and codec is not None:
        codec = Threshold(TAU * LR, entropy=codec.entropy, limit=math.inf)  # pyright: ignore
    run = simulate(task, Strom(codec, lr), uneven(4, seed), faults=LOSSY if seed % 2 else Faults())
    assert all(same(p, run.params) for p in params(run))
    left = residuals(run) * (LR if lr is not None else 1.0) if codec is not None else torch.zeros(NUMEL)
    assert torch.equal(run.params, torch.arange(float(NUMEL)) - (LR * gradients(task, 4) - left))
    if codec is not None:
        assert left.abs().max() > 0, "a residual is not zero"


def test_each_value_sent_is_plus_or_minus_the_threshold():
    """Every model has moved by integer multiples of lr * tau."""
    run = simulate(dyadic(), Strom(Threshold(TAU, limit=math.inf), LR), uneven(4, 0))
    moved = (torch.arange(float(NUMEL)) - run.params) / (LR * TAU)
    assert torch.equal(moved, moved.round()) and moved.abs().max() >= 1


@pytest.mark.parametrize("codec", [OneBit(), TopK(ratio=0.1)], ids=str)
def test_it_works_with_any_codec(codec: Codec):
    """Up to rounding, because their values have many bits."""
    task = dyadic()
    run = simulate(task, Strom(codec, LR), uneven(4, 0))
    expected = torch.arange(float(NUMEL)) - LR * (gradients(task, 4) - residuals(run))
    assert all(torch.allclose(p, expected, atol=1e-4) for p in params(run))


# F1.4


def test_without_retransmission_a_lost_message_leaves_models_different(monkeypatch: pytest.MonkeyPatch):
    """Shows that the laws above depend on retransmission."""

    def nothing_missing(self: BroadcastLog, src: int, count: int, kept: Any) -> list[tuple[int, int]]:
        return []

    strategy = Strom(Threshold(TAU, limit=math.inf), LR)
    whole = simulate(dyadic(), strategy, uneven(4, 1), faults=LOSSY)
    assert all(same(p, whole.params) for p in params(whole))
    monkeypatch.setattr(BroadcastLog, "missing", nothing_missing)
    broken = simulate(dyadic(), strategy, uneven(4, 1), faults=LOSSY)
    assert any(not same(p, broken.params) for p in params(broken))


def test_without_losses_there_is_no_retransmission():
    run = simulate(dyadic(), Strom(None, LR), uneven(4, 0))
    assert [run.trace.bytes_sent(rank) for rank in range(4)] == [3 * STEPS * 4 * NUMEL] * 4


def test_the_log_drops_messages_that_all_workers_have():
    """Also if one worker sends no more messages of its own: it acknowledges all the same."""
    kept: list[int] = []
    task = dyadic(steps=60)

    class Watched(BroadcastLog):
        async def broadcast(self, data: Tensor, rate: float = 1.0) -> None:
            await super().broadcast(data, rate)
            kept.append(len(self._sent) + sum(map(len, self._kept.values())))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.strategies.strom.BroadcastLog", Watched)
        simulate(task, Strom(None, LR), Cluster(workers=3, compute=["10ms", "10ms", "11ms"]))
        assert max(kept) < 20
        kept.clear()
        simulate(task, Strom(None, LR), Cluster(workers=2, compute=["1ms", "10ms"]))  # The first finishes early.
        assert max(kept[len(kept) // 2 :]) < 40


# Workers that die and join.


@pytest.mark.parametrize("lossy", [False, True], ids=["", "lossy"])
@pytest.mark.parametrize("seed", range(15))
def test_all_living_workers_apply_the_same_messages_when_others_die(lossy: bool, seed: int):
    """Including the last messages of a dead worker that only one peer has received, and for workers that join."""
    chance = Random(seed)
    dead = chance.sample(range(4), chance.randrange(1, 4))
    faults = Faults(
        {rank: chance.uniform(0, 0.2) for rank in dead},
        [chance.uniform(0, 0.15) for _ in range(chance.randrange(3))],
        notice=chance.choice([0.0, 0.001, 0.05]),
        lost=0.1 * lossy,
        doubled=0.1 * lossy,
        retransmit_s=0.05,
    )
    run = simulate(dyadic(), Strom(Threshold(TAU, limit=math.inf), LR), uneven(4, seed), faults=faults)
    begun = {p.rank for p in run.trace.points}
    living = [p for rank, p in enumerate(params(run)) if rank in begun and rank not in dead]
    assert living and all(same(p, living[0]) for p in living)


def test_updates_of_a_dead_worker_stay_and_its_residual_is_lost():
    task = dyadic(steps=40)
    died = 0.155
    run = simulate(task, Strom(None, LR), Cluster(workers=4, compute="10ms"), faults=Faults({3: died}))
    said = [
        task.part(k, rank, 4)[0].mean(0) for k in range(40) for rank in range(4) if rank < 3 or 0.010 * (k + 1) < died
    ]
    assert torch.equal(run.params, torch.arange(float(NUMEL)) - LR * torch.stack(said).sum(0))


def test_workers_do_not_wait_for_a_slow_or_dead_peer():
    cluster = Cluster(workers=4, compute=["10ms", "10ms", "200ms", "10ms"])
    run = simulate(dyadic(steps=30), Strom(None, LR), cluster, faults=Faults({3: 0.1}))
    last = {rank: max(s.stop for s in run.trace.spans if s.rank == rank and s.kind == "gradient") for rank in range(4)}
    assert last[0] < 0.31 and last[1] < 0.31


# Training.


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [Strom(Threshold(tau=0.05, limit=math.inf), lr=0.2 / 8), Gossip(RandomPairs()), Gossip()],
    ids=["strom", "gossip", "on a ring"],
)
def test_digits_are_learnt_almost_as_well_as_by_all_reduce_sgd(strategy: Strategy):
    """On eight workers of different speeds; docs/results/strom.md has more."""
    reference, run = (simulate(Demo(10).task(), s, CLUSTER, strict=False) for s in (AllReduceSGD(), strategy))
    assert reference.final["accuracy"] > 0.93
    assert run.final["accuracy"] > reference.final["accuracy"] - 0.03
    assert run.trace.bytes_sent(0) < 0.25 * reference.trace.bytes_sent(0) and run.seconds < 0.4 * reference.seconds


# The first steps.


@pytest.mark.parametrize("few", [1, 2, 3])
def test_few_workers_start_and_no_data_is_left_out(few: int):
    task = dyadic()
    run = simulate(task, Strom(None, LR, few=few, few_steps=5), Cluster(workers=4, compute="10ms"))
    assert {p.rank for p in run.trace.points if p.step < 5} == set(range(few))
    assert {p.rank for p in run.trace.points if p.step >= 5} == set(range(4))
    assert torch.equal(run.params, torch.arange(float(NUMEL)) - LR * gradients(task, 4))
    assert all(same(p, run.params) for p in params(run))


def test_it_can_follow_another_strategy():
    task = dyadic()
    run = simulate(task, Then(Replicated(), Strom(Threshold(TAU, limit=math.inf), LR), steps=4), Cluster(workers=4))
    assert all(same(p, run.params) for p in params(run))
    assert {p.samples for p in run.trace.points if p.step < 4} == {16} and {
        p.samples for p in run.trace.points if p.step >= 4
    } == {4}


# Invalid settings and values.


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Strom(Threshold(tau=0.0)), "tau is a positive number"),
        (lambda: Strom(Threshold(tau=-2.0)), "tau is a positive number"),
        (lambda: Strom(PowerSGD()), r"Strom\(codec=PowerSGD"),
        (lambda: Strom(None, lr=0.0), r"Strom\(lr=0.0\): a learning rate is positive"),
        (lambda: Strom(None, few=0), r"Strom\(few=0, few_steps=0\)"),
        (
            lambda: simulate(
                quadratic(steps=3, batch=4), Strom(None), Cluster(workers=2), faults=Faults(suspicions=[(1, 0.1)])
            ),
            "Strom has no servers",
        ),
    ],
)
def test_invalid_settings_are_refused(make: Any, said: str):
    with pytest.raises(ValueError, match=said):
        make()


def test_a_nan_is_not_sent():
    task = dyadic()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return slope(model, batch) * (torch.nan if float(batch[0][0, 0]) > 2 else 1.0)

    with pytest.warns(match="NaN"):
        run = simulate(
            Task(Sum, loss, task.data, BATCH, task.optimizer, steps=STEPS), Strom(None, LR), Cluster(workers=4)
        )
    assert all(same(p, run.params) for p in params(run)) and run.params.isfinite().all()
    assert not same(run.params, trained_alone(task).float())
