"""Averaging by a codec with error feedback: what a worker has not sent stays in its own parameters."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import (
    AdaptiveAveraging,
    AsyncDiLoCo,
    BlockMomentum,
    Cluster,
    DiLoCo,
    PeriodicAveraging,
    Run,
    SlowMo,
    Task,
    resized,
    simulate,
)
from paceline.codecs import QSGD, Codec, OneBit, PowerSGD
from paceline.families.unsent import Unsent
from paceline.server.store import Store
from tests.laws.slots import owed
from tests.laws.tasks import close, numbers, params, quadratic, regression, same, values

FOUR = Cluster(workers=4)


METHODS = [
    PeriodicAveraging(period=4),
    PeriodicAveraging(period=4, delay=2),
    AdaptiveAveraging(period=4, warmup=4, low=0.0, high=math.inf),
    DiLoCo(period=4),
    DiLoCo(period=4, fragments=2, delay=1),
    BlockMomentum(period=4),
    BlockMomentum(period=4, form="cntk", time_constant=20.0),
    SlowMo(period=4, momentum=0.8, rate=0.7),
]
every_method = pytest.mark.parametrize("strategy", METHODS, ids=lambda s: type(s).__name__)


def anchor(run: Run) -> Tensor:
    return values(run.states[0], "sync")["anchor"]


def effect(states: list[Any]) -> Tensor:
    """What the outer optimizer would have made of all that is not sent."""
    slots = [values(state, "sync.effect") for state in states]
    return sum(slot["effect"] for slot in slots) if "effect" in slots[0] else owed(states)


def offsets(run: Run) -> list[Tensor]:
    return [values(state, "sync.unsent")["offset"] for state in run.states]


def weighted_offsets(run: Run) -> Tensor:
    """The mean of the workers' offsets, by the weights that the mean of models gives them."""
    total = torch.zeros_like(run.params)
    for state, offset in zip(run.states, offsets(run), strict=True):
        for start, stop, weight in values(state, "sync.effect")["weights"]:
            total[start:stop] += weight * offset[start:stop]
    return total


def drop(step: int) -> float:
    return 0.5 if step >= 8 else 1.0


def slopes(numel: int = 700, **more: Any) -> Task:
    """Epochs of minibatches of 8, 8, 8 and 3 samples, and gradients that depend on the data alone."""
    task = quadratic(batch=8, numel=numel, samples=27, schedule=drop, **more)
    return replace(task, loss=lambda model, batch: (model.w * batch[0]).sum(1).mean())


@every_method
def test_the_anchor_and_the_effect_of_what_is_not_sent_are_the_anchor_without_a_codec(strategy: Any):
    """On slopes, with shares that change from sync to sync.  The mean of the models holds this effect."""
    task = slopes(steps=20)
    plain, coded = (
        simulate(task, replace(strategy, codec=c), Cluster(workers=3), stop_at=19) for c in (None, OneBit())
    )
    assert close(anchor(coded) + effect(coded.states), anchor(plain), rtol=1e-9)
    assert not close(anchor(coded), anchor(plain), rtol=1e-2)
    assert close(weighted_offsets(coded), effect(coded.states), rtol=1e-9)


def test_what_is_not_sent_does_not_count_as_a_spread_of_the_workers():
    """No worker moves after the first sync, so its distance to the mean is the length of the mean that is sent late."""
    task = replace(slopes(steps=12), schedule=lambda step: 1.0 if step < 2 else 0.0)
    one_bit = PeriodicAveraging(period=2, codec=OneBit())
    first, second = (simulate(task, one_bit, Cluster(workers=3), stop_at=k) for k in (3, 5))
    late = float((anchor(second) - anchor(first)).square().sum())
    assert late > 0
    assert second.trace.syncs[-1].divergence == pytest.approx(late, rel=1e-9)


class ByHost(DiLoCo):
    """Three workers on one host, and one on another."""

    async def worker(self, w: Any) -> None:
        run = w.endpoint.run_collectives

        def by_host(routine: Any, **more: Any) -> Any:
            def routed(endpoint: Any) -> Any:
                endpoint.hosts = [[0, 1, 2], [3]]
                return routine(endpoint)

            return run(routed, **more)

        w.endpoint.run_collectives = by_host
        await super().worker(w)


