"""Synchronous methods, compression and Sandblaster against references in numpy, which import nothing of paceline.

Each row runs a method in the simulator, in float64, and its reference on the same minibatches.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import paceline as pl
from paceline.codecs import DGC, QSGD, Codec, OneBit, PowerSGD, TernGrad, TopK
from paceline.families.topology import Exponential, Ring
from tests.laws.tasks import instant, numbers
from tests.reference import sync_averaging as averaging
from tests.reference import sync_gradients as gradients
from tests.reference.sync_lbfgs import lbfgs
from tests.reference.sync_problem import (
    AdamW,
    Sgd,
    linear_gradient,
    logistic_gradient,
    logistic_loss,
)
from tests.reference.table import TABLE, Row, compared

NUMEL = 20
LR = 0.3
DRAWS = 40_000
CNTK = "CNTK manual"
DL4J = "DL4J overview"
ADPSGD = "Jiang & Agrawal"
ON_THE_WIRE = "values travel in single precision; the reference rounds them too"


class Logistic(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-0.5, 0.5, numel, dtype=torch.float64))


def logistic(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return torch.nn.functional.softplus(-y * (x @ model.w)).mean()


def squared(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return 0.5 * (model(x) - y).square().sum(1).mean()


def task_of(
    optimizer: Callable[..., torch.optim.Optimizer], *, steps: int, batch: int, numel: int = NUMEL, **more: Any
) -> pl.Task:
    samples = more.pop("samples", 5 * batch)
    x = numbers(samples, numel, seed=2)
    y = (x @ numbers(numel, seed=3) + numbers(samples, seed=4)).sign()
    return pl.Task(lambda: Logistic(numel), logistic, [x, y], batch, optimizer, steps=steps, **more)


def batches_of(task: pl.Task, workers: int) -> list[Any]:
    """The minibatches of a task: `batches[k][i]` is worker i's part, in numpy."""
    steps = range(task.total_steps)
    return [[tuple(t.numpy() for t in task.part(k, i, workers)) for i in range(workers)] for k in steps]


def start_of(task: pl.Task) -> np.ndarray:
    return torch.cat([p.detach().reshape(-1) for p in task.build().parameters()]).numpy()


def simulated(task: pl.Task, strategy: pl.Strategy, workers: int, **more: Any) -> pl.Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Some settings of the papers warn about a short run.
        return pl.simulate(task, strategy, instant(workers, **more))


def sync_steps(run: pl.Run, task: pl.Task) -> list[int]:
    """The steps after which workers met.  The last one is after the data has ended: it belongs to the last step."""
    return [min(sync.step, task.total_steps - 1) for sync in run.trace.syncs if sync.rank == 0]


def relative(found: Any, expected: Any) -> float:
    found = np.asarray(found, dtype=np.float64)
    expected = np.asarray(expected, dtype=np.float64)
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def torch_sgd(**settings: Any) -> Callable[..., torch.optim.Optimizer]:
    return partial(torch.optim.SGD, **settings)


# Plain sums.


@compared("AllReduceSGD", "unequal shares, momentum 0.9, weight decay", f"{DL4J}; {CNTK}")
def _() -> float:
    task = task_of(torch_sgd(lr=LR, momentum=0.9, weight_decay=0.01), steps=40, batch=10, samples=34)
    run = simulated(task, pl.AllReduceSGD(), 4)
    optimizer = Sgd(LR, 0.9, 0.01)
    return relative(
        run.params, gradients.all_reduce_sgd(start_of(task), batches_of(task, 4), logistic_gradient, optimizer)
    )


for group in (1, 2, 4, 7):

    @compared("AllReduceSGD by groups", f"7 workers, groups of {group}", "Wongpanich et al., 3.4")
    def _(group: int = group) -> float:
        task = task_of(torch_sgd(lr=LR), steps=20, batch=14)
        run = simulated(task, pl.AllReduceSGD(group=group), 7)
        expected = gradients.hierarchical_sgd(
            start_of(task), batches_of(task, 7), logistic_gradient, Sgd(LR), group=group
        )
        return relative(run.params, expected)


@compared("Averaging every minibatch = one machine", "4 workers, no momentum: the overview's proof", DL4J)
def _() -> float:
    task = task_of(torch_sgd(lr=LR), steps=30, batch=12)
    run = simulated(task, pl.PeriodicAveraging(period=1), 4)
    return relative(run.params, gradients.one_machine(start_of(task), batches_of(task, 4), logistic_gradient, Sgd(LR)))


