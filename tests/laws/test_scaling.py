"""Rates and momentum that belong to a sample, the schedules behind them, and what cannot follow them (H2, I1 and I5 of
the reference of methods)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline import (
    ASGD,
    EAMSGD,
    AllReduceSGD,
    AsyncDiLoCo,
    AutoBatch,
    Cluster,
    DiLoCo,
    GrowingBatch,
    OneBitAdam,
    ParameterServer,
    PeriodicAveraging,
    PerSample,
    Replicated,
    Sandblaster,
    Scaling,
    Schedule,
    SoftSync,
    Strategy,
    Task,
    Then,
    attach,
    simulate,
)
from paceline.codecs import DGC, Entropy, OneBit
from paceline.optimizers import TwoStage
from paceline.server.rules import Every, Momentum, Quorum, Scaled, Sgd
from paceline.training.length import Position
from paceline.training.scaling import momentum_of, time_constant_of
from tests.laws.tasks import OPTIMIZERS, close, instant, quadratic, regression, same, values, vector

# H2: rates for a sample, and momentum as a time constant.


@given(momentum=st.floats(0.01, 0.999), samples=st.integers(1, 100_000), lr=st.floats(1e-6, 1.0))
def test_conversions_both_ways_give_what_was_given(momentum: float, samples: int, lr: float):
    constant = time_constant_of(momentum, samples)
    assert momentum_of(constant, samples) == pytest.approx(momentum)
    assert momentum_of(constant, 2 * samples) == pytest.approx(momentum**2)
    there = PerSample.of(lr, momentum, samples)
    assert there.settings(samples) == pytest.approx({"lr": lr, "momentum": momentum})


def test_the_time_constant_of_the_manual_and_the_momentum_without_one():
    assert time_constant_of(0.9, 256) == pytest.approx(2429.75, abs=0.01)
    assert momentum_of(0.0, 256) == 0.0 and PerSample(0.001).settings(64) == {"lr": 0.064, "momentum": 0.0}


def steps_of_torch(settings: dict[str, float], gradients: list[torch.Tensor], **more: Any) -> torch.Tensor:
    w = torch.nn.Parameter(torch.linspace(-1, 1, 4, dtype=torch.float64))
    optimizer = torch.optim.SGD([w], **settings, **more)
    for g in gradients:
        w.grad = g.clone()
        optimizer.step()
    return w.detach()


@pytest.mark.parametrize("samples", [1, 16, 256])
def test_in_the_long_run_a_sample_moves_the_model_by_its_rate_whatever_the_minibatch(samples: int):
    settings = PerSample(lr=0.0005, time_constant=100.0).settings(samples)
    g = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    before, after = (steps_of_torch(settings, [g] * steps) for steps in (3000, 3001))
    assert torch.allclose((before - after) / samples, 0.0005 * g, rtol=1e-10)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("samples", [1, 8, 100])
def test_torchs_optimizer_with_the_conversion_is_cntks(samples: int, nesterov: bool):
    """CNTK's, written out: the gradient is a sum, L2 is for each sample, and the velocity holds the rate."""
    lr, constant, l2 = 0.002, 90.0, 0.01
    means = [torch.randn(4, generator=torch.Generator().manual_seed(k), dtype=torch.float64) for k in range(20)]
    w, v = torch.linspace(-1, 1, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    mu = math.exp(-samples / constant)
    for mean in means:
        total = mean * samples + l2 * samples * w
        v = mu * v + (1 - mu) * lr * total
        w = w - (mu * v + (1 - mu) * lr * total if nesterov else v)
    settings = PerSample(lr, constant).settings(samples)
    assert close(steps_of_torch(settings, means, weight_decay=l2, nesterov=nesterov), w)


def groups(task: Task, strategy: Strategy, workers: int, stop_at: int) -> list[dict[str, Any]]:
    """The optimizer's settings at the step before."""
    states = simulate(task, strategy, instant(workers), stop_at=stop_at).states
    return [values(state, "optimizer")["param_groups"][0] for state in states]


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("base", [4, 16, 50])
def test_a_task_has_the_rate_and_momentum_of_its_steps_also_of_the_smaller_last_one(workers: int, base: int):
    """An epoch of 40 samples has steps of 16, 16 and 8."""
    own = PerSample.of(0.05, 0.9, base)
    task = regression(steps=3, batch=16, samples=40, optimizer=OPTIMIZERS["momentum"], scaling=Scaling(base))
    for step, size in ((1, 16), (3, 8)):
        for group in groups(task, AllReduceSGD(), workers, step):
            assert (group["lr"], group["momentum"]) == pytest.approx(tuple(own.settings(size).values()))
    averaging = groups(task, PeriodicAveraging(period=2), workers, 1)[0]
    assert averaging["momentum"] == pytest.approx(own.settings(16 / workers)["momentum"])
    assert averaging["lr"] == pytest.approx(workers * own.settings(16 / workers)["lr"])


def test_the_root_of_the_size_scales_the_rate_of_adam_and_its_betas_decay_over_the_same_samples():
    task = regression(steps=1, batch=32, optimizer=OPTIMIZERS["adam"], scaling=Scaling(8, rate="sqrt"))
    [group] = groups(task, AllReduceSGD(), 1, 1)
    assert group["lr"] == pytest.approx(0.02) and group["betas"] == pytest.approx((0.9**4, 0.999**4))
    kept = replace(task, scaling=Scaling(8, rate="none"))
    assert groups(kept, AllReduceSGD(), 1, 1)[0]["lr"] == 0.01


SIZES: dict[str, tuple[Strategy, float, float]] = {
    "a rule": (ParameterServer(rule=Sgd(0.1)), 16, 16),
    "every third": (ParameterServer(rule=Scaled(Every(Momentum(0.1), 3))), 16, 48),
    "a majority": (ParameterServer(rule=Quorum(Sgd(0.1))), 16, 48),
    "a quorum of pairs": (ParameterServer(rule=Quorum(Every(Sgd(0.1), 2), 2)), 16, 64),
    "softsync": (SoftSync(), 16, 32),
    "softsync of 3": (SoftSync(updates=3, scale=None), 16, 48),
    "deltas that are added": (ASGD(period=2), 16, 16),
    "diloco": (DiLoCo(period=4, rate=0.5, momentum=0.5), 16, 64),
    "diloco without a barrier": (AsyncDiLoCo(period=4, rate=0.5, momentum=0.5, quorum=4), 16, 64),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_step_has_as_many_samples_behind_it_as_updates_are_averaged(name: str):
    """With 4 workers of 16 samples: behind an optimizer's step, and behind what moves the model of all workers."""
    strategy, step, rate = SIZES[name]
    assert (strategy.samples_of_step(64, 4), strategy.samples_of_rate(64, 4)) == (step, rate)


def test_the_rate_of_a_sample_reaches_the_rules_of_servers():
    """Twice the samples of a step, twice the rate: as with a rule of twice the rate."""
    scaled = quadratic(steps=6, batch=8, scaling=Scaling(4, momentum="none"))
    half, whole = (simulate(scaled, ParameterServer(rule=Sgd(lr)), instant(1)).params for lr in (0.01, 0.02))
    plain = simulate(quadratic(steps=6, batch=8), ParameterServer(rule=Sgd(0.02)), instant(1)).params
    assert close(half, plain) and not close(whole, plain)


# I1 and I5: warm-up and decay.


def test_linear_scaling_gives_the_rates_of_the_papers():
    assert 0.1 * Scaling(base=256).gain(8192) == pytest.approx(3.2)
    assert 0.1 * Scaling(base=256).gain(2048) == pytest.approx(0.8)


def at_steps(schedule: Schedule, steps: int, gain: float = 1.0) -> list[float]:
    return [schedule.at(Position(k, 10 * k, k / 10, steps, steps / 10), gain) for k in range(steps + 1)]


@given(
    length=st.sampled_from(["37 steps", "123 samples", "2.5 epochs"]),
    start=st.floats(0.0, 1.0) | st.just("base"),
    gain=st.floats(0.5, 64.0),
)
def test_a_warm_up_rises_evenly_from_its_start_to_the_rate_and_stays(length: str, start: Any, gain: float):
    found = at_steps(Schedule(warmup=length, start=start), 60, gain)
    first = min(1.0, 1 / gain) if start == "base" else start
    assert found[0] == pytest.approx(first) and found == sorted(found) and found[-1] == 1.0
    rises = [b - a for a, b in pairwise(found) if b < 1]
    assert rises == pytest.approx([rises[0]] * len(rises) if rises else [])


def test_the_stairs_of_imagenet_are_an_eighth_an_epoch():
    """Through a Task: batch 2048 of 256 at 0.1, in epochs of two steps."""
    task = quadratic(
        steps=20,
        batch=16,
        samples=32,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        scaling=Scaling(2),
        schedule=Schedule(warmup="8 epochs", stairs=True),
    )
    seen: list[float] = []
    for k in range(1, 20, 2):
        seen.append(groups(task, AllReduceSGD(), 2, k)[0]["lr"])
    assert seen == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.8, 0.8])


