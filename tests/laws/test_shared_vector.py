"""Vectors in shared memory, and Hogwild! on them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import (
    AllReduceSGD,
    Cluster,
    ClusterError,
    EAWild,
    Faults,
    Hogwild,
    LogNormal,
    Task,
    Then,
    simulate,
    train,
)
from paceline.endpoint import Layout, WriteCounts
from paceline.families.centre import InMemory
from paceline.families.company import Company
from paceline.sim.endpoint import SimEndpoint
from paceline.sim.simulator import Simulator
from paceline.sim.world import World
from paceline.strategies.hogwild import train_on_copies
from paceline.transport.endpoint import Clock, ProcessEndpoint
from paceline.transport.shared_vector import StagedSharedVector
from paceline.worker.replica import Replica
from tests.dist.test_decentralised import mortal
from tests.laws.ranks import on_shared_memory
from tests.laws.tasks import OPTIMIZERS, Point, close, instant, numbers, regression, same, trained_alone, vector

LR = 0.125  # A power of two, so that sums of small integers are exact.


def sharing(workers: int, **more: Any) -> tuple[Simulator, list[SimEndpoint]]:
    layout = Layout(workers)
    simulator = Simulator(layout.name)
    world = World(simulator, instant(workers, **more), layout, strict=True)
    return simulator, [SimEndpoint(world, rank) for rank in range(workers)]


def test_all_start_with_the_first_ranks_values_and_see_the_changes_of_others():
    simulator, endpoints = sharing(3)
    found: list[Tensor] = []

    async def role(endpoint: SimEndpoint) -> None:
        common = await endpoint.shared_vector(torch.full((16,), float(endpoint.rank)))
        await endpoint.busy(1.0 + endpoint.rank)
        await common.draw(torch.full((16,), 8.0), 0.5)
        await endpoint.busy(5.0)
        found.append(await common.read(torch.empty(16)))

    simulator.run({e.rank: role(e) for e in endpoints})
    assert all(x.unique().tolist() == [7.0] for x in found), "0, 4, 6, 7"


def test_a_reader_may_get_parts_of_different_ages_and_a_change_may_be_lost():
    simulator, endpoints = sharing(3, memory_bandwidth="64B/s")
    read, left = torch.empty(16), torch.empty(16)

    async def role(endpoint: SimEndpoint) -> None:
        common = await endpoint.shared_vector(torch.zeros(16))
        if endpoint.rank == 2:
            await endpoint.busy(0.5)
            read.copy_(common.values)  # As a gradient that starts at this moment does.
            await endpoint.busy(5.0)
            left.copy_(common.values)
        else:
            await endpoint.busy(0.01 * endpoint.rank)  # Within the time of a piece.
            await common.draw(torch.full((16,), 8.0), 0.5)

    simulator.run({e.rank: role(e) for e in endpoints})
    assert set(read.tolist()) == {0.0, 4.0}
    assert left.unique().tolist() == [4.0], "one of the two was lost; both would have made 6"


# Hogwild!


def loss_of(task: Task, params: Tensor) -> float:
    """The loss on all data."""
    model = task.build()
    torch.nn.utils.vector_to_parameters(params, model.parameters())
    return task.loss(model, tuple(task.data)).item()


def halfway(task: Task) -> float:
    return (loss_of(task, vector(task.build())) + loss_of(task, trained_alone(task))) / 2


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_one_process_trains_as_without_paceline_bit_for_bit(optimizer: Any):
    task = regression(steps=12, batch=5, samples=22, optimizer=optimizer)
    assert same(train(task, Hogwild(), workers=1).params, trained_alone(task))


def slope(model: Any, batch: Sequence[Tensor]) -> Tensor:
    """The gradient is the same everywhere, so the sum of all steps is known."""
    return (model.w * batch[0]).sum(1).mean()


def walk(data: Tensor, steps: int = 12) -> Task:
    return Task(lambda: Point(data.shape[1]), slope, [data], 4, lambda p: torch.optim.SGD(p, lr=LR), steps=steps)


def after_all_steps(task: Task, workers: int) -> Tensor:
    parts = [task.part(k, j, workers)[0].mean(0) for k in range(task.total_steps) for j in range(workers)]
    return vector(task.build()) - LR * torch.stack(parts).sum(0)


@pytest.mark.parametrize("seed", range(5))
def test_no_step_is_lost_where_writes_take_no_time(seed: int):
    task = walk(numbers(16, 24, seed=seed))
    run = simulate(task, Hogwild(), instant(4, compute=LogNormal(1.0, 0.7), seed=seed))
    assert close(run.params, after_all_steps(task, 4))


def test_dense_steps_are_lost_where_writes_take_long_and_the_loss_still_falls():
    task = walk(numbers(16, 24))
    run = simulate(task, Hogwild(), instant(4, compute=LogNormal(1.0, 0.7), memory_bandwidth="100B/s"))
    assert not close(run.params, after_all_steps(task, 4), rtol=1e-3)
    learning = regression(steps=60, batch=8, optimizer=OPTIMIZERS["sgd"])
    slow = simulate(learning, Hogwild(), instant(4, compute=LogNormal(1.0, 0.7), memory_bandwidth="5kB/s"))
    assert loss_of(learning, slow.params) < halfway(learning)


@pytest.mark.parametrize("seed", range(5))
def test_steps_that_change_different_values_give_the_same_result_in_any_order(seed: int):
    """Writes may take any time: each sample has its own values, and its gradient changes no others."""
    task = walk(torch.eye(16, dtype=torch.float64) * numbers(16, seed=seed), steps=4)
    run = simulate(task, Hogwild(), instant(4, compute=LogNormal(1.0, 0.7), memory_bandwidth="20B/s", seed=seed))
    assert close(run.params, after_all_steps(task, 4))


# Staleness.


# Workers of equal speed write in the order of their ranks.  In Hogwild a worker reads after its own write.  In EA-wild
# all workers read at the same moment, and then write.
STALENESS = {Hogwild(): [0, 1] + 16 * [2], EAWild(): [0, 1, 2] + 5 * [2, 3, 4]}


@pytest.mark.parametrize("strategy", STALENESS, ids=["hogwild", "ea-wild"])
def test_the_staleness_of_a_write_counts_the_writes_of_others_since_the_read_before_it(strategy: Any):
    run = simulate(regression(steps=6, batch=9, optimizer=OPTIMIZERS["sgd"]), strategy, instant(3))
    points = [p for p in run.trace.points if p.staleness is not None]
    assert [p.step for p in points] == list(range(18)), "the number of writes before each write"
    assert [p.staleness for p in points] == STALENESS[strategy]
    assert [p.rank for p in points] == 6 * [0, 1, 2]


def test_a_slow_worker_has_the_stale_writes():
    """It computes for the time of four steps of the others, which see its writes seldom."""
    run = simulate(walk(numbers(16, 24), steps=8), Hogwild(), instant(3, compute=[1.0, 1.0, 4.5]))
    slow = [p.staleness for p in run.trace.points if p.rank == 2 and p.staleness is not None]
    assert slow[0] == 8, "four steps of each of the others"
    assert slow[2:] == 6 * [0], "the others have finished"


@pytest.mark.parametrize("strategy", [Hogwild(), EAWild()], ids=["hogwild", "ea-wild"])
def test_a_single_worker_has_no_stale_write(strategy: Any):
    assert set(train(regression(steps=5, batch=5), strategy, workers=1).trace.staleness()) == {0}


# Workers with their models on a device: they step on copies of the shared memory.


class OnCopies(Hogwild):
    """Hogwild as it runs on a device other than the CPU."""

    async def worker(self, w: Replica) -> None:
        company = await Company.of(w)
        await train_on_copies(w, company)
        await company.wait_for_all()
        w.params.copy_(company.vector.values)


def test_steps_on_copies_equal_steps_in_place():
    task = regression(steps=12, batch=5, samples=22, optimizer=OPTIMIZERS["adam"])
    assert close(simulate(task, OnCopies(), instant(1)).params, trained_alone(task))
    task = walk(numbers(16, 24))
    run = simulate(task, OnCopies(), instant(4, compute=LogNormal(1.0, 0.7), seed=3))
    assert close(run.params, after_all_steps(task, 4))
    assert sum(run.trace.staleness_counts.values()) == 48


def test_writes_through_a_buffer_on_the_host_equal_direct_writes():
    endpoint = ProcessEndpoint(0, Layout(1), Clock(0.0))
    start, change, towards = numbers(7, seed=1), numbers(7, seed=2), numbers(7, seed=3)
    counts = WriteCounts(torch.zeros(1, dtype=torch.int64), 0)
    staged = StagedSharedVector(endpoint, start.clone(), counts, memoryview(bytes(8)), torch.empty_like(start))
    staged.add(change).wait()
    staged.draw(towards, 0.25).wait()
    assert same(staged.read(torch.empty_like(start)).wait(), (start + change).lerp(towards, 0.25))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 4, sparse=True)


def of_words(model: Any, batch: Sequence[Tensor]) -> Tensor:
    return model.table(batch[0]).sum(-1).mean()


@pytest.mark.parametrize("how", ["simulated", pytest.param("real", marks=pytest.mark.dist)])
def test_sparse_steps_change_only_their_rows(how: str):
    """The time of a step is that of its rows."""
    words = torch.arange(0, 64).view(32, 2)
    task = Task(Words, of_words, [words], 8, lambda p: torch.optim.SGD(p, lr=LR), steps=4)
    before = vector(task.build()).view(1000, 4)
    cluster = Cluster(2, memory_bandwidth="10kB/s")
    run = simulate(task, Hogwild(), cluster) if how == "simulated" else train(task, Hogwild(), workers=2)
    moved = (run.params.view(1000, 4) != before).any(1)
    assert moved[:64].all() and not moved[64:].any()
    # Every row is in the mean of one of four minibatches, of any worker.
    assert torch.allclose(run.params.view(1000, 4)[:64], before[:64] - LR / 8, atol=1e-6)
    if how == "simulated":
        dense = Task(
            lambda: Point(4000, torch.float32),
            slope,
            [torch.ones(32, 4000)],
            8,
            lambda p: torch.optim.SGD(p, lr=LR),
            steps=4,
        )
        assert simulate(dense, Hogwild(), cluster).seconds > 10 * run.seconds


def test_a_strategy_after_hogwild_has_parameters_of_its_own():
    def task(steps: int) -> Task:
        return regression(steps=steps, batch=9, optimizer=OPTIMIZERS["sgd"])

    run = simulate(task(9), Then(Hogwild(), AllReduceSGD(), steps=5), instant(3))
    model = task(9).build()
    torch.nn.utils.vector_to_parameters(simulate(task(5), Hogwild(), instant(3)).params, model.parameters())
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for k in range(5, 9):
        optimizer.zero_grad()
        task(9).loss(model, task(9).part(k, 0, 1)).backward()
        optimizer.step()
    assert close(run.params, vector(model))


# On real processes.


@pytest.mark.dist
def test_a_worker_stopped_within_a_write_does_not_delay_the_others(tmp_path: Path):
    """Half of the centre still has the values from before the write, and the other worker averages with it."""

    async def law(endpoint: ProcessEndpoint) -> list[float]:
        common = await endpoint.shared_vector(torch.zeros(1 << 20))
        is_over = await endpoint.shared_vector(torch.zeros(1))
        writer = int((await endpoint.broadcast(torch.tensor([os.getpid()]), 0))[0])
        if endpoint.rank == 0:
            while not is_over.values:
                await common.draw(torch.ones(1 << 20), 1e-3)
            return []
        seen, is_amid = torch.empty(1 << 20), False
        while not is_amid:
            os.kill(writer, signal.SIGCONT)
            os.kill(writer, signal.SIGSTOP)
            while Path(f"/proc/{writer}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                pass
            is_amid = bool(common.values[0] != common.values[-1])
        for _ in range(3):
            await InMemory(common, endpoint).meet(torch.full((1 << 20,), 8.0), 0.5, seen)
        is_over.values.fill_(1.0)
        os.kill(writer, signal.SIGCONT)
        return [float(seen[0]), float(seen[-1])]

    _, [first, last] = on_shared_memory(tmp_path, 2, law, True)
    assert first != last and min(first, last) >= 6.0


@pytest.mark.dist
@pytest.mark.parametrize(
    "strategy", [Hogwild(), EAWild(), EAWild(group=2), EAWild(group=2, groups="random", regroup=5)], ids=str
)
def test_real_processes_learn_in_shared_memory(strategy: Any):
    task = regression(steps=80, batch=8, optimizer=OPTIMIZERS["sgd"])
    run = train(task, strategy, workers=4)
    assert loss_of(task, run.params) < halfway(task)
    assert sum(p.loss is not None for p in run.trace.points) == 4 * 80
    # Hogwild writes at every step; a group of EA-wild when it meets the centre, from its second step on and at the end.
    writes = 4 * 80 if isinstance(strategy, Hogwild) else (4 // strategy.group) * 80
    assert sum(run.trace.staleness_counts.values()) == writes
    assert min(run.trace.staleness()) >= 0 and max(run.trace.staleness()) > 0


@pytest.mark.dist
def test_a_worker_of_a_group_that_is_killed_does_not_leave_the_others_waiting(tmp_path: Path):
    task = mortal(walk(numbers(16, 3)), tmp_path / "flag", lambda n: n == 3, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(ClusterError, match=r"rank 1 \(process \d+\) was killed by SIGKILL"):
        train(task, EAWild(group=2), workers=4, timeout_s=30)
    assert time.monotonic() - began < 20


# Workers that die and join.


@pytest.mark.parametrize("strategy", [Hogwild(), EAWild()], ids=["hogwild", "ea-wild"])
def test_a_replacement_continues_where_the_dead_worker_was(strategy: Any):
    """Whenever it dies: the minibatch that it was at is computed again, and no other."""
    task = walk(torch.eye(32, dtype=torch.float64) * numbers(32, seed=1), steps=8)
    for seed in range(12):
        chance = Random(seed)
        died = chance.uniform(0.01, 7.0)
        faults = Faults({1: died}, joins=[died + chance.uniform(0.0, 0.4)])
        run = simulate(task, strategy, instant(3, compute=LogNormal(1.0, 0.3), seed=seed), faults=faults)
        steps = sorted(p.step for p in run.trace.points if p.rank in (1, 3) and p.loss is not None)
        assert steps == list(range(8)), seed
        if isinstance(strategy, Hogwild):
            assert close(run.params, after_all_steps(task, 3)), seed


class Rows(nn.Module):
    """Every sample has a row of its own, and a step adds one to it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 1, sparse=True)
        nn.init.zeros_(self.table.weight)


