"""Optimizers for large batches: what their papers say of a step, and what they equal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import sqrt
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from paceline import AllReduceSGD, Cluster, simulate
from paceline.optimizers import LAMB, LARS, TwoStage
from tests.laws.tasks import close, network, numbers, regression, same, vector

Make = Callable[[Any], torch.optim.Optimizer]
MATRICES = [(4, 3), (2, 5), (3, 2, 2)]


def layers(*, seed: int = 0) -> list[nn.Parameter]:
    return [nn.Parameter(numbers(*shape, seed=seed + i)) for i, shape in enumerate(MATRICES)]


def give_gradients(params: list[nn.Parameter], *, seed: int = 10, scale: float = 1.0) -> None:
    for i, p in enumerate(params):
        p.grad = scale * numbers(*p.shape, seed=seed + i)


def changes(make: Make, *, scale: float = 1.0) -> list[Tensor]:
    """What one step changes in every layer."""
    params = layers()
    give_gradients(params, scale=scale)
    before = [p.detach().clone() for p in params]
    make(params).step()
    return [p.detach() - b for p, b in zip(params, before, strict=True)]


def trained(make: Make, *, steps: int = 6, rate: Callable[[int], float] | None = None) -> Tensor:
    """A network after some steps; `rate` gives the learning rate of a step."""
    torch.manual_seed(0)
    model = network()
    optimizer = make(model.parameters())
    x, y = numbers(12, 6, seed=2), numbers(12, 3, seed=3)
    for k in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] if rate is None else rate(k)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return vector(model)


# LARS.


@settings(max_examples=25)
@given(scale=st.floats(1e-6, 1e6))
def test_a_step_of_lars_changes_every_layer_by_the_same_share_of_its_norm(scale: float):
    found = changes(partial(LARS, lr=0.5, momentum=0.0, trust=0.02, eps=0.0), scale=scale)
    assert [float(c.norm() / p.detach().norm()) for c, p in zip(found, layers(), strict=True)] == pytest.approx(
        [0.01] * 3
    )


def test_the_scale_of_a_gradient_does_not_change_a_step_of_lars():
    make = partial(LARS, lr=0.5, eps=0.0)
    assert all(close(a, b) for a, b in zip(changes(make), changes(make, scale=1e5), strict=True))


@pytest.mark.parametrize("zero", ["weights", "gradient"])
def test_a_layer_of_zeros_or_with_a_zero_gradient_takes_the_plain_step(zero: str):
    p, q = (nn.Parameter(numbers(3, 4) * (zero != "weights")) for _ in range(2))
    p.grad = q.grad = numbers(3, 4, seed=1) * (zero != "gradient")
    LARS([p], lr=0.1, weight_decay=0.01).step()
    SGD([q], lr=0.1, momentum=0.9, weight_decay=0.01).step()
    assert same(p.detach(), q.detach())


@pytest.mark.parametrize("more", [{}, {"nesterov": True}, {"weight_decay": 0.01}, {"momentum": 0.0}], ids=str)
def test_without_factors_lars_is_momentum_sgd(more: dict[str, Any]):
    plain = trained(partial(SGD, **{"lr": 0.1, "momentum": 0.9} | more))
    assert same(trained(partial(LARS, lr=0.1, adapt=False, **more)), plain)
    assert same(trained(partial(LARS, lr=0.1, trust=1e9, clip=True, **more)), plain)


def test_biases_take_the_steps_of_momentum_sgd_and_follow_adapt():
    def after(make: Make) -> Tensor:
        bias = nn.Parameter(numbers(5))
        optimizer = make([bias])
        for k in range(4):
            bias.grad = numbers(5, seed=k)
            optimizer.step()
        return bias.detach()

    assert same(after(partial(LARS, lr=0.1)), after(partial(SGD, lr=0.1, momentum=0.9)))
    assert not torch.allclose(after(partial(LARS, lr=0.1, adapt=True)), after(partial(LARS, lr=0.1)))


@pytest.mark.parametrize("inside", [False, True], ids=["corrected", "as in the paper"])
def test_the_rate_is_a_factor_of_the_velocity_or_of_what_goes_into_it(inside: bool):
    params = layers()
    mine = [p.detach().clone() for p in params]
    velocities = [torch.zeros_like(p) for p in mine]
    optimizer = LARS(params, lr=1.0, weight_decay=0.01, trust=0.1, correct_momentum=not inside)
    for k, rate in enumerate((1.0, 0.5, 0.05)):
        give_gradients(params, seed=20 * k)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        for i, (w, p) in enumerate(zip(mine, params, strict=True)):
            assert p.grad is not None
            local = 0.1 * w.norm() / (p.grad.norm() + 0.01 * w.norm() + 1e-8)
            velocities[i] = 0.9 * velocities[i] + (rate if inside else 1.0) * local * (p.grad + 0.01 * w)
            w -= (1.0 if inside else rate) * velocities[i]
    assert all(close(w, p.detach()) for w, p in zip(mine, params, strict=True))


@pytest.mark.parametrize("make", [partial(LARS, lr=1.0, trust=0.05), partial(LAMB, lr=0.05)], ids=["LARS", "LAMB"])
@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
def test_workers_take_the_norms_of_the_mean_gradient(make: Make, bucket_bytes: int):
    task = regression(steps=10, batch=12, optimizer=make, bucket_bytes=bucket_bytes)
    one, four = (simulate(task, AllReduceSGD(), Cluster(workers=n)).params for n in (1, 4))
    assert close(one, four)


# LAMB.


def test_a_step_of_lamb_changes_every_layer_by_the_rate_times_its_norm():
    found = changes(partial(LAMB, lr=0.01))
    assert [float(c.norm() / p.detach().norm()) for c, p in zip(found, layers(), strict=True)] == pytest.approx(
        [0.01] * 3
    )


def test_without_factors_lamb_is_adamw():
    assert close(trained(partial(LAMB, lr=0.01, adapt=False)), trained(partial(AdamW, lr=0.01, eps=1e-6)), rtol=1e-12)


# Two stages.


FIRST, SECOND = partial(SGD, lr=0.1), partial(Adam, lr=0.02)


def test_the_first_steps_are_those_of_the_first_optimizer_to_the_bit():
    two = partial(TwoStage, first=FIRST, second=SECOND, steps=6)
    assert same(trained(two), trained(FIRST))
    assert same(trained(partial(two, steps=0)), trained(SECOND))


def test_adam_starts_without_a_memory_of_the_first_stage():
    params = layers()
    optimizer = TwoStage(params, first=FIRST, second=SECOND, steps=3)
    for k in range(4):
        give_gradients(params, seed=10 * k)
        before = [p.detach().clone() for p in params]
        optimizer.step()
    for p, b in zip(params, before, strict=True):
        assert p.grad is not None
        assert torch.allclose(p.detach() - b, -0.02 * p.grad.sign(), rtol=1e-5)


def test_a_schedule_acts_on_both_stages():
    halved = trained(partial(TwoStage, first=FIRST, second=SECOND, steps=3), rate=lambda k: 0.05)
    assert same(halved, trained(partial(TwoStage, first=partial(SGD, lr=0.05), second=partial(Adam, lr=0.01), steps=3)))


@pytest.mark.parametrize("after", [2, 3, 5])
def test_two_stages_continue_from_a_saved_state(after: int):
    params = layers()
    make = partial(TwoStage, first=partial(SGD, lr=0.1, momentum=0.9), second=SECOND, steps=3)
    optimizer = make(params)
    for k in range(7):
        if k == after:
            saved = copy.deepcopy(optimizer.state_dict())
            params = [nn.Parameter(p.detach().clone()) for p in params]
            optimizer = make(params)
            optimizer.load_state_dict(saved)
        give_gradients(params, seed=10 * k)
        optimizer.step()
    whole = layers()
    optimizer = make(whole)
    for k in range(7):
        give_gradients(whole, seed=10 * k)
        optimizer.step()
    assert all(same(p.detach(), q.detach()) for p, q in zip(params, whole, strict=True))


# Linear scaling.


def test_one_step_with_a_large_batch_is_near_to_small_steps_with_the_scaled_rate():
    """The difference is of second order: half the rate has a quarter of it."""
    x, y = numbers(16, 6, seed=2), numbers(16, 3, seed=3)

    def after(rate: float, batch: int) -> Tensor:
        torch.manual_seed(0)
        model = network()
        optimizer = SGD(model.parameters(), lr=rate * batch / 4)
        for part, wanted in zip(x.split(batch), y.split(batch), strict=True):
            optimizer.zero_grad()
            (model(part) - wanted).square().mean().backward()
            optimizer.step()
        return vector(model)

    gaps = [float((after(rate, 16) - after(rate, 4)).norm()) for rate in (0.02, 0.01, 0.005)]
    assert [sqrt(a / b) for a, b in pairwise(gaps)] == pytest.approx([2.0, 2.0], rel=0.05)
