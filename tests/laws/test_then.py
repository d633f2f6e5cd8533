"""Warm starts and their usual first phase: all workers train as one machine does, or by synchronous SGD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import (
    AdaptiveAveraging,
    AllReduceSGD,
    BlockMomentum,
    Cluster,
    DiLoCo,
    ParameterServer,
    PeriodicAveraging,
    Replicated,
    Run,
    SlowMo,
    Task,
    Then,
    simulate,
)
from paceline.codecs import Fp32, OneBit
from paceline.strategy import Strategy
from tests.laws.tasks import OPTIMIZERS, close, params, quadratic, regression, same, trained_alone, values, vector
from tests.laws.test_strategies import assert_same_states, restless

FOUR = Cluster(workers=4)
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


def end(task: Task, strategy: Strategy, workers: int = 4) -> Tensor:
    return simulate(task, strategy, Cluster(workers=workers)).params


def samples_of(run: Run, rank: int) -> list[int]:
    """The number of samples that a rank had at each of its steps."""
    return [p.samples for p in sorted(run.trace.points, key=lambda p: p.step) if p.rank == rank]


# H1


@pytest.mark.parametrize("step", [1, 3, 6])
def test_replicas_are_equal_to_the_bit_and_send_nothing_until_the_switch(step: int):
    """With dropout and BatchNorm: random numbers and buffers are equal too."""
    task = regression(steps=12, batch=9, samples=33, model=restless)
    run = simulate(task, Then(Replicated(), PeriodicAveraging(period=3), steps=6), Cluster(workers=3), stop_at=step)
    assert run.trace.bytes_sent() == 0 or step == 6, "with step 6 the second has begun"
    for state in run.states[1:]:
        for name in run.states[0]["slots"].keys() - {"random numbers"}:
            assert_same_states([values(state, name)], [values(run.states[0], name)])
    assert simulate(replace(task, steps=6), Replicated(), Cluster(workers=3)).trace.bytes_sent() == 0


@every_optimizer
def test_up_to_the_switch_it_equals_training_on_one_machine(optimizer: str):
    """To the bit; and it differs afterwards."""
    task = regression(steps=12, batch=10, samples=33, optimizer=OPTIMIZERS[optimizer])
    strategy = Then(Replicated(), PeriodicAveraging(period=3), steps=7)
    for step in (1, 4, 7, 8):
        run = simulate(task, strategy, FOUR, stop_at=step)
        assert all(same(p, trained_alone(replace(task, steps=step))) for p in params(run)) is (step <= 7)


@pytest.mark.parametrize(
    ("until", "switch"),
    [
        ({"steps": 0}, 0),
        ({"steps": 3}, 3),
        ({"samples": 0}, 0),
        ({"samples": 1}, 1),
        ({"samples": 64}, 4),
        ({"samples": 65}, 5),
        ({"samples": 70}, 5),
        ({"samples": 71}, 6),
        ({"samples": 87}, 7),
        ({"epochs": 1}, 5),
        ({"epochs": 1.4}, 7),
        ({"epochs": 0.5}, 3),
        ({"epochs": 2}, 10),
    ],
    ids=str,
)
def test_the_switch_is_at_the_first_step_that_has_seen_enough(until: dict[str, Any], switch: int):
    """Epochs of 70 samples: four minibatches of 16 and one of 6. Until the switch all workers see all samples; then
    each sees a part."""
    run = simulate(
        quadratic(steps=11, batch=16, samples=70), Then(Replicated(), AllReduceSGD(), **until), Cluster(workers=2)
    )
    whole = [16, 16, 16, 16, 6, 16, 16, 16, 16, 6, 16]
    for rank in range(2):
        assert samples_of(run, rank) == whole[:switch] + [n // 2 for n in whole[switch:]]


@every_optimizer
@pytest.mark.parametrize("steps", [0, 1, 6, 13, 20])
def test_the_length_of_the_warm_up_does_not_change_synchronous_sgd(optimizer: str, steps: int):
    """It continues from the same parameters and the same optimizer state. With Adam, rounding errors grow."""
    task = regression(steps=20, batch=10, samples=33, optimizer=OPTIMIZERS[optimizer])
    assert close(end(task, Then(Replicated(), AllReduceSGD(), steps=steps)), trained_alone(task), rtol=1e-9)


@pytest.mark.parametrize(
    "first", [Replicated(), AllReduceSGD(), BlockMomentum(period=3, delay=1), PeriodicAveraging(period=5)], ids=str
)
@pytest.mark.parametrize(
    "then", [PeriodicAveraging(period=4), AllReduceSGD(codec=OneBit()), DiLoCo(period=4, fragments=2)], ids=str
)
def test_a_first_phase_of_length_0_equals_the_second_alone(first: Strategy, then: Strategy):
    """To the bit."""
    task = regression(steps=10, batch=10)
    assert same(end(task, Then(first, then, steps=0)), end(task, then))


@pytest.mark.parametrize(
    "first", [Replicated(), AllReduceSGD(), BlockMomentum(period=3), SlowMo(period=5, delay=2)], ids=str
)
def test_a_second_phase_of_length_0_equals_the_first_alone(first: Strategy):
    """To the bit. The second phase, which synchronises every 4 steps, has nothing to do."""
    task = regression(steps=10, batch=10)
    assert same(end(task, Then(first, PeriodicAveraging(period=4), steps=10)), end(task, first))


def test_the_second_phase_continues_with_the_first_phases_model_and_optimizer():
    """From block momentum it takes the model, not the look-ahead point; from the optimizers' states, the mean."""
    task = regression(steps=8, batch=8)
    first = simulate(replace(task, steps=4), AllReduceSGD(), FOUR)
    both = simulate(task, Then(AllReduceSGD(), PeriodicAveraging(period=2), steps=4), FOUR)
    start = simulate(task, PeriodicAveraging(period=2), FOUR, stop_at=0).states
    for state, trained in zip(start, first.states, strict=True):
        state["slots"] |= trained["slots"]
        values(state, "sync")["anchor"] = values(trained, "model")["params"]
    alone = simulate(task, PeriodicAveraging(period=2), FOUR, resume=start)
    assert same(both.params, alone.params) and not close(both.params, end(task, PeriodicAveraging(period=2)), rtol=1e-4)

    blocks = simulate(replace(task, steps=4), BlockMomentum(period=2), FOUR)
    switched = simulate(task, Then(BlockMomentum(period=2), AllReduceSGD(), steps=4), FOUR, stop_at=4)
    assert same(switched.params, blocks.params) and not same(blocks.params, values(blocks.states[0], "sync")["anchor"])


