"""Supervisor: starts the workers of this host and watches them until the job ends.

It replaces dead workers or starts all of them again.  When the job fails it names the rank that failed first.  However
the job ends, the remaining workers are killed.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import SAVED_CODE, ClusterError, shown_traceback

AGAIN_S = 3.0  # Between the first SIGTERM to the workers of a run that failed, and the second.
TICK_S = 0.1
CAUSE_S = 3.0  # How long to wait for the rank that failed, when a rank reports that it lost a peer.
SAME_S = 0.2  # How long to wait for other ranks that fail in the same way.
LEFT_OUT = 75  # The exit code of a worker without which the others went on; a new process can take its place.
PEER_ERRORS = ("PeerLost", "ClusterError")
ERROR_FILE = "PACELINE_ERROR_FILE"  # The variable with the path of a worker's report.


class Stopped(Exception):
    """The supervisor's own process got a signal to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(frozen=True)
class Worker:
    """A started process.  `poll` returns its exit code, negative if a signal killed it, or None while it runs."""

    pid: int
    poll: Callable[[], int | None]
    leads_group: bool = False  # It leads a process group, whose members are killed with it.

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if self.leads_group:
                with suppress(ProcessLookupError):  # It has not come so far as to lead one.
                    os.killpg(self.pid, number)
                    return
            os.kill(self.pid, number)


class Output(Protocol):
    """What workers write, on its way to the screen."""

    def files(self) -> list[int]: ...
    def pump(self) -> None: ...
    def finish(self) -> None: ...


@dataclass(frozen=True)
class Report:
    """The error that ended a worker, in its own words."""

    error: str
    is_consequence: bool  # It lost a peer, so another rank failed before.
    traceback: str = ""
    time: float = 0.0


@dataclass(frozen=True)
class Failure:
    """A worker that ended with another exit code than 0."""

    rank: int
    pid: int
    code: int
    report: Report | None
    noticed: float = field(default_factory=time.time)
    hung_s: float | None = None  # It was killed because it had done nothing for so long.

    @property
    def is_consequence(self) -> bool:
        return self.report is not None and self.report.is_consequence

    @property
    def time(self) -> float:
        return self.report.time if self.report is not None and self.report.time else self.noticed

    def describe(self, *, with_traceback: bool = False) -> str:
        who = f"rank {self.rank} (process {self.pid})"
        if self.hung_s is not None:
            return f"{who} made no progress for {self.hung_s:.1f} s, longer than timeout_s, and was killed"
        if self.code == LEFT_OUT:
            return f"{who} was left out: it had been silent for too long, and the others went on"
        if self.code < 0:
            return f"{who} was killed by {signal.Signals(-self.code).name}"
        if self.report is None:
            return f"{who} failed: exit code {self.code}"
        text = f"{who} failed: {self.report.error}"
        return f"{text}\n\n{self.report.traceback}" if with_traceback and self.report.traceback else text


class WorkersFailed(ClusterError):
    """A job's workers failed; the text names the first cause."""


