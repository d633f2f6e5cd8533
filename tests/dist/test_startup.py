"""Workers that are killed while a job starts, and workers that hang; benchmarks/startups.py kills after every step."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.transport.progress import Progress, hung_s
from tests.dist import forked
from tests.dist.starting import Steps, mortal
from tests.dist.test_elastic import counting

pytestmark = [pytest.mark.dist, pytest.mark.timeout(60)]
SERVED = pl.ParameterServer(rule=pl.rules.Sgd(lr=1.0), servers=2)


@pytest.mark.parametrize(
    ("strategy", "rank", "step", "times"),
    [
        (SERVED, 0, "set pid/0", 2),  # The others know it, and nobody has started the servers.
        (SERVED, 0, "start servers [3, 4]", 1),  # Its replacement starts a second set of servers.
        (SERVED, 0, "send start to 3", 1),  # One shard has the first value, and the other has not.
        (pl.Gossip(), 1, "open the mailbox", 2),  # The others find its address.
    ],
    ids=["before servers", "after servers", "between first values", "after the mailbox"],
)
def test_a_run_goes_on_when_a_worker_is_killed_at_its_start(
    strategy: pl.Strategy, rank: int, step: str, times: int, tmp_path: Path
):
    task, steps = counting(steps=12, batch=6, slow_s=0.005), Steps(tmp_path, rank=rank, step=step, times=times)
    with mortal(steps):
        run = pl.train(task, strategy, workers=3, timeout_s=20.0)
    assert steps.killed == times, f"it took none of these steps: {steps.of(rank)}"
    if strategy is SERVED:
        assert run.params.tolist() == [1.0] * task.samples


def test_a_rank_that_was_killed_before_it_joined_and_is_not_replaced_is_named(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(f"""
import os, sys, torch
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import paceline as pl
from tests.dist.starting import Steps, mortal
from pathlib import Path
model = torch.nn.Linear(2, 1)
with mortal(Steps(Path({str(tmp_path)!r}), rank=1, step="meet")), pl.attach(model, None, pl.ParameterServer()):
    raise AssertionError("it began without rank 1")
""")
    done = forked.paceline("run", "-n", "2", "--replacements", "0", str(script), folder=tmp_path, timeout_s=30)
    assert done.returncode == 1
    assert "rank 1 was killed before it had joined the job, and is not replaced" in done.stderr


def hanging(task: pl.Task, flag: Path, hang: Callable[[float], object]) -> pl.Task:
    """The same task, but the second worker hangs in its sixth gradient, once."""
    done = 0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal done
        done += 1
        if multiprocessing.current_process().name == "worker-1" and done == 6 and not flag.exists():
            flag.touch()
            hang(1000)
        return task.loss(model, batch)

    return replace(task, loss=loss)


def with_the_lock_of_python(seconds: float) -> None:
    """Sleep in C code that lets no thread of Python run, so that no heartbeat is sent."""
    ctypes.PyDLL(None).sleep(int(seconds))


@pytest.mark.parametrize(
    ("strategy", "hang"),
    [(pl.ASGD(period=1), time.sleep), (SERVED, with_the_lock_of_python), (pl.Gossip(), time.sleep)],
    ids=["asgd", "server", "gossip"],
)
def test_a_worker_that_hangs_is_killed_and_replaced(
    strategy: pl.Strategy, hang: Callable[[float], object], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    task = counting(steps=40, batch=6, slow_s=0.01)
    run = pl.train(hanging(task, tmp_path / "flag", hang), strategy, workers=3, timeout_s=0.8, replacements=1)
    assert "rank 1 made no progress for 0." in capfd.readouterr().err
    if strategy is SERVED:
        assert run.params.tolist() == [1.0] * task.samples


def test_a_worker_that_writes_its_progress_while_it_is_read_does_not_hang(tmp_path: Path):
    """A half-written time was read as the start of the machine, and the worker was killed."""
    path = tmp_path / "progress"

    def work() -> None:
        progress = Progress(path, timeout_s=1.0)
        while True:
            progress.note()
            progress.rest()

    writer = multiprocessing.get_context("fork").Process(target=work)
    writer.start()
    try:
        assert writer.pid is not None
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            assert hung_s(path, writer.pid) is None
    finally:
        writer.kill()
        writer.join()
    progress = Progress(path, timeout_s=0.01)
    progress.note()
    time.sleep(0.02)
    assert 0.02 <= (hung_s(path, os.getpid()) or 0.0) < 1.0, "one that does nothing is still found"
