"""Asynchronous and elastic methods against references in numpy, which import nothing of paceline.

The task is logistic regression in float64 on workers of different speed, each with its own data, and messages that take
no time.  The references share nothing with the package but the minibatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from paceline import (
    ASGD,
    EAMSGD,
    EASGD,
    AsyncDiLoCo,
    AsyncEASGD,
    AsyncMomentum,
    DelayCompensated,
    Downpour,
    EAWild,
    Gossip,
    Hogwild,
    ParameterServer,
    RoundRobinEASGD,
    SoftSync,
    StaleSynchronous,
    Strategy,
    Strom,
)
from paceline.codecs import OneBit, Threshold
from paceline.server import rules
from paceline.server.gates import RoundRobin
from tests.reference import async_servers as servers
from tests.reference import elastic_averaging as elastic
from tests.reference.harness import Apart, apart, classes, sgd
from tests.reference.sync_codes import one_bit
from tests.reference.sync_problem import Adagrad, AdamW, Sgd
from tests.reference.table import Row, compared, rows_of

SECONDS = (1.0, 1.37, 2.11)
LR = Apart.LR
CNTK = "CNTK manual"
DEAN = "Dean et al. 2012"
ZHENG = "Zheng et al. 2017"
ZHANG = "Zhang et al. 2015"
ON_THE_WIRE = "values travel in single precision; the reference rounds them too"


def drop(step: int) -> float:
    """A warm-up, and a tenfold drop."""
    return min(1.0, (step + 1) / 3) if step < 12 else 0.1


# Each is compared with a schedule; those of CONSTANT also without one.
Case = tuple[Strategy, str, str, Callable[..., Any], dict[str, Any]]
SERVED: list[Case] = [
    (ParameterServer(rule=rules.Sgd(LR)), "plain", "DL4J overview", servers.served, {"optimizer": partial(Sgd, LR)}),
    (
        ParameterServer(rule=rules.Momentum(LR, 0.5, weight_decay=0.01)),
        "momentum and weight decay",
        "DL4J overview",
        servers.served,
        {"optimizer": partial(Sgd, LR, 0.5, 0.01)},
    ),
    (
        ParameterServer(rule=rules.Adagrad(0.1, weight_decay=0.01)),
        "Adagrad and weight decay",
        DEAN,
        servers.served,
        {"optimizer": partial(Adagrad, 0.1, decay=0.01)},
    ),
    (
        ParameterServer(rule=rules.Adam(0.05, betas=(0.8, 0.95), weight_decay=0.01)),
        "Adam and weight decay",
        "Kingma & Ba 2015",
        servers.served,
        {"optimizer": partial(AdamW, 0.05, betas=(0.8, 0.95), decay=0.0, l2=0.01)},
    ),
    (
        ParameterServer(rule=rules.Adam(0.05, betas=(0.8, 0.95), weight_decay=0.1, decoupled=True)),
        "AdamW",
        "Loshchilov & Hutter 2019",
        servers.served,
        {"optimizer": partial(AdamW, 0.05, betas=(0.8, 0.95), decay=0.1)},
    ),
    (
        ParameterServer(rule=rules.Sgd(LR), gate=RoundRobin()),
        "updates in the order of ranks",
        "Langford et al. 2009",
        servers.in_turns,
        {"lr": LR},
    ),
    (
        AsyncMomentum(lr=0.1, momentum=0.5, weight_decay=0.05),
        "weight decay",
        "Mitliagkas et al. 2016",
        servers.served,
        {"optimizer": partial(Sgd, 0.1, 0.5, 0.05)},
    ),
    (
        AsyncMomentum(lr=0.1, momentum=0.5, nesterov=True, unit_gain=True),
        "Nesterov, unit gain",
        "CNTK manual",
        servers.served,
        {"optimizer": partial(Sgd, 0.1 * 0.5, 0.5, nesterov=True)},
    ),
    *(
        (
            SoftSync(lr=LR, updates=s),
            f"s = {s}, lr / staleness",
            "Zhang et al. 2016",
            servers.softsync,
            {"lr": LR, "s": s},
        )
        for s in (1, 2, 3)
    ),
    (
        SoftSync(lr=LR, updates=2, scale="1/(tau+1)"),
        "s = 2, lr / (staleness + 1)",
        "DL4J overview",
        servers.softsync,
        {"lr": LR, "s": 2, "scale": lambda staleness: 1 / (staleness + 1)},
    ),
    (
        SoftSync(lr=LR, updates=2, scale=None),
        "s = 2, not scaled",
        "Zhang et al. 2016",
        servers.softsync,
        {"lr": LR, "s": 2, "scale": lambda staleness: 1.0},
    ),
    (DelayCompensated(lr=LR, lam=0.5), "constant", ZHENG, servers.delay_compensated, {"lr": LR, "lam": 0.5}),
    (
        DelayCompensated(lr=LR, adaptive=True),
        "adaptive, m = 0.95",
        ZHENG,
        servers.delay_compensated,
        {"lr": LR, "lam": 2.0, "m": 0.95},
    ),
    (
        DelayCompensated(lr=LR, adaptive=True, decay=0.0),
        "adaptive, m = 0",
        ZHENG,
        servers.delay_compensated,
        {"lr": LR, "lam": 2.0, "m": 0.0},
    ),
    *(
        (
            StaleSynchronous(lr=LR, bound=bound),
            f"at most {bound} steps ahead",
            "Ho et al. 2013",
            servers.stale_synchronous,
            {"lr": LR, "bound": bound},
        )
        for bound in (0, 1, 3)
    ),
    (
        StaleSynchronous(lr=LR, bound=0, visible="clock"),
        "visible by the clock: synchronous SGD",
        "Ho et al. 2013",
        servers.by_clock,
        {"lr": LR},
    ),
    *(
        (
            Downpour(rule=rules.Adagrad(0.05), push=push, fetch=fetch, local_lr=0.2),
            f"Adagrad, push {push}, fetch {fetch}",
            DEAN,
            servers.downpour,
            {"lr": 0.05, "local_lr": 0.2, "push": push, "fetch": fetch},
        )
        for push, fetch in ((1, 1), (3, 3), (3, 2), (1, 4))
    ),
    *((ASGD(period=period), f"period {period}", CNTK, servers.asgd, {"lr": LR, "period": period}) for period in (1, 3)),
    *(
        (
            ASGD(period=period, ramp=4, ramp_from=0.2),
            f"period {period}, the manual's ramp of the rate",
            CNTK,
            servers.asgd,
            {"lr": LR, "period": period, "rate_of_minibatch": servers.staircase(0.2, 4)},
        )
        for period in (1, 3)
    ),
    (
        ASGD(period=1, ramp=6, ramp_from=0.1, ramp_kind="linear"),
        "period 1, a linear ramp of the rate",
        CNTK,
        servers.asgd,
        {"lr": LR, "period": 1, "rate_of_minibatch": lambda passed: min(1.0, 0.1 + 0.9 * passed / 6)},
    ),
    (
        ASGD(period=3, ramp=2, ramp_from=0.2, ramp_of="delta"),
        "period 3, the code's ramp of what is pushed",
        "CNTK's code",
        servers.asgd,
        {"lr": LR, "period": 3, "share_of_exchange": servers.staircase(0.2, 2)},
    ),
    (Hogwild(), "no write is lost", "Recht et al. 2011", servers.hogwild, {"lr": LR}),
    (
        Strom(Threshold(tau=0.125, limit=math.inf), lr=0.1),
        "gradients, tau 0.125",
        "Strom 2015",
        servers.strom,
        {"lr": 0.1, "tau": 0.125},
    ),
]
CONSTANT = ("plain", "Adagrad, push 3, fetch 2", "period 3", "gradients, tau 0.125")
WITH_MOMENTUM: list[Case] = [
    (ASGD(period=3), "period 3", CNTK, servers.asgd, {"period": 3}),
    (ASGD(period=2, pipeline=True), "period 2, pipelined", CNTK, servers.asgd, {"period": 2, "pipeline": True}),
    (
        ASGD(period=3, ramp=4, ramp_from=0.2),
        "period 3, the manual's ramp of the rate",
        CNTK,
        servers.asgd,
        {"period": 3, "rate_of_minibatch": servers.staircase(0.2, 4)},
    ),
    (Hogwild(), "no write is lost", "Recht et al. 2011", servers.hogwild, {}),
    (
        Strom(Threshold(tau=0.015625, limit=math.inf)),
        "the workers' own steps, tau 1/64",
        "Strom 2015",
        servers.strom,
        {"tau": 0.015625},
    ),
]

for case, steps, mu, rate in (
    *((case, 20, 0.0, drop) for case in SERVED),
    *((case, 19, 0.0, None) for case in SERVED if case[1] in CONSTANT),
    *((case, 19, 0.9, drop) for case in WITH_MOMENTUM),
):
    given = [case[1], *([f"momentum {mu}"] if mu else []), "a schedule" if rate else "a constant rate"]

    @compared(case[0], type(case[0]).__name__, ", ".join(given), case[2])
    def _(strategy: Strategy, case: Case = case, steps: int = steps, mu: float = mu, rate: Any = rate) -> float:
        settings = {"lr": LR, "mu": mu} | case[4] if mu else case[4]
        return apart(steps, SECONDS, mu, rate).compare(strategy, case[3], **settings)


@compared(
    ParameterServer(rule=rules.Sgd(LR), servers=1, codec=OneBit(bucket=32), pulls=OneBit(bucket=32)),
    "ParameterServer",
    "pushes and pulls by 1 bit, a schedule",
    "Seide et al. 2014",
    reason=ON_THE_WIRE,
)
def _(strategy: Strategy) -> float:
    return apart(20, SECONDS, rate=drop).compare(strategy, servers.coded, lr=LR, code=one_bit)


for quorum, grace, nesterov in ((1, 0.0, True), (2, 0.5, True), (3, 0.0, False)):

    @compared(
        AsyncDiLoCo(period=3, quorum=quorum, grace=grace, momentum=0.5, nesterov=nesterov),
        "AsyncDiLoCo",
        f"outer {'Nesterov' if nesterov else 'momentum'}, period 3, a quorum of {quorum}, {grace:g} s of grace",
        "Decoupled DiLoCo, 2026",
    )
    def _(strategy: Strategy, quorum: int = quorum, grace: float = grace, nesterov: bool = nesterov) -> float:
        outer = partial(Sgd, 0.7, 0.5, nesterov=nesterov)
        settings = {"lr": LR, "period": 3, "outer": outer, "quorum": quorum, "grace": grace}
        return apart(18, SECONDS).compare(strategy, servers.async_diloco, **settings)


@compared(Gossip(), "Gossip (AD-PSGD)", "2 workers, averages while they compute, a schedule", "Lian et al. 2018")
def _(strategy: Strategy) -> float:
    return apart(20, SECONDS[:2], rate=drop).compare(strategy, servers.ad_psgd, lr=LR)


# Elastic averaging.  The share of the difference by which worker and centre move: alpha at step k, for `n` workers.

Alpha = Callable[[int, int], float]
FORCES: dict[str, tuple[dict[str, float], Alpha]] = {
    "alpha": ({"alpha": 0.25}, lambda n, k: 0.25),
    "beta": ({"beta": 0.6}, lambda n, k: 0.6 / n),
    "rho": ({"rho": 0.9}, lambda n, k: 0.9 * LR * drop(k)),
}
END = "the run ends with one more meeting, in the reference too"


def eta(step: int) -> float:
    return LR * drop(step)


for period, steps, force in ((1, 17, "rho"), (4, 16, "alpha"), (4, 17, "beta"), (4, 17, "rho"), (4, 19, "rho")):

    @compared(
        EASGD(period=period, **FORCES[force][0]),
        "EASGD",
        f"{force}, period {period}, {steps} steps, a schedule",
        ZHANG,
        reason=END,
    )
    def _(strategy: Strategy, period: int = period, steps: int = steps, force: str = force) -> float:
        problem = apart(steps, SECONDS, rate=drop)
        alpha = partial(FORCES[force][1], 3)
        expected = elastic.together(problem.first, problem.gradient, 3, steps, eta=eta, alpha=alpha, period=period)
        return problem.difference(strategy, expected)


ONE_BY_ONE: dict[str, tuple[Callable[..., Strategy], dict[str, Any], str]] = {
    "AsyncEASGD": (AsyncEASGD, {}, ZHANG),
    "EAMSGD": (EAMSGD, {"momentum": 0.5}, ZHANG),
    "RoundRobinEASGD": (RoundRobinEASGD, {}, ZHANG),
    "EAWild in memory": (EAWild, {}, "EA-wild, 2020"),
    "EAWild on shards": (EAWild, {"servers": 2}, "EA-wild, 2020"),
}
for name, (make, more, source) in ONE_BY_ONE.items():
    for period, steps, force in ((1, 16, "alpha"), (4, 16, "beta"), (4, 17, "rho")):

        @compared(
            make(period=period, **FORCES[force][0], **more),
            name,
            f"{force}, period {period}, {steps} steps, a schedule",
            source,
            reason=END,
        )
        def _(
            strategy: Strategy, period: int = period, steps: int = steps, force: str = force, more: Any = more
        ) -> float:
            problem = apart(steps, SECONDS, rate=drop)
            takes_turns = isinstance(strategy, RoundRobinEASGD)
            order = elastic.in_turn(3, steps) if takes_turns else elastic.begun(SECONDS, steps)
            alpha = partial(FORCES[force][1], 3)
            mu = more.get("momentum", 0.0)
            expected = elastic.one_by_one(
                problem.first, problem.gradient, order, eta=eta, alpha=alpha, period=period, mu=mu
            )
            return problem.difference(strategy, expected)


for where, force in (({}, "alpha"), ({"servers": 2}, "beta"), ({"servers": 2}, "rho")):

    @compared(
        EAWild(group=2, period=2, **FORCES[force][0], **where),
        "EAWild on shards" if where else "EAWild in memory",
        f"{force}, 2 groups of 2 that act as one worker each, a schedule",
        "EA-wild, 2020",
        reason=END,
    )
    def _(strategy: Strategy, force: str = force) -> float:
        """A group takes the mean of its gradients, at the speed of its slower worker."""
        problem = apart(18, (1.0, 1.37, 2.11, 1.9), rate=drop)
        expected = elastic.one_by_one(
            problem.first,
            lambda w, j, k: (problem.gradient(w, 2 * j, k) + problem.gradient(w, 2 * j + 1, k)) / 2,
            elastic.begun((1.37, 2.11), 18),
            eta=eta,
            alpha=partial(FORCES[force][1], 2),
            period=2,
        )
        return problem.difference(strategy, expected)


@compared(
    EAWild(group=2, groups="random", regroup=3, period=4, beta=0.6),
    "EAWild in memory",
    "beta, 2 groups of 2, drawn at random every 3 steps, a schedule",
    "EA-wild, 2020",
    reason="which groups are drawn is not the source's: the reference is given them",
)
def _(strategy: EAWild) -> float:
    problem = classes(sgd(lr=LR), 4, steps=12, schedule=drop)
    seconds = [1.0, 1.001, 1.002, 1.003]
    expected = elastic.in_changing_groups(
        problem.start,
        lambda w, j, k: problem.gradient(w, *problem.batches[k][j]),
        seconds,
        12,
        groups_at=lambda k: sorted({strategy.group_of(j, range(4), k) for j in range(4)}),
        regroup=3,
        eta=eta,
        alpha=partial(FORCES["beta"][1], 2),
        period=4,
    )
    return problem.difference(problem.run(strategy, compute=seconds), expected)


@pytest.mark.parametrize("row", rows_of(__name__), ids=str)
def test_algorithm_equals_its_reference(row: Row):
    assert row.difference() <= row.limit
