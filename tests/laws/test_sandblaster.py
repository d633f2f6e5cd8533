"""Sandblaster equals L-BFGS on one machine, for any number of workers and shards. Its coordinator sees no vector."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import (
    AllReduceSGD,
    Cluster,
    Constant,
    Sandblaster,
    Shard,
    Stragglers,
    Task,
    Then,
    attach,
    simulate,
)
from paceline.families.lbfgs import Pair
from paceline.families.line_search import Point, armijo, strong_wolfe
from paceline.op import Op, Ready, drive
from paceline.server.coordinator import Coordinator
from tests.laws.tasks import close, numbers, quadratic, regression, vector

FEATURES, SAMPLES = 12, 96


class Linear(nn.Module):
    def __init__(self, numel: int, size: float = 0.5) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-size, size, numel, dtype=torch.float64))


def logistic(
    epochs: int, *, batch: int = 24, decay: float = 0.01, scales: Tensor | None = None, size: float = 0.5
) -> Task:
    """Logistic regression; the `scales` of the features make it ill-conditioned."""
    x = numbers(SAMPLES, FEATURES, seed=1) * (1.0 if scales is None else scales)
    y = (x @ numbers(FEATURES, seed=2) + 0.5 * numbers(SAMPLES, seed=3) > 0).double()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        assert isinstance(model, Linear)
        return F.binary_cross_entropy_with_logits(batch[0] @ model.w, batch[1]) + 0.5 * decay * model.w.square().sum()

    return Task(
        lambda: Linear(FEATURES, size),
        loss,
        [x, y],
        batch,
        lambda params: torch.optim.SGD(params, lr=0.1),
        epochs=epochs,
    )


def least_squares(epochs: int, numel: int) -> Task:
    """A quadratic whose Hessian has a condition number of some hundred."""
    a, b = (
        numbers(3 * numel, numel, seed=4) * torch.logspace(0, -1, numel, dtype=torch.float64),
        numbers(3 * numel, seed=5),
    )

    def loss(model: nn.Module, batch: Any) -> Tensor:
        assert isinstance(model, Linear)
        return 0.5 * (batch[0] @ model.w - batch[1]).square().mean()

    return Task(
        lambda: Linear(numel), loss, [a, b], numel, lambda params: torch.optim.SGD(params, lr=0.1), epochs=epochs
    )


def valleys(epochs: int, numel: int) -> Task:
    """Many curved valleys; each takes some steps to descend."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        assert isinstance(model, Linear)
        a, b = model.w[::2] - batch[0], model.w[1::2]
        return ((1 - a).square() + 3 * (b - a.square()).square()).mean()

    return Task(
        lambda: Linear(numel), loss, [numbers(8, 1)], 4, lambda params: torch.optim.SGD(params, lr=0.1), epochs=epochs
    )


def whole(task: Task, w: np.ndarray) -> tuple[float, np.ndarray]:
    """The loss over all of the data, and its gradient, in one pass."""
    model = task.build()
    with torch.no_grad():
        next(model.parameters()).copy_(torch.from_numpy(w))
    loss = task.loss(model, tuple(task.data))
    loss.backward()
    grad = next(model.parameters()).grad
    assert grad is not None
    return loss.item(), grad.numpy().copy()


def reference(task: Task, passes: int, *, history: int, c1: float = 1e-4) -> np.ndarray:
    """L-BFGS with backtracking, written by hand for one machine. Returns the parameters after the given number of
    evaluations."""
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
    """Records what the coordinator does and receives."""

    slopes: list[float] = field(default_factory=list[float], compare=False)
    pairs: list[int] = field(default_factory=list[int], compare=False)  # the number of pairs after each step
    heard: list[tuple[int, int]] = field(
        default_factory=list[tuple[int, int]], compare=False
    )  # sender and bytes of each message

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
    """Also records the length of each gradient."""

    norms: list[float] = field(default_factory=list[float], compare=False)

    async def remember(self, c: Coordinator, pairs: deque[Pair]) -> None:
        await super().remember(c, pairs)
        self.norms.append((await c.dot("g", "g")) ** 0.5)


class Listening:
    """An endpoint that records what it receives."""

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
@pytest.mark.parametrize("passes", [1, 2, 3, 5, 9, 16])
def test_it_equals_l_bfgs_on_one_machine_step_for_step(history: int, passes: int):
    task = logistic(passes)
    run = simulate(task, Sandblaster(history=history), Cluster(workers=3, compute=[0.01, 0.013, 0.03]))
    expected = torch.from_numpy(reference(task, passes, history=history))
    assert close(run.params, expected, rtol=1e-9)
    if passes > 1:
        assert not close(expected, vector(task.build()), rtol=1e-2), "something was learnt"


@pytest.mark.parametrize("passes", [2, 3, 4, 6, 9])
def test_it_backtracks_as_on_one_machine(passes: int):
    task = logistic(passes, decay=5.0, size=0.1)  # The first step, of length 1, goes beyond the minimum.
    run = simulate(task, Sandblaster(), Cluster(workers=2))
    assert close(run.params, torch.from_numpy(reference(task, passes, history=10)), rtol=1e-9)
    if passes == 2:
        assert close(run.params, vector(task.build())), "the first try was refused, and there is no other in the budget"


