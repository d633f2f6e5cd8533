"""Server processes: they hold the shards of a parameter server.

The first worker of each host starts those of its host, so `-n 4` means four workers.  A server runs until the workers
have left it, and no longer than a pipe is open.  The pipe belongs to the worker that started the server; or to a
launcher that replaces dead workers, and then the job goes on without the worker that started it.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paceline import registry
from paceline.endpoint import Layout
from paceline.engines.processes import fresh_random_state, set_name, threads
from paceline.engines.shard_saver import ShardSaver
from paceline.op import drive
from paceline.server.shard import Shard
from paceline.strategy import Strategy
from paceline.trace import Trace
from paceline.transport.endpoint import SPANS_KEPT, Clock, ProcessEndpoint
from paceline.transport.job_key import JobKey, SignedStore
from paceline.transport.stage_view import StageMailbox, StageView

SETTINGS = "PACELINE_SERVER"  # The variable with the settings of a server that is a fresh interpreter.
NAME = "paceline-server"
GRACE_S = 60.0  # How long shards wait for the replacement of a dead worker.
FAILED = 70  # A worker's exit code when its server failed (sysexits: internal software error).


@dataclass(frozen=True)
class ServerSettings:
    """What the servers of one host must know besides their strategy: plain data, to be written as JSON."""

    layout: tuple[int, int]
    store: Mapping[str, Any]
    prefix: str
    key: JobKey | None
    epoch: float
    bind: str
    timeout_s: float
    silent_s: float
    workers: Sequence[tuple[int, int]]  # Ranks and process ids of this host's workers.
    is_elastic: bool
    grace_s: float
    takes_nonfinite: bool
    stages: int

    @staticmethod
    def of(
        layout: Layout,
        store: dist.Store,
        prefix: str,
        *,
        key: JobKey | None,
        epoch: float,
        bind: str,
        timeout_s: float,
        silent_s: float,
        workers: Mapping[int, int],
        is_elastic: bool,
        may_lose_starter: bool,
        takes_nonfinite: bool,
        stages: int,
    ) -> ServerSettings:
        return ServerSettings(
            layout=(layout.workers, layout.servers),
            store=_address(store),
            prefix=prefix,
            key=key,
            epoch=epoch,
            bind=bind,
            timeout_s=timeout_s,
            silent_s=silent_s,
            workers=tuple(workers.items()),
            is_elastic=is_elastic,
            grace_s=GRACE_S if may_lose_starter else 0.0,
            takes_nonfinite=takes_nonfinite,
            stages=stages,
        )


class ServerProcesses:
    """The servers of one host, in the worker that has started them.

    With `forks` this process is forked if it has one thread, which takes no time; otherwise each server is a fresh
    interpreter, which imports everything again.
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
        self._layout = Layout(*settings.layout)
        start = _fork if forks and threads() == 1 else _start_interpreter
        self._processes = {rank: start(strategy, rank, settings, launcher_pipe) for rank in ranks}
        for rank, process in self._processes.items():
            threading.Thread(target=self._watch, args=(rank, process), name=f"server-{rank}", daemon=True).start()

    def _watch(self, rank: int, process: ServerProcess) -> None:
        code = process.reap()
        process.ended.set()
        if code and not self._is_closing:
            # The workers wait for an answer that will never arrive, perhaps inside C code: there is no gentler way out.
            print(
                f"paceline: {self._layout.name(rank)} failed with exit code {code}; its job ends here",
                file=sys.stderr,
                flush=True,
            )
            os._exit(FAILED)

    def wait(self) -> None:
        """Until the last worker has left the servers, and these have ended."""
        for process in self._processes.values():
            process.ended.wait()

    def close(self) -> None:
        """End the servers, whatever they are doing."""
        self._is_closing = True
        for process in self._processes.values():
            process.kill()
            process.ended.wait()
            process.release()


@dataclass(frozen=True)
class ServerProcess:
    """A server as its worker sees it: how to wait for its exit code, and how to kill it."""

    reap: Callable[[], int]
    kill: Callable[[], None]
    release: Callable[[], None]  # Close this process's files that belong to it.
    ended: threading.Event = dataclasses.field(default_factory=threading.Event)


def _start_interpreter(
    strategy: Strategy, rank: int, settings: ServerSettings, launcher_pipe: int | None
) -> ServerProcess:
    plain = {
        "strategy": registry.to_plain(strategy),
        "path": sys.path,
        "rank": rank,
        "settings": dataclasses.asdict(dataclasses.replace(settings, key=None)),
    }
    key_file = None if settings.key is None else _readable(settings.key)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", SETTINGS: json.dumps(plain | {"key_file": key_file})}
    # Its own session: a signal to the worker's process group (Ctrl-C, a launcher's SIGTERM) is for the worker, and a
    # server that ended before its worker would look like the cause.
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.engines.server_process"],
        stdin=subprocess.PIPE if launcher_pipe is None else launcher_pipe,
        env=environment,
        pass_fds=() if key_file is None else (key_file,),
        start_new_session=True,
    )
    if key_file is not None:
        os.close(key_file)

    def release() -> None:
        if process.stdin is not None:
            process.stdin.close()

    return ServerProcess(process.wait, process.kill, release)