ROWS = 360


def each_row(model: Any, batch: Sequence[Tensor]) -> Tensor:
    time.sleep(0.01)
    return -model.table(batch[0]).sum()


@pytest.mark.dist
@pytest.mark.parametrize("victim", [0, 1])  # The first one may have made the memory.
def test_when_a_worker_of_hogwild_is_killed_its_replacement_takes_its_place(victim: int, tmp_path: Path):
    task = Task(Rows, each_row, [torch.arange(ROWS)], 6, lambda p: torch.optim.SGD(p, lr=1.0), steps=60)
    deadly = mortal(task, tmp_path / "flag", lambda n: n == 10, signal.SIGKILL, victim)
    assert train(deadly, Hogwild(), workers=3, replacements=1).params.tolist() == [1.0] * ROWS


@pytest.mark.dist
@pytest.mark.parametrize("strategy", [Hogwild(), EAWild()], ids=["hogwild", "ea-wild"])
def test_without_a_replacement_the_others_go_on(strategy: Any, tmp_path: Path):
    task = mortal(walk(numbers(16, 3), steps=40), tmp_path / "flag", lambda n: n == 3, signal.SIGKILL)
    run = train(task, strategy, workers=3, replacements=0)
    steps = [[p.step for p in run.trace.points if p.rank == rank and p.loss is not None] for rank in range(3)]
    assert steps == [list(range(40)), [], list(range(40))], "the trace of a killed worker is lost with it"
