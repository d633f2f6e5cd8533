"""launch: a script on several worker processes of this host; `paceline run` calls it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from socket import socket

import torch

from paceline.engines.entry import run_forked
from paceline.engines.folder import run_folder
from paceline.engines.hosts import note_lost
from paceline.engines.job import LAUNCHER_PIPE
from paceline.engines.joining import KEY_FILE, given_key, write_key
from paceline.engines.meeting import loopback_listener, reach_store, serve_store
from paceline.engines.output import LineRelay
from paceline.engines.store_process import check_store, poll, start_store, stop_store
from paceline.engines.supervisor import (
    ERROR_FILE,
    LEFT_OUT,
    Stopped,
    Supervisor,
    Worker,
    WorkersFailed,
    print_notice,
)
from paceline.errors import ClusterError
from paceline.transport.job_key import JobKey
from paceline.transport.progress import VARIABLE, hung_s

STOP_S = 30.0  # How long workers may take to end after SIGTERM.
# What a worker needs: torch imports the first with the first optimizer.
WARM = ("torch._dynamo", "paceline.session.attach", "paceline.session.train", "paceline.transport.mailbox")
# A process that has looked for a GPU must not be forked, and importing torch may look for one.
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def launch(
    command: Sequence[str],
    workers: int,
    *,
    port: int = 0,
    is_module: bool = False,
    restarts: int = 0,
    replacements: int | None = None,
    prefix: bool = True,
) -> None:
    """Run a script (or module) with its arguments on `workers` processes of this host; ClusterError if one fails.

    With `prefix`, each line that one of several workers prints begins with `[worker 1]`, or whichever it is.
    `restarts` is how often all workers are started again after a failure.  With a number of `replacements` a killed
    worker is no failure: so many are started again while the others go on, as methods on a parameter server can.
    """
    if workers < 1:
        raise ValueError(f"paceline run -n {workers}: there must be at least 1 worker")
    if not is_module and not Path(command[0]).is_file():
        raise ValueError(f"paceline run: there is no script '{command[0]}'")
    if replacements is not None and (restarts or replacements < 0):
        raise ValueError(
            f"paceline run --restarts {restarts} --replacements {replacements}: either all workers are started again "
            "after a failure, or 0 or more of them one by one"
        )
    with _listening(port) as listener, _signals_raised():
        try:
            job = _Launch(command, workers, is_module=is_module, replacements=replacements, prefix=prefix)
            job.run(listener, restarts)
        except Stopped as stopped:
            name = signal.Signals(stopped.number).name
            raise ClusterError(f"paceline run got {name}; all workers were stopped") from None


class _Launch:
    """One call of `paceline run`: the store's process, the workers, and the files that they share."""

    def __init__(
        self, command: Sequence[str], workers: int, *, is_module: bool, replacements: int | None, prefix: bool
    ) -> None:
        self._command = command
        self._workers = workers
        self._is_module = is_module
        self._replacements = replacements
        self._output = LineRelay() if prefix and workers > 1 else None
        self._run_id = str(uuid.uuid4())
        # As torchrun does: N processes that use all cores each would slow each other down.
        self._threads = None if "OMP_NUM_THREADS" in os.environ else max(1, (os.cpu_count() or 1) // workers)

    def run(self, listener: socket, restarts: int) -> None:
        with run_folder() as folder:
            self._run(folder, listener, restarts)

    def _run(self, folder: Path, listener: socket, restarts: int) -> None:
        self._key_file: Path | None = None
        if given_key() is None:
            self._key_file = folder / "job-key"
            write_key(JobKey.fresh(), self._key_file)
        pipe = os.pipe()  # Servers of replaceable workers run as long as it is open, whichever worker started them.
        self._folder = folder
        self._pipe = pipe
        self._port = listener.getsockname()[1]
        store: Worker | None = None
        try:
            if _can_fork():
                store = start_store(listener, self._workers)
                listener.close()
                for module in WARM:
                    import_module(module)
            else:
                self._store = serve_store(listener)
            for attempt in range(restarts + 1):
                try:
                    return self._attempt(attempt, restarts, store)
                except WorkersFailed as failed:
                    if attempt == restarts:
                        raise
                    print_notice(f"{failed}\nall workers are started again ({attempt + 1} of {restarts} times)")
        finally:
            os.close(pipe[0])
            os.close(pipe[1])
            if store is not None:
                stop_store(store)

    def _attempt(self, attempt: int, restarts: int, store: Worker | None) -> None:
        start = self._fork if _can_fork() else self._start_interpreter
        supervisor = Supervisor(
            self._workers,
            lambda rank: start(rank, self._environment(rank, attempt, restarts)),
            lambda rank: self._report_path(rank, attempt),
            replacements=self._replacements,
            on_replacement=_print_replacement,
            hung_s=lambda rank, pid: hung_s(self._progress_path(rank), pid),
            on_loss=lambda rank: note_lost(reach_store(self._port), attempt, rank),
            every_tick=lambda: check_store(store),
            stop_s=STOP_S,
            output=self._output,
        )
        supervisor.run()

    def _report_path(self, rank: int, attempt: int) -> Path:
        return self._folder / f"error-{attempt}-{rank}.json"

    def _progress_path(self, rank: int) -> Path:
        return self._folder / f"progress-{rank}"

    def _environment(self, rank: int, attempt: int, restarts: int) -> dict[str, str]:
        """The variables that torchrun sets, and paceline's own."""
        values: dict[str, object] = {
            "RANK": rank,
            "WORLD_SIZE": self._workers,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": self._workers,
            "GROUP_RANK": 0,
            "GROUP_WORLD_SIZE": 1,
            "ROLE_NAME": "default",
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": self._workers,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self._port,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            "TORCHELASTIC_RUN_ID": self._run_id,
            "TORCHELASTIC_RESTART_COUNT": attempt,
            "TORCHELASTIC_MAX_RESTARTS": restarts,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_ERROR_FILE": self._report_path(rank, attempt),
            ERROR_FILE: self._report_path(rank, attempt),
            VARIABLE: self._progress_path(rank),
        }
        if self._key_file is not None:
            values[KEY_FILE] = self._key_file
        if self._threads is not None:
            values["OMP_NUM_THREADS"] = self._threads
        if self._replacements is not None:
            values[LAUNCHER_PIPE] = self._pipe[0]
        return {name: str(value) for name, value in values.items()}

    def _fork(self, rank: int, environment: dict[str, str]) -> Worker:
        launcher = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        ends = None if self._output is None else self._output.open(rank)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            pid = os.fork()
            if pid == 0:
                os.close(self._pipe[1])
                if self._output is not None and ends is not None:
                    self._output.become(ends)
                run_forked(
                    self._command,
                    is_module=self._is_module,
                    environment=environment,
                    launcher=launcher,
                    threads=self._threads,
                )
        finally:
            _close(ends)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return Worker(pid, lambda: poll(pid), leads_group=True)

    def _start_interpreter(self, rank: int, environment: dict[str, str]) -> Worker:
        kind = "module" if self._is_module else "script"
        ends = None if self._output is None else self._output.open(rank)
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "paceline.engines.entry", str(os.getpid()), kind, *self._command],
            env=os.environ | environment,
            pass_fds=[self._pipe[0]],
            stdout=None if ends is None else ends[0],
            stderr=None if ends is None else ends[1],
            start_new_session=True,
        )
        _close(ends)
        return Worker(process.pid, process.poll, leads_group=True)


def _can_fork() -> bool:
    """Whether workers are forked from this process, which has imported torch already."""
    if sys.platform != "linux":
        return False
    is_cpu_build = torch.version.cuda is None and torch.version.hip is None
    return is_cpu_build or not any(Path(file).exists() for file in GPU_FILES)


def _close(ends: tuple[int, int] | None) -> None:
    for end in ends or ():
        os.close(end)


def _print_replacement(rank: int, code: int) -> None:
    how = "was left out" if code == LEFT_OUT else f"was killed by {signal.Signals(-code).name}"
    print_notice(f"rank {rank} {how}; another takes its place")


@contextmanager
def _listening(port: int) -> Generator[socket]:
    try:
        listener = loopback_listener(port)
    except OSError as error:
        raise ClusterError(
            f"paceline run --port {port}: the port is in use ({error.strerror}); choose another or leave it out"
        ) from None
    with listener:
        yield listener


@contextmanager
def _signals_raised() -> Generator[None]:
    """Ctrl-C and SIGTERM as an exception."""

    def stop(number: int, _: object) -> None:
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
