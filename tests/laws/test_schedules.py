"""Learning rates that change: what a schedule does to the rules of servers, to elastic forces and to ramps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline import (
    ASGD,
    AllReduceSGD,
    AsyncDiLoCo,
    AsyncEASGD,
    AsyncMomentum,
    Cluster,
    DelayCompensated,
    Downpour,
    EAWild,
    ParameterServer,
    Replica,
    SoftSync,
    StaleSynchronous,
    Strategy,
    Strom,
    Task,
    Then,
    attach,
    simulate,
    train,
)
from paceline.server.rules import Adagrad, Adam, Compensated, Every, Momentum, Push, Quorum, Rule, Scaled, Sgd
from paceline.state import Slot
from tests.laws.tasks import OPTIMIZERS, close, instant, numbers, params, quadratic, regression, same, vector

LR = 0.03


def warm_up_and_drop(step: int) -> float:
    return min(1.0, (step + 1) / 4) if step < 9 else 0.1


def trained_by_lambda_lr(task: Task, optimizer: Callable[..., torch.optim.Optimizer]) -> torch.Tensor:
    """Plain torch with its own scheduler."""
    model = task.build()
    chosen = optimizer(model.parameters())
    assert task.schedule is not None
    scheduler = torch.optim.lr_scheduler.LambdaLR(chosen, task.schedule)
    for k in range(task.total_steps):
        chosen.zero_grad()
        task.loss(model, task.part(k, 0, 1)).backward()
        chosen.step()
        scheduler.step()
    return vector(model)


RULES: dict[str, tuple[Rule, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (Sgd(0.02), lambda p: torch.optim.SGD(p, lr=0.02)),
    "sgd, decayed": (Sgd(0.02, weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=0.02, weight_decay=0.1)),
    "momentum": (Momentum(0.02), lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9)),
    "momentum, decayed": (
        Momentum(0.02, 0.8, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.8, weight_decay=0.1),
    ),
    "nesterov, decayed": (
        Momentum(0.02, nesterov=True, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.1),
    ),
    "adagrad": (Adagrad(0.05), lambda p: torch.optim.Adagrad(p, lr=0.05)),
    "adagrad, decayed": (
        Adagrad(0.05, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.05, weight_decay=0.1),
    ),
    "adam": (Adam(0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
    "adam, decayed": (Adam(0.01, weight_decay=0.1), lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1)),
    "adamw": (
        Adam(0.01, weight_decay=0.1, decoupled=True),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    ),
    "scaled": (Scaled(Momentum(0.02)), lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9)),
    "compensated": (Compensated(Adam(0.01), lam=3.0), lambda p: torch.optim.Adam(p, lr=0.01)),
    "every 1": (Every(Adagrad(0.05), 1), lambda p: torch.optim.Adagrad(p, lr=0.05)),
    "quorum": (Quorum(Adam(0.01), 1), lambda p: torch.optim.Adam(p, lr=0.01)),
}


# One worker is torch.


@pytest.mark.parametrize("schedule", [lambda step: 1.0, warm_up_and_drop], ids=["constant", "scheduled"])
@pytest.mark.parametrize("name", RULES)
def test_one_worker_with_a_rule_equals_torchs_optimizer_and_scheduler_to_the_bit(name: str, schedule: Any):
    rule, optimizer = RULES[name]
    task = regression(steps=17, batch=1 if name == "quorum" else 5, schedule=schedule)
    run = simulate(task, ParameterServer(rule=rule, servers=3), Cluster(workers=1))
    assert same(run.params, trained_by_lambda_lr(task, optimizer))


@pytest.mark.parametrize("name", ["momentum, decayed", "adagrad, decayed", "adam, decayed", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_rule_works_in_pieces_with_the_bits_of_torch(name: str, dtype: torch.dtype):
    """On vectors that are longer than a piece and end within one."""
    rule, optimizer = RULES[name]
    p = torch.nn.Parameter(numbers(150_001, dtype=dtype))
    value = p.detach().clone()
    m = Slot(**rule.memory(value))
    theirs = optimizer([p])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for seed in range(3):
            p.grad = numbers(150_001, seed=seed + 1, dtype=dtype)
            rule.apply(value, p.grad.clone(), m, Push())
            theirs.step()
    finally:
        torch.set_num_threads(threads)
    assert same(value, p.detach())


METHODS: dict[str, tuple[Strategy, Callable[..., torch.optim.Optimizer]]] = {
    "soft-sync": (SoftSync(lr=LR), lambda p: torch.optim.SGD(p, lr=LR)),
    "stale-synchronous": (StaleSynchronous(lr=LR, bound=1), lambda p: torch.optim.SGD(p, lr=LR)),
    "delay-compensated": (DelayCompensated(lr=LR), lambda p: torch.optim.SGD(p, lr=LR)),
    "async-momentum": (AsyncMomentum(lr=LR), lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9)),
    "downpour": (Downpour(), lambda p: torch.optim.Adagrad(p, lr=0.01)),
    "strom": (Strom(None, lr=LR), lambda p: torch.optim.SGD(p, lr=LR)),
    "asgd": (ASGD(period=1), OPTIMIZERS["momentum"]),
}


@pytest.mark.parametrize("name", METHODS)
def test_one_worker_of_each_method_follows_the_schedule_as_torch_does(name: str):
    strategy, optimizer = METHODS[name]
    task = regression(steps=17, batch=5, schedule=warm_up_and_drop)
    alone = trained_by_lambda_lr(task, optimizer)
    run = simulate(task, strategy, Cluster(workers=1))
    # The deltas of ASGD are rounded.
    assert close(run.params, alone) if name == "asgd" else same(run.params, alone)


EVERY = {
    **{name: strategy for name, (strategy, _) in METHODS.items()},
    "parameter-server": ParameterServer(rule=Adam(0.01)),
    "every": ParameterServer(rule=Every(Momentum(LR), 3)),
    "downpour, seldom": Downpour(push=3, fetch=2),
    "async-diloco": AsyncDiLoCo(period=4),
    "async-easgd": AsyncEASGD(rho=2.0, period=2),
    "ea-wild on shards": EAWild(rho=2.0, servers=2),
    "then": Then(AllReduceSGD(), ParameterServer(rule=Adam(0.01)), steps=3),
}


@pytest.mark.parametrize("name", EVERY)
def test_a_schedule_of_0_changes_nothing(name: str):
    task = regression(steps=9, batch=9, optimizer=OPTIMIZERS["sgd"], schedule=lambda step: 0.0)
    run = simulate(task, EVERY[name], instant(3, compute=[1.0, 1.4, 2.3]))
    assert all(same(p, vector(task.build())) for p in params(run))


@pytest.mark.parametrize("name", EVERY)
def test_a_schedule_of_1_equals_none(name: str):
    def run(schedule: Any) -> Any:
        task = regression(steps=9, batch=9, optimizer=OPTIMIZERS["sgd"], schedule=schedule)
        return simulate(task, EVERY[name], instant(3, compute=[1.0, 1.4, 2.3]))

    assert all(same(a, b) for a, b in zip(params(run(lambda step: 1.0)), params(run(None)), strict=True))


@pytest.mark.parametrize(
    ("half", "full"),
    [
        (ParameterServer(rule=Adam(0.02)), ParameterServer(rule=Adam(0.01))),
        (SoftSync(lr=2 * LR, updates=2), SoftSync(lr=LR, updates=2)),
        (ParameterServer(rule=Quorum(Momentum(2 * LR), 2)), ParameterServer(rule=Quorum(Momentum(LR), 2))),
        (
            Downpour(rule=Adagrad(0.02), push=3, fetch=2, local_lr=0.04),
            Downpour(rule=Adagrad(0.01), push=3, fetch=2, local_lr=0.02),
        ),
        (Strom(None, lr=2 * LR), Strom(None, lr=LR)),
        (EAWild(alpha=0.2, servers=1), EAWild(alpha=0.2, servers=1)),
    ],
    ids=lambda value: "",
)
def test_a_schedule_of_one_half_equals_half_the_learning_rate(half: Strategy, full: Strategy):
    def run(strategy: Strategy, lr: float, schedule: Any) -> Any:
        task = regression(steps=9, batch=9, optimizer=lambda p: torch.optim.SGD(p, lr=lr), schedule=schedule)
        return simulate(task, strategy, instant(3, compute=[1.0, 1.4, 2.3]))

    scheduled, constant = run(half, 2 * LR, lambda step: 0.5), run(full, LR, None)
    assert all(same(a, b) for a, b in zip(params(scheduled), params(constant), strict=True))


def test_rules_that_combine_updates_use_the_mean_of_their_factors():
    """`Every` counts all updates alike, `Quorum` weights them by samples."""
    updates = [numbers(20, seed=seed) for seed in range(3)]
    pushes = [
        Push(src, samples, workers=3, rate=rate) for src, samples, rate in ((0, 4, 1.0), (1, 2, 0.5), (2, 2, 0.1))
    ]

    def applied(rule: Rule) -> torch.Tensor:
        value = numbers(20, seed=9)
        m = Slot(**rule.memory(value))
        for update, push in zip(updates, pushes, strict=True):
            rule.apply(value, update.clone(), m, push)
        rule.flush(value, m)
        return value

    mean, weighted = sum(updates) / 3, (4 * updates[0] + 2 * updates[1] + 2 * updates[2]) / 8
    assert close(applied(Every(Sgd(0.5), 3)), numbers(20, seed=9) - 0.5 * (1.6 / 3) * mean)
    assert close(applied(Every(Sgd(0.5), 4)), numbers(20, seed=9) - 0.5 * (1.6 / 3) * mean), "flushed"
    assert close(applied(Quorum(Sgd(0.5), 3)), numbers(20, seed=9) - 0.5 * (5.2 / 8) * weighted)


def test_all_workers_use_the_factor_of_the_minibatch_whoever_works_on_it():
    """The schedule stops all minibatches from step 6 on; a slow worker applies its last one of the steps before."""
    cut = regression(steps=12, batch=9, schedule=lambda step: 1.0 if step < 6 else 0.0)
    short = regression(steps=6, batch=9, samples=36)
    rule = ParameterServer(rule=Sgd(LR), servers=1)
    cluster = instant(3, compute=[1.0, 1.0, 1.0])
    assert same(params(simulate(cut, rule, cluster))[0], params(simulate(short, rule, cluster))[0])


# In processes and in the user's loop.


def test_on_real_processes_the_schedule_reaches_the_servers():
    task = regression(steps=11, batch=5, schedule=warm_up_and_drop)
    rule, optimizer = RULES["momentum, decayed"]
    run = train(task, ParameterServer(rule=rule), workers=1)
    assert same(run.params, trained_by_lambda_lr(task, optimizer))


def looped(task: Task, strategy: Strategy, optimizer: Any = None, scheduler: Any = None) -> torch.Tensor:
    """The task in a user's own loop, with a scheduler of the user's own."""
    model = task.build()
    inner = None if optimizer is None else optimizer(model.parameters())
    with attach(model, inner, strategy) as session:
        chosen = (scheduler or (lambda o: torch.optim.lr_scheduler.LambdaLR(o, task.schedule)))(session.optimizer)
        for k in range(task.total_steps):
            session.optimizer.zero_grad()
            task.loss(model, task.part(k, 0, 1)).backward()
            session.step()
            chosen.step()
    return vector(model)


def test_in_a_loop_a_scheduler_of_the_session_reaches_the_servers_to_the_bit():
    task = regression(steps=11, batch=5, schedule=warm_up_and_drop)
    rule, optimizer = RULES["nesterov, decayed"]
    assert same(looped(task, ParameterServer(rule=rule, servers=1)), trained_by_lambda_lr(task, optimizer))


def test_in_a_loop_the_given_optimizers_rate_has_an_effect_by_its_changes():
    task = regression(steps=11, batch=5, schedule=warm_up_and_drop)
    with pytest.warns(UserWarning, match="only the changes of its learning rate have an effect, as factors"):
        found = looped(task, Strom(None, lr=LR), lambda p: torch.optim.SGD(p, lr=123.0, momentum=0.5))
    assert close(found, trained_by_lambda_lr(task, lambda p: torch.optim.SGD(p, lr=LR)))


@pytest.mark.filterwarnings("ignore:.*only the changes of its learning rate")
def test_in_a_loop_a_scheduler_that_was_built_before_counts_from_its_initial_rate():
    task = regression(steps=11, batch=5, schedule=warm_up_and_drop)
    model = task.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_and_drop)  # The rate is 0.1 now.
    with attach(model, optimizer, Strom(None, lr=LR)) as session:
        for k in range(task.total_steps):
            optimizer.zero_grad()
            task.loss(model, task.part(k, 0, 1)).backward()
            session.step()
            scheduler.step()
    assert close(vector(model), trained_by_lambda_lr(task, lambda p: torch.optim.SGD(p, lr=LR)))


@pytest.mark.filterwarnings("ignore:.*only the changes of its learning rate")
def test_in_a_loop_rates_that_servers_cannot_follow_are_refused():
    task = regression(steps=3, batch=5, schedule=lambda step: 1.0)
    with pytest.raises(ValueError, match="learning rate was 0 at attach"):
        looped(task, ParameterServer(), lambda p: torch.optim.SGD(p, lr=0.0))

    def two_groups(p: Any) -> torch.optim.Optimizer:
        first, *rest = p
        return torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": rest, "lr": 0.2}])

    def differently(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda k: 0.5**k, lambda k: 1.0])

    with pytest.raises(ValueError, match=r"were \[0.1, 0.2\] and are \[0.05, 0.2\]: servers have one learning rate"):
        looped(task, Strom(None, lr=LR), two_groups, differently)


def test_in_a_loop_an_elastic_force_uses_the_rate_of_its_step():
    task = regression(steps=11, batch=5, optimizer=OPTIMIZERS["sgd"], schedule=warm_up_and_drop)
    strategy = AsyncEASGD(rho=2.0, period=2, servers=1)
    assert close(looped(task, strategy, task.optimizer), simulate(task, strategy, instant(1)).params)


def test_in_a_loop_ea_wild_uses_the_rate_of_the_step_while_backward_runs():
    task = quadratic(steps=11, batch=5, schedule=warm_up_and_drop)
    x = centre = vector(task.build())
    for k in range(12):  # A worker learns only in another, empty step that all data has ended.
        eta = 0.05 * warm_up_and_drop(k)
        force = 2.0 * eta * (x - centre) if k else torch.zeros_like(x)
        gradient = x - task.part(k, 0, 1)[0].mean(0) if k < 11 else torch.zeros_like(x)
        x, centre = x - eta * gradient - force, centre + force
    centre = centre + 2.0 * 0.005 * (x - centre)
    assert close(looped(task, EAWild(rho=2.0), task.optimizer), centre)


# Bad schedules.


@pytest.mark.parametrize("factor", [-0.5, math.nan, math.inf, None, "fast"], ids=str)
def test_a_factor_that_is_no_rate_is_refused(factor: Any):
    task = quadratic(steps=3, batch=4, schedule=lambda step: factor if step == 2 else 1.0)
    for strategy in (AllReduceSGD(), ParameterServer()):
        with pytest.raises(ValueError, match=rf"schedule\(2\) is {factor!r}, and the factor on the learning rate"):
            simulate(task, strategy, instant(2))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Sgd(weight_decay=-0.1), r"Sgd\(lr=0.1, weight_decay=-0.1\).*weight decay at least 0"),
        (lambda: Adam(weight_decay=math.nan), r"Adam\(.*weight_decay=nan\)"),
        (
            lambda: ParameterServer(rule=Momentum(weight_decay=0.1), sparse=True),
            r"sparse=True\): Momentum\(.*needs all rows, and cannot update only some; leave out sparse",
        ),
        (lambda: ASGD(ramp=4, ramp_of="all"), r"ASGD\(ramp_of='all'\)"),  # pyright: ignore
    ],
)
def test_impossible_settings_are_refused(make: Any, named: str):
    with pytest.raises(ValueError, match=named):
        make()


# Ramps.


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov", "adam"])
@pytest.mark.parametrize("period", [1, 3])
def test_a_ramp_of_the_rate_is_a_schedule_by_minibatches(optimizer: str, period: int):
    """One worker: CNTK's manual lets the rate rise by the coefficient every so many minibatches."""
    ramped = regression(steps=13, batch=5, optimizer=OPTIMIZERS[optimizer])
    scheduled = regression(
        steps=13, batch=5, optimizer=OPTIMIZERS[optimizer], schedule=lambda k: min(1.0, 0.25 * (k // 3 + 1))
    )
    run = simulate(ramped, ASGD(period=period, ramp=3, ramp_from=0.25), Cluster(workers=1))
    assert close(run.params, trained_by_lambda_lr(scheduled, OPTIMIZERS[optimizer]))


def test_a_ramp_of_the_delta_scales_what_is_pushed():
    task = quadratic(steps=6, batch=4)
    value = vector(task.build())
    for c in range(1, 7):
        value = value - min(1.0, 0.3 * (c // 2 + 1)) * 0.05 * (value - task.part(c - 1, 0, 1)[0].mean(0))
    ramp = ASGD(period=1, ramp=2, ramp_from=0.3, ramp_of="delta")
    assert close(simulate(task, ramp, Cluster(workers=1)).params, value)


# A strategy that never averages.


class NeverAverages(Strategy):
    async def worker(self, w: Replica) -> None:
        for _ in w.steps():
            await w.local_step()


def test_steps_without_a_mean_are_an_error_at_once():
    task = quadratic(steps=5, batch=4)
    with pytest.raises(
        RuntimeError, match=r"data ended after step 4, and 10001 empty steps .* Count `steps_alone\(\)`"
    ):
        simulate(task, NeverAverages(), instant(2))