class Supervisor:
    """Workers 0 to `workers` - 1, each started by `start(rank)`, which reports its error to `report_path(rank)`.

    With a number of `replacements` a killed worker is no failure: so many are started again.  After that the others go
    on without it, if it had joined them (`has_joined`), and `on_loss` is called.  A worker for which `hung_s` gives a
    time does nothing for so long that it is killed.  `every_tick` is called about ten times a second.  `output` prints
    what the workers write.
    """

    def __init__(
        self,
        workers: int,
        start: Callable[[int], Worker],
        report_path: Callable[[int], Path],
        *,
        replacements: int | None = None,
        has_joined: Callable[[int], bool] = lambda rank: True,
        on_replacement: Callable[[int, int], None] = lambda rank, code: None,
        hung_s: Callable[[int, int], float | None] = lambda rank, pid: None,
        on_loss: Callable[[int], None] = lambda rank: None,
        every_tick: Callable[[], None] = lambda: None,
        stop_s: float = 0.0,
        with_traceback: bool = False,
        output: Output | None = None,
    ) -> None:
        self._ranks = range(workers)
        self._start = start
        self._report_path = report_path
        self._replacements = replacements
        self._has_joined = has_joined
        self._on_replacement = on_replacement
        self._on_loss = on_loss
        self._hung_s = hung_s
        self._hung: dict[int, float] = {}  # By process: for how long it had done nothing when it was killed.
        self._every_tick = every_tick
        self._stop_s = stop_s
        self._with_traceback = with_traceback
        self._output = output
        self._again_s = math.inf  # When those that still run get a second SIGTERM.
        self._running: dict[int, Worker] = {}
        self.has_saved = False  # Whether workers have saved the run after SIGTERM, and ended.

    def run(self) -> None:
        """Until all workers have ended; WorkersFailed names the first cause if they failed."""
        try:
            for rank in self._ranks:
                self._running[rank] = self._start(rank)
            self._watch()
        except WorkersFailed:
            self._again_s = AGAIN_S
            raise
        finally:
            self._stop()
            if self._output is not None:
                self._output.finish()

    def _watch(self) -> None:
        has_finished = False
        while self._running:
            self._wait()
            for rank, worker, code in self._ended():
                if code in (0, SAVED_CODE):
                    has_finished = True
                elif not self._can_lose(rank, code, has_finished):
                    hung_s = self._hung.get(worker.pid)
                    failure = Failure(rank, worker.pid, code, self._report(rank), hung_s=hung_s)
                    raise WorkersFailed(self._first_cause(failure))
                elif self._replacements and not has_finished:
                    self._replacements -= 1
                    self._report_path(rank).unlink(missing_ok=True)  # The next one has not failed.
                    self._on_replacement(rank, code)
                    self._running[rank] = self._start(rank)
                else:
                    self._on_loss(rank)
            self._kill_hung()
            self._every_tick()

    def _kill_hung(self) -> None:
        for rank, worker in self._running.items():
            seconds = self._hung_s(rank, worker.pid)
            if seconds is not None and worker.pid not in self._hung:
                self._hung[worker.pid] = seconds
                print_notice(f"rank {rank} made no progress for {seconds:.1f} s, longer than timeout_s: it is killed")
                worker.signal(signal.SIGKILL)

    def _wait(self) -> None:
        """Until a worker ends or writes something, for a tick at most."""
        if self._output is None:
            return wait_for_any(list(self._running.values()), TICK_S)
        wait_for_any(list(self._running.values()), TICK_S, self._output.files())
        self._output.pump()

    def _ended(self) -> list[tuple[int, Worker, int]]:
        """The workers that have ended since the last call, with their exit codes."""
        ended: list[tuple[int, Worker, int]] = []
        for rank, worker in list(self._running.items()):
            code = worker.poll()
            if code is not None:
                del self._running[rank]
                self.has_saved |= code == SAVED_CODE
                ended.append((rank, worker, code))
        return ended

    def _can_lose(self, rank: int, code: int, has_finished: bool) -> bool:
        if self._replacements is None or (code > 0 and code != LEFT_OUT):
            return False
        if self._replacements:
            return True
        return self._has_joined(rank) and bool(self._running or has_finished)

    def _first_cause(self, first: Failure) -> str:
        """Name the rank that failed first.  A rank that only lost a peer is not the cause: wait for the one that is."""
        failures = [first]
        deadline = time.monotonic() + (CAUSE_S if first.is_consequence else SAME_S)
        while self._running and time.monotonic() < deadline:
            self._wait()
            for rank, worker, code in self._ended():
                if code:
                    failures.append(Failure(rank, worker.pid, code, self._report(rank)))
            if not all(failure.is_consequence for failure in (*failures, *self._reported())):
                deadline = min(deadline, time.monotonic() + SAME_S)
        return describe([*failures, *self._reported()], with_traceback=self._with_traceback)

    def _reported(self) -> list[Failure]:
        """The ranks that have reported an error, and still run: a process can take long to end."""
        reports = [(rank, worker.pid, self._report(rank)) for rank, worker in self._running.items()]
        return [Failure(rank, pid, 1, report) for rank, pid, report in reports if report is not None]

    def _report(self, rank: int) -> Report | None:
        return read_report(self._report_path(rank))

    def _stop(self) -> None:
        """End all workers that still run: by SIGTERM, and after `stop_s` seconds by SIGKILL.

        If one has failed, by a second SIGTERM between: with checkpoints the first lets them save the run at their next
        step, and they may wait for the one that has failed.
        """
        try:
            if self._stop_s:
                self._signal_all(signal.SIGTERM)
                began = time.monotonic()
                while self._running and time.monotonic() < began + self._stop_s:
                    if time.monotonic() > began + self._again_s:
                        self._again_s = math.inf
                        self._signal_all(signal.SIGTERM)
                    self._wait()
                    self._ended()
        except (Stopped, KeyboardInterrupt):  # A second Ctrl-C: do not wait any longer.
            pass
        self._signal_all(signal.SIGKILL)
        while self._running:
            self._wait()
            self._ended()

    def _signal_all(self, number: int) -> None:
        for worker in self._running.values():
            worker.signal(number)