# Compressed gradients.

for momentum in (0.0, 0.9):

    @compared("1-bit SGD", f"feedback, two levels, bucket 64, momentum {momentum}", CNTK, reason=ON_THE_WIRE)
    def _(momentum: float = momentum) -> float:
        task = task_of(torch_sgd(lr=0.1, momentum=momentum), steps=40, batch=12, numel=200)
        run = simulated(task, pl.AllReduceSGD(codec=OneBit(bucket=64)), 3)
        expected = gradients.one_bit_sgd(
            start_of(task), batches_of(task, 3), logistic_gradient, Sgd(0.1, momentum), bucket=64
        )
        return relative(run.params, expected)


@compared("Top-k", "5 %, feedback, momentum 0.9", "Aji & Heafield 2017", reason=ON_THE_WIRE)
def _() -> float:
    task = task_of(torch_sgd(lr=0.1, momentum=0.9), steps=40, batch=12, numel=200)
    run = simulated(task, pl.AllReduceSGD(codec=TopK(ratio=0.05)), 3)
    expected = gradients.top_k_sgd(start_of(task), batches_of(task, 3), logistic_gradient, Sgd(0.1, 0.9), ratio=0.05)
    return relative(run.params, expected)


for setting, more in (
    ("5 %, momentum 0.9", {}),
    ("5 %, Nesterov, clipped", {"nesterov": True, "clip": 0.5}),
    ("5 %, warm-up of 8 messages", {"warmup": 8}),
):

    @compared("DGC", setting, "Lin et al. 2018", reason=ON_THE_WIRE)
    def _(more: dict[str, Any] = more) -> float:
        task = task_of(torch_sgd(lr=0.1), steps=40, batch=12, numel=200)
        workers = {"workers": 3} if "clip" in more else {}
        run = simulated(task, pl.AllReduceSGD(codec=DGC(ratio=0.05, momentum=0.9, **more, **workers)), 3)
        ratios = [0.25, 0.25, 0.0625, 0.0625] + [0.05] * 4 if "warmup" in more else []
        others = {name: value for name, value in more.items() if name != "warmup"}
        expected = gradients.dgc(
            start_of(task),
            batches_of(task, 3),
            logistic_gradient,
            lr=0.1,
            ratio=0.05,
            momentum=0.9,
            ratios=ratios,
            **others,
        )
        return relative(run.params, expected)


for rank in (1, 3):

    @compared("PowerSGD", f"rank {rank}, a matrix of 10 x 12 and a bias, momentum 0.9", "Vogels et al. 2019")
    def _(rank: int = rank) -> float:
        x = numbers(60, 12, seed=2)
        y = x @ numbers(12, 10, seed=3) + numbers(60, 10, seed=4)
        task = pl.Task(
            lambda: nn.Linear(12, 10).double(), squared, [x, y], 12, torch_sgd(lr=0.02, momentum=0.9), steps=40
        )
        run = simulated(task, pl.AllReduceSGD(codec=PowerSGD(rank=rank)), 3)
        guess = 2 * torch.rand(rank, 12, generator=torch.Generator().manual_seed(1234)).double().numpy().T - 1
        expected = gradients.power_sgd(
            start_of(task), batches_of(task, 3), linear_gradient, Sgd(0.02, 0.9), (10, 12), guess
        )
        return relative(run.params, expected)


def standard_errors(codec: Codec, v: torch.Tensor, mean: np.ndarray, variance: np.ndarray) -> float:
    """How far the mean of many draws is from the right one, at most, in standard errors; likewise for the variance.

    One message holds all draws: each copy of `v` is a bucket of its own, or has the same scale.
    """
    message = codec.encode(v.repeat(DRAWS), torch.Generator().manual_seed(0))
    drawn = codec.decode(message, DRAWS * v.numel()).view(DRAWS, -1).double().numpy()
    spread = np.sqrt(variance)
    is_random = spread > 1e-3 * np.abs(mean).max()
    assert np.allclose(drawn[:, ~is_random], mean[~is_random], rtol=1e-6)
    of_mean = np.abs(drawn.mean(0) - mean)[is_random] / (spread[is_random] / np.sqrt(DRAWS))
    squares = (drawn - mean)[:, is_random] ** 2
    # Near a probability of one half all squares are equal, so that only rounding is left.
    error = np.maximum(squares.std(0) / np.sqrt(DRAWS), 1e-4 * variance[is_random])
    of_variance = np.abs(squares.mean(0) - variance[is_random]) / error
    return float(max(of_mean.max(), of_variance.max()))