def test_polynomial_and_cosine_decay_reach_their_end_and_are_half_way_where_the_papers_say():
    for power, half in ((1.0, 0.5), (0.5, 0.75)):
        found = at_steps(Schedule(decay="polynomial", power=power), 100)
        assert (found[0], found[100]) == (1.0, 0.0) and found[round(100 * half)] == pytest.approx(0.5)
    cosine = at_steps(Schedule(decay="cosine", end=0.2), 100)
    assert (cosine[0], cosine[50], cosine[100]) == pytest.approx((1.0, 0.6, 0.2))
    exponential = at_steps(Schedule(decay="exponential", end=0.01), 100)
    assert (exponential[0], exponential[50], exponential[100]) == pytest.approx((1.0, 0.1, 0.01))


def test_a_milestone_counts_from_its_own_step_on():
    found = at_steps(Schedule(decay="multistep", milestones=["3 epochs", "6 epochs", "8 epochs"]), 100)
    for step, factor in ((29, 1.0), (30, 0.1), (59, 0.1), (60, 0.01), (79, 0.01), (80, 0.001), (100, 0.001)):
        assert found[step] == pytest.approx(factor)


def test_a_decay_counts_from_the_start_of_the_training_and_ends_with_its_length():
    schedule = Schedule(warmup="20 steps", start=0.0, decay="polynomial", end=0.5, over="4 epochs")
    found = at_steps(schedule, 60)
    assert (found[10], found[20], found[40], found[60]) == pytest.approx((0.5 * 0.875, 0.75, 0.5, 0.5))