def test_momentum_that_differs_continues_as_its_mean():
    """This includes the momentum of a parameter that is a single number."""
    task = replace(scaled(steps=8), optimizer=OPTIMIZERS["momentum"])
    first = simulate(replace(task, steps=4), PeriodicAveraging(period=4), FOUR)
    momenta = [[s["momentum_buffer"] for s in values(state, "optimizer")["state"].values()] for state in first.states]
    switched = simulate(task, Then(PeriodicAveraging(period=4), AllReduceSGD(), steps=4), FOUR, stop_at=4)
    for state in switched.states:
        for i, now in enumerate(values(state, "optimizer")["state"].values()):
            assert close(now["momentum_buffer"], sum(m[i] for m in momenta) / 4)  # pyright: ignore


@every_optimizer
def test_warm_starts_may_be_nested(optimizer: str):
    """Both nestings are equal to the bit."""
    task = regression(steps=14, batch=10, optimizer=OPTIMIZERS[optimizer])
    one, two, three = Replicated(), AllReduceSGD(), PeriodicAveraging(period=3)
    left, right = Then(Then(one, two, steps=4), three, steps=9), Then(one, Then(two, three, steps=9), steps=4)
    assert same(end(task, left), end(task, right))
    assert not close(end(task, left), end(task, Then(one, three, steps=4)), rtol=1e-6), "the second counts"