RANDOM = "random: the largest of 128 deviations of a mean or a variance, in standard errors of 40 000 draws"

for norm in ("l2", "max"):

    @compared("QSGD", f"7 levels, norm {norm}: mean and variance", "Alistarh et al. 2017", limit=4.0, reason=RANDOM)
    def _(norm: Any = norm) -> float:
        v = numbers(64, seed=5, dtype=torch.float32)
        moments = gradients.qsgd_moments(v.double().numpy(), 7, norm)
        return standard_errors(QSGD(levels=7, bucket=64, norm=norm), v, *moments)


for clip in (None, 1.5):

    @compared("TernGrad", f"clip {clip}: mean and variance", "Wen et al. 2017", limit=4.0, reason=RANDOM)
    def _(clip: float | None = clip) -> float:
        v = numbers(64, seed=5, dtype=torch.float32)
        moments = gradients.terngrad_moments(v.double().numpy(), clip)
        return standard_errors(TernGrad(clip=clip), v, *moments)


# Averaging.

for period in (1, 3, 8):
    for momentum in (0.0, 0.9):

        @compared("Model averaging", f"period {period}, momentum {momentum}, unequal shares", f"{DL4J}; {CNTK}")
        def _(period: int = period, momentum: float = momentum) -> float:
            task = task_of(torch_sgd(lr=0.1, momentum=momentum), steps=30, batch=10, samples=34)
            run = simulated(task, pl.PeriodicAveraging(period=period), 4)
            expected = averaging.model_averaging(
                start_of(task), batches_of(task, 4), logistic_gradient, lambda: Sgd(0.1, momentum), period
            )
            return relative(run.params, expected)


for setting, ours, theirs in (
    ("Nesterov, reset, default momentum", {}, {"nesterov": True, "reset": True}),
    ("Nesterov, kept", {"optimizer_state": "keep"}, {"nesterov": True, "reset": False}),
    ("classical, reset, momentum 0.5, rate 0.8", {"nesterov": False}, {"nesterov": False, "reset": True}),
    ("classical, kept", {"nesterov": False, "optimizer_state": "keep"}, {"nesterov": False, "reset": False}),
    ("Nesterov, time constant", {"time_constant": 40.0}, {"nesterov": True, "reset": True, "time_constant": 40.0}),
    ("CNTK's form, Nesterov", {"form": "cntk"}, {"nesterov": True, "reset": True, "form": "cntk"}),
    (
        "CNTK's form, classical, momentum 0.5, rate 0.8",
        {"form": "cntk", "nesterov": False},
        {"nesterov": False, "reset": True, "form": "cntk"},
    ),
):

    @compared("BMUF", setting, f"Chen & Huo 2016; {CNTK}")
    def _(setting: str = setting, ours: dict[str, Any] = ours, theirs: dict[str, Any] = theirs) -> float:
        given = {"momentum": 0.5, "rate": 0.8} if "momentum 0.5" in setting else {}
        task = task_of(torch_sgd(lr=0.1, momentum=0.9), steps=30, batch=12)
        run = simulated(task, pl.BlockMomentum(period=4, **ours, **given), 4)
        expected = averaging.bmuf(
            start_of(task),
            batches_of(task, 4),
            logistic_gradient,
            lambda: Sgd(0.1, 0.9),
            period=4,
            **{"form": "paper"} | theirs | given,
        )
        return relative(run.params, expected)


def two_drops(step: int) -> float:
    return 1.0 if step < 150 else 0.1 if step < 280 else 0.01


for momentum in (0.0, 0.9):

    @compared(
        "ADPSGD",
        f"400 steps, two drops of the rate, momentum {momentum}: model, sync steps, spreads",
        f"{ADPSGD}, algorithm 2",
        reason="the run ends with one more sync, in the reference too",
    )
    def _(momentum: float = momentum) -> float:
        task = task_of(torch_sgd(lr=0.1, momentum=momentum), steps=400, batch=12, schedule=two_drops)
        run = simulated(task, pl.AdaptiveAveraging(period=4, warmup=10, sampling=0.25), 4)
        expected, syncs, spreads = averaging.adpsgd(
            start_of(task),
            batches_of(task, 4),
            logistic_gradient,
            lambda: Sgd(0.1, momentum),
            period=4,
            warmup=10,
            sampling=100,
            lr=0.1,
            factor_at=two_drops,
        )
        assert sync_steps(run, task) == syncs
        spreads_found = [sync.divergence for sync in run.trace.syncs if sync.rank == 0]
        assert len({later - step for step, later in pairwise(syncs)}) > 5  # The period changes.
        return max(relative(run.params, expected), relative(spreads_found, spreads))