def _readable(key: JobKey) -> int:
    """A pipe from which the key can be read once: unlike a variable, no other process can see it."""
    reading, writing = os.pipe()
    with open(writing, "w") as opened:
        opened.write(key.text())
    return reading


def _read_key(file: int) -> JobKey:
    with open(file) as opened:
        return JobKey.of_text(opened.read(), "the pipe of a server process")


def _fork(strategy: Strategy, rank: int, settings: ServerSettings, launcher_pipe: int | None) -> ServerProcess:
    own_pipe = os.pipe() if launcher_pipe is None else None
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _become_server(launcher_pipe if own_pipe is None else own_pipe[0])
            code = _run(strategy, rank, settings)
        finally:
            os._exit(code)  # Nothing of the worker's is cleaned up here.
    pidfd = os.pidfd_open(pid)
    if own_pipe is not None:
        os.close(own_pipe[0])

    def kill() -> None:
        with suppress(ProcessLookupError):  # A pidfd cannot mean another process that got the same id.
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def release() -> None:
        os.close(pidfd)
        if own_pipe is not None:
            os.close(own_pipe[1])

    return ServerProcess(lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), kill, release)


def _become_server(pipe: int | None) -> None:
    """Make a forked worker a server: its own session, its pipe as standard input, and no other file of the worker."""
    assert pipe is not None
    gc.freeze()  # Nothing of the worker's is finalised here: that could close a file of the server.
    os.setsid()
    os.dup2(pipe, 0)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with suppress(OSError):  # The one of this listing is closed already.
                os.close(int(name))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fresh_random_state()


def _address(store: dist.Store) -> dict[str, Any]:
    if isinstance(store, dist.TCPStore):
        return {"tcp": [store.host, store.port]}
    if isinstance(store, dist.FileStore):
        return {"file": store.path}  # pyright: ignore
    raise ValueError(
        f"servers cannot reach a {type(store).__name__}: start the job by torchrun or paceline run, or with a TCPStore "
        "or FileStore"
    )


def _run(strategy: Strategy | Mapping[str, Any], rank: int, settings: ServerSettings) -> int:
    """Serve until the end; the exit code."""
    torch.set_num_threads(1)
    set_name(NAME)
    # A scheduler may send SIGTERM to every process of a job: the workers save it first, and servers end with them.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_die_with_pipe, daemon=True).start()
    try:
        _serve(registry.from_plain(strategy) if isinstance(strategy, Mapping) else strategy, rank, settings)
    except Exception as error:
        name = Layout(*settings.layout).name(rank)
        print(f"paceline: {name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _serve(strategy: Strategy, rank: int, settings: ServerSettings) -> None:
    from paceline.transport.mailbox import Mailbox

    address = settings.store
    base = dist.FileStore(address["file"]) if "file" in address else dist.TCPStore(*address["tcp"], is_master=False)
    layout = Layout(*settings.layout)
    store = dist.PrefixStore(settings.prefix, base)
    if settings.key is not None:
        store = SignedStore(store, settings.key, settings.prefix)
    is_elastic = settings.is_elastic
    own = str(os.getpid())
    if is_elastic and store.compare_set(f"serving/{rank}", "", own) != own.encode():
        return  # The worker that started this server's twin died at once, and its replacement could not know of it.
    mailbox = Mailbox(
        store,
        rank,
        layout.size,
        bind=settings.bind,
        timeout_s=settings.timeout_s,
        is_open=is_elastic,
        silent_s=settings.silent_s if is_elastic else None,
    )
    with closing(mailbox):
        if is_elastic:
            for worker, pid in settings.workers:
                mailbox.watch(worker, pid)
        trace = Trace(keep=SPANS_KEPT)
        view = StageView.of(rank, layout, settings.stages, strategy.coordinators)
        mail = mailbox if settings.stages == 1 else StageMailbox(mailbox, view)
        endpoint = ProcessEndpoint(
            view.rank, view.layout, Clock(settings.epoch), open_mailbox=lambda: mail, trace=trace
        )
        shard = Shard(
            endpoint,
            grace_s=settings.grace_s,
            return_s=settings.timeout_s,
            takes_nonfinite=settings.takes_nonfinite,
        )
        saver = ShardSaver(shard, rank - layout.workers, layout.servers, store, timeout_s=settings.timeout_s)
        drive(strategy.server(shard))
        saver.wait()
        trace.move_to(rank)
        store.set(f"trace/{rank}", trace.dumps())


def _die_with_pipe() -> None:
    """End this process when the pipe on its standard input is closed."""
    # Not through sys.stdin: a thread must not hold its lock when the interpreter shuts down.
    while os.read(0, 4096):
        pass
    os._exit(0)


def main() -> None:
    plain = json.loads(os.environ.pop(SETTINGS))
    sys.path[:] = plain["path"]  # A strategy may be in a module beside the user's script.
    settings = ServerSettings(**plain["settings"])
    if plain["key_file"] is not None:
        settings = dataclasses.replace(settings, key=_read_key(plain["key_file"]))
    code = _run(plain["strategy"], plain["rank"], settings)
    sys.exit(code)


if __name__ == "__main__":
    main()
