"""Methods on a parameter server: rules, gates, and their relations to each other and to plain training."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from paceline import (
    ASGD,
    AllReduceSGD,
    AsyncDiLoCo,
    AsyncMomentum,
    Cluster,
    DelayCompensated,
    DiLoCo,
    Downpour,
    ParameterServer,
    Replicated,
    Run,
    Slot,
    SoftSync,
    StaleSynchronous,
    Strategy,
    Then,
    simulate,
)
from paceline.codecs import QSGD, Fp32, OneBit, PowerSGD, kernels
from paceline.server.gates import Bound, RoundRobin
from paceline.server.rules import (
    Adagrad,
    Compensated,
    Every,
    Momentum,
    Push,
    Rule,
    Scaled,
    Sgd,
)
from tests.laws.every import RULES
from tests.laws.tasks import (
    OPTIMIZERS,
    close,
    instant,
    numbers,
    params,
    quadratic,
    regression,
    same,
    trained_alone,
    vector,
)

UNEQUAL = [1.0, 1.4, 2.3]
LR = 0.03


def on_three(strategy: Strategy, compute: Any = UNEQUAL, steps: int = 12, **more: Any) -> Any:
    return simulate(regression(steps=steps, batch=9, **more), strategy, instant(3, compute=compute))


def memory(rule: Rule, value: torch.Tensor) -> Slot:
    return Slot(**rule.memory(value))


# Rules alone.


def test_momentum_of_unit_gain_is_momentum_at_a_larger_rate():
    """test_schedules compares the other rules with torch's optimizers."""
    task = regression(steps=17, batch=5)
    rule = Momentum(lr=0.2, momentum=0.9, unit_gain=True)
    run = simulate(task, ParameterServer(rule=rule, servers=3), Cluster(workers=1))
    alone = trained_alone(task, optimizer=lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9))
    assert close(run.params, alone, rtol=1e-9)


def test_adagrads_squares_never_shrink():
    rule, value = Adagrad(lr=0.1), numbers(50)
    m, last = memory(rule, value), torch.zeros(50, dtype=torch.float64)
    for seed in range(5):
        rule.apply(value, numbers(50, seed=seed), m, Push())
        assert (m.squares >= last).all()
        last = m.squares.clone()


@pytest.mark.parametrize(
    ("by", "tau", "scale"), [("1/tau", 0, 1.0), ("1/tau", 1, 1.0), ("1/tau", 4, 0.25), ("1/(tau+1)", 4, 0.2)]
)
def test_a_stale_update_has_less_weight(by: Any, tau: int, scale: float):
    rule, value, update = Scaled(Sgd(lr=0.5), by), numbers(20), numbers(20, seed=1)
    expected = value - 0.5 * scale * update
    assert rule.apply(value, update.clone(), memory(rule, value), Push(staleness=tau))
    assert close(value, expected)


def test_the_mean_of_every_few_updates_is_applied_and_at_the_end_that_of_the_rest():
    rule, value = Every(Sgd(lr=0.5), 3), numbers(20)
    m, updates = memory(rule, value), [numbers(20, seed=s) for s in range(5)]
    first = value.clone()
    assert [rule.apply(value, u.clone(), m, Push()) for u in updates] == [False, False, True, False, False]
    assert close(value, first - 0.5 * sum(updates[:3]) / 3)
    assert rule.flush(value, m) and not rule.flush(value, m)
    assert close(value, first - 0.5 * sum(updates[:3]) / 3 - 0.5 * sum(updates[3:]) / 2)


def test_on_a_parabola_the_compensated_gradient_equals_the_current_one():
    """0.5 h w^2 with lam = h / g^2."""
    h, read, now = 3.0, torch.tensor([2.0], dtype=torch.float64), torch.tensor([0.7], dtype=torch.float64)
    g = h * read
    rule = Compensated(Sgd(lr=1.0), lam=float(h / g.square()))
    m, value = memory(rule, read), now.clone()
    rule.pulled(read, m, src=5)
    rule.apply(value, g.clone(), m, Push(src=5, staleness=2))
    assert close(now - value, h * now)


def test_without_a_decay_of_squares_the_adaptive_correction_is_lam_times_the_size_of_the_gradient():
    g, read, now = numbers(30), numbers(30, seed=1), numbers(30, seed=2)
    rule = Compensated(Sgd(lr=1.0), lam=2.0, adaptive=True, decay=0.0, eps=1e-30)
    m, value = memory(rule, read), now.clone()
    rule.pulled(read, m, src=0)
    rule.apply(value, g.clone(), m, Push(staleness=1))
    assert close(now - value, g + 2.0 * g.abs() * (now - read), rtol=1e-9)


# Methods that are the same.


