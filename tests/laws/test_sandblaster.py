"""Sandblaster is L-BFGS on one machine, whatever the numbers of workers and shards; its coordinator sees no vector."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import AllReduceSGD, Cluster, Sandblaster, Shard, Stragglers, Task, simulate
from paceline.line_search import Point, strong_wolfe
from paceline.op import Op, Ready, drive
from paceline.server.coordinator import Coordinator
from paceline.strategies.sandblaster import Pair
from tests.laws.tasks import close, numbers, quadratic, regression, vector

FEATURES, SAMPLES = 12, 96


class Linear(nn.Module):
    def __init__(self, numel: int, size: float = 0.5) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-size, size, numel, dtype=torch.float64))


def logistic(epochs: int, *, batch: int = 24, decay: float = 0.01, scales: Tensor | None = None, size: float = 0.5) -> Task:
    """Logistic regression; `scales` of the features make it ill-conditioned."""
    x = numbers(SAMPLES, FEATURES, seed=1) * (1.0 if scales is None else scales)
    y = (x @ numbers(FEATURES, seed=2) + 0.5 * numbers(SAMPLES, seed=3) > 0).double()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        assert isinstance(model, Linear)
        return F.binary_cross_entropy_with_logits(batch[0] @ model.w, batch[1]) + 0.5 * decay * model.w.square().sum()

    return Task(lambda: Linear(FEATURES, size), loss, [x, y], batch, lambda params: torch.optim.SGD(params, lr=0.1), epochs=epochs)


def least_squares(epochs: int, numel: int) -> Task:
    """A quadratic whose Hessian has a condition number of some hundred."""
    a, b = numbers(3 * numel, numel, seed=4) * torch.logspace(0, -1, numel, dtype=torch.float64), numbers(3 * numel, seed=5)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        assert isinstance(model, Linear)
        return 0.5 * (batch[0] @ model.w - batch[1]).square().mean()

    return Task(lambda: Linear(numel), loss, [a, b], numel, lambda params: torch.optim.SGD(params, lr=0.1), epochs=epochs)


def valleys(epochs: int, numel: int) -> Task:
    """Many curved valleys, down each of which it takes some steps."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        assert isinstance(model, Linear)
        a, b = model.w[::2] - batch[0], model.w[1::2]
        return ((1 - a).square() + 3 * (b - a.square()).square()).mean()

    return Task(lambda: Linear(numel), loss, [numbers(8, 1)], 4, lambda params: torch.optim.SGD(params, lr=0.1), epochs=epochs)


def whole(task: Task, w: np.ndarray) -> tuple[float, np.ndarray]:
    """The loss over all of the data, and its gradient, in one go."""
    model = task.build()
    with torch.no_grad():
        next(model.parameters()).copy_(torch.from_numpy(w))
    loss = task.loss(model, tuple(task.data))
    loss.backward()
    grad = next(model.parameters()).grad
    assert grad is not None
    return loss.item(), grad.numpy().copy()


def reference(task: Task, passes: int, *, history: int, c1: float = 1e-4) -> np.ndarray:
    """L-BFGS with backtracking as a reader would write it for one machine; where it stands after so many evaluations."""
    w = vector(task.build()).numpy().copy()
    value, g = whole(task, w)
    spent, steps, changes = 1, deque[np.ndarray](maxlen=history), deque[np.ndarray](maxlen=history)
    while True:
        q, alphas = g.copy(), list[float]()
        for s, y in zip(reversed(steps), reversed(changes), strict=True):
            alphas.append(float(s @ q / (y @ s)))
            q -= alphas[-1] * y
        q *= steps[-1] @ changes[-1] / (changes[-1] @ changes[-1]) if steps else 1 / np.linalg.norm(g)
        for s, y, alpha in zip(steps, changes, reversed(alphas), strict=True):
            q += (alpha - y @ q / (y @ s)) * s
        t = 1.0
        while True:
            if spent == passes:
                return w
            new_value, new_g = whole(task, w - t * q)
            spent += 1
            if new_value <= value - c1 * t * (q @ g):
                break
            t /= 2
        steps.append(-t * q)
        changes.append(new_g - g)
        w, value, g = w - t * q, new_value, new_g


@dataclass(frozen=True)
class Watched(Sandblaster):
    """Notes what the coordinator does and hears."""

    slopes: list[float] = field(default_factory=list[float], compare=False)
    pairs: list[int] = field(default_factory=list[int], compare=False)  # how many there are after each step
    heard: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]], compare=False)  # sender and bytes of each message

    async def server(self, s: Shard) -> None:
        if s.endpoint.rank == s.endpoint.layout.server_ranks[0]:
            s.endpoint = Listening(s.endpoint, self.heard)  # pyright: ignore
        await super().server(s)

    async def find(self, c: Coordinator, start: Point) -> Point | None:
        self.slopes.append(start.slope)
        return await super().find(c, start)

    async def remember(self, c: Coordinator, pairs: deque[Pair]) -> None:
        await super().remember(c, pairs)
        self.pairs.append(len(pairs))


