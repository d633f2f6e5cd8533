"""The task: every sample once an epoch, in an order that does not depend on the number of workers."""

from __future__ import annotations

import math
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline import AllReduceSGD, Cluster, Task, simulate
from paceline.stripes import stripe_of
from paceline.task import Trainee
from tests.laws.tasks import OPTIMIZERS, quadratic, regression, same


def counting(*, samples: int, batch: int, seed: int = 0) -> Task:
    """A data set in which each sample is its own index."""
    return Task(
        lambda: nn.Linear(1, 1),
        lambda model, batch: model.weight.sum(),
        [torch.arange(samples)],
        batch,
        OPTIMIZERS["sgd"],
        epochs=2,
        seed=seed,
    )


def drawn(task: Task, workers: int) -> list[list[list[int]]]:
    return [[task.part(k, rank, workers)[0].tolist() for rank in range(workers)] for k in range(task.total_steps)]


@given(samples=st.integers(1, 60), batch=st.integers(1, 20), workers=st.integers(1, 9), seed=st.integers(0, 5))
def test_parts_are_disjoint_nearly_equal_and_together_the_minibatch(samples: int, batch: int, workers: int, seed: int):
    """This includes fewer samples than workers."""
    task = counting(samples=samples, batch=batch, seed=seed)
    steps = drawn(task, workers)
    for k, parts in enumerate(steps):
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == min(batch, samples - k % task.steps_per_epoch * batch)
    for epoch in range(2):
        seen = [
            i
            for parts in steps[epoch * task.steps_per_epoch : (epoch + 1) * task.steps_per_epoch]
            for part in parts
            for i in part
        ]
        assert sorted(seen) == list(range(samples))


@given(lengths=st.lists(st.integers(1, 9), min_size=7, max_size=7), batch=st.integers(1, 20))
def test_each_worker_reads_every_sample_of_its_own_once_in_each_of_its_epochs(lengths: list[int], batch: int):
    """One task, on 1 to 7 workers one after the other."""
    task = Task(
        lambda: nn.Linear(1, 1),
        lambda model, batch: model.weight.sum(),
        lambda rank, workers: [torch.arange(lengths[rank] + workers)],
        batch,
        OPTIMIZERS["sgd"],
        steps=30,
    )
    for workers in range(1, 8):
        steps = drawn(task, workers)
        assert all(sum(map(len, parts)) == batch for parts in steps)
        for rank in range(workers):
            samples = lengths[rank] + workers
            read = [i for parts in steps for i in parts[rank]]
            epochs = [read[i : i + samples] for i in range(0, len(read), samples)]
            assert all(sorted(epoch) == list(range(samples)) for epoch in epochs[:-1])
            assert all(len({*epoch}) == len(epoch) for epoch in epochs)


@given(samples=st.integers(1, 60), batch=st.integers(1, 20), workers=st.integers(2, 9))
def test_the_global_order_does_not_depend_on_the_number_of_workers(samples: int, batch: int, workers: int):
    alone, together = (
        drawn(counting(samples=samples, batch=batch), 1),
        drawn(counting(samples=samples, batch=batch), workers),
    )
    assert [[*chain(*parts)] for parts in together] == [parts[0] for parts in alone]


def test_every_epoch_and_every_seed_has_its_own_order():
    orders = [
        tuple(chain(*(task.part(k, 0, 1)[0].tolist() for k in range(start, start + 5))))
        for task, start in ((counting(samples=50, batch=10, seed=s), e) for s in (0, 1) for e in (0, 5))
    ]
    assert len(set(orders)) == 4


def test_epochs_may_be_visited_in_any_order():
    """A resumed run never draws the epochs before it."""
    task, fresh = counting(samples=50, batch=10), counting(samples=50, batch=10)
    for k in range(7):
        task.part(k, 0, 1)
    assert task.part(2, 0, 1)[0].tolist() == fresh.part(2, 0, 1)[0].tolist()
    assert task.part(7, 1, 3)[0].tolist() == fresh.part(7, 1, 3)[0].tolist()