@pytest.mark.parametrize(
    "strategy",
    [
        SoftSync(lr=LR, updates=1, scale=None),
        StaleSynchronous(lr=LR, bound=10**9),
        DelayCompensated(lr=LR, lam=0.0),
        AsyncMomentum(lr=LR, momentum=0.0),
        Downpour(rule=Sgd(lr=LR), local_lr=0.0),
        ParameterServer(rule=Sgd(lr=LR), codec=None, servers=3),
    ],
    ids=str,
)
def test_methods_that_equal_plain_asynchronous_sgd_to_the_bit(strategy: Strategy):
    plain = on_three(ParameterServer(rule=Sgd(lr=LR)))
    assert all(same(a, b) for a, b in zip(params(on_three(strategy)), params(plain), strict=True))


@pytest.mark.parametrize(
    "strategy",
    [StaleSynchronous(lr=LR, bound=0, visible="clock"), ParameterServer(rule=Every(Sgd(LR), 3), gate=Bound(0))],
    ids=str,
)
@pytest.mark.parametrize("compute", [[1.0, 1.0, 1.0], UNEQUAL], ids=["equal", "unequal"])
def test_in_lockstep_with_updates_visible_by_clock_it_equals_all_reduce_sgd(strategy: Strategy, compute: list[float]):
    lockstep = on_three(AllReduceSGD(), compute, optimizer=lambda p: torch.optim.SGD(p, lr=LR))
    run = on_three(strategy, compute)
    assert all(close(p, lockstep.params, rtol=1e-9) for p in params(run))


def test_in_lockstep_with_updates_visible_at_once_it_differs():
    """A worker may see updates of other workers of the same clock."""
    lockstep = on_three(AllReduceSGD(), optimizer=lambda p: torch.optim.SGD(p, lr=LR))
    assert not close(on_three(StaleSynchronous(lr=LR, bound=0)).params, lockstep.params, rtol=1e-3)