@pytest.mark.parametrize("search", ["armijo", "wolfe"])
@pytest.mark.parametrize("shards", [2, 5, 12])
def test_any_number_of_shards_equals_one_shard(search: Any, shards: int):
    one, many = (
        simulate(logistic(12), Sandblaster(shards=n, search=search), Cluster(workers=3)).params for n in (1, shards)
    )
    assert close(one, many, rtol=1e-9)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_any_number_of_workers_equals_one_worker(workers: int):
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
def test_the_coordinator_receives_only_inner_products(numel: int, shards: int, history: int):
    """Each shard sends 8 bytes for each. With m pairs there are 2m + 2 for a direction, one more to check that it leads
    downhill, and one to check that the pair has information. None depends on the size of the model."""
    strategy = Watched(shards=shards, history=history)
    task = valleys(12, numel)
    simulate(task, strategy, Cluster(workers=2))
    assert len(strategy.pairs) >= 5
    assert max(nbytes for _, nbytes in strategy.heard) <= 32
    products = 1 + sum(2 * m + 1 for m in strategy.pairs[: len(strategy.slopes) - 1]) + 3 * len(strategy.pairs)
    for shard in range(2 + 1, 2 + 1 + shards):
        assert sum(nbytes for src, nbytes in strategy.heard if src == shard) == 8 * products


def test_it_beats_sgd_at_the_same_budget_on_an_ill_conditioned_problem():
    """The scales of the features differ by a factor of 100; each method has 30 epochs."""
    epochs, scales = 30, torch.logspace(0, -2, FEATURES, dtype=torch.float64)
    task = logistic(epochs, decay=1e-3, scales=scales)

    def excess(task: Task, strategy: Any) -> float:
        return whole(task, simulate(task, strategy, Cluster(workers=2)).params.numpy())[0] - lowest

    def by(lr: float) -> Task:
        return Task(
            task.model, task.loss, task.data, task.batch, lambda params: torch.optim.SGD(params, lr=lr), epochs=epochs
        )

    lowest = whole(task, reference(task, 120, history=10))[0]
    rates = [0.3, 1.0, 3.0, 10.0, 30.0]
    sgd = [excess(by(lr), AllReduceSGD()) for lr in rates]
    assert 0 < sgd.index(min(sgd)) < len(rates) - 1, "there is no better rate below or above"
    assert 0 <= excess(task, Sandblaster()) < 0.01 * min(sgd)


