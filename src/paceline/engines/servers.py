"""Servers: the server processes of one host, as the worker sees them that has started them.

The first worker of each host starts a keeper, which starts the servers of its host, so `-n 4` means four workers.  A
server runs until the workers have left it, and no longer than a pipe is open.  The pipe belongs to the worker that
started the keeper; or to a launcher that replaces dead workers, and then the job goes on without the worker that
started it.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from paceline import registry
from paceline.engines.keeper import FAILED, SETTINGS, STOP, keep
from paceline.engines.processes import fresh_random_state, threads, use_own_streams
from paceline.engines.server_process import ServerSettings
from paceline.strategy import Strategy
from paceline.transport.job_key import JobKey

STOP_S = 5.0  # How long a keeper may take to end its servers and to remove their logs.


class ServerProcesses:
    """The servers of one host, in the worker that has started them.

    A process of their own, the keeper, starts each of them, and starts it again if it is killed and its strategy is
    durable.  With `forks` this process is forked if it has one thread, which takes no time; otherwise the keeper is a
    fresh interpreter, which imports everything again.
    """

    def __init__(
        self,
        strategy: Strategy,
        ranks: Sequence[int],
        settings: ServerSettings,
        *,
        launcher_pipe: int | None,
        forks: bool,
    ) -> None:
        self._is_closing = False
        if strategy.durability != "none" and not hasattr(os, "memfd_create"):
            raise ValueError(
                f"{type(strategy).__name__}(durability={strategy.durability!r}): the log of a server is memory without "
                "a name (memfd_create), which Linux alone has; leave durability out"
            )
        start = _fork if forks and threads() == 1 else _start_interpreter
        self._keeper = start(strategy, ranks, settings, launcher_pipe)
        threading.Thread(target=self._watch, name="servers", daemon=True).start()

    def _watch(self) -> None:
        code = self._keeper.reap()
        self._keeper.ended.set()
        if code and not self._is_closing:
            # The workers wait for an answer that will never arrive, perhaps inside C code: there is no gentler way out.
            if code < 0:
                print(f"paceline: the keeper of the servers was killed (exit code {code})", file=sys.stderr, flush=True)
            os._exit(FAILED)

    def wait(self) -> None:
        """Until the last worker has left the servers, and these have ended."""
        self._keeper.ended.wait()

    def close(self) -> None:
        """End the servers, whatever they are doing."""
        self._is_closing = True
        self._keeper.stop()
        if not self._keeper.ended.wait(STOP_S):
            self._keeper.kill()
            self._keeper.ended.wait()
        self._keeper.release()


@dataclass(frozen=True)
class Keeper:
    """A keeper as its worker sees it: how to wait for its exit code, and how to end it and its servers."""

    reap: Callable[[], int]
    stop: Callable[[], None]
    kill: Callable[[], None]
    release: Callable[[], None]  # Close this process's files that belong to it.
    ended: threading.Event = dataclasses.field(default_factory=threading.Event)


def _start_interpreter(
    strategy: Strategy, ranks: Sequence[int], settings: ServerSettings, launcher_pipe: int | None
) -> Keeper:
    plain = {
        "strategy": registry.to_plain(strategy),
        "path": sys.path,
        "ranks": list(ranks),
        "settings": dataclasses.asdict(dataclasses.replace(settings, key=None)),
    }
    key_file = None if settings.key is None else _readable(settings.key)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", SETTINGS: json.dumps(plain | {"key_file": key_file})}
    # Its own session: a signal to the worker's process group (Ctrl-C, a launcher's SIGTERM) is for the worker, and a
    # server that ended before its worker would look like the cause.
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.engines.keeper"],
        stdin=subprocess.PIPE if launcher_pipe is None else launcher_pipe,
        env=environment,
        pass_fds=() if key_file is None else (key_file,),
        start_new_session=True,
    )
    if key_file is not None:
        os.close(key_file)

    def kill() -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def release() -> None:
        if process.stdin is not None:
            process.stdin.close()

    return Keeper(process.wait, lambda: process.send_signal(STOP), kill, release)


def _readable(key: JobKey) -> int:
    """A pipe from which the key can be read once: unlike a variable, no other process can see it."""
    reading, writing = os.pipe()
    with open(writing, "w") as opened:
        opened.write(key.text())
    return reading


def _fork(strategy: Strategy, ranks: Sequence[int], settings: ServerSettings, launcher_pipe: int | None) -> Keeper:
    own_pipe = os.pipe() if launcher_pipe is None else None
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _become_keeper(launcher_pipe if own_pipe is None else own_pipe[0])
            code = keep(strategy, ranks, settings)
        finally:
            os._exit(code)  # Nothing of the worker's is cleaned up here.
    pidfd = os.pidfd_open(pid)
    if own_pipe is not None:
        os.close(own_pipe[0])

    def send(number: int) -> None:
        with suppress(ProcessLookupError):  # A pidfd cannot mean another process that got the same id.
            signal.pidfd_send_signal(pidfd, number)

    def kill() -> None:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)

    def release() -> None:
        os.close(pidfd)
        if own_pipe is not None:
            os.close(own_pipe[1])

    def reap() -> int:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    return Keeper(reap, lambda: send(STOP), kill, release)


def _become_keeper(pipe: int | None) -> None:
    """Make a forked worker a keeper: its own session, its pipe as standard input, and no other file of the worker."""
    assert pipe is not None
    gc.freeze()  # Nothing of the worker's is finalised here: that could close a file of a server.
    os.setsid()
    os.dup2(pipe, 0)
    use_own_streams()
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with suppress(OSError):  # The one of this listing is closed already.
                os.close(int(name))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    fresh_random_state()