def test_with_fewer_updates_in_a_mean_than_workers_one_worker_may_count_twice():
    """Softsync with as many updates as workers, but without lockstep, is not AllReduceSGD."""
    lockstep = on_three(AllReduceSGD(), optimizer=lambda p: torch.optim.SGD(p, lr=LR))
    assert not close(on_three(SoftSync(lr=LR, updates=3, scale=None)).params, lockstep.params, rtol=1e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("settings", [{"period": 1}, {"period": 4}, {"samples": 11}], ids=str)
def test_asgd_of_one_worker_equals_its_optimizer(optimizer: Any, settings: dict[str, Any]):
    task = regression(steps=13, batch=5, optimizer=optimizer)
    assert close(simulate(task, ASGD(**settings), Cluster(workers=1)).params, trained_alone(task), rtol=1e-9)


def test_with_a_pipeline_the_model_lacks_the_newest_exchange():
    """D2.4: the value loaded at an exchange holds all steps except those of that exchange."""
    task = quadratic(steps=6, batch=4, optimizer=OPTIMIZERS["sgd"])
    lr = task.optimizer([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"]
    value = loaded = fetched = vector(task.build())
    for k in range(6):
        step = lr * (loaded - task.part(k, 0, 1)[0].mean(0))
        value, loaded, fetched = value - step, fetched, value - step
    assert close(simulate(task, ASGD(period=1, pipeline=True, servers=1), Cluster(workers=1)).params, value)


def test_diloco_without_a_barrier_equals_diloco_with_a_full_quorum_and_equal_speeds():
    equal = [1.0, 1.0, 1.0]
    together = on_three(DiLoCo(period=4), equal, optimizer=OPTIMIZERS["momentum"])
    run = on_three(AsyncDiLoCo(period=4, quorum=3), equal, optimizer=OPTIMIZERS["momentum"])
    assert close(run.params, together.params, rtol=1e-9)


# Staleness and clocks.


@pytest.mark.slow
@pytest.mark.parametrize("updates", [1, 2, 4])
@pytest.mark.parametrize("compute", [[1.0, 1.0, 1.0, 1.0], [1.0, 1.3, 2.1, 3.7]], ids=["equal", "unequal"])
def test_mean_staleness_is_the_other_workers_over_the_updates(updates: int, compute: list[float]):
    """(N - 1) / s, at any speeds; see test_lattice for the window."""
    run = simulate(quadratic(steps=400, batch=4), SoftSync(updates=updates, servers=1), instant(4, compute=compute))
    window = [p.staleness for p in run.trace.points if p.rank == 4 and p.time <= 399.5]
    mean = sum(s for s in window if s is not None) / len(window)
    assert abs(mean - 3 / updates) <= 3 * (max(run.trace.staleness()) + 1) / len(window) < 0.06


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_worker_gets_further_ahead_than_the_bound(bound: int):
    run = simulate(
        regression(steps=30, batch=9),
        StaleSynchronous(lr=LR, bound=bound, servers=1),
        instant(3, compute=[1.0, 2.0, 7.0]),
    )
    begun = {
        rank: sorted(s.start for s in run.trace.spans if s.rank == rank and s.kind == "gradient") for rank in range(3)
    }
    ended = {
        rank: sorted(s.stop for s in run.trace.spans if s.rank == rank and s.kind == "gradient") for rank in range(3)
    }
    ahead = 0
    for starts in begun.values():
        for clock, start in enumerate(starts):
            ahead = max(ahead, clock - min(sum(e <= start for e in ends) for ends in ended.values()))
    assert ahead == bound
    assert all(b - a == 7.0 for a, b in zip(begun[2], begun[2][1:], strict=False)), "the slowest never waits"


def test_round_robin_applies_updates_in_the_order_of_ranks():
    run = on_three(ParameterServer(rule=Sgd(lr=LR), gate=RoundRobin(), servers=1))
    other = on_three(ParameterServer(rule=Sgd(lr=LR), gate=RoundRobin(), servers=1), [2.0, 1.0, 3.0])
    assert same(params(run)[2], params(other)[2]), "whatever the speeds"


# Codecs.


@pytest.mark.parametrize(
    ("pushes", "pulls"), [(Fp32(), None), (None, Fp32()), (Fp32(), Fp32())], ids=["pushes", "pulls", "both"]
)
def test_in_fp32_it_is_the_same_up_to_rounding(pushes: Any, pulls: Any):
    plain, coded = (
        on_three(ParameterServer(rule=Sgd(lr=LR), codec=c, pulls=p)) for c, p in ((None, None), (pushes, pulls))
    )
    assert close(coded.params, plain.params, rtol=1e-5)


@cache
def trained_by(codec: Any, pulls: Any) -> Run:
    task = quadratic(steps=600, batch=6, numel=2000, dtype=torch.float32)
    return simulate(task, ParameterServer(rule=Sgd(lr=0.02), codec=codec, pulls=pulls), Cluster(workers=3))


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "pulls"), [(OneBit(), None), (QSGD(), QSGD()), (OneBit(), OneBit())], ids=str)
def test_codecs_train_and_save_bytes(codec: Any, pulls: Any):
    plain, coded = trained_by(None, None), trained_by(codec, pulls)
    goal = quadratic(steps=600, batch=6, numel=2000, dtype=torch.float32).data[0].mean(0)
    assert (coded.params - goal).norm() < 0.2 * goal.norm()
    assert coded.trace.bytes_sent(1) < plain.trace.bytes_sent(1) / 3
    if pulls is not None:
        assert coded.trace.bytes_sent(3) < plain.trace.bytes_sent(3) / 3


# Start and end of a run.


@pytest.mark.parametrize("then", [Downpour(), ASGD(period=2), SoftSync(lr=LR)], ids=str)
def test_one_replica_may_train_alone_first(then: Strategy):
    task = regression(steps=12, batch=9)
    alone, shared, never = (simulate(task, Then(Replicated(), then, steps=steps), instant(3)) for steps in (12, 5, 0))
    assert same(alone.params, trained_alone(task))
    assert same(never.params, simulate(task, then, instant(3)).params)
    assert len({p.step for p in shared.trace.points if p.rank == 0}) == 12
    assert not close(shared.params, alone.params, rtol=1e-6) and not close(shared.params, never.params, rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ParameterServer(servers=0), r"ParameterServer\(servers=0\)"),
        (lambda: SoftSync(updates=0), r"Every\(n=0\)"),
        (lambda: SoftSync(lr=0.0), r"Sgd\(lr=0.0\)"),
        (lambda: StaleSynchronous(bound=-1), r"Bound\(bound=-1\)"),
        (lambda: StaleSynchronous(bound=2, visible="clock"), "requires bound=0"),
        (lambda: DelayCompensated(lam=-1.0), r"Compensated\(lam=-1.0"),
        (lambda: AsyncMomentum(momentum=1.0), r"Momentum\(lr=0.1, momentum=1.0\)"),
        (lambda: ASGD(period=2, samples=3), "in steps or in samples, not in both"),
        (lambda: ASGD(samples=0), r"ASGD\(samples=0\)"),
        (lambda: ASGD(ramp=10, ramp_from=0.0), r"begins in \(0, 1\]"),
        (lambda: Downpour(push=0), r"Downpour\(push=0, fetch=1\)"),
        (lambda: AsyncDiLoCo(period=4, delay=4), "the delay at least 0 and shorter than the period"),
        (lambda: AsyncDiLoCo(quorum=0), r"Quorum\(least=0"),
        (lambda: ParameterServer(codec=PowerSGD()), "works only in a mean over all workers"),
        (lambda: Then(ParameterServer(), AllReduceSGD(), steps=2), "servers run to the end of a job"),
    ],
)
def test_impossible_settings_are_refused(make: Any, named: str):
    with pytest.raises(ValueError, match=named):
        make()


# Kernels.


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("numel", [1, 7, 1000, 300_001])
def test_fused_rules_equal_plain_ones(rule: Rule, numel: int):
    def applied() -> torch.Tensor:
        value = numbers(numel).float()
        m = memory(rule, value)
        rule.pulled(numbers(numel, seed=9).float(), m, src=1)
        for seed in range(4):
            rule.apply(value, numbers(numel, seed=seed).float(), m, Push(src=1, staleness=2, workers=3, samples=5.0))
        return value

    fused = applied()
    with kernels.plain():
        plain = applied()
    assert torch.allclose(fused, plain, rtol=1e-5, atol=1e-6)
    assert not torch.equal(fused, numbers(numel).float())