@given(numel=st.integers(0, 5000), owners=st.integers(1, 12), unit=st.sampled_from([1, 8, 512]))
def test_stripes_cover_everything_once_in_order_and_in_whole_units(numel: int, owners: int, unit: int):
    stripes = [stripe_of(j, numel, owners, unit=unit) for j in range(owners)]
    assert stripes[0].start == 0 and stripes[-1].stop == numel
    assert all(a.stop == b.start for a, b in pairwise(stripes))
    assert all(s.start % unit == 0 or s.start == numel for s in stripes)
    units = [-(-(s.stop - s.start) // unit) for s in stripes]
    assert max(units) - min(units) <= 1 and units == sorted(units, reverse=True)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"steps": 3, "epochs": 1.0}, r"steps=3, epochs=1.0.*one of the two"),
        ({}, r"steps=None, epochs=None.*one of the two"),
        ({"steps": 3, "batch": 0}, r"batch=0"),
        ({"steps": 3, "data": [torch.zeros(3), torch.zeros(4)]}, r"lengths \[3, 4\]"),
        ({"steps": 3, "data": [torch.zeros(0)]}, r"lengths \[0\]"),
    ],
)
def test_an_impossible_task_is_refused_by_name(settings: dict[str, Any], named: str):
    usual = {
        "model": nn.Identity,
        "loss": lambda m, b: b[0],
        "data": [torch.zeros(3)],
        "batch": 2,
        "optimizer": OPTIMIZERS["sgd"],
    }
    with pytest.raises(ValueError, match=named):
        Task(**usual | settings)


@pytest.mark.parametrize("settings", [{"steps": -1}, {"epochs": -1.0}, {"epochs": math.inf}], ids=str)
def test_a_negative_or_infinite_length_is_refused(settings: dict[str, Any]):
    with pytest.raises(ValueError, match="must be finite and at least 0"):
        Task(nn.Identity, lambda m, b: b[0], [torch.zeros(3)], 2, OPTIMIZERS["sgd"], **settings)


def test_epochs_are_counted_in_steps():
    assert counting(samples=25, batch=10).steps_per_epoch == 3
    assert counting(samples=25, batch=10).total_steps == 6
    half = Task(nn.Identity, lambda m, b: b[0], [torch.zeros(40)], 10, OPTIMIZERS["sgd"], epochs=0.5)
    assert half.total_steps == 2


def test_the_initial_model_is_the_same_everywhere_and_does_not_change_the_random_state():
    task = regression(steps=1, batch=4)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    a, b = task.build(), task.build()
    assert all(same(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert torch.equal(torch.rand(1), expected)
    other = regression(steps=1, batch=4, seed=1).build()
    assert not same(next(a.parameters()), next(other.parameters()))


def test_a_simulation_does_not_change_the_random_state():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    simulate(
        regression(steps=3, batch=4, model=lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)).double()),
        AllReduceSGD(),
        Cluster(workers=2),
    )
    assert torch.equal(torch.rand(1), expected)


def test_a_failing_loss_does_not_change_the_random_state():
    def fails(model: nn.Module, batch: Any) -> torch.Tensor:
        raise ArithmeticError

    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    task = Task(lambda: nn.Linear(1, 1), fails, [torch.zeros(4, 1)], 4, OPTIMIZERS["sgd"], steps=1)
    with pytest.raises(ArithmeticError):
        Trainee(task, task.build(), 0, 1).backward((torch.zeros(4, 1),))
    assert torch.equal(torch.rand(1), expected)


def test_each_worker_has_its_own_random_numbers():
    """With one shared stream, all workers would drop the same units."""
    task = regression(steps=1, batch=4, model=lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)).double())
    batch = (torch.ones(8, 6, dtype=torch.float64), torch.zeros(8, 3, dtype=torch.float64))
    losses = []
    for rank in range(3):
        trainee = Trainee(task, task.build(), rank, 3)
        trainee.backward(batch)
        losses.append(trainee.loss)
    assert len(set(losses)) == 3


def test_evaluation_uses_eval_mode_and_restores_everything():
    modes: list[bool] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        modes.append(model.training)
        return {"sum": model.w.sum().item()}

    task = quadratic(steps=1, batch=4, evaluate=evaluate)
    trainee = Trainee(task, task.build(), 0, 1)
    before = trainee.flat.params.clone()
    assert trainee.evaluate(torch.full((5,), 2.0, dtype=torch.float64)) == {"sum": 10.0}
    assert modes == [False] and trainee.flat.model.training and same(trainee.flat.params, before)


def test_a_run_is_evaluated_once_an_epoch_and_at_its_end():
    task = quadratic(steps=10, batch=4, samples=16, evaluate=lambda model: {"sum": model.w.sum().item()})
    run = simulate(task, AllReduceSGD(), Cluster(workers=2))
    assert [e.samples for e in run.trace.evaluations] == [16, 32, 40]
    assert run.final == {"sum": pytest.approx(run.params.sum().item())}