@pytest.mark.parametrize(
    "first", [Replicated(), PeriodicAveraging(period=3, delay=1), DiLoCo(period=4, fragments=2)], ids=str
)
@pytest.mark.parametrize("at", [4, 5, 6])
def test_a_run_resumes_just_before_at_and_after_the_switch(first: Strategy, at: int):
    task, cluster = regression(steps=11, batch=9, samples=33, model=restless), Cluster(workers=3)
    strategy = Then(first, AllReduceSGD(codec=OneBit()), steps=5)
    broken = simulate(task, strategy, cluster, stop_at=at)
    assert all(values(state, "then")["is_second"] is (at >= 5) for state in broken.states)
    resumed, whole = simulate(task, strategy, cluster, resume=broken.states), simulate(task, strategy, cluster)
    assert_same_states(resumed.states, whole.states)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (
            lambda: Then(Replicated(), AllReduceSGD()),
            r"Then\(\): give the length of the first method once.*steps, samples or epochs",
        ),
        (lambda: Then(Replicated(), AllReduceSGD(), steps=3, epochs=1), r"Then\(steps=3, epochs=1\): give the length"),
        (lambda: Then(Replicated(), AllReduceSGD(), samples=-1), r"Then\(samples=-1\).*at least 0"),
        (lambda: Then(ParameterServer(), AllReduceSGD(), steps=3), "servers run to the end of a job"),
        (lambda: Then(AllReduceSGD(), Replicated(), steps=3), "Replicated can only be the first method"),
        (lambda: Then(Replicated(), AllReduceSGD(), steps=9), r"would take 9 steps, but the whole run has only 8"),
        (lambda: Then(Replicated(), AllReduceSGD(), epochs=3), r"would take 12 steps, but the whole run has only 8"),
        (lambda: Then(Replicated(), AdaptiveAveraging(warmup=0, sampling=4), steps=4), "shorter than one period"),
    ],
)
def test_an_impossible_warm_start_is_refused(make: Callable[[], Strategy], named: str):
    with pytest.raises(ValueError, match=named):
        simulate(quadratic(steps=8, batch=4), make(), Cluster(workers=2))


# A1, A3, and the task's own settings


@pytest.mark.parametrize("workers", [4, 5, 7])
@pytest.mark.parametrize("group", [1, 2, 4, 7])
def test_sums_by_groups_equal_those_of_the_flat_ring(workers: int, group: int):
    """This includes a smaller last group, for which the mean of the groups' means would differ."""
    task = regression(steps=12, batch=17, bucket_bytes=200)
    run = simulate(task, AllReduceSGD(group=group), Cluster(workers=workers))
    assert close(run.params, end(task, AllReduceSGD(), workers)) and all(same(p, run.params) for p in params(run))


@pytest.mark.parametrize("workers", [4, 5])
def test_encoded_sums_by_groups_equal_those_of_the_flat_ring(workers: int):
    """Up to the rounding of float32 in the messages."""
    task = regression(steps=12, batch=17, bucket_bytes=200)
    assert close(end(task, AllReduceSGD(group=2, codec=Fp32()), workers), end(task, AllReduceSGD(), workers), rtol=1e-5)


def test_groups_send_less_to_other_groups():
    """With groups of 2, half as many workers send to another group."""
    task = quadratic(steps=3, batch=8, numel=1000)
    flat, grouped = (simulate(task, AllReduceSGD(group=g), FOUR).trace for g in (None, 2))
    assert (
        [s.rank for s in grouped.spans if s.kind == "all_reduce"].count(1)
        == 0
        < grouped.bytes_sent(1)
        < flat.bytes_sent(1)
    )


