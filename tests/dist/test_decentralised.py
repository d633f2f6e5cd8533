"""Methods without a server, on real processes: final models, and workers that are killed, replaced and stopped."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from tests.dist import forked
from tests.dist.test_elastic import counting

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

WORKERS, STEPS, BATCH = 3, 60, 6
PART = BATCH // WORKERS


def mortal(task: pl.Task, flag: Path, when: Callable[[int], bool], how: signal.Signals, victim: int = 1) -> pl.Task:
    """The same task, but one worker sends itself a signal, once, in the gradient that `when` selects; they count from
    0."""
    done = 0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal done
        if multiprocessing.current_process().name == f"worker-{victim}" and when(done) and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), how)
        done += 1
        return task.loss(model, batch)

    return replace(task, loss=loss)


def visits(task: pl.Task, params: torch.Tensor) -> list[list[float]]:
    """How often each data shard of each minibatch was applied, one row for each data shard."""
    rows: list[list[float]] = []
    for rank in range(WORKERS):
        parts = [task.part(k, rank, WORKERS)[0] for k in range(task.total_steps)]
        counts = [{float(v) for v in params[part.argmax(1)]} for part in parts]
        assert all(len(count) == 1 for count in counts), "a message is applied as a whole"
        rows.append([count.pop() for count in counts])
    return rows


@pytest.mark.parametrize("codec", [None, pl.codecs.Threshold(tau=1.0)], ids=str)
def test_every_gradient_is_applied_once(codec: pl.codecs.Codec | None):
    task = counting(STEPS, BATCH)
    run = pl.train(task, pl.Strom(codec, lr=1.0), workers=WORKERS)
    assert run.params.tolist() == [1.0] * task.samples


def test_updates_of_a_killed_worker_stay_and_the_rest_of_its_data_is_left_out(tmp_path: Path):
    task = counting(STEPS, BATCH, slow_s=0.005)
    run = pl.train(
        mortal(task, tmp_path / "flag", lambda n: n == 20, signal.SIGKILL),
        pl.Strom(None, lr=1.0),
        WORKERS,
        replacements=0,
    )
    first, dead, last = visits(task, run.params)
    assert first == last == [1.0] * STEPS
    said = int(sum(dead))
    assert dead == [1.0] * said + [0.0] * (STEPS - said) and said <= 20


def test_a_replacement_continues_the_data_shard_of_the_dead_worker(tmp_path: Path):
    task = counting(400, BATCH, slow_s=0.01)
    run = pl.train(
        mortal(task, tmp_path / "flag", lambda n: n == 20, signal.SIGKILL),
        pl.Strom(None, lr=1.0),
        WORKERS,
        replacements=1,
    )
    first, second, last = visits(task, run.params)
    assert first == last == [1.0] * 400
    lost = second.index(0.0)
    assert lost <= 20
    back = lost + second[lost:].index(1.0)
    assert second == [1.0] * lost + [0.0] * (back - lost) + [1.0] * (400 - back), (
        "only the steps between death and replacement are left out"
    )


@pytest.mark.parametrize(("overlap", "replacements"), [(True, 1), (False, 0)])
def test_gossip_continues_when_a_worker_dies_during_an_exchange(overlap: bool, replacements: int, tmp_path: Path):
    """The second worker is killed while it has offers of others.  The run ends with the mean of the living workers."""
    task = counting(100, BATCH, slow_s=0.01)
    deadly = mortal(task, tmp_path / "flag", lambda n: n == 20, signal.SIGKILL)
    run = pl.train(deadly, pl.Gossip(overlap=overlap), WORKERS, replacements=replacements)
    steps = [{p.step for p in run.trace.points if p.rank == rank} for rank in range(WORKERS + 1)]
    assert steps[0] == steps[2] == set(range(100))
    if replacements:
        assert max(steps[WORKERS]) == 99 and min(steps[WORKERS]) > 0
    # The mean of models that have each applied their own data shard once: no sample can count more than once.
    first, dead, last = visits_of_means(task, run.params)
    assert all(0 < v <= 1 for v in (*first, *last)) and all(0 <= v <= 1 for v in dead)


def visits_of_means(task: pl.Task, params: torch.Tensor) -> list[list[float]]:
    return [
        [float(params[task.part(k, rank, WORKERS)[0].argmax(1)].mean()) for k in range(task.total_steps)]
        for rank in range(WORKERS)
    ]


def test_gossip_ends_with_the_mean_of_all_models():
    """Each sample's gradient was added to one of three models, and averages keep the sum: a third of it is in the
    mean."""
    task = counting(STEPS, BATCH)
    run = pl.train(task, pl.Gossip(), workers=WORKERS)
    assert torch.allclose(run.params, torch.full((task.samples,), 1 / WORKERS), atol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "victim"), [(pl.Strom(None, lr=1.0), 0), (pl.Gossip(), 2)], ids=["strom", "gossip"]
)
def test_workers_do_not_wait_for_a_stopped_worker(strategy: pl.Strategy, victim: int, tmp_path: Path):
    """The others finish without it.  When it continues, the run has ended, and its model does not count."""
    task, flag, began = counting(150, BATCH, slow_s=0.01), tmp_path / "flag", time.monotonic()
    # First it must send a heartbeat, which takes up to a quarter of a second.
    stopped = mortal(
        task, flag, lambda n: n > 100 or (n > 10 and time.monotonic() - began > 1.5), signal.SIGSTOP, victim
    )
    done = threading.Event()

    def wake() -> None:
        while not done.wait(0.05):
            alive = [p for p in multiprocessing.active_children() if p.name.startswith("worker-")]
            if flag.exists() and [p.name for p in alive] == [f"worker-{victim}"] and alive[0].pid:
                return os.kill(alive[0].pid, signal.SIGCONT)

    thread = threading.Thread(target=wake)
    thread.start()
    try:
        run = pl.train(stopped, strategy, WORKERS, replacements=0, silent_s=1.0)
    finally:
        done.set()
        thread.join()
    assert flag.exists(), "the run was over before the worker was stopped"
    others = [rank for rank in range(WORKERS) if rank != victim]
    assert all({p.step for p in run.trace.points if p.rank == rank} == set(range(150)) for rank in others)
    if isinstance(strategy, pl.Strom):
        assert all(visits(task, run.params)[rank] == [1.0] * 150 for rank in others)


@contextmanager
def woken(task: pl.Task, pauses: dict[int, tuple[int, float]], folder: Path) -> Iterator[pl.Task]:
    """The same task, but each of these workers stops in one of its gradients, once, for so many seconds."""
    done, over = 0, threading.Event()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal done
        rank = int(multiprocessing.current_process().name.removeprefix("worker-"))
        if rank in pauses and pauses[rank][0] == done:
            (folder / f"stopped-{rank}").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        done += 1
        return task.loss(model, batch)

    def wake(rank: int, seconds: float) -> None:
        file = folder / f"stopped-{rank}"
        while not (file.exists() and file.read_text()):
            if over.wait(0.01):
                return
        over.wait(seconds)
        os.kill(int(file.read_text()), signal.SIGCONT)

    threads = [threading.Thread(target=wake, args=(rank, seconds)) for rank, (_, seconds) in pauses.items()]
    for thread in threads:
        thread.start()
    try:
        yield replace(task, loss=loss)
    finally:
        over.set()
        for thread in threads:
            thread.join()


# The last one: each is stopped while another one is, so that all suspect each other.
PAUSES = [{1: (30, 1.0)}, {0: (30, 1.0), 1: (60, 1.0), 2: (90, 1.0)}]


@pytest.mark.parametrize("pauses", PAUSES, ids=["one", "all"])
@pytest.mark.parametrize("strategy", [pl.Strom(None, lr=1.0), pl.Gossip()], ids=["strom", "gossip"])
def test_a_worker_that_was_silent_too_long_comes_back(
    strategy: pl.Strategy, pauses: dict[int, tuple[int, float]], tmp_path: Path
):
    """Nobody leaves, and what it has missed is sent again: each gradient counts once."""
    task = counting(150, BATCH, slow_s=0.01)
    with woken(task, pauses, tmp_path) as stopped:
        run = pl.train(stopped, strategy, WORKERS, replacements=0, silent_s=0.4)
    assert all({p.step for p in run.trace.points if p.rank == rank} == set(range(150)) for rank in range(WORKERS))
    if isinstance(strategy, pl.Strom):
        assert run.params.tolist() == [1.0] * task.samples
    else:
        assert torch.allclose(run.params, torch.full((task.samples,), 1 / WORKERS), atol=1e-5)


def test_in_a_users_own_loop(tmp_path: Path):
    """Under the launcher, with sharded minibatches: at the end all ranks have the same model."""
    script = tmp_path / "train.py"
    script.write_text("""
import json, sys, torch, paceline as pl
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
x = torch.randn(240, 8, generator=torch.Generator().manual_seed(0))
for strategy in (pl.Gossip(), pl.Strom(pl.codecs.Threshold(tau=2.0), lr=0.02), pl.Strom(None)):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02) if strategy.needs.optimizer else None
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=24)
    with pl.attach(model, optimizer, strategy) as session:
        for _ in range(12):
            for inputs, targets in session.shard(loader):
                model.zero_grad()
                (model(inputs) - targets).square().mean().backward()
                session.step()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean().item()
    assert loss < 1.0, loss
    with open(f"{sys.argv[1]}/{session.rank}.txt", "a") as file:
        print(json.dumps(model.weight.flatten().tolist()), file=file)
""")
    done = forked.paceline("run", "-n", "2", str(script), str(tmp_path), folder=tmp_path, timeout_s=100)
    assert done.returncode == 0, done.stderr
    first, second = (
        [json.loads(line) for line in (tmp_path / f"{rank}.txt").read_text().splitlines()] for rank in range(2)
    )
    assert len(first) == 3
    for a, b in zip(first, second, strict=True):
        assert torch.allclose(torch.tensor(a), torch.tensor(b), atol=1e-5)