def test_what_the_first_worker_of_a_host_has_not_sent_for_all_is_in_its_parameters():
    task = slopes(steps=20)
    plain, coded = (simulate(task, ByHost(period=4, codec=c), FOUR, stop_at=19) for c in (None, OneBit()))
    assert close(anchor(coded) + effect(coded.states), anchor(plain), rtol=1e-9)
    assert close(weighted_offsets(coded), effect(coded.states), rtol=1e-9)
    assert [bool(o.count_nonzero()) for o in offsets(coded)] == [True, False, False, True]


@every_method
@pytest.mark.parametrize("codec", [OneBit(), PowerSGD(rank=1)], ids=lambda codec: type(codec).__name__)
def test_the_mean_of_the_models_is_that_of_a_run_without_a_codec(strategy: Any, codec: Codec):
    """On a quadratic the mean of the gradients is the gradient of the mean.  At the end all workers are equal."""
    task = quadratic(steps=24, batch=8, numel=700)
    means = [
        torch.stack(params(simulate(task, replace(strategy, codec=c), FOUR, stop_at=20))).mean(0) for c in (None, codec)
    ]
    assert close(*means, rtol=1e-9)
    run = simulate(task, replace(strategy, codec=codec), FOUR)
    assert all(same(p, run.params) for p in params(run)) and not any(o.count_nonzero() for o in offsets(run))


@pytest.mark.parametrize(
    "strategy", [METHODS[0], METHODS[1], METHODS[3], METHODS[5], METHODS[7]], ids=lambda s: type(s).__name__
)
def test_nothing_unsent_is_lost_with_4_then_2_then_1_then_3_workers(strategy: Any):
    """Outer optimizers use the number of workers and of samples, so without a codec the numbers change too."""
    task, ends = slopes(steps=36), []
    for codec in (None, OneBit()):
        states = None
        for workers, stop in ((4, 8), (2, 16), (1, 21), (3, 31)):
            resume = None if states is None else resized(states, workers)
            run = simulate(task, replace(strategy, codec=codec), Cluster(workers=workers), resume=resume, stop_at=stop)
            states = run.states
        ends.append(anchor(run) if codec is None else anchor(run) + effect(run.states))
    assert close(*ends, rtol=1e-9)


def test_a_codec_without_feedback_has_nothing_to_keep():
    run = simulate(regression(steps=8, batch=8), PeriodicAveraging(period=4, codec=QSGD()), FOUR)
    assert "sync.unsent" not in run.states[0]["slots"]


def valley(**more: Any) -> Task:
    """A quadratic with curvatures from 0.01 to 1."""
    curvature = torch.logspace(0, -2, 600, dtype=torch.float64)

    def loss(model: Any, batch: Any) -> Tensor:
        return 0.5 * ((model.w - batch[0]).square() * curvature).sum(1).mean()

    task = quadratic(batch=8, numel=600, samples=64, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **more)
    return replace(task, loss=loss)


def height(strategy: Any) -> float:
    """How far a run ends above the minimum."""
    curvature = torch.logspace(0, -2, 600, dtype=torch.float64)
    end = simulate(valley(steps=160), strategy, FOUR).params
    return float(((end - numbers(64, 600, seed=1).mean(0)).square() * curvature).sum())


@pytest.mark.filterwarnings("ignore::paceline.strategies.block_momentum.TooFewSamples")
@pytest.mark.parametrize("strategy", [DiLoCo(period=4), BlockMomentum(period=4)], ids=lambda s: type(s).__name__)
def test_outer_momentum_does_not_amplify_what_was_not_sent(strategy: Any, monkeypatch: pytest.MonkeyPatch):
    """Workers that go back to the anchor learn their residuals once more: the run diverges, or ends far above.

    It starts at a height of 66; without a codec, it ends at 0.1 and 0.2.  With their own residuals alone, without their
    effect and without what they leave out as owners, DiLoCo would end at 8.3.
    """
    one_bit = replace(strategy, codec=OneBit(512, "zero"))
    assert height(one_bit) < 0.6
    monkeypatch.setattr(Unsent, "put_into", lambda *_, **__: None)
    assert height(one_bit) > 80


@pytest.mark.parametrize("delay", [0, 2])
def test_a_worker_of_asynchronous_diloco_keeps_what_it_has_not_sent(delay: int, monkeypatch: pytest.MonkeyPatch):
    one_bit = AsyncDiLoCo(period=4, delay=delay, codec=OneBit(512, "zero"))
    assert height(one_bit) < 0.6
    monkeypatch.setattr(Store, "unsent", lambda _: None)
    assert height(one_bit) > 80
