"""The keeper of a host's servers: the process that starts each of them, and starts it again if it is killed.

It has one thread and holds no state of theirs, so it forks them in no time.  It ends when they have ended, or when the
pipe on its standard input is closed: then the job is over.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import FrameType

from paceline import registry
from paceline.endpoint import Layout
from paceline.engines.processes import fresh_random_state, set_name
from paceline.engines.server_process import LOG_FILES, Life, ServerSettings, run, store_of
from paceline.strategy import Strategy
from paceline.transport.failure_detector import GONE
from paceline.transport.job_key import JobKey

SETTINGS = "PACELINE_SERVER"  # The variable with the settings of a keeper that is a fresh interpreter.
NAME = "paceline-keeper"
STOP = signal.SIGUSR1  # Ends a keeper and its servers.
FAILED = 70  # A worker's exit code when its server failed (sysexits: internal software error).
SHORT_S, SHORT_LIVES = 1.0, 10  # A server that is killed so soon, so often in succession, is not started again.


def keep(strategy: Strategy, ranks: Sequence[int], settings: ServerSettings) -> int:
    """Run the servers of these ranks to their end; the exit code."""
    set_name(NAME)
    # A scheduler may send SIGTERM to every process of a job: the workers save it first, and end their keeper then.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(STOP, _stop)
    try:
        return _Servers(strategy, settings).run(ranks)
    except _Stopped:
        return 0


class _Stopped(BaseException):
    """The job is over."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stopped


@dataclass
class _Server:
    """A server that runs: its process, and when its earlier processes were started."""

    rank: int
    pid: int
    pidfd: int
    started: list[float] = field(default_factory=list[float])


class _Servers:
    """The servers of a host, as their keeper sees them."""

    def __init__(self, strategy: Strategy, settings: ServerSettings) -> None:
        self._strategy = strategy
        self._settings = settings
        self._is_durable = strategy.durability != "none"
        self._logs: dict[int, dict[str, int]] = {}
        self._layout = Layout(*settings.layout)
        self._running: dict[int, _Server] = {}  # By pidfd.

    def run(self, ranks: Sequence[int]) -> int:
        try:
            for rank in ranks:
                if self._is_durable:
                    # Memory without a name: nothing of it is left, however the job ends.
                    self._logs[rank] = {name: os.memfd_create(f"paceline-{name}") for name in LOG_FILES}
                self._start(rank, [])
            while self._running:
                ready, _, _ = select.select([0, *self._running], [], [])
                for pidfd in ready:
                    if pidfd and (code := self._ended(self._running.pop(pidfd))):
                        return code
                if 0 in ready and not os.read(0, 4096):
                    return 0
            return 0
        finally:
            for server in self._running.values():
                with suppress(ProcessLookupError):
                    os.kill(server.pid, signal.SIGKILL)
                os.waitpid(server.pid, 0)

    def _start(self, rank: int, started: list[float]) -> None:
        life = Life(len(started), os.getpid(), self._logs.get(rank))
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.signal(STOP, signal.SIG_DFL)
                for pidfd in self._running:
                    os.close(pidfd)
                fresh_random_state()
                code = run(self._strategy, rank, self._settings, life)
            finally:
                os._exit(code)  # Nothing of the keeper's is cleaned up here.
        pidfd = os.pidfd_open(pid)
        self._running[pidfd] = _Server(rank, pid, pidfd, [*started, time.monotonic()])

    def _ended(self, server: _Server) -> int:
        """A server has ended: start it again if it was killed.  The exit code of the job, if it cannot go on."""
        os.close(server.pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(server.pid, 0)[1])
        name = self._layout.name(server.rank)
        if not code:
            return 0
        if code < 0 and self._is_durable and not _is_hopeless(server.started):
            print(
                f"paceline: {name} was killed by {_signal(code)}; it continues from its log",
                file=sys.stderr,
                flush=True,
            )
            self._start(server.rank, server.started)
            return 0
        what = f"failed with exit code {code}" if code > 0 else f"was killed by {_signal(code)}"
        print(f"paceline: {name} {what}; its job ends here", file=sys.stderr, flush=True)
        with suppress(RuntimeError):  # The store may be gone too.
            store_of(self._settings).set(f"{GONE}{server.rank}", "")
        return FAILED


def _is_hopeless(started: Sequence[float]) -> bool:
    """Whether the last processes of a server were killed at once, and so will be the next."""
    ends = [*started[1:], time.monotonic()]
    lives = [end - start for start, end in zip(started, ends, strict=True)]
    return len(lives) >= SHORT_LIVES and max(lives[-SHORT_LIVES:]) < SHORT_S


def _signal(code: int) -> str:
    return signal.Signals(-code).name


def main() -> None:
    plain: Mapping[str, object] = json.loads(os.environ.pop(SETTINGS))
    sys.path[:] = plain["path"]  # pyright: ignore  # A strategy may be in a module beside the user's script.
    strategy = registry.from_plain(plain["strategy"])  # pyright: ignore
    settings = ServerSettings(**plain["settings"])  # pyright: ignore
    if plain["key_file"] is not None:
        settings = replace(settings, key=_read_key(plain["key_file"]))  # pyright: ignore
    sys.exit(keep(strategy, plain["ranks"], settings))  # pyright: ignore


def _read_key(file: int) -> JobKey:
    with open(file) as opened:
        return JobKey.of_text(opened.read(), "the pipe of the keeper of servers")


if __name__ == "__main__":
    main()