def test_a_schedule_follows_the_samples_when_minibatches_grow():
    """At the start of every epoch it has the factor that it has with minibatches of one size."""
    schedule = Schedule(warmup="2 epochs", decay="cosine")
    fixed = quadratic(steps=None, epochs=6, batch=8, samples=64, schedule=schedule)  # pyright: ignore[reportArgumentType]
    growing = replace(fixed, batch=GrowingBatch(8, 32, epochs=3))
    for epoch in range(6):
        a, b = (schedule.at(t.position(t.timetable().start(epoch), t.timetable())) for t in (fixed, growing))
        assert a == pytest.approx(b)


@pytest.mark.parametrize("strategy", [AllReduceSGD(), ParameterServer(rule=Momentum(0.02), servers=1)], ids=repr)
def test_in_a_users_loop_the_scheduler_of_a_schedule_does_what_a_task_does(strategy: Strategy):
    """To the bit, and also where servers take the steps."""
    schedule = Schedule(warmup="30 samples", start="base", decay="multistep", milestones=["2 epochs"])
    given: dict[str, Any] = {"steps": 12, "batch": 5, "samples": 20, "schedule": schedule}
    task = regression(**given, scaling=Scaling(2, momentum="none"))
    model = task.build()
    optimizer = task.optimizer(model.parameters()) if strategy.needs.optimizer else None
    if optimizer is not None:
        optimizer.param_groups[0]["lr"] *= 2.5
    with attach(model, optimizer, strategy) as session:
        scheduler = schedule.scheduler(session.optimizer, steps_per_epoch=4, batch=5, gain=2.5)
        for k in range(12):
            session.optimizer.zero_grad()
            task.loss(model, task.part(k, 0, 1)).backward()
            session.step()
            scheduler.step()
    if strategy.needs.optimizer:
        assert close(vector(model), simulate(task, strategy, instant(1)).params)
    else:  # A rule's own rate is that of the user, who has scaled it or not.
        plain = replace(task, scaling=None, schedule=lambda k: schedule.at(task.position(k, task.timetable()), 2.5))
        assert same(vector(model), simulate(plain, strategy, instant(1)).params)


# What cannot follow.


class Muon(torch.optim.SGD):
    """Of the name alone: older versions of torch have no Muon."""


ADAM = OPTIMIZERS["adam"]