def seconds(portions: int, strategy: Sandblaster, slow: dict[int, float]) -> float:
    """The time of one pass on 8 workers. One worker takes 4 s for all of the data."""
    passes = 4
    task = quadratic(steps=passes * portions // 8, batch=8 * 800 // portions, samples=800)
    cluster = Cluster(workers=8, compute=Stragglers(Constant(4.0 / portions), slow=slow))
    return simulate(task, strategy, cluster).seconds / passes


def test_a_worker_ten_times_slower_hardly_slows_down_the_others():
    """Another worker backs up its last portion. Without backups all wait for it."""
    undisturbed = seconds(80, Sandblaster(), {})
    assert seconds(80, Sandblaster(), {3: 10.0}) < 1.3 * undisturbed
    assert seconds(80, Sandblaster(backups=0), {3: 10.0}) > 1.5 * undisturbed


def test_small_portions_take_no_longer_than_their_work():
    assert seconds(240, Sandblaster(), {}) < 1.1 * 4.0 / 8


def test_with_one_portion_a_worker_all_wait_for_the_slowest():
    equal = seconds(8, Sandblaster(backups=0), {})
    assert seconds(8, Sandblaster(backups=0), {3: 10.0}) > 9 * equal
    assert 1.9 * equal < seconds(8, Sandblaster(), {3: 10.0}) < 4 * equal, "a backup does all of it again"


def test_a_model_whose_loss_is_not_finite_is_refused():
    bad = logistic(3)
    poisoned = Task(
        bad.model, lambda model, batch: bad.loss(model, batch) * float("nan"), bad.data, 24, bad.optimizer, epochs=3
    )
    with pytest.raises(FloatingPointError, match="loss of the initial model is not finite"):
        simulate(poisoned, Sandblaster(), Cluster(workers=2), nonfinite="pass")


@pytest.mark.filterwarnings("ignore::paceline.NonFiniteGradient")
@pytest.mark.parametrize("nonfinite", ["skip", "pass"])
def test_a_step_to_a_loss_that_is_not_finite_is_not_taken(nonfinite: Any):
    """log(1 - w.w) is finite up to a distance of 1 from the origin, and the first step goes beyond it."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        assert isinstance(model, Linear)
        return -(1 - model.w.square().sum()).log() - (batch[0] @ model.w).mean()

    data = [numbers(SAMPLES, FEATURES, seed=1) + 1.0]
    task = Task(
        lambda: Linear(FEATURES, 0.3), loss, data, 24, lambda params: torch.optim.SGD(params, lr=0.1), epochs=25
    )
    run = simulate(task, Sandblaster(), Cluster(workers=2), nonfinite=nonfinite)
    value, g = whole(task, run.params.numpy())
    assert value < whole(task, vector(task.build()).numpy())[0]
    assert np.linalg.norm(g) < 1e-3


def test_at_a_minimum_it_ends_before_its_budget():
    task = quadratic(steps=40, batch=4, samples=16)
    task = Task(task.model, task.loss, [vector(task.build()).repeat(16, 1)], 4, task.optimizer, steps=40)
    run = simulate(task, Sandblaster(), Cluster(workers=2))
    assert {p.step for p in run.trace.points if p.loss is not None} == {0, 1, 2, 3}
    assert close(run.params, vector(task.build()))


def test_after_a_warm_start_it_starts_with_the_next_epoch():
    task = logistic(9)
    warm = Then(AllReduceSGD(), Sandblaster(), steps=3)
    run = simulate(task, warm, Cluster(workers=2))
    trained = sorted({p.step for p in run.trace.points if p.loss is not None})
    assert trained == [0, 1, 2, *range(4, 36)]
    warmed = simulate(task, AllReduceSGD(), Cluster(workers=2), stop_at=3).params
    assert whole(task, run.params.numpy())[0] < whole(task, warmed.numpy())[0]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"shards": 0}, r"Sandblaster\(shards=0\): it must be at least 1"),
        ({"history": 0}, r"history=0"),
        ({"push": 0}, r"push=0"),
        ({"backups": -1}, r"backups=-1\): it must be at least 0"),
        ({"search": "exact"}, r"search='exact'\): give 'armijo' or 'wolfe'"),
        ({"c1": 0.9, "c2": 0.1}, r"c1=0.9, c2=0.1\): a line search needs 0 < c1 < c2 < 1"),
    ],
)
def test_impossible_settings_are_refused(given: Any, named: str):
    with pytest.raises(ValueError, match=named):
        Sandblaster(**given)


def test_a_run_of_less_than_an_epoch_is_refused():
    with pytest.raises(ValueError, match="from step 0 to 3: it works on whole epochs, of 4 steps, and there is none"):
        simulate(quadratic(steps=3, batch=4), Sandblaster(), Cluster(workers=2))


def test_more_shards_than_parameters_are_refused():
    with pytest.raises(ValueError, match=r"shards=6\) for 5 parameters"):
        simulate(quadratic(steps=4, batch=4), Sandblaster(shards=6), Cluster(workers=2))


def test_attach_refuses_it():
    """In a user's own loop each worker has its own data, and no other worker can read it."""
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"attach\(Sandblaster\): it needs global data .* a loop of your own"):
        attach(model, None, Sandblaster())


# Line searches.

FUNCTIONS: dict[str, tuple[Any, Any]] = {
    "parabola": (lambda t: (t - 7) ** 2, lambda t: 2 * (t - 7)),
    "near": (lambda t: 100 * (t - 0.013) ** 2, lambda t: 200 * (t - 0.013)),
    "quartic": (lambda t: (t - 3) ** 4 + 0.1 * t, lambda t: 4 * (t - 3) ** 3 + 0.1),
    "waves": (lambda t: np.cos(3 * t) + 0.1 * t * t - 0.5 * t, lambda t: -3 * np.sin(3 * t) + 0.2 * t - 0.5),
    "ends": (
        lambda t: -np.log(0.4 - t) - 9 * t if t < 0.4 else np.inf,
        lambda t: 1 / (0.4 - t) - 9 if t < 0.4 else np.nan,
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("c2", [0.9, 0.1, 1e-4])
def test_strong_wolfe_fulfils_its_conditions(name: str, c2: float):
    f, slope = FUNCTIONS[name]
    tried: list[float] = []

    def trial(t: float) -> Op[Point]:
        tried.append(t)
        return Ready("point", Point(t, f(t), slope(t)))

    found = drive(strong_wolfe(trial, Point(0.0, f(0.0), slope(0.0)), c1=1e-5, c2=c2))
    assert found is not None and found.t == tried[-1]
    assert found.value <= f(0.0) + 1e-5 * found.t * slope(0.0)
    assert abs(found.slope) <= c2 * abs(slope(0.0))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_backtracking_finds_the_first_half_that_is_low_enough(name: str):
    f, slope = FUNCTIONS[name]
    found = drive(armijo(lambda t: Ready("point", Point(t, f(t))), Point(0.0, f(0.0), slope(0.0)), c1=1e-4))
    low = [0.5**n for n in range(20) if f(0.5**n) <= f(0.0) + 1e-4 * 0.5**n * slope(0.0)]
    assert found is not None and found.t == low[0]


def test_uphill_the_line_search_finds_no_step():
    start = Point(0.0, 0.0, -1.0)  # The slope is negative, but the loss rises.
    assert drive(armijo(lambda t: Ready("point", Point(t, t)), start, c1=1e-4)) is None
    assert drive(strong_wolfe(lambda t: Ready("point", Point(t, t, 1.0)), start, c1=1e-4, c2=0.9)) is None
