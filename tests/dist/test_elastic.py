"""Workers that are killed, on real processes: the others continue, and no acknowledged update is lost or applied
twice."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.engines.server_process import NAME
from tests.dist.processes import processes_below

WORKERS = 3


def counting(steps: int, batch: int, slow_s: float = 0.0) -> pl.Task:
    """Every sample has its own parameter, and an update adds one to it."""
    samples = steps * batch

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total = nn.Parameter(torch.zeros(samples))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        assert isinstance(model, Sum)
        time.sleep(slow_s)
        return -(batch[0] @ model.total).sum()

    return pl.Task(
        model=Sum,
        loss=loss,
        data=[torch.eye(samples)],
        batch=batch,
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        steps=steps,
    )


@contextmanager
def killer(times: int, *, every_s: float, begin: threading.Event | None = None) -> Iterator[list[float]]:
    """Kill one of this process's workers at random moments, from the time that `begin` is set."""
    done, killed, chance = threading.Event(), list[float](), random.Random(0)

    def run() -> None:
        while not (begin is None or begin.wait(0.05) or done.is_set()):
            pass
        while len(killed) < times and not done.wait(chance.uniform(0.2, 1.8) * every_s):
            workers = [p for p in multiprocessing.active_children() if p.name.startswith("worker-") and p.pid]
            if workers:
                victim = chance.choice(workers)
                assert victim.pid is not None
                os.kill(victim.pid, signal.SIGKILL)
                killed.append(time.monotonic())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield killed
    finally:
        done.set()
        thread.join()


def after(step: int, event: threading.Event) -> Callable[[int], None]:
    """A `progress` that sets the event at that step."""
    return lambda k: event.set() if k >= step else None


def test_every_sample_is_applied_once_when_workers_are_killed_and_replaced():
    task, begin = counting(steps=150, batch=6, slow_s=0.01), threading.Event()
    method = pl.ParameterServer(rule=pl.rules.Sgd(lr=1.0), servers=1)
    with killer(5, every_s=0.3, begin=begin) as killed:
        run = pl.train(task, method, workers=WORKERS, replacements=10, progress=after(5, begin))
    assert killed, "the run was over before anybody was killed"
    assert run.params.tolist() == [1.0] * task.samples


def test_the_others_continue_without_a_replacement():
    task, begin = counting(steps=120, batch=6, slow_s=0.01), threading.Event()
    method = pl.StaleSynchronous(lr=1.0, bound=2, servers=2)
    with killer(2, every_s=0.4, begin=begin) as killed:  # The bound keeps step 5 for after all have joined.
        run = pl.train(task, method, workers=WORKERS, replacements=0, progress=after(5, begin))
    assert len(killed) == 2
    assert run.params.tolist() == [1.0] * task.samples
    starts = sorted(s.start for s in run.trace.spans if s.kind == "gradient")
    assert max(b - a for a, b in pairwise(starts)) < 1.0


def test_a_replacement_that_starts_too_late_changes_nothing(tmp_path: Path):
    """The first worker is killed, and its replacement starts only after the others have finished."""
    task, parent, flag = counting(steps=40, batch=6, slow_s=0.01), os.getpid(), tmp_path / "killed"

    def model() -> nn.Module:
        if flag.exists() and os.getpid() != parent:
            time.sleep(4.0)
        return task.model()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if multiprocessing.current_process().name == "worker-0" and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return task.loss(model, batch)

    late = replace(task, model=model, loss=loss)
    run = pl.train(late, pl.ParameterServer(rule=pl.rules.Sgd(lr=1.0), servers=1), workers=WORKERS, replacements=1)
    assert flag.exists() and run.params.tolist() == [1.0] * task.samples


def test_servers_report_their_work_when_workers_are_killed(tmp_path: Path):
    task, flag = counting(steps=60, batch=6, slow_s=0.01), tmp_path / "killed"

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if multiprocessing.current_process().name == "worker-0" and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return task.loss(model, batch)

    mortal = replace(task, loss=loss)
    run = pl.train(mortal, pl.ParameterServer(rule=pl.rules.Sgd(lr=1.0), servers=1), workers=WORKERS, replacements=0)
    assert run.params.tolist() == [1.0] * task.samples
    assert sum(run.trace.staleness_counts.values()) == 60 * WORKERS


def test_an_error_says_that_all_workers_were_killed():
    with killer(WORKERS, every_s=0.1), pytest.raises(pl.ClusterError, match="was killed by SIGKILL"):
        pl.train(counting(steps=400, batch=6, slow_s=0.02), pl.ParameterServer(), workers=WORKERS, replacements=0)


def test_an_error_in_a_worker_ends_the_run_and_is_named():
    task = counting(steps=50, batch=6)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        raise KeyError("a mistake of the user's")

    with pytest.raises(pl.ClusterError, match="a mistake of the user's"):
        pl.train(replace(task, loss=loss), pl.ParameterServer(), workers=2)


def test_an_error_names_a_killed_server():
    def kill_a_server(k: int) -> None:
        if k >= 5:
            for pid in processes_below(NAME):
                os.kill(pid, signal.SIGKILL)

    with pytest.raises(pl.ClusterError, match=r"server|exit code 70"):
        pl.train(
            counting(steps=300, batch=6, slow_s=0.01),
            pl.ParameterServer(servers=1),
            workers=2,
            progress=kill_a_server,
        )
