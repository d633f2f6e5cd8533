"""Shards that are killed, on real processes: they come back, workers wait, and each sample is applied once in each.

That nothing is left behind, processes and memory, is checked after each test of this folder.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

import paceline as pl
from paceline.engines.keeper import NAME as KEEPER
from paceline.engines.server_process import NAME
from tests.dist.processes import processes_below
from tests.dist.test_elastic import counting

EXACT: dict[str, pl.Strategy] = {
    "one shard": pl.ParameterServer(rule=pl.rules.Sgd(lr=1.0), servers=1, durability="process"),
    "two shards": pl.ParameterServer(rule=pl.rules.Sgd(lr=1.0), servers=2, durability="process"),
    "bounded": pl.StaleSynchronous(lr=1.0, bound=1, servers=1, durability="process"),
}


def kill(pids: list[int]) -> bool:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return True


def at_steps(*actions: tuple[int, Callable[[], bool]]) -> Callable[[int], None]:
    """A progress function that calls each action from its step on, until it has been possible."""
    left = list(actions)

    def progress(step: int) -> None:
        if left and step >= left[0][0] and left[0][1]():
            left.pop(0)

    return progress


@pytest.mark.parametrize("strategy", EXACT.values(), ids=EXACT)
def test_every_sample_is_applied_once_when_shards_are_killed(strategy: pl.Strategy):
    killed: list[int] = []

    def kill_all() -> bool:
        """Kill all shards, once they are there."""
        there = [pid for pid in processes_below(NAME) if pid not in killed]
        if len(there) == strategy.servers:
            kill(there)
            killed.extend(there)
        return len(there) == strategy.servers

    task = counting(steps=60, batch=6, slow_s=0.005)
    run = pl.train(task, strategy, workers=2, progress=at_steps((8, kill_all), (16, kill_all)), timeout_s=30)
    assert len(killed) == 2 * strategy.servers
    assert run.params.tolist() == [1.0] * task.samples


def test_every_sample_is_applied_once_when_a_shard_and_a_worker_are_killed_together():
    def kill_both() -> bool:
        workers = [p.pid for p in multiprocessing.active_children() if p.name == "worker-1" and p.pid]
        return kill([processes_below(NAME)[-1], *workers])

    task = counting(steps=40, batch=6, slow_s=0.01)
    progress = at_steps((10, kill_both))
    run = pl.train(task, EXACT["two shards"], workers=2, replacements=1, progress=progress, timeout_s=30)
    assert run.params.tolist() == [1.0] * task.samples
    assert any(span.rank > 3 for span in run.trace.spans), "the replacement has worked"


def test_shards_that_are_killed_while_the_job_starts_come_back():
    """Each shard is killed as soon as it is there: before its mailbox, before its first value, while workers join."""
    killed: list[int] = []
    done = threading.Event()

    def kill_early() -> None:
        while not done.is_set() and len(killed) < 6:
            for pid in processes_below(NAME):
                if pid not in killed:
                    time.sleep(0.004 * len(killed))
                    killed.append(pid)
                    kill([pid])

    thread = threading.Thread(target=kill_early)
    thread.start()
    try:
        task = counting(steps=20, batch=6)
        run = pl.train(task, EXACT["two shards"], workers=2, timeout_s=30)
    finally:
        done.set()
        thread.join()
    assert len(killed) == 6
    assert run.params.tolist() == [1.0] * task.samples


def test_a_killed_keeper_ends_the_job_with_its_servers():
    """It is the parent of the servers, which no process could bring back any more."""
    with pytest.raises(pl.ClusterError, match="exit code 70"):
        pl.train(
            counting(steps=400, batch=6, slow_s=0.01),
            EXACT["one shard"],
            workers=2,
            progress=at_steps((4, lambda: kill(processes_below(KEEPER)))),
            timeout_s=30,
        )