def staged(first: Callable[..., torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    return partial(TwoStage, first=first, second=partial(torch.optim.SGD, lr=0.1), steps=2)


@pytest.mark.parametrize(
    ("strategy", "settings", "error"),
    [
        (Sandblaster(), {"schedule": lambda step: 0.5}, "under Sandblaster: it finds the length of each step itself"),
        (Sandblaster(), {"scaling": Scaling(4, momentum="none")}, "under Sandblaster: it finds the length of each"),
        (ParameterServer(), {"scaling": Scaling(4)}, "a rule on its servers takes the steps, and its momentum does"),
        (
            Then(AllReduceSGD(), ParameterServer(), steps=2),
            {"scaling": Scaling(4)},
            "under ParameterServer: a rule on its servers takes the steps, and its momentum does",
        ),
        (OneBitAdam(), {"scaling": Scaling(4), "optimizer": ADAM}, "under OneBitAdam: it has a momentum of its own"),
        (EAMSGD(), {"scaling": Scaling(4)}, "under EAMSGD: it has a momentum of its own"),
        (AllReduceSGD(codec=Entropy(DGC())), {"scaling": Scaling(4)}, "AllReduceSGD: it has a momentum of its own"),
        (
            AllReduceSGD(codec=DGC()),
            {"optimizer": staged(partial(torch.optim.SGD, lr=0.1, momentum=0.9))},
            "with an optimizer of momentum 0.9: DGC adds the momentum at the sender",
        ),
        (
            AllReduceSGD(),
            {"schedule": Schedule(warmup="3 steps", start="base")},
            "it would change nothing; give scaling",
        ),
        (
            AllReduceSGD(),
            {"schedule": Schedule(warmup="3 steps", start="base"), "scaling": Scaling(4, rate="none")},
            "without a scaled rate it would change nothing",
        ),
        (
            AllReduceSGD(),
            {"scaling": Scaling(4), "optimizer": Muon},
            "the length of its steps does not depend on its momentum",
        ),
        (
            AllReduceSGD(),
            {"scaling": Scaling(4), "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1)},
            "a momentum as time constant belongs to undamped momentum",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Strategy) else "",
)
def test_what_has_no_effect_or_cannot_follow_the_size_of_a_step_is_refused_at_the_start(
    strategy: Strategy, settings: dict[str, Any], error: str
):
    def never(model: Any, batch: Any) -> Any:
        pytest.fail("a gradient was computed")

    with pytest.raises(ValueError) as caught:
        simulate(replace(regression(steps=8, batch=4, **settings), loss=never), strategy, Cluster(workers=2))
    assert error in str(caught.value)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Schedule(warmup="2 epochs", stairs=True, start=0.5), "start has no effect without a rise with every"),
        (lambda: Schedule(start="base"), "start has no effect without warmup"),
        (lambda: Schedule(warmup="2 steps", stairs=True), "stairs are epochs"),
        (lambda: Schedule(decay="cosine", power=2.0), "power has no effect without decay='polynomial'"),
        (lambda: Schedule(decay="multistep"), "decay='multistep' and milestones belong together"),
        (lambda: Schedule(decay="exponential"), "give the factor at the end, above 0"),
        (lambda: Schedule(over="2 epochs"), "over has no effect with this decay"),
        (lambda: Schedule(decay="multistep", milestones=["2 epochs", "1 epoch"]), "in one unit and in order"),
        (
            lambda: Schedule(warmup="2 steps", start="base").scheduler(torch.optim.SGD([torch.zeros(1)])),
            "needs the factor by which the rate was scaled up",
        ),
        (
            lambda: Schedule(warmup="9 samples").scheduler(torch.optim.SGD([torch.zeros(1)])),
            "a length in samples needs the samples of a step",
        ),
        (
            lambda: Schedule(decay="cosine").scheduler(torch.optim.SGD([torch.zeros(1)])),
            "the length of this run is not known",
        ),
        (lambda: PerSample(-1.0), "both must be finite and at least 0"),
        (lambda: PerSample.of(0.1, 1.0, 4), "momentum lies in [0, 1)"),
        (lambda: Scaling(4, rate="none", momentum="none"), "this scales nothing; leave it out"),
        (lambda: quadratic(steps=4, batch=4, evaluate_every="0 epochs"), "give a length above 0"),
    ],
)
def test_settings_without_effect_are_refused(make: Callable[[], object], error: str):
    with pytest.raises(ValueError) as caught:
        make()
    assert error in str(caught.value)


def test_a_coarse_codec_with_adam_as_the_second_stage_is_a_warning():
    optimizer = partial(TwoStage, first=partial(torch.optim.SGD, lr=0.1), second=torch.optim.Adam, steps=2)
    with pytest.warns(RuntimeWarning, match="spoils its second moments"):
        simulate(regression(steps=4, batch=4, optimizer=optimizer), AllReduceSGD(codec=OneBit()), Cluster(workers=2))


def test_a_warm_start_may_have_no_scaling_of_its_own():
    """Of both methods the one that steps now counts: first whole minibatches on every worker, then its part."""
    task = regression(steps=8, batch=8, optimizer=OPTIMIZERS["momentum"], scaling=Scaling(2), samples=32)
    strategy = Then(Replicated(), PeriodicAveraging(period=2), steps=4)
    for stop_at, samples, gain in ((4, 8, 1), (5, 2, 4)):
        group = groups(task, strategy, 4, stop_at)[0]
        expected = PerSample.of(0.05, 0.9, 2).settings(samples)
        assert (group["lr"], group["momentum"]) == pytest.approx((gain * expected["lr"], expected["momentum"]))
    growing = replace(task, batch=AutoBatch(8, largest=8, multiple=8))
    assert same(simulate(growing, strategy, instant(4)).params, simulate(task, strategy, instant(4)).params)
