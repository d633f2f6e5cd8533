"""Synchronous methods and Sandblaster against references in numpy, which import nothing of paceline.

Each row runs a method in the simulator, in float64, and its reference on the same minibatches.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

import paceline as pl
from paceline.codecs import OneBit
from paceline.families.topology import Exponential, RandomPairs, Ring
from paceline.stripes import stripe_of
from tests.reference import sync_averaging as averaging
from tests.reference import sync_gradients as gradients
from tests.reference.harness import classes, relative, sgd, sync_steps
from tests.reference.sync_codes import by_buckets, one_bit
from tests.reference.sync_lbfgs import armijo, lbfgs, wolfe
from tests.reference.sync_problem import AdamW, Sgd, logistic_gradient, logistic_loss
from tests.reference.table import Row, compared, rows_of

LR = 0.3
CNTK = "CNTK manual"
DL4J = "DL4J overview"
ADPSGD = "Jiang & Agrawal"
ON_THE_WIRE = "values travel in single precision; the reference rounds them too"
SMALL = partial(by_buckets, one_bit, bucket=64)


def stripes(numel: int, workers: int) -> list[slice]:
    """Which values of a mean each worker owns: whole buckets of 64."""
    return [stripe_of(i, numel, workers, unit=64) for i in range(workers)]


# Plain sums.


@compared(pl.AllReduceSGD(), "AllReduceSGD", "unequal shares, momentum 0.9, weight decay", f"{DL4J}; {CNTK}")
def _(strategy: pl.Strategy) -> float:
    problem = classes(sgd(lr=LR, momentum=0.9, weight_decay=0.01), 4, steps=40, batch=10, samples=34)
    return problem.compare(strategy, gradients.all_reduce_sgd, Sgd(LR, 0.9, 0.01))


@compared(pl.AllReduceSGD(clip=0.1), "AllReduceSGD, clipped", "norm of the mean gradient at most 0.1", "torch's manual")
def _(strategy: pl.Strategy) -> float:
    problem = classes(sgd(lr=LR, momentum=0.9), 3, steps=20)
    return problem.compare(strategy, gradients.clipped_sgd, Sgd(LR, 0.9), clip=0.1)


for group in (1, 2, 4, 7):

    @compared(
        pl.AllReduceSGD(group=group),
        "AllReduceSGD by groups",
        f"7 workers, groups of {group}",
        "Wongpanich et al., 3.4",
    )
    def _(strategy: pl.Strategy, group: int = group) -> float:
        return classes(sgd(lr=LR), 7, steps=20, batch=14).compare(
            strategy, gradients.hierarchical_sgd, Sgd(LR), group=group
        )


@compared(
    pl.PeriodicAveraging(period=1),
    "Averaging every minibatch = one machine",
    "4 workers, no momentum: the overview's proof",
    DL4J,
)
def _(strategy: pl.Strategy) -> float:
    return classes(sgd(lr=LR), 4, steps=30).compare(strategy, gradients.one_machine, Sgd(LR))


@compared(pl.Replicated(), "Replicated", "every worker reads the whole minibatches, momentum 0.9", CNTK)
def _(strategy: pl.Strategy) -> float:
    return classes(sgd(lr=LR, momentum=0.9), 3, steps=20).compare(strategy, gradients.one_machine, Sgd(LR, 0.9))


@compared(
    pl.Then(pl.Replicated(), pl.AllReduceSGD(codec=OneBit(bucket=64)), samples=120),
    "Warm start of 1-bit SGD",
    "after 120 samples, momentum 0.9",
    CNTK,
    reason=ON_THE_WIRE,
)
def _(strategy: pl.Strategy) -> float:
    problem = classes(sgd(lr=0.1, momentum=0.9), 3, steps=22, numel=200)
    optimizer = Sgd(0.1, 0.9)
    w = gradients.one_machine(problem.start, problem.batches[:10], problem.gradient, optimizer)
    w = gradients.two_levels(w, problem.batches[10:], problem.gradient, optimizer, SMALL)
    return problem.difference(problem.run(strategy), w)


# Averaging.

for period, momentum in ((1, 0.9), (3, 0.0), (3, 0.9), (8, 0.9)):

    @compared(
        pl.PeriodicAveraging(period=period),
        "Model averaging",
        f"period {period}, momentum {momentum}, unequal shares",
        f"{DL4J}; {CNTK}",
    )
    def _(strategy: pl.Strategy, period: int = period, momentum: float = momentum) -> float:
        problem = classes(sgd(lr=0.1, momentum=momentum), 4, steps=30, batch=10, samples=34)
        return problem.compare(strategy, averaging.model_averaging, lambda: Sgd(0.1, momentum), period)


@compared(pl.PeriodicAveraging(samples=10), "Model averaging", "period 10 samples of a worker, 3 in a step", CNTK)
def _(strategy: pl.Strategy) -> float:
    problem = classes(sgd(lr=0.1, momentum=0.9), 4, steps=30)
    return problem.compare(strategy, averaging.model_averaging, lambda: Sgd(0.1, 0.9), 4)


@compared(
    pl.PeriodicAveraging(period=3, optimizer_state="average"),
    "Model averaging",
    "period 3, momentum 0.9 averaged too, unequal shares",
    DL4J,
)
def _(strategy: pl.Strategy) -> float:
    problem = classes(sgd(lr=0.1, momentum=0.9), 4, steps=30, batch=10, samples=34)
    return problem.compare(strategy, averaging.model_averaging, lambda: Sgd(0.1, 0.9), 3, of_state=True)


@compared(
    pl.PeriodicAveraging(period=5, delay=2),
    "Model averaging",
    "period 5, means arrive 2 steps later, momentum 0.9",
    "Douillard et al. 2025, overlap",
)
def _(strategy: pl.Strategy) -> float:
    problem = classes(sgd(lr=0.1, momentum=0.9), 4, steps=30)
    return problem.compare(strategy, averaging.delayed_averaging, lambda: Sgd(0.1, 0.9), 5, 2)


@compared(
    pl.PeriodicAveraging(period=3, codec=OneBit(bucket=64)),
    "Model averaging by 1 bit",
    "period 3, feedback, two levels, momentum 0.9",
    f"{DL4J}; Seide et al. 2014",
    reason=ON_THE_WIRE,
)
def _(strategy: pl.Strategy) -> float:
    problem = classes(sgd(lr=0.1, momentum=0.9), 3, steps=30, numel=200)
    return problem.compare(strategy, averaging.coded_averaging, lambda: Sgd(0.1, 0.9), 3, SMALL, stripes(200, 3))


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
    given = {"momentum": 0.5, "rate": 0.8} if "momentum 0.5" in setting else {}

    @compared(pl.BlockMomentum(period=4, **ours, **given), "BMUF", setting, f"Chen & Huo 2016; {CNTK}")
    def _(strategy: pl.Strategy, settings: dict[str, Any] = {"form": "paper"} | theirs | given) -> float:
        problem = classes(sgd(lr=0.1, momentum=0.9), 4, steps=30)
        return problem.compare(strategy, averaging.bmuf, lambda: Sgd(0.1, 0.9), period=4, **settings)


def two_drops(step: int) -> float:
    return 1.0 if step < 150 else 0.1 if step < 280 else 0.01


@compared(
    pl.AdaptiveAveraging(period=4, warmup=10, sampling=0.25),
    "ADPSGD",
    "400 steps, two drops of the rate, momentum 0.9: model, sync steps, spreads",
    f"{ADPSGD}, algorithm 2",
    reason="the run ends with one more sync, in the reference too",
)
def _(strategy: pl.Strategy) -> float:
    problem = classes(sgd(lr=0.1, momentum=0.9), 4, steps=400, schedule=two_drops)
    run = problem.run(strategy)
    expected, syncs, spreads = problem.of(
        averaging.adpsgd,
        lambda: Sgd(0.1, 0.9),
        period=4,
        warmup=10,
        sampling=100,
        lr=0.1,
        factor_at=two_drops,
    )
    assert sync_steps(run, problem.task) == syncs
    spreads_found = [sync.divergence for sync in run.trace.syncs if sync.rank == 0]
    assert len({later - step for step, later in pairwise(syncs)}) > 5  # The period changes.
    return max(problem.difference(run, expected), relative(spreads_found, spreads))


@compared(
    pl.DecreasingAveraging(periods=(20, 5)),
    "Decreasing periods",
    "20 then 5 in 100 steps: model and sync steps",
    f"{ADPSGD}, V-B",
)
def _(strategy: pl.Strategy) -> float:
    problem = classes(sgd(lr=0.1), 4, steps=100)
    run = problem.run(strategy)
    expected, syncs = problem.of(averaging.by_schedule, lambda: Sgd(0.1), lambda k: 20 if k < 50 else 5)
    assert sync_steps(run, problem.task) == syncs
    return problem.difference(run, expected)


@compared(
    pl.AdaComm(period=16, steps=20),
    "AdaComm",
    "from period 16, a choice every 20 steps, one drop of the rate",
    "Wang & Joshi 2019",
)
def _(strategy: pl.Strategy) -> float:
    def factor_at(step: int) -> float:
        return 1.0 if step < 120 else 0.25

    problem = classes(sgd(lr=0.3), 4, steps=200, schedule=factor_at)
    run = problem.run(strategy)
    expected, syncs = problem.of(
        averaging.ada_comm, lambda: Sgd(0.3), logistic_loss, period=16, steps=20, lr=0.3, factor_at=factor_at
    )
    assert sync_steps(run, problem.task) == syncs
    return problem.difference(run, expected)


@compared(pl.DiLoCo(period=5), "DiLoCo", "inner AdamW, outer Nesterov, period 5", "Douillard et al. 2023")
def _(strategy: pl.Strategy) -> float:
    problem = classes(partial(torch.optim.AdamW, lr=0.02), 4, steps=32)
    return problem.compare(strategy, averaging.diloco, lambda: AdamW(0.02), period=5, rate=0.7, momentum=0.9)


@compared(
    pl.DiLoCo(period=4, rate=0.5, momentum=0.8, nesterov=False),
    "DiLoCo",
    "outer classical momentum, period 4",
    "Douillard et al. 2023",
)
def _(strategy: pl.Strategy) -> float:
    problem = classes(sgd(lr=0.1), 4, steps=30)
    return problem.compare(
        strategy, averaging.diloco, lambda: Sgd(0.1), period=4, rate=0.5, momentum=0.8, nesterov=False
    )


@compared(pl.DiLoCo(period=6, fragments=3), "Streaming DiLoCo", "3 fragments, period 6", "Douillard et al. 2025")
def _(strategy: pl.Strategy) -> float:
    problem = classes(sgd(lr=0.1), 4, steps=32)
    settings = {"period": 6, "fragments": 3, "rate": 0.7, "momentum": 0.9}
    return problem.compare(strategy, averaging.streaming_diloco, lambda: Sgd(0.1), **settings)


@compared(
    pl.DiLoCo(period=3, codec=OneBit(bucket=64)),
    "DiLoCo by 1 bit",
    "period 3, feedback, two levels",
    "Douillard et al. 2023; Seide et al. 2014",
    reason=ON_THE_WIRE,
)
def _(strategy: pl.Strategy) -> float:
    problem = classes(sgd(lr=0.1), 3, steps=30, numel=200)
    settings = {"stripes": stripes(200, 3), "rate": 0.7, "momentum": 0.9}
    return problem.compare(strategy, averaging.coded_averaging, lambda: Sgd(0.1), 3, SMALL, **settings)


@compared(pl.SlowMo(period=4, momentum=0.6, rate=0.9), "SlowMo", "period 4, a drop of the rate", "Wang et al. 2020")
def _(strategy: pl.Strategy) -> float:
    def factor_at(step: int) -> float:
        return 1.0 if step < 14 else 0.1

    problem = classes(sgd(lr=0.1, momentum=0.9), 4, steps=30, schedule=factor_at)
    settings = {"period": 4, "rate": 0.9, "momentum": 0.6, "lr": 0.1, "factor_at": factor_at}
    return problem.compare(strategy, averaging.slow_mo, lambda: Sgd(0.1, 0.9), **settings)


# Without a centre, and in batches.

for topology, partner, more in (
    (Ring(), averaging.ring_partner, {}),
    (Exponential(), averaging.exponential_partner, {}),
    (Exponential(), averaging.exponential_partner, {"rounds": 2}),
    (RandomPairs(), RandomPairs(), {"period": 2}),
):

    @compared(
        pl.Gossip(topology, overlap=False, **more),
        "Gossip without overlap (D-PSGD in pairs)",
        ", ".join([str(topology), *(f"{name} {value}" for name, value in more.items()), "4 workers, momentum 0.9"]),
        "Lian et al. 2017",
        reason="which pairs are drawn is not the source's: the reference is given them" if partner is topology else "",
    )
    def _(strategy: pl.Strategy, partner: Any = partner, more: Any = more) -> float:
        problem = classes(sgd(lr=0.1, momentum=0.9), 4, steps=31)
        return problem.compare(strategy, averaging.d_psgd, lambda: Sgd(0.1, 0.9), partner, **more)


for history, search, settings in (
    (1, armijo, {}),
    (3, armijo, {}),
    (10, armijo, {}),
    (10, wolfe, {"c2": 0.1}),
    (2, wolfe, {"c2": 0.01}),
):

    @compared(
        pl.Sandblaster(history=history, search=search.__name__, **settings),
        "Sandblaster L-BFGS",
        ", ".join([f"history {history}", search.__name__, *(f"{k} {v}" for k, v in settings.items()), "24 passes"]),
        "Dean et al. 2012; Nocedal & Wright",
    )
    def _(strategy: pl.Strategy, history: int = history, search: Any = search, settings: Any = settings) -> float:
        problem = classes(sgd(lr=1.0), 3, steps=24 * 2, batch=30, samples=60)
        x, y = (t.numpy() for t in problem.task.data)
        expected = lbfgs(
            problem.start,
            lambda w: logistic_loss(w, x, y),
            lambda w: logistic_gradient(w, x, y),
            history=history,
            evaluations=24,
            search=partial(search, **settings),
        )
        return problem.difference(problem.run(strategy), expected)


@pytest.mark.parametrize("row", rows_of(__name__), ids=str)
def test_algorithm_equals_its_reference(row: Row):
    assert row.difference() <= row.limit