def describe(failures: list[Failure], *, with_traceback: bool = False) -> str:
    """The first cause; then those that failed otherwise.  Ranks that only lost a peer are left out."""
    first, *others = sorted(failures, key=lambda failure: (failure.is_consequence, failure.time))
    text = first.describe(with_traceback=with_traceback)
    same = sum(_is_same(failure, first) for failure in others)
    if same:
        text += f"\n  ({same} other {'rank' if same == 1 else 'ranks'} said the same)"
    different = [f.describe() for f in others if not f.is_consequence and not _is_same(f, first)]
    return "\n  ".join([text, *different])


def _is_same(failure: Failure, first: Failure) -> bool:
    return failure.report is not None and first.report is not None and failure.report.error == first.report.error


def wait_for_any(workers: list[Worker], timeout_s: float, outputs: Sequence[int] = ()) -> None:
    """Until one of the workers ends, one of the files `outputs` can be read, or the time is over."""
    if not hasattr(os, "pidfd_open"):
        select.select(outputs, [], [], timeout_s / 2)
        return
    files: list[int] = []
    try:
        for worker in workers:
            try:
                files.append(os.pidfd_open(worker.pid))
            except ProcessLookupError:  # It has ended, and another thread has waited for it.
                return
        select.select([*files, *outputs], [], [], timeout_s)
    finally:
        for file in files:
            os.close(file)


def write_report(path: Path, error: BaseException) -> None:
    """Write down what ended this worker, in the form of torch's own error files.

    The file appears with its whole content: the supervisor may read it at any moment.
    """
    extra = {"py_callstack": shown_traceback(error), "timestamp": repr(time.time())}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps({"message": message, "is_consequence": isinstance(error, ClusterError)}))
    os.replace(part, path)


def report_now(error: BaseException) -> None:
    """Write the report of a worker that has a supervisor, before it closes its connections.

    Peers report the closed connection at once, and closing all that a worker has open can take long.
    """
    path = os.environ.get(ERROR_FILE)
    if path is not None and isinstance(error, Exception):
        write_report(Path(path), error)


def withdraw_report() -> None:
    """The script has caught the error that was reported, and goes on."""
    path = os.environ.get(ERROR_FILE)
    if path is not None:
        Path(path).unlink(missing_ok=True)


def read_report(path: Path) -> Report | None:
    """A worker's report, or the error file that torch's `record` wrote; None if there is none."""
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        written = data["message"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    message: dict[str, Any] = written if isinstance(written, dict) else {"message": written}
    found = message.get("extraInfo")
    extra: dict[str, Any] = found if isinstance(found, dict) else {}
    error = str(message.get("message", ""))
    try:
        when = float(extra.get("timestamp", 0.0))
    except (ValueError, TypeError, OverflowError):
        when = 0.0
    is_consequence = bool(data.get("is_consequence", False)) or error.startswith(PEER_ERRORS)
    return Report(error, is_consequence, str(extra.get("py_callstack", "")), when)


def print_notice(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)
