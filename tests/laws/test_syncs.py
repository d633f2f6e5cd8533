"""What a synchronisation of workers must preserve, for any model and any optimizer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from paceline import (
    AdaptiveAveraging,
    Cluster,
    DiLoCo,
    PeriodicAveraging,
    SlowMo,
    Task,
    Then,
    simulate,
)
from paceline.codecs import kernels
from paceline.codecs.kernels import vectors
from paceline.worker.buffers import carry_over
from paceline.worker.flat import FlatModel
from tests.laws.tasks import close, numbers, params, regression, squared_error, values

OTHERS = {
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "two groups": lambda p: torch.optim.SGD(
        [{"params": (q := list(p))[:2], "lr": 0.0}, {"params": q[2:]}], lr=0.05, momentum=0.9
    ),
}


class Masked(nn.Module):
    """A network with buffers that are not statistics, and a parameter that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.scale = nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
        self.register_buffer("sentinel", torch.tensor([2**63 - 1]))
        self.register_buffer("seen", torch.tensor([True, False]))
        self.register_buffer("cache", torch.full((1,), float(id(self) % 1000)), persistent=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x) * self.scale
        return (self.norm(y) if len(x) > 1 else y) + torch.softmax(self.mask, 1)[-1]


def masked(
    optimizer: Any = lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), *, batch: int = 12, **more: Any
) -> Task:
    return regression(steps=13, batch=batch, samples=40, model=Masked, optimizer=optimizer, **more)


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("batch", [12, 3], ids=["equal", "one has none"])
def test_infinite_masks_and_largest_integers_do_not_change(delay: int, batch: int):
    run = simulate(masked(batch=batch), PeriodicAveraging(period=4, delay=delay), Cluster(workers=4))
    assert torch.equal(run.model.mask, Masked().mask) and run.model.sentinel.item() == 2**63 - 1
    assert run.params.isfinite().all() and run.model.norm.running_var.isfinite().all()


@pytest.mark.parametrize(
    "strategy", [PeriodicAveraging(period=4, delay=2), SlowMo(period=4), DiLoCo(period=4, delay=2)], ids=str
)
def test_kernels_and_plain_torch_agree_to_the_bit(strategy: Any, monkeypatch: pytest.MonkeyPatch):
    def run() -> Any:
        return simulate(regression(steps=13, batch=12, samples=40, model=wide), strategy, Cluster(workers=3))

    fused = run()
    for name in ("compute_delta", "merge", "squared_distance"):
        monkeypatch.delattr(vectors, name)
    with kernels.plain():
        plain = run()
    assert torch.equal(fused.params, plain.params)
    assert [s.divergence for s in fused.trace.syncs] == pytest.approx(
        [s.divergence for s in plain.trace.syncs], rel=1e-4
    )


def wide() -> nn.Module:
    """In float32, and longer than a kernel's block."""
    return nn.Sequential(Cast(torch.float32), nn.Linear(6, 600), nn.Tanh(), nn.Linear(600, 3), Cast(torch.float64))


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)


def test_only_statistics_are_sent():
    """These are: BatchNorm's mean and variance of 3 values each, its counter, the mask and the sentinel."""
    assert FlatModel(Masked()).buffers().numel() == 3 + 3 + 1 + 9 + 1


@pytest.mark.parametrize("optimizer", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize(
    "strategy",
    [PeriodicAveraging(period=4, optimizer_state="average"), Then(PeriodicAveraging(), SlowMo(), steps=9)],
    ids=str,
)
def test_the_state_of_any_optimizer_can_be_averaged(optimizer: Any, strategy: Any):
    run = simulate(masked(optimizer), strategy, Cluster(workers=3))
    assert all(close(p, run.params, rtol=0.0) for p in params(run))


def test_a_decaying_value_does_not_fall_below_zero():
    """A variance of 1 shrinks to a tenth, while the mean over all workers was a fifth of it."""
    mean, now, sent = (torch.tensor([v]) for v in (0.2, 0.1, 1.0))
    assert carry_over(mean, now, sent).item() == pytest.approx(0.1)
    assert carry_over(torch.tensor([3.0]), torch.tensor([5.0]), torch.tensor([4.0])).item() == 4.0


@pytest.mark.parametrize(
    "strategy", [PeriodicAveraging(period=8, delay=6), DiLoCo(period=8, optimizer_state="average", delay=6)], ids=str
)
def test_variances_stay_positive_through_delayed_synchronisations(strategy: Any):
    """One sample in thirty is thirty times as large as the others."""
    x, y = numbers(240, 6, seed=2), numbers(240, 3, seed=3)
    x[::30] *= 30
    adam = lambda p: torch.optim.AdamW(p, lr=1e-3, betas=(0.9, 0.8))  # noqa: E731
    run = simulate(Task(Masked, squared_error, [x, y], 24, adam, steps=40), strategy, Cluster(workers=8))
    for state in run.states:
        assert values(state, "model")["params"].isfinite().all()
        assert all((s["exp_avg_sq"] >= 0).all() for s in values(state, "optimizer")["state"].values())
    assert (run.model.norm.running_var > 0).all()


def test_bad_statistics_of_one_worker_do_not_spread():
    task = masked()
    task.data[0][task.part(5, 1, 4)[0].sum(1).argmax()] = math.nan
    with pytest.warns(RuntimeWarning, match="NaN or infinity"):
        run = simulate(task, PeriodicAveraging(period=4), Cluster(workers=4))
    assert run.model.norm.running_mean.isfinite().all() and run.params.isfinite().all()


def test_a_frozen_first_group_does_not_stop_the_controllers():
    task = masked(OTHERS["two groups"])
    slow, plain = (
        simulate(task, SlowMo(period=4, momentum=m, optimizer_state="keep"), Cluster(workers=3)) for m in (0.5, 0.0)
    )
    assert not close(slow.params, plain.params, rtol=1e-4)
    run = simulate(task, AdaptiveAveraging(period=2, warmup=0, sampling=6, low=1.0, high=1.0), Cluster(workers=3))
    assert len({sync.period for sync in run.trace.syncs}) > 1
