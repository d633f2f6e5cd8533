"""Averaging by a codec with error feedback: what a worker has not sent stays in its own parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import AsyncDiLoCo, BlockMomentum, Cluster, DiLoCo, PeriodicAveraging, Task, simulate
from paceline.codecs import DGC, QSGD, Codec, Entropy, OneBit, PowerSGD, TopK
from paceline.families.unsent import Unsent
from paceline.server.store import Store
from tests.laws.tasks import close, numbers, params, quadratic, regression, same, values

FOUR = Cluster(workers=4)


@pytest.mark.parametrize(
    "codec", [OneBit(), TopK(0.1), Entropy(OneBit()), DGC(ratio=0.1, momentum=0.0), PowerSGD(rank=1)], ids=str
)
@pytest.mark.parametrize("strategy", [PeriodicAveraging(period=4), DiLoCo(period=4, fragments=2)], ids=str)
def test_a_worker_goes_on_from_the_anchor_and_its_own_residual(strategy: Any, codec: Codec):
    """After each sync, in the part that was exchanged; at the end of the run all workers are equal."""
    strategy = replace(strategy, codec=codec)
    task = regression(steps=12, batch=8)
    run = simulate(task, strategy, FOUR, stop_at=8)
    fragments = getattr(strategy, "fragments", 1)
    for worker, state in zip(params(run), run.states, strict=True):
        anchor, residual = values(state, "sync")["anchor"], values(state, "sync.residuals")["residual"]
        last = slice(worker.numel() - worker.numel() // fragments, None)  # The last fragment was exchanged last.
        assert close(worker[last], (anchor + residual)[last]) and residual[last].count_nonzero()
        assert same(values(state, "sync.unsent")["offset"][last], residual[last])
    run = simulate(task, strategy, FOUR)
    assert all(same(p, run.params) for p in params(run))
    assert not any(values(state, "sync.unsent")["offset"].count_nonzero() for state in run.states)


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

    It starts at a height of 66; without a codec, it ends at 0.1 and 0.2.
    """
    one_bit = replace(strategy, codec=OneBit(bucket=512))
    assert height(one_bit) < 10
    monkeypatch.setattr(Unsent, "put_into", lambda *_, **__: None)
    assert height(one_bit) > 80


@pytest.mark.parametrize("delay", [0, 2])
def test_a_worker_of_asynchronous_diloco_keeps_what_it_has_not_sent(delay: int, monkeypatch: pytest.MonkeyPatch):
    one_bit = AsyncDiLoCo(period=4, delay=delay, codec=OneBit(bucket=512))
    assert height(one_bit) < 3
    monkeypatch.setattr(Store, "unsent", lambda _: None)
    assert height(one_bit) > 80