@dataclass(frozen=True)
class Measured(Watched):
    """Notes also how long each gradient is."""

    norms: list[float] = field(default_factory=list[float], compare=False)

    async def remember(self, c: Coordinator, pairs: deque[Pair]) -> None:
        await super().remember(c, pairs)
        self.norms.append((await c.dot("g", "g")) ** 0.5)


class Listening:
    """An endpoint that notes what it receives."""

    def __init__(self, endpoint: Any, heard: list[tuple[int, int]]) -> None:
        self._endpoint, self._heard = endpoint, heard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._endpoint, name)

    def recv(self, **given: Any) -> Op[Any]:
        return self._endpoint.spawn(self._recv(given))

    async def _recv(self, given: Any) -> Any:
        message = await self._endpoint.recv(**given)
        self._heard.append((message.src, message.nbytes))
        return message


@pytest.mark.parametrize("history", [1, 3, 10])
@pytest.mark.parametrize("passes", [1, 2, 3, 5, 8, 13, 20])
def test_it_is_l_bfgs_on_one_machine_step_for_step(history: int, passes: int):
    task = logistic(passes)
    run = simulate(task, Sandblaster(history=history), Cluster(workers=3, compute=[0.01, 0.013, 0.03]))
    expected = torch.from_numpy(reference(task, passes, history=history))
    assert close(run.params, expected, rtol=1e-9)
    if passes > 1:
        assert not close(expected, vector(task.build()), rtol=1e-2), "something was learnt"


@pytest.mark.parametrize("passes", [2, 3, 4, 6, 9])
def test_it_backtracks_as_on_one_machine(passes: int):
    task = logistic(passes, decay=5.0, size=0.1)  # The first step, of length 1, is longer than the way to the minimum.
    run = simulate(task, Sandblaster(), Cluster(workers=2))
    assert close(run.params, torch.from_numpy(reference(task, passes, history=10)), rtol=1e-9)
    if passes == 2:
        assert close(run.params, vector(task.build())), "the first try was refused, and there is no other in the budget"


@pytest.mark.parametrize("search", ["armijo", "wolfe"])
@pytest.mark.parametrize("shards", [2, 5, 12])
def test_any_number_of_shards_is_one_shard(search: Any, shards: int):
    one, many = (simulate(logistic(12), Sandblaster(shards=n, search=search), Cluster(workers=3)).params for n in (1, shards))
    assert close(one, many, rtol=1e-9)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_any_number_of_workers_is_one_worker(workers: int):
    one, many = (simulate(logistic(12), Sandblaster(), Cluster(workers=n)).params for n in (1, workers))
    assert close(one, many, rtol=1e-9)


def test_several_parameters_of_a_network_are_one_vector():
    task = regression(steps=80, batch=8, samples=32)
    run = simulate(task, Sandblaster(search="wolfe"), Cluster(workers=3))
    before, after = (task.loss(model, tuple(task.data)).item() for model in (task.build(), run.model))
    assert after < 0.4 * before


@pytest.mark.parametrize("history", [5, 20])
def test_with_an_exact_line_search_a_quadratic_of_n_values_takes_n_iterations(history: int):
    numel = 12
    strategy = Measured(history=history, search="wolfe", c1=1e-9, c2=1e-8)
    simulate(least_squares(6 * numel, numel), strategy, Cluster(workers=3))
    assert min(strategy.norms[: numel + 1]) < 1e-7 * strategy.norms[0]  # A short history loses some digits.
    assert strategy.norms[numel // 2] > 1e-2 * strategy.norms[0], "it was not too easy"


@pytest.mark.parametrize("search", ["armijo", "wolfe"])
def test_every_direction_leads_downhill(search: Any):
    strategy = Watched(search=search)
    simulate(logistic(15), strategy, Cluster(workers=3))
    assert len(strategy.slopes) > 8
    assert all(slope < 0 for slope in strategy.slopes)


def test_the_gradient_of_a_pass_is_that_of_one_minibatch_of_all_the_data():
    task = logistic(2, batch=7)
    start = vector(task.build())
    together = Task(task.model, task.loss, task.data, SAMPLES, lambda params: torch.optim.SGD(params, lr=1.0), steps=1)
    g = start - simulate(together, AllReduceSGD(), Cluster(workers=3)).params
    step = start - simulate(task, Sandblaster(), Cluster(workers=3)).params
    assert close(step, g / g.norm())


@pytest.mark.parametrize("numel", [40, 4000])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("history", [2, 10])
def test_the_coordinator_hears_inner_products_alone(numel: int, shards: int, history: int):
    """Of 8 bytes from each shard: with m pairs 2m + 2 for a direction, and one more to see that it leads down and one to see that the
    pair tells something.  Nothing depends on the size of the model."""
    strategy = Watched(shards=shards, history=history)
    task = valleys(12, numel)
    simulate(task, strategy, Cluster(workers=2))
    assert len(strategy.pairs) >= 5
    assert max(nbytes for _, nbytes in strategy.heard) <= 32
    products = 1 + sum(2 * m + 1 for m in strategy.pairs[: len(strategy.slopes) - 1]) + 3 * len(strategy.pairs)
    for shard in range(2 + 1, 2 + 1 + shards):
        assert sum(nbytes for src, nbytes in strategy.heard if src == shard) == 8 * products
