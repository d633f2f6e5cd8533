"""Processes that are stopped or cut off: noticed by their silence, not waited for, and welcome when they come back."""

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
from paceline.transport import heartbeat as heart
from paceline.transport.heartbeat import FailureDetector
from paceline.transport.mailbox import Mailbox
from tests.dist.test_elastic import counting
from tests.dist.test_mailbox import assert_serves, deliver, header, job
from tests.dist.test_parcels import child
from tests.messages import Hello

SILENT_S = 0.4


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that is set by hand."""
    now = [0.0]
    monkeypatch.setattr(heart.time, "monotonic", lambda: now[0])
    return now


def test_who_was_never_heard_is_not_silent(clock: list[float]):
    silence = FailureDetector(4.0)
    for clock[0] in range(20):
        assert silence.found() == []


def test_silence_is_found_once_and_again_after_a_word(clock: list[float]):
    silence, found = FailureDetector(4.0), list[tuple[float, list[int]]]()
    silence.hear(7)
    for clock[0] in range(20):
        if clock[0] == 10:
            silence.hear(7)
        if silent := silence.found():
            found.append((clock[0], silent))
    assert found == [(5, [7]), (15, [7])]


def test_who_was_away_itself_does_not_blame_the_others(clock: list[float]):
    silence = FailureDetector(4.0)
    silence.hear(7)
    clock[0] = 100.0
    assert silence.found() == []
    for clock[0] in range(101, 105):
        assert silence.found() == []
    clock[0] = 105.0
    assert silence.found() == [7]


def test_a_beat_is_no_message_and_its_end_is_noticed():
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
def test_no_rank_can_say_that_another_is_dead(event: str):
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
def test_a_process_that_is_stopped_is_silent_and_one_that_is_busy_is_not(tmp_path: Path):
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
def test_others_do_the_work_of_a_stopped_worker_which_then_comes_back():
    """With a bound of 1 all wait for the slowest: for one that is stopped, only until its silence is noticed."""
    task, threads = counting(steps=500, batch=3, slow_s=0.01), list[threading.Thread]()

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
    assert gaps[1] > 2.5, "it was stopped while the others worked, and came back"
    assert max(gaps[0], gaps[2]) < 2.0, gaps


def test_a_limit_that_is_no_time_is_refused():
    with pytest.raises(ValueError, match=r"train\(silent_s=0\)"):
        pl.train(counting(steps=1, batch=1), pl.ParameterServer(), workers=1, silent_s=0)
