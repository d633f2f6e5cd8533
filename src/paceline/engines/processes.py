"""What the operating system says about processes, and what it can be asked to do with them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
DEFAULT_SEED = 67280421310721  # of torch


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends; exit at once if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def set_name(name: str) -> None:
    """The name, of up to 15 characters, that `ps -o comm` and `top` show for this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def threads() -> int:
    """How many threads this process has, those of C libraries included; 0 if that cannot be known."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0


def launcher_of(variable: str) -> str | None:
    """The process that started this rank and the others of its host, as "pid start-time"; None if it cannot be known.

    It is the nearest ancestor that was started without the `variable` with its rank; there may be shells in between.
    """
    pid = os.getppid()
    while pid > 1 and _has(pid, variable):
        parent = _stat(pid)
        if parent is None:
            return None
        pid = int(parent[1])
    stat = _stat(pid)
    return None if stat is None else f"{pid} {stat[19]}"


def _has(pid: int, variable: str) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # Another user's process cannot be a rank of this job.
        return False
    return any(line.startswith(f"{variable}=".encode()) for line in environ.split(b"\0"))


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third on (proc(5)): state, parent, ..., the 20th is the start time."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def fresh_random_state() -> None:
    """Random numbers of a forked process as a new interpreter has them (Python's own `random` does this by itself)."""
    np.random.seed()
    torch.default_generator.manual_seed(DEFAULT_SEED)


def use_own_streams() -> None:
    """Write to files 1 and 2.  A notebook or a test has put other streams there, whose files a forked process may not
    have."""
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