def trained(task: Task, workers: int, *, each: Callable[[nn.Module], Any], all: Callable[[nn.Module], Any]) -> Tensor:
    """One machine that applies a function to each worker's gradient, and another to their mean. The parts are equal."""
    model = task.build()
    optimizer = task.optimizer(model.parameters())
    for k in range(task.total_steps):
        grads = [torch.zeros_like(p) for p in model.parameters()]
        for rank in range(workers):
            model.zero_grad()
            task.loss(model, task.part(k, rank, workers)).backward()
            each(model)
            for grad, p in zip(grads, model.parameters(), strict=True):
                grad.add_(p.grad, alpha=1 / workers)  # pyright: ignore
        for grad, p in zip(grads, model.parameters(), strict=True):
            p.grad = grad
        all(model)
        optimizer.step()
    return vector(model)


@every_optimizer
def test_clipping_is_torchs_and_applies_to_the_mean_gradient(optimizer: str):
    """The norm is above the limit in half of the steps."""
    task = regression(steps=12, batch=8, optimizer=OPTIMIZERS[optimizer], bucket_bytes=200)

    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.7)

    clipped = end(task, AllReduceSGD(clip=0.7))
    assert close(clipped, trained(task, 4, each=lambda model: None, all=clip), rtol=1e-9)
    assert not close(clipped, trained(task, 4, each=clip, all=lambda model: None), rtol=1e-4)
    assert not close(clipped, trained_alone(task), rtol=1e-4)


@pytest.mark.parametrize("strategy", [AllReduceSGD(), PeriodicAveraging(period=3), Replicated()], ids=str)
@pytest.mark.parametrize("passes", [2, 3, 50])
def test_a_gradient_in_several_passes_equals_the_gradient_in_one(strategy: Strategy, passes: int):
    """5 samples in parts of 2, 2 and 1, or in more parts than there are samples. The reported losses are the same."""
    task = regression(steps=9, batch=20, bucket_bytes=200)
    once, several = (simulate(replace(task, accumulate=a), strategy, FOUR) for a in (1, passes))
    assert close(several.params, once.params)
    assert [p.loss for p in several.trace.points] == pytest.approx([p.loss for p in once.trace.points])


@every_optimizer
def test_a_schedule_equals_torchs_lambda_lr(optimizer: str):
    """To the bit on one machine; on four machines up to rounding."""
    task = regression(steps=12, batch=8, optimizer=OPTIMIZERS[optimizer], schedule=lambda k: 0.5 ** (k // 3))
    model = task.build()
    stepper = task.optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(stepper, lambda k: 0.5 ** (k // 3))
    for k in range(12):
        stepper.zero_grad()
        task.loss(model, task.part(k, 0, 1)).backward()
        stepper.step()
        scheduler.step()
    assert same(end(task, PeriodicAveraging(period=3), workers=1), vector(model))
    assert close(end(task, AllReduceSGD()), vector(model), rtol=1e-9)
    assert not close(vector(model), trained_alone(task), rtol=1e-3), "which keeps its rate"


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, 5, dtype=torch.float64))
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))


def scaled(*, steps: int) -> Task:
    """A model with a parameter that is a single number."""
    task = quadratic(steps=steps, batch=8)
    return replace(
        task, model=Scaled, loss=lambda model, batch: (model.scale * model.w - batch[0]).square().sum(1).mean()
    )


def test_replicas_that_should_be_equal_and_are_not_cause_a_warning():
    """The forward pass differs between workers. The same happens when each worker has different data."""

    plain, calls = regression(steps=6, batch=8), count(1)
    task = replace(plain, loss=lambda model, batch: plain.loss(model, batch) / next(calls))
    with pytest.warns(UserWarning, match="continue with worker 0's model"):
        simulate(task, Then(Replicated(), PeriodicAveraging(period=2), steps=3), Cluster(workers=3))
