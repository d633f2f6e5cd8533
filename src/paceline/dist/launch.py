"""launch: local workers on torch's elastic agent, with one way out.

Whatever fails, the first cause is named by its rank, the rest are killed, nothing is left behind and the exit code says so.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import ClusterError

PEER_ERRORS = ("PeerLost", "ClusterError")  # What a rank says whose own fault it was not.


def launch(command: Sequence[str], workers: int, *, port: int = 0, is_module: bool = False, restarts: int = 0) -> None:
    """Run a script (or module) with its arguments on `workers` processes of this machine; ClusterError if one of them fails."""
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
        entry = ["-u", "-m", "paceline.dist.entry", str(os.getpid()), "module" if is_module else "script", *command]
        try:
            elastic_launch(config, sys.executable)(*entry)
        except ChildFailedError as error:
            raise ClusterError(_first_cause(error.failures)) from None
        except SignalException as stopped:
            raise ClusterError(f"paceline run got {signal.Signals(stopped.sigval).name}; all workers were stopped") from None


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
