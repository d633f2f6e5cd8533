"""Sandblaster on real processes: the same result as in the simulator, also when workers are killed."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import paceline as pl
from tests.dist.test_elastic import killer

pytestmark = pytest.mark.dist


def task(epochs: int, slow_s: float = 0.0) -> pl.Task:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(96, n, generator=generator, dtype=torch.float64) for n in (7, 3))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        time.sleep(slow_s)
        return (model(batch[0]) - batch[1]).square().mean()

    return pl.Task(
        model=lambda: nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 3)).double(),
        loss=loss,
        data=(x, y),
        batch=12,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        epochs=epochs,
        evaluate=lambda model: {"loss": (model(x) - y).square().mean().item()},
    )


def test_real_processes_give_the_simulators_result():
    strategy = pl.Sandblaster(shards=1, search="wolfe")
    simulated = pl.simulate(task(12), strategy, pl.Cluster(workers=2))
    real = pl.train(task(12), strategy, workers=2)
    assert torch.allclose(real.params, simulated.params, rtol=1e-7, atol=1e-9)
    assert real.final["loss"] == pytest.approx(simulated.final["loss"])
    assert simulated.final["loss"] < 0.9 * simulated.trace.evaluations[0].values["loss"]


def test_killed_workers_do_not_change_the_result():
    expected = pl.simulate(task(10), pl.Sandblaster(push=3), pl.Cluster(workers=3)).params
    with killer(3, every_s=0.5) as killed:
        run = pl.train(task(10, slow_s=0.02), pl.Sandblaster(push=3), workers=3, replacements=6)
    assert killed, "the run was over before anybody was killed"
    assert torch.allclose(run.params, expected, rtol=1e-7, atol=1e-9)