@compared("Decreasing periods", "20 then 5 in 200 steps: model and sync steps", f"{ADPSGD}, V-B")
def _() -> float:
    task = task_of(torch_sgd(lr=0.1), steps=200, batch=12)
    run = simulated(task, pl.DecreasingAveraging(periods=(20, 5)), 4)
    expected, syncs = averaging.by_schedule(
        start_of(task),
        batches_of(task, 4),
        logistic_gradient,
        lambda: Sgd(0.1),
        lambda k: 20 if k < 100 else 5,
    )
    assert sync_steps(run, task) == syncs
    return relative(run.params, expected)


@compared("AdaComm", "from period 16, a choice every 20 steps, one drop of the rate", "Wang & Joshi 2019")
def _() -> float:
    def factor_at(step: int) -> float:
        return 1.0 if step < 120 else 0.25

    task = task_of(torch_sgd(lr=0.3), steps=200, batch=12, schedule=factor_at)
    run = simulated(task, pl.AdaComm(period=16, steps=20), 4)
    expected, syncs = averaging.ada_comm(
        start_of(task),
        batches_of(task, 4),
        logistic_gradient,
        lambda: Sgd(0.3),
        logistic_loss,
        period=16,
        steps=20,
        lr=0.3,
        factor_at=factor_at,
    )
    assert sync_steps(run, task) == syncs
    return relative(run.params, expected)


@compared("DiLoCo", "inner AdamW, outer Nesterov, period 5", "Douillard et al. 2023")
def _() -> float:
    task = task_of(partial(torch.optim.AdamW, lr=0.02), steps=32, batch=12)
    run = simulated(task, pl.DiLoCo(period=5), 4)
    expected = averaging.outer_nesterov(
        start_of(task),
        batches_of(task, 4),
        logistic_gradient,
        lambda: AdamW(0.02),
        period=5,
        rate=0.7,
        momentum=0.9,
    )
    return relative(run.params, expected)


@compared("SlowMo", "period 4, a drop of the rate", "Wang et al. 2020")
def _() -> float:
    def factor_at(step: int) -> float:
        return 1.0 if step < 14 else 0.1

    task = task_of(torch_sgd(lr=0.1, momentum=0.9), steps=30, batch=12, schedule=factor_at)
    run = simulated(task, pl.SlowMo(period=4, momentum=0.6, rate=0.9), 4)
    expected = averaging.slow_mo(
        start_of(task),
        batches_of(task, 4),
        logistic_gradient,
        lambda: Sgd(0.1, 0.9),
        period=4,
        rate=0.9,
        momentum=0.6,
        lr=0.1,
        factor_at=factor_at,
    )
    return relative(run.params, expected)


# Without a centre, and in batches.

for topology, partner in ((Ring(), averaging.ring_partner), (Exponential(), averaging.exponential_partner)):

    @compared("Gossip without overlap (D-PSGD in pairs)", f"{topology}, 4 workers, momentum 0.9", "Lian et al. 2017")
    def _(topology: Any = topology, partner: Any = partner) -> float:
        task = task_of(torch_sgd(lr=0.1, momentum=0.9), steps=31, batch=12)
        run = simulated(task, pl.Gossip(topology, overlap=False), 4)
        expected = averaging.d_psgd(
            start_of(task), batches_of(task, 4), logistic_gradient, lambda: Sgd(0.1, 0.9), partner
        )
        return relative(run.params, expected)


for history in (1, 3, 10):

    @compared("Sandblaster L-BFGS", f"history {history}, 24 passes", "Dean et al. 2012; Nocedal & Wright")
    def _(history: int = history) -> float:
        task = task_of(torch_sgd(lr=1.0), steps=24 * 5, batch=12)
        run = simulated(task, pl.Sandblaster(history=history), 3)
        x, y = (t.numpy() for t in task.data)
        expected = lbfgs(
            start_of(task),
            lambda w: logistic_loss(w, x, y),
            lambda w: logistic_gradient(w, x, y),
            history=history,
            evaluations=24,
        )
        return relative(run.params, expected)


OURS = [row for row in TABLE if row.difference.__module__ == __name__]


@pytest.mark.parametrize("row", OURS, ids=lambda row: f"{row.algorithm}, {row.setting}")
def test_algorithm_equals_its_reference(row: Row):
    assert row.difference() <= row.limit
