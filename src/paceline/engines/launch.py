"""launch: local workers on torch's elastic agent, with one way out.

Whatever fails, the first cause is named by its rank, the rest are killed, nothing is left behind and the exit code says so.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import ClusterError

LIFE = "PACELINE_LIFE"  # The variable with the pipe that servers of replaceable workers live by.
PEER_ERRORS = ("PeerLost", "ClusterError")  # What a rank says whose own fault it was not.


def launch(
    command: Sequence[str],
    workers: int,
    *,
    port: int = 0,
    is_module: bool = False,
    restarts: int = 0,
    replacements: int | None = None,
) -> None:
    """Run a script (or module) with its arguments on `workers` processes of this machine; ClusterError if one of them fails.

    With a number of `replacements`, a worker that is killed is no failure: so many are started anew while the others go on, as
    methods on a parameter server can.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if workers < 1:
        raise ValueError(f"paceline run -n {workers}: there must be at least 1 worker")
    if not is_module and not Path(command[0]).is_file():
        raise ValueError(f"paceline run: there is no script '{command[0]}'")
    if port:
        _check_free(port)
    # As torchrun does: N processes with all cores each would fight for them.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    entry = ["-u", "-m", "paceline.engines.entry", str(os.getpid()), "module" if is_module else "script", *command]
    if replacements is not None:
        if restarts or replacements < 0:
            raise ValueError(
                f"paceline run --restarts {restarts} --replacements {replacements}: either all workers are started again after a failure, "
                "or 0 or more of them one by one"
            )
        return Replacing(entry, workers, port).run(replacements)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="paceline-run-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id=str(uuid.uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint=f"127.0.0.1:{port}",
            rdzv_configs={"is_host": True},
            max_restarts=restarts,
            monitor_interval=0.1,
            start_method="spawn",
            local_addr="127.0.0.1",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, sys.executable)(*entry)
        except ChildFailedError as error:
            raise ClusterError(_first_cause(error.failures)) from None
        except SignalException as stopped:
            raise ClusterError(
                f"paceline run got {signal.Signals(stopped.sigval).name}; all workers were stopped"
            ) from None


class Replacing:
    """Local workers, each of which can be replaced by another.  Torch's agent starts all anew when one ends."""

    def __init__(self, entry: Sequence[str], workers: int, port: int) -> None:
        self.entry, self.workers, self.port = entry, workers, port
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def run(self, replacements: int) -> None:
        from torch.distributed import TCPStore

        life, hold = os.pipe()  # Servers live for as long as it is open, whichever worker has started them.
        store = TCPStore("127.0.0.1", self.port, is_master=True, wait_for_workers=False)
        with tempfile.TemporaryDirectory(prefix="paceline-run-") as folder, _signals_raised():
            try:
                for rank in range(self.workers):
                    self._start(rank, store.port, life, folder)
                self._watch(replacements, lambda rank: self._start(rank, store.port, life, folder), folder)
            except _Signalled as stopped:
                raise ClusterError(
                    f"paceline run got {signal.Signals(stopped.number).name}; all workers were stopped"
                ) from None
            finally:
                os.close(life)
                os.close(hold)
                for process in self.processes.values():
                    process.kill()
                    process.wait()

    def _start(self, rank: int, port: int, life: int, folder: str) -> None:
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": self.workers,
            "LOCAL_WORLD_SIZE": self.workers,
            "GROUP_RANK": 0,
        }
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True, LIFE: life}
        place |= {"TORCHELASTIC_ERROR_FILE": Path(folder, f"error-{rank}.json")}
        environment = os.environ | {name: str(value) for name, value in place.items()}
        self.processes[rank] = subprocess.Popen([sys.executable, *self.entry], env=environment, pass_fds=[life])

    def _watch(self, replacements: int, start: Callable[[int], None], folder: str) -> None:
        alive, ended = set(self.processes), 0
        while alive:
            pidfds = {os.pidfd_open(self.processes[rank].pid): rank for rank in alive}
            try:
                ready, _, _ = select.select(list(pidfds), [], [])
            finally:
                for pidfd in pidfds:
                    os.close(pidfd)
            for rank in sorted(pidfds[pidfd] for pidfd in ready):
                code = self.processes[rank].wait()
                alive.discard(rank)
                if not code:
                    ended += 1
                elif code > 0 or (not alive and not ended and not replacements):
                    failure = Failure(self.processes[rank].pid, code, str(Path(folder, f"error-{rank}.json")))
                    raise ClusterError(_first_cause({rank: failure}))
                elif replacements and not ended:
                    replacements -= 1
                    print(
                        f"paceline: rank {rank} was killed by {signal.Signals(-code).name}; another takes its place",
                        file=sys.stderr,
                    )
                    start(rank)
                    alive.add(rank)


class Failure(NamedTuple):
    """A worker's end, as torch's agent would tell it."""

    pid: int
    exitcode: int
    error_file: str
    timestamp: int = 0


class _Signalled(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def _signals_raised() -> Generator[None]:
    """Ctrl-C and a polite request to end, as an exception."""

    def stop(number: int, _: object) -> None:
        raise _Signalled(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _first_cause(failures: dict[int, Any]) -> str:
    """Name the rank whose failure brought down the others, and the others only if they have another story to tell."""
    ordered = sorted(failures.items(), key=lambda item: (_is_consequence(item[1]), item[1].timestamp))
    first = _error(ordered[0][1])
    more = [_told(rank, f) for rank, f in ordered[1:] if not _is_consequence(f) and _error(f) != first]
    alike = sum(_error(f) == first != "" for _, f in ordered[1:])
    also = f"\n  ({alike} other {'rank' if alike == 1 else 'ranks'} said the same)" if alike else ""
    return "\n  ".join([_told(*ordered[0]) + also, *more])


def _is_consequence(failure: Any) -> bool:
    return _error(failure).startswith(PEER_ERRORS) or failure.exitcode == -signal.SIGTERM


def _told(rank: int, failure: Any) -> str:
    if failure.exitcode < 0:
        return f"rank {rank} (process {failure.pid}) was killed by {signal.Signals(-failure.exitcode).name}"
    return f"rank {rank} (process {failure.pid}) failed: {_error(failure) or f'exit code {failure.exitcode}'}"


def _error(failure: Any) -> str:
    """What the worker wrote before it ended; empty if it could not."""
    try:
        message = json.loads(Path(failure.error_file).read_text())["message"]
    except (OSError, ValueError, KeyError):
        return ""
    return message["message"] if isinstance(message, dict) else str(message)


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ClusterError(
                f"paceline run --port {port}: the port is in use ({error.strerror}); choose another or leave it out"
            ) from None
