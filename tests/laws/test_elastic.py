"""Elastic averaging: workers and centre pull each other with equal and opposite force."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from paceline import (
    EAMSGD,
    EASGD,
    AllReduceSGD,
    AsyncEASGD,
    Cluster,
    Constant,
    EAWild,
    LogNormal,
    Replica,
    RoundRobinEASGD,
    Task,
    Then,
    simulate,
)
from paceline.families.elastic import UnstableElastic, largest_share
from paceline.strategy import Strategy
from tests.laws.tasks import (
    Point,
    close,
    instant,
    network,
    numbers,
    quadratic,
    regression,
    same,
    squared_distance,
    squared_error,
    vector,
)

FORMS = {"async": AsyncEASGD, "with momentum": partial(EAMSGD, momentum=0.0)}
LR = 0.1


def plain(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR)


def ends(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[Tensor, Tensor]]:
    """The final parameters of each worker of the next run, and the centre as that worker knows it. The run itself
    returns only the centre."""
    found: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(w: Replica) -> None:
        if w.published is not None:
            found[w.rank] = w.params.clone(), w.published.clone()
            w.params.copy_(w.published)
            w.published = None

    monkeypatch.setattr("paceline.worker.run.take_published", keep)
    monkeypatch.setattr("paceline.worker.replica.take_published", keep)
    return found


def gradient_at(task: Task, x: Tensor, step: int, rank: int, workers: int) -> Tensor:
    model = task.build()
    start = 0
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(x[start : start + p.numel()].view(p.shape))
            start += p.numel()
    task.loss(model, task.part(step, rank, workers)).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def in_turn(task: Task, workers: int, alpha: float, period: int) -> tuple[list[Tensor], Tensor]:
    """The paper's update, for one worker after the other. The elastic move and the gradient both start at the old
    values.

    At the end each worker averages with the centre once more.
    """
    centre = vector(task.build())
    xs = [centre.clone() for _ in range(workers)]
    for k in range(task.total_steps):
        for j in range(workers):
            force = alpha * (xs[j] - centre) if k % period == 0 else torch.zeros_like(centre)
            centre = centre + force
            xs[j] = xs[j] - LR * gradient_at(task, xs[j], k, j, workers) - force
    for j in range(workers):
        force = alpha * (xs[j] - centre)
        centre, xs[j] = centre + force, xs[j] - force
    return xs, centre


def together(task: Task, workers: int, alpha: float, period: int) -> tuple[list[Tensor], Tensor]:
    """The paper's update, for all workers at once. Workers learn only at a meeting that all data has ended."""
    centre = vector(task.build())
    xs = [centre.clone() for _ in range(workers)]
    last = task.total_steps - 1
    for k in range(-(-last // period) * period + 1):
        forces = [alpha * (x - centre) if k % period == 0 else torch.zeros_like(x) for x in xs]
        if k <= last:
            xs = [x - LR * gradient_at(task, x, k, j, workers) for j, x in enumerate(xs)]
        xs = [x - force for x, force in zip(xs, forces, strict=True)]
        centre = centre + torch.stack(forces).sum(0)
    return xs, centre


def walk(*, steps: int, batch: int, samples: int, seed: int = 0) -> Task:
    """A slope that is the same everywhere, so it is known how far all workers move together."""

    def slope(model: Any, batch: Sequence[Tensor]) -> Tensor:
        return (model.w * batch[0]).sum(1).mean()

    return Task(lambda: Point(5), slope, [numbers(samples, 5, seed=seed)], batch, plain, steps=steps)


def come_to(task: Task, workers: int) -> Tensor:
    """The sum of workers and centre that is expected after all steps."""
    start = vector(task.build())
    gone = [gradient_at(task, start, k, j, workers) for k in range(task.total_steps) for j in range(workers)]
    return (workers + 1) * start - LR * sum(g for g in gone if g.isfinite().all())


def staggered(workers: int, **more: Any) -> Cluster:
    """All workers are equally fast, except for tiny differences that keep them in the order of their ranks."""
    return instant(workers, compute=Constant([1.0 + 1e-4 * j for j in range(workers)]), **more)


# The synchronous form.


@pytest.mark.parametrize(("workers", "period"), [(3, 1), (4, 1), (4, 3), (2, 11), (2, 20)])
def test_the_synchronous_form_equals_the_papers(workers: int, period: int, monkeypatch: pytest.MonkeyPatch):
    task, found = regression(steps=12, batch=12, optimizer=plain), ends(monkeypatch)
    run = simulate(task, EASGD(beta=0.6, period=period), instant(workers))
    xs, centre = together(task, workers, 0.6 / workers, period)
    assert all(close(found[j][0], x) for j, x in enumerate(xs))
    assert close(run.params, centre)
    assert not close(run.params, vector(task.build()), rtol=1e-2), "something was learnt"


def test_the_synchronous_centre_is_a_moving_average_of_the_mean(monkeypatch: pytest.MonkeyPatch):
    """One more step moves it by beta towards the workers' mean after the step before."""
    found = ends(monkeypatch)

    def centre_and_mean(steps: int) -> tuple[Tensor, Tensor]:
        run = simulate(regression(steps=steps, batch=12, optimizer=plain), EASGD(beta=0.7, period=1), instant(3))
        return run.params, torch.stack([x for x, _ in found.values()]).mean(0)

    (before, mean), (after, _) = centre_and_mean(5), centre_and_mean(6)
    assert close(after, 0.3 * before + 0.7 * mean)
    assert not close(after, before, rtol=1e-3)


def test_unequal_parts_of_a_minibatch_conserve_the_sum(monkeypatch: pytest.MonkeyPatch):
    """Parts of 3, 2 and 2 samples: a worker with more samples pulls the centre more, and is pulled back as much
    more."""
    task, found = walk(steps=8, batch=7, samples=28), ends(monkeypatch)
    simulate(task, EASGD(beta=0.6, period=2), instant(3))
    assert close(sum(x for x, _ in found.values()) + found[0][1], come_to(task, 3))


@pytest.mark.filterwarnings("ignore::paceline.NonFiniteGradient")
def test_a_step_without_a_gradient_conserves_the_sum(monkeypatch: pytest.MonkeyPatch):
    """The gradient of a minibatch with NaN in it is skipped."""
    task, found = walk(steps=6, batch=4, samples=24), ends(monkeypatch)
    task.data[0][5] = float("nan")
    simulate(task, AsyncEASGD(alpha=0.3, period=1), instant(2))
    assert close(sum(x for x, _ in found.values()) + found[0][1], come_to(task, 2))


class Apart(Task):
    """Every worker has its own data, the same at each step."""

    def part(self, step: int, rank: int, workers: int) -> tuple[Tensor, ...]:
        return tuple(t[rank : rank + 1] for t in self.data)


def curved(model: Any, batch: Sequence[Tensor]) -> Tensor:
    """Half the curvature times the squared distance."""
    return batch[1].mean() * squared_distance(model, batch[:1])


@pytest.mark.slow
@pytest.mark.parametrize("curvatures", [(1.0, 1.0, 1.0), (0.5, 1.0, 3.0)], ids=["equal", "unequal"])
@pytest.mark.parametrize("rho", [0.5, 2.0])
def test_the_fixed_point_of_parabolas_with_different_minima(
    rho: float, curvatures: Sequence[float], monkeypatch: pytest.MonkeyPatch
):
    """The centre is where springs in series with the parabolas hold it. Every worker is between its own minimum and the
    centre.

    The centre minimises the sum of the parabolas only if all have the same curvature.
    """
    minima, found = torch.tensor([[1.0, -2.0], [4.0, 0.5], [-2.0, 3.0]], dtype=torch.float64), ends(monkeypatch)
    h = torch.tensor(curvatures, dtype=torch.float64).unsqueeze(1)
    task = Apart(lambda: Point(2), curved, [minima, h], 3, plain, steps=400)
    simulate(task, EASGD(rho=rho, period=1), instant(3))
    k = h * rho / (h + rho)
    centre = (k * minima).sum(0) / k.sum()
    assert all(close(found[j][1], centre, rtol=1e-6) for j in range(3))
    assert all(close(found[j][0], (h[j] * minima[j] + rho * centre) / (h[j] + rho), rtol=1e-6) for j in range(3))
    assert close(centre, (h * minima).sum(0) / h.sum(), rtol=1e-2) == (len(set(curvatures)) == 1)


class Permuted(Task):
    """Every worker has the data of another worker."""

    order: Sequence[int] = ()

    def part(self, step: int, rank: int, workers: int) -> tuple[Tensor, ...]:
        return super().part(step, self.order[rank], workers)


def test_permuting_the_workers_data_changes_only_rounding(monkeypatch: pytest.MonkeyPatch):
    """Parts of 4, 3 and 3 samples."""
    found = ends(monkeypatch)

    def run(*order: int) -> tuple[Tensor, dict[int, Tensor]]:
        task = Permuted(network, squared_error, regression(steps=12, batch=10).data, 10, plain, steps=12)
        task.order = order
        centre = simulate(task, EASGD(beta=0.6, period=2), instant(3)).params
        return centre, {other: found[j][0] for j, other in enumerate(order)}

    centre, workers = run(0, 1, 2)
    for order in ((2, 0, 1), (1, 0, 2)):
        permuted, there = run(*order)
        assert close(permuted, centre) and all(close(there[j], workers[j]) for j in range(3))
    assert not close(run(0, 1, 1)[0], centre, rtol=1e-3), "the data of workers differ"


# On shards, and without a lock.


@pytest.mark.parametrize(("workers", "period"), [(1, 1), (3, 1), (3, 2)])
@pytest.mark.parametrize("form", FORMS)
def test_in_the_order_of_ranks_it_equals_the_papers_round_robin(
    form: str, workers: int, period: int, monkeypatch: pytest.MonkeyPatch
):
    task, found = regression(steps=8, batch=12, optimizer=plain), ends(monkeypatch)
    run = simulate(task, FORMS[form](alpha=0.3, period=period), staggered(workers))
    xs, centre = in_turn(task, workers, 0.3, period)  # 8 steps are a multiple of the period.
    assert all(close(found[j][0], x) for j, x in enumerate(xs))
    assert close(run.params, centre)


@pytest.mark.parametrize("servers", [0, 1, 2], ids=["in memory", "on a shard", "on shards"])
@pytest.mark.parametrize(("workers", "period"), [(1, 1), (3, 1), (3, 2)])
def test_ea_wild_in_the_order_of_ranks_equals_it_too(
    servers: int, workers: int, period: int, monkeypatch: pytest.MonkeyPatch
):
    """This holds although EA-wild computes the centre's side of the difference where the centre is."""
    task, found = regression(steps=8, batch=12, optimizer=plain), ends(monkeypatch)
    run = simulate(task, EAWild(alpha=0.3, period=period, servers=servers), staggered(workers))
    _, centre = in_turn(task, workers, 0.3, period)
    assert close(run.params, centre)
    assert len(found) == workers


@pytest.mark.parametrize("speeds", [0.0, 0.5])
def test_round_robin_keeps_the_order_at_any_speeds(speeds: float, monkeypatch: pytest.MonkeyPatch):
    """All workers have the same data here, because parts of minibatches go to the workers that ask first."""
    task, found = quadratic(steps=8, batch=3, samples=3, optimizer=plain), ends(monkeypatch)
    task.data[0][:] = task.data[0][0]
    run = simulate(task, RoundRobinEASGD(alpha=0.3, period=1), instant(3, compute=LogNormal(1.0, speeds)))
    xs, centre = in_turn(task, 3, 0.3, 1)
    assert close(run.params, centre)
    assert len(found) == len(xs)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "strategy", [AsyncEASGD(alpha=0.3, period=2), RoundRobinEASGD(alpha=0.3, period=2)], ids=["async", "round robin"]
)
def test_only_gradients_change_the_sum_of_workers_and_centre(
    strategy: Strategy, seed: int, monkeypatch: pytest.MonkeyPatch
):
    """In any order."""
    task, found = walk(steps=18, batch=8, samples=24, seed=seed), ends(monkeypatch)
    simulate(task, strategy, Cluster(4, compute=LogNormal("5ms", 0.8), bandwidth="1MB/s", seed=seed))
    assert close(sum(x for x, _ in found.values()) + found[0][1], come_to(task, 4))


@pytest.mark.parametrize("seed", range(6))
def test_momentum_0_equals_async_easgd_to_the_bit(seed: int):
    task, cluster = regression(steps=10, batch=9, optimizer=plain), Cluster(3, compute=LogNormal("5ms", 0.8), seed=seed)
    assert same(
        simulate(task, EAMSGD(momentum=0.0, period=2), cluster).params,
        simulate(task, AsyncEASGD(period=2), cluster).params,
    )


def test_one_worker_with_momentum_and_no_force_is_nesterov_in_look_ahead_form(monkeypatch: pytest.MonkeyPatch):
    task, found, mu = regression(steps=12, batch=6, optimizer=plain), ends(monkeypatch), 0.7
    run = simulate(task, EAMSGD(alpha=0.0, momentum=mu, period=1), instant(1))
    x, v = vector(task.build()), torch.zeros(1, dtype=torch.float64)
    for k in range(task.total_steps):
        v = mu * v - LR * gradient_at(task, x + mu * v, k, 0, 1)
        x = x + v
    assert close(found[0][0], x)
    assert same(run.params, vector(task.build())), "nothing pulls the centre"


@pytest.mark.parametrize("strategy", [EASGD(alpha=0.0, period=2), EAWild(alpha=0.0)], ids=str)
def test_without_a_force_workers_train_alone(strategy: Strategy, monkeypatch: pytest.MonkeyPatch):
    task, found = regression(steps=10, batch=9, optimizer=plain), ends(monkeypatch)
    run = simulate(task, strategy, instant(3))
    for j in range(3):
        model = task.build()
        optimizer = plain(model.parameters())
        for k in range(task.total_steps):
            optimizer.zero_grad()
            task.loss(model, task.part(k, j, 3)).backward()
            optimizer.step()
        assert same(found[j][0], vector(model))
    assert same(run.params, vector(task.build()))


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize("size", [2, 4])
def test_a_group_equals_one_worker_with_all_its_minibatches(size: int, servers: int):
    task = regression(steps=9, batch=16, optimizer=plain)
    in_groups = simulate(task, EAWild(alpha=0.2, group=size, servers=servers), instant(2 * size))
    alone = simulate(task, EAWild(alpha=0.2, servers=servers), instant(2))
    assert close(in_groups.params, alone.params)


@pytest.mark.parametrize("seed", range(8))
def test_the_centre_stays_within_the_range_of_its_old_values_and_targets(seed: int):
    """This holds although updates are lost: memory is so slow here that all workers write at the same time."""
    task = quadratic(steps=30, batch=8, samples=40, numel=64, optimizer=plain)
    run = simulate(task, EAWild(alpha=0.9), Cluster(4, compute=LogNormal("1ms", 0.5), bus="200kB/s", seed=seed))
    everything = torch.cat([task.data[0], vector(task.build()).unsqueeze(0)])
    assert (run.params >= everything.amin(0)).all() and (run.params <= everything.amax(0)).all()
    assert not close(run.params, vector(task.build()), rtol=1e-2)


def test_random_groups_change_and_are_the_same_for_all_their_members():
    strategy, ranks = EAWild(group=2, groups="random", regroup=10), range(6)
    seen: set[tuple[int, ...]] = set()
    for step in range(5, 80, 10):
        groups = [strategy.group_of(rank, ranks, step) for rank in ranks]
        assert all(rank in group and groups[other] == group for rank, group in enumerate(groups) for other in group)
        assert sorted(r for group in set(groups) for r in group) == list(ranks)
        seen |= set(groups)
    assert len(seen) > 3


def test_new_groups_start_with_the_mean_of_their_members(monkeypatch: pytest.MonkeyPatch):
    """Without a force, so only the groups bring their members together."""
    task, found, ranks = regression(steps=8, batch=12, optimizer=plain), ends(monkeypatch), range(6)
    strategy = EAWild(alpha=0.0, group=2, groups="random", regroup=3)
    simulate(task, strategy, instant(6))
    xs, groups = [vector(task.build()) for _ in ranks], [(rank,) for rank in ranks]
    for k in range(task.total_steps):
        if k % 3 == 0:
            before, groups = groups, [strategy.group_of(rank, ranks, k) for rank in ranks]
            assert groups != before, "others meet"
            xs = [torch.stack([xs[j] for j in group]).mean(0) for group in groups]
        gradients = [gradient_at(task, xs[j], k, j, 6) for j in ranks]
        xs = [xs[j] - LR * torch.stack([gradients[i] for i in groups[j]]).mean(0) for j in ranks]
    assert all(close(found[j][0], xs[j]) for j in ranks)


def test_groups_start_where_the_method_before_ended(monkeypatch: pytest.MonkeyPatch):
    task, found = regression(steps=9, batch=12, optimizer=plain), ends(monkeypatch)
    simulate(task, Then(AllReduceSGD(), EAWild(alpha=0.0, group=2), steps=3), instant(4))
    assert close(found[0][0], found[1][0]) and close(found[2][0], found[3][0])
    assert not close(found[0][0], found[2][0], rtol=1e-3)


@pytest.mark.parametrize("period", [5, 100])
@pytest.mark.parametrize("servers", [0, 1])
def test_the_last_steps_reach_the_centre(servers: int, period: int):
    task = regression(steps=12, batch=12, optimizer=plain)
    run = simulate(task, EAWild(alpha=0.3, period=period, servers=servers), instant(3))
    assert not close(run.params, vector(task.build()), rtol=1e-2)


def test_it_is_faster_than_round_robin():
    """On one bus, where round robin takes time for every turn."""
    task, host = (
        quadratic(steps=40, batch=4, numel=100),
        Cluster(4, compute=LogNormal("1ms", 0.2), bus="10MB/s", latency="20us"),
    )
    wild, in_turn = (simulate(task, s, host).seconds for s in (EAWild(), RoundRobinEASGD(period=1, servers=1)))
    assert wild < 0.9 * in_turn


def test_no_worker_waits_for_a_lock():
    """An exchange takes as long among many workers as alone, although memory is so slow that all are always in one."""
    task = quadratic(steps=20, batch=4, numel=100)
    among, alone = (simulate(task, EAWild(), instant(n, compute="1us", memory_bandwidth="1kB/s")) for n in (4, 1))
    assert among.seconds == pytest.approx(alone.seconds)


# Where it is stable.


@pytest.mark.slow
@pytest.mark.parametrize("lr", [0.1, 0.5, 1.5])
@pytest.mark.parametrize("kind", ["async", "together"])
def test_at_the_bound_on_alpha_a_parabola_diverges(kind: str, lr: float):
    workers = 1 if kind == "async" else 4
    bound = largest_share(lr, None if kind == "async" else workers)

    def distance(alpha: float) -> float:
        task = quadratic(steps=400, batch=workers, samples=workers, optimizer=partial(torch.optim.SGD, lr=lr))
        task.data[0][:] = 0.0
        with warnings.catch_warnings(action="ignore"):
            strategy = AsyncEASGD(alpha=alpha, period=1) if kind == "async" else EASGD(alpha=alpha, period=1)
            return float(simulate(task, strategy, instant(workers)).params.abs().max())

    assert distance(0.97 * bound) < 1e-2
    assert distance(1.03 * bound) > 10


@pytest.mark.parametrize("strategy", [EASGD(beta=2.0), AsyncEASGD(alpha=1.2), EAWild(rho=30.0)], ids=str)
def test_a_force_that_is_too_strong_causes_a_warning_with_the_bound(strategy: Strategy):
    task = quadratic(steps=4, batch=4, optimizer=plain)
    bound = largest_share(LR, 4 if isinstance(strategy, EASGD) else None)
    with pytest.warns(UnstableElastic, match=f"alpha=.* with 4 workers is above {bound:.4g}"):
        simulate(task, strategy, instant(4))


def test_a_moderate_force_causes_no_warning():
    with warnings.catch_warnings(action="error"):
        simulate(quadratic(steps=4, batch=4, optimizer=plain), EASGD(), instant(4))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: EASGD(alpha=-0.1), "alpha=-0.1"),
        (lambda: AsyncEASGD(rho=float("nan")), "rho=nan"),
        (lambda: EASGD(alpha=0.1, rho=1.0), "give one of them"),
        (lambda: EASGD(period=0), "at least 1"),
        (lambda: EAMSGD(momentum=1.0), r"\[0, 1\)"),
        (lambda: EAWild(group=0), "at least 1 worker"),
        (lambda: EAWild(groups=cast(Any, "some")), "'fixed' or 'random'"),
        (lambda: AsyncEASGD(servers=0), "at least 1 shard"),
        (lambda: AsyncEASGD(sparse=True), "there are no rows to send"),
    ],
)
def test_impossible_settings_are_refused(make: Any, says: str):
    with pytest.raises(ValueError, match=says):
        make()


def test_groups_that_do_not_divide_the_workers_are_refused():
    with pytest.raises(ValueError, match="5 workers make 2 groups and leave 1 over"):
        simulate(quadratic(steps=4, batch=4), EAWild(group=2), instant(5))
