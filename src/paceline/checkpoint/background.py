"""Threads that write in the background: training comes first where no core is free."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress

NICENESS = 10


def in_background(work: Callable[..., None], *args: object) -> threading.Thread:
    """Start a thread with a low priority.  It is no daemon: an interpreter waits for it at its end."""

    def run() -> None:
        with suppress(OSError, AttributeError):  # On Linux each thread has a priority of its own.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        work(*args)

    thread = threading.Thread(target=run, name="checkpoint")
    thread.start()
    return thread
