"""Processes that are stopped or cut off are suspected by their missing heartbeats, not waited for, and may return."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

import paceline as pl
from paceline.protocol.messages import PeerDied, PeerSuspected
from paceline.transport.mailbox import Mailbox
from tests.dist.test_elastic import counting
from tests.dist.test_mailbox import assert_serves, deliver, header, job
from tests.dist.test_segments import child
from tests.messages import Hello

SILENT_S = 0.4


def test_a_heartbeat_is_not_a_message_and_missing_heartbeats_are_reported_once():
    with job(2, is_open=True, silent_s=SILENT_S) as (a, b):
        b.beat([0], every_s=0.05)
        with pytest.raises(TimeoutError):
            a.recv(timeout=3 * SILENT_S).wait()
        b.close()
        began = time.monotonic()
        message = a.recv().wait()
        assert isinstance(message, PeerSuspected) and message.src == 1 and time.monotonic() - began < 2 * SILENT_S
        with pytest.raises(TimeoutError):
            a.recv(timeout=3 * SILENT_S).wait()


@pytest.mark.parametrize("event", ["peer died", "peer suspected"])
def test_no_rank_can_report_the_failure_of_another(event: str):
    with job(2, is_open=True, silent_s=SILENT_S) as boxes:
        assert deliver(boxes, [[header(tag=event)]]) == []
        assert f"'{event}' is an event, which each rank finds out by itself" in (boxes[0].last_refusal or "")
        assert_serves(*boxes)


def _beat(path: Path) -> None:
    box = Mailbox(FileStore(str(path)), 1, 2, is_open=True)
    box.beat([0], every_s=0.05)
    box.send(0, Hello()).wait()
    time.sleep(60)


@pytest.mark.dist
def test_a_stopped_process_is_suspected_and_a_busy_one_is_not(tmp_path: Path):
    box = Mailbox(FileStore(str(tmp_path / "store")), 0, 2, is_open=True, silent_s=SILENT_S, timeout_s=10)
    try:
        with child(_beat, tmp_path / "store") as process:
            assert process.pid is not None
            assert isinstance(box.recv().wait(), Hello)
            with pytest.raises(TimeoutError):
                box.recv(timeout=3 * SILENT_S).wait()
            os.kill(process.pid, signal.SIGSTOP)
            assert isinstance(box.recv().wait(), PeerSuspected)
            os.kill(process.pid, signal.SIGCONT)
            with pytest.raises(TimeoutError):
                box.recv(timeout=2 * SILENT_S).wait()
            os.kill(process.pid, signal.SIGSTOP)
            assert isinstance(box.recv().wait(), PeerSuspected)
            os.kill(process.pid, signal.SIGKILL)
            assert isinstance(box.recv().wait(), PeerDied)
    finally:
        box.close()


@pytest.mark.dist
def test_others_do_the_work_of_a_stopped_worker_which_then_returns():
    """With a bound of 1 all wait for the slowest: for a stopped one, only until it is suspected."""
    task, threads = counting(steps=200, batch=3, slow_s=0.025), list[threading.Thread]()

    def stop_one() -> None:
        victim = next(p for p in multiprocessing.active_children() if p.name == "worker-1")
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGSTOP)
        time.sleep(3.0)
        os.kill(victim.pid, signal.SIGCONT)

    def stop_one_at_step_20(k: int) -> None:
        if k >= 20 and not threads:
            threads.append(threading.Thread(target=stop_one))
            threads[0].start()

    strategy = pl.StaleSynchronous(lr=1.0, bound=1, servers=1)
    run = pl.train(task, strategy, workers=3, silent_s=0.5, progress=stop_one_at_step_20)
    threads[0].join()
    assert run.params.tolist() == [1.0] * task.samples
    starts = {
        rank: sorted(s.start for s in run.trace.spans if s.kind == "gradient" and s.rank == rank) for rank in range(3)
    }
    gaps = {rank: max(b - a for a, b in pairwise(of)) for rank, of in starts.items()}
    assert gaps[1] > 2.5, "it was stopped while the others worked, and returned"
    assert max(gaps[0], gaps[2]) < 2.0, gaps


def test_a_limit_of_zero_seconds_is_refused():
    with pytest.raises(ValueError, match=r"train\(silent_s=0\)"):
        pl.train(counting(steps=1, batch=1), pl.ParameterServer(), workers=1, silent_s=0)
