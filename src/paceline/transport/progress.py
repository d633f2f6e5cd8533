"""Progress: when a worker last did something, in a small file that its launcher reads.

A heartbeat shows that a process is alive, and a process that hangs is alive too: in a deadlock, in a read from a dead
disk, or in C code that never returns to Python.  The launcher kills it when it has done nothing for `timeout_s`, and
the others go on as without any killed worker.  One that waits for a message does not hang.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from math import inf
from pathlib import Path

VARIABLE = "PACELINE_PROGRESS"  # The variable with the path of a worker's file.
FIELDS = struct.Struct("=qdd")  # The process, when it last did something, and how long it may do nothing.
WHEN = 8  # Where the second one is.


class Progress:
    """The file of this process, for the thread that made it."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._thread = threading.get_ident()
        part = path.with_name(f"{path.name}.part")
        part.write_bytes(FIELDS.pack(os.getpid(), inf, timeout_s))
        with part.open("r+b") as file:
            memory = memoryview(mmap.mmap(file.fileno(), FIELDS.size))
        # One store of eight bytes: struct.pack_into writes zeros first, which would be read as long ago.
        self._when = memory[WHEN : WHEN + 8].cast("d")
        os.replace(part, path)  # The file of this rank's last process stays whole for who reads it now.

    @classmethod
    def of_launcher(cls, timeout_s: float) -> Progress | None:
        """The file that the launcher of this process reads; None if it reads none."""
        return cls(Path(os.environ[VARIABLE]), timeout_s) if VARIABLE in os.environ else None

    def note(self) -> None:
        """This process does something."""
        if threading.get_ident() == self._thread:
            self._when[0] = time.monotonic()

    def rest(self) -> None:
        """From now on this process waits for others, or does what is not training; until the next `note`."""
        if threading.get_ident() == self._thread:
            self._when[0] = inf


def hung_s(path: Path, pid: int) -> float | None:
    """For how long a process has done nothing, if that is longer than it may; None if it trains or waits."""
    found = _read(path)
    if found is None:
        return None
    process, last, timeout_s = found
    idle = time.monotonic() - last
    # Read twice: a process that hangs writes nothing, and what another one is writing may be half there.
    return idle if process == pid and idle > timeout_s and _read(path) == found else None


def _read(path: Path) -> tuple[int, float, float] | None:
    try:
        return FIELDS.unpack(path.read_bytes())
    except (OSError, struct.error):
        return None
