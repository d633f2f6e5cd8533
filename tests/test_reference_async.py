"""Every asynchronous and elastic method against a reference of a few lines of numpy.

The task is logistic regression in float64 on workers of different speed, each with its own data, and messages that take
no time.  The references share nothing with the package but the minibatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline import (
    ASGD,
    EAMSGD,
    EASGD,
    AsyncEASGD,
    AsyncMomentum,
    DelayCompensated,
    Downpour,
    EAWild,
    Hogwild,
    ParameterServer,
    RoundRobinEASGD,
    SoftSync,
    StaleSynchronous,
    Strategy,
    Strom,
    Task,
    simulate,
)
from paceline.codecs import Threshold
from paceline.server.rules import Adagrad, Momentum, Sgd
from tests.laws.tasks import instant
from tests.reference import async_servers as servers
from tests.reference import elastic_averaging as elastic

SECONDS = [1.0, 1.37, 2.11]
NUMEL = 20
SAMPLES = 8  # Of a worker's minibatch.
LR = 0.3


def drop(step: int) -> float:
    """A warm-up, and a tenfold drop."""
    return min(1.0, (step + 1) / 3) if step < 12 else 0.1


class Regression:
    """Logistic regression: the task for the package, and its gradient in numpy for the references."""

    def __init__(
        self, steps: int, workers: int, *, mu: float = 0.0, rate: Callable[[int], float] | None = None
    ) -> None:
        self.first = np.linspace(-0.5, 0.5, NUMEL)
        self.task = Task(
            self.model,
            lambda model, batch: nn.functional.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), batch[1]),
            self.data,
            SAMPLES * workers,
            lambda parameters: torch.optim.SGD(parameters, lr=LR, momentum=mu),
            steps=steps,
            schedule=rate,
        )
        self.parts = [[self.task.part(k, j, workers) for k in range(steps)] for j in range(workers)]

    def model(self) -> nn.Module:
        model = nn.Linear(NUMEL, 1, bias=False).double()
        with torch.no_grad():
            model.weight.copy_(torch.from_numpy(self.first))
        return model

    def data(self, rank: int, workers: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(7 * SAMPLES, NUMEL, generator=generator, dtype=torch.float64)
        y = (x.sum(1) + torch.randn(len(x), generator=generator, dtype=torch.float64) > 0).double()
        return [x, y]

    def gradient(self, w: Any, j: int, k: int) -> Any:
        x, y = (t.numpy() for t in self.parts[j][k])
        return x.T @ (1 / (1 + np.exp(-x @ w)) - y) / len(y)


Case = tuple[Strategy, Callable[..., Any], dict[str, Any]]

SERVERS: dict[str, Case] = {
    "parameter server": (ParameterServer(rule=Sgd(LR)), servers.sgd, {"lr": LR}),
    "parameter server, momentum and weight decay": (
        ParameterServer(rule=Momentum(LR, 0.5, weight_decay=0.01)),
        servers.momentum,
        {"lr": LR, "mu": 0.5, "decay": 0.01},
    ),
    "async momentum": (AsyncMomentum(lr=0.1, momentum=0.5), servers.momentum, {"lr": 0.1, "mu": 0.5}),
    "async momentum, weight decay": (
        AsyncMomentum(lr=0.1, momentum=0.5, weight_decay=0.05),
        servers.momentum,
        {"lr": 0.1, "mu": 0.5, "decay": 0.05},
    ),
    **{f"softsync, s={s}": (SoftSync(lr=LR, updates=s), servers.softsync, {"lr": LR, "s": s}) for s in (1, 2, 3)},
    "dc-asgd-c": (DelayCompensated(lr=LR, lam=0.5), servers.delay_compensated, {"lr": LR, "lam": 0.5}),
    "dc-asgd-a": (
        DelayCompensated(lr=LR, adaptive=True),
        servers.delay_compensated,
        {"lr": LR, "lam": 2.0, "m": 0.95},
    ),
    "dc-asgd-a, m=0": (
        DelayCompensated(lr=LR, adaptive=True, decay=0.0),
        servers.delay_compensated,
        {"lr": LR, "lam": 2.0, "m": 0.0},
    ),
    **{
        f"stale synchronous, bound {bound}": (
            StaleSynchronous(lr=LR, bound=bound),
            servers.stale_synchronous,
            {"lr": LR, "bound": bound},
        )
        for bound in (0, 1, 3)
    },
    **{
        f"downpour, push {push} and fetch {fetch}": (
            Downpour(rule=Adagrad(0.05), push=push, fetch=fetch, local_lr=0.2),
            servers.downpour,
            {"lr": 0.05, "local_lr": 0.2, "push": push, "fetch": fetch},
        )
        for push, fetch in ((1, 1), (3, 3), (3, 2), (1, 4))
    },
    **{
        f"asgd, period {period}": (ASGD(period=period), servers.asgd, {"lr": LR, "period": period}) for period in (1, 3)
    },
    "asgd, pipelined": (
        ASGD(period=3, pipeline=True),
        servers.asgd,
        {"lr": LR, "period": 3, "pipeline": True},
    ),
    **{
        f"asgd, the manual's ramp, period {period}": (
            ASGD(period=period, ramp=4, ramp_from=0.2),
            servers.asgd,
            {"lr": LR, "period": period, "rate_of_minibatch": servers.staircase(0.2, 4)},
        )
        for period in (1, 3)
    },
    "asgd, the code's ramp": (
        ASGD(period=3, ramp=2, ramp_from=0.2, ramp_of="delta"),
        servers.asgd,
        {"lr": LR, "period": 3, "share_of_exchange": servers.staircase(0.2, 2)},
    ),
    "hogwild": (Hogwild(), servers.hogwild, {"lr": LR}),
    "strom": (Strom(Threshold(tau=0.125, limit=math.inf), lr=0.1), servers.strom, {"lr": 0.1, "tau": 0.125}),
}

LOCAL_MOMENTUM: dict[str, Case] = {
    "asgd": (ASGD(period=3), servers.asgd, {"lr": LR, "mu": 0.9, "period": 3}),
    "asgd, pipelined": (
        ASGD(period=2, pipeline=True),
        servers.asgd,
        {"lr": LR, "mu": 0.9, "period": 2, "pipeline": True},
    ),
    "asgd, the manual's ramp": (
        ASGD(period=3, ramp=4, ramp_from=0.2),
        servers.asgd,
        {"lr": LR, "mu": 0.9, "period": 3, "rate_of_minibatch": servers.staircase(0.2, 4)},
    ),
    "hogwild": (Hogwild(), servers.hogwild, {"lr": LR, "mu": 0.9}),
}


def check(found: torch.Tensor, expected: Any, first: Any) -> None:
    """The difference is at most 1e-7 of the way that the model has gone."""
    gone = float(np.abs(expected - first).max())
    assert gone > 0.05, "the model has hardly moved"
    assert float(np.abs(found.numpy() - expected).max()) < 1e-7 * gone


def compare(case: Case, steps: int, mu: float, rate: Callable[[int], float] | None) -> None:
    strategy, reference, settings = case
    regression = Regression(steps, len(SECONDS), mu=mu, rate=rate)
    run = simulate(regression.task, strategy, instant(len(SECONDS), compute=SECONDS))
    scheduled = {} if rate is None else {"rate": rate}
    expected = reference(regression.first, regression.gradient, SECONDS, steps, **settings, **scheduled)
    check(run.params, expected, regression.first)


@pytest.mark.parametrize(("steps", "rate"), [(19, None), (20, drop)], ids=["constant", "scheduled"])
@pytest.mark.parametrize("name", SERVERS)
def test_asynchronous_methods_equal_their_references(name: str, steps: int, rate: Any):
    compare(SERVERS[name], steps, 0.0, rate)


@pytest.mark.parametrize("rate", [None, drop], ids=["constant", "scheduled"])
@pytest.mark.parametrize("name", LOCAL_MOMENTUM)
def test_asynchronous_methods_with_momentum_in_the_workers_equal_their_references(name: str, rate: Any):
    compare(LOCAL_MOMENTUM[name], 19, 0.9, rate)


FORCES: dict[str, tuple[dict[str, float], Callable[[int, Callable[[int], float]], Callable[[int], float]]]] = {
    "alpha": ({"alpha": 0.25}, lambda workers, eta: lambda k: 0.25),
    "beta": ({"beta": 0.6}, lambda workers, eta: lambda k: 0.6 / workers),
    "rho": ({"rho": 0.9}, lambda workers, eta: lambda k: 0.9 * eta(k)),
}


PULLS = [("alpha", None), ("beta", drop), ("rho", drop)]


def eta_of(rate: Callable[[int], float] | None) -> Callable[[int], float]:
    return lambda k: LR * (1.0 if rate is None else rate(k))


@pytest.mark.parametrize(("force", "rate"), PULLS, ids=[force for force, _ in PULLS])
@pytest.mark.parametrize("steps", [16, 17, 19])
@pytest.mark.parametrize("period", [1, 4])
def test_synchronous_elastic_averaging_equals_its_reference(period: int, steps: int, force: str, rate: Any):
    given, alpha_of = FORCES[force]
    regression = Regression(steps, 3, rate=rate)
    run = simulate(regression.task, EASGD(period=period, **given), instant(3, compute=SECONDS))
    eta = eta_of(rate)
    expected = elastic.together(
        regression.first, regression.gradient, 3, steps, eta=eta, alpha=alpha_of(3, eta), period=period
    )
    check(run.params, expected, regression.first)


ONE_BY_ONE: dict[str, tuple[Callable[..., Strategy], bool, dict[str, Any]]] = {
    "async easgd": (AsyncEASGD, False, {}),
    "eamsgd": (EAMSGD, False, {"momentum": 0.5}),
    "round robin": (RoundRobinEASGD, True, {}),
    "ea-wild in memory": (EAWild, False, {}),
    "ea-wild on shards": (EAWild, False, {"servers": 2}),
}


@pytest.mark.parametrize(("force", "rate"), PULLS, ids=[force for force, _ in PULLS])
@pytest.mark.parametrize(("steps", "period"), [(16, 1), (16, 4), (17, 4)])
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_asynchronous_elastic_averaging_equals_its_reference(name: str, steps: int, period: int, force: str, rate: Any):
    make, takes_turns, more = ONE_BY_ONE[name]
    given, alpha_of = FORCES[force]
    regression = Regression(steps, 3, rate=rate)
    run = simulate(regression.task, make(period=period, **given, **more), instant(3, compute=SECONDS))
    eta = eta_of(rate)
    expected = elastic.one_by_one(
        regression.first,
        regression.gradient,
        elastic.in_turn(3, steps) if takes_turns else elastic.begun(SECONDS, steps),
        eta=eta,
        alpha=alpha_of(3, eta),
        period=period,
        mu=more.get("momentum", 0.0),
    )
    check(run.params, expected, regression.first)


@pytest.mark.parametrize("where", [{}, {"servers": 2}], ids=["in memory", "on shards"])
@pytest.mark.parametrize("force", FORCES)
def test_groups_of_ea_wild_equal_one_worker_each(force: str, where: dict[str, int]):
    """Workers 0 and 1, and 2 and 3, act as one: by the mean of their gradients, at the speed of the slower."""
    given, alpha_of = FORCES[force]
    regression = Regression(18, 4, rate=drop)
    strategy = EAWild(group=2, period=2, **given, **where)
    run = simulate(regression.task, strategy, instant(4, compute=[1.0, 1.37, 2.11, 1.9]))
    eta = eta_of(drop)
    expected = elastic.one_by_one(
        regression.first,
        lambda w, j, k: (regression.gradient(w, 2 * j, k) + regression.gradient(w, 2 * j + 1, k)) / 2,
        elastic.begun([1.37, 2.11], 18),
        eta=eta,
        alpha=alpha_of(2, eta),
        period=2,
    )
    check(run.params, expected, regression.first)
