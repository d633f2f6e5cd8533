"""The process that serves a job's store, started by a launcher.

The store has threads, and a process with threads must not be forked, so it is not the launcher's own.  Nor is it a
file: a worker that is killed while it writes to a FileStore leaves half a record, which stops all others for ever.
"""

from __future__ import annotations

import os
import signal
from socket import socket

from paceline.engines import open_files
from paceline.engines.meeting import serve_store
from paceline.engines.processes import die_with_parent, set_name
from paceline.engines.supervisor import Worker
from paceline.errors import ClusterError


def start_store(listener: socket, workers: int) -> Worker:
    """Fork a process that serves a store for so many workers through `listener`, and ends with this one."""
    open_files.check(f"a job of {workers} workers on one host", open_files.of_launcher(workers))
    open_files.check(f"the store of {workers} workers", open_files.of_store(workers))
    launcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            die_with_parent(launcher)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            set_name("paceline-store")
            _serving = serve_store(listener)
            while True:
                signal.pause()
        finally:
            os._exit(1)
    return Worker(pid, lambda: poll(pid))


def check_store(store: Worker | None) -> None:
    code = None if store is None else store.poll()
    if store is not None and code is not None:
        raise ClusterError(f"the process of the job's store ({store.pid}) ended with exit code {code}")


def stop_store(store: Worker) -> None:
    if store.poll() is None:
        store.signal(signal.SIGKILL)
        os.waitpid(store.pid, 0)


def poll(pid: int) -> int | None:
    """The exit code of a child of this process; None while it runs."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:  # It was waited for before.
        return 0
    return os.waitstatus_to_exitcode(status) if ended else None
