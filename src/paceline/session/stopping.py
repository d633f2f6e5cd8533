"""Stopping: on SIGTERM all workers save the run at the next step, and end.

A scheduler that takes machines away (Slurm, Kubernetes) sends SIGTERM to all workers, and kills them some seconds
later.  The signal of one worker is enough: it says so through the store.  Workers that wait for each other look there
at the same steps, about once a second: the first worker says at which step to look again.  A second SIGTERM ends a
process at once.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.distributed import Store

from paceline.checkpoint.cadence import awaited
from paceline.errors import SAVED_CODE

LOOK_S = 1.0  # Between two looks.
STOP = "stop"  # The key that a worker sets that got the signal.


class Preempted(SystemExit):
    """The run was saved after SIGTERM, and ends.  The process ends with exit code 143, as after SIGTERM."""

    def __init__(self) -> None:
        super().__init__(SAVED_CODE)


class Stopping:
    """Whether this worker, or another one, got SIGTERM."""

    def __init__(
        self, store: Store | None, *, is_first: bool, timeout_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`store` is None for one worker alone."""
        self.has_signal = False  # Whether this process got the signal.
        self._store = store
        self._is_first = is_first
        self._timeout_s = timeout_s
        self._now = now
        self._looks = 0
        self._last: tuple[float, int] | None = None  # The time and the step of the last look,
        self._next = 0  # and the step of the next one.
        self._before: Any = None  # The handler of the signal before.

    def listen(self) -> None:
        """Handle SIGTERM from now on, unless the user's program does."""
        handler = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is threading.main_thread() and handler is signal.SIG_DFL:
            self._before = signal.SIG_DFL
            signal.signal(signal.SIGTERM, self._note)

    def close(self) -> None:
        if self._before is not None:
            with suppress(ValueError):  # In another thread.
                if signal.getsignal(signal.SIGTERM) == self._note:
                    signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _note(self, number: int, frame: object) -> None:
        self.has_signal = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # The next one ends the process.

    def tell(self) -> None:
        """Tell the other workers that this one got the signal."""
        if self._store is not None:
            self._store.set(STOP, "")

    def is_told(self) -> bool:
        """Whether any worker got the signal."""
        return self.has_signal or (self._store is not None and self._store.check([STOP]))

    def is_due(self, step: int) -> bool:
        """Whether all workers stop before this step; all of them ask at the same steps."""
        if self._store is None:
            return self.has_signal
        if self.has_signal:
            self.tell()
        if step < self._next:
            return False
        self._looks += 1
        key = f"stop/{self._looks}"
        if not self._is_first:
            stops, self._next = json.loads(awaited(self._store, key, self._timeout_s))
            return stops
        stops, self._next = self.is_told(), step + self._steps(step)
        self._store.set(key, json.dumps([stops, self._next]))
        return stops

    def _steps(self, step: int) -> int:
        """After how many steps to look again."""
        now = self._now()
        last, self._last = self._last, (now, step)
        if last is None or step <= last[1]:
            return 1
        steps = step - last[1]
        return max(1, min(int(LOOK_S / max(1e-9, (now - last[0]) / steps)), 2 * steps))
