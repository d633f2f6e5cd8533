"""Stopping: on SIGTERM all workers save the run at the next step, and end.

A scheduler that takes machines away (Slurm, Kubernetes) sends SIGTERM to all workers, and kills them some seconds
later.  The signal of one worker is enough: it says so through the store.  Workers that wait for each other look there
at the same steps, about once a second: the first worker says at which step to look again.  A second SIGTERM ends a
process at once.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from typing import Any

from torch.distributed import Store

from paceline.checkpoint import Checkpoints
from paceline.checkpoint.cadence import Losses, Lost, awaited
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
        self,
        store: Store | None,
        *,
        is_first: bool,
        timeout_s: float,
        now: Callable[[], float] = time.monotonic,
        losses: Losses = lambda rank: None,
    ) -> None:
        """`store` is None for one worker alone.  `losses` says why a worker will say nothing more."""
        self._losses = losses
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
        if self._is_first:
            said = json.dumps([self.is_told(), step + self._steps(step)])
            said = self._store.compare_set(key, "", said).decode()
        else:
            try:
                said = awaited(self._store, key, self._timeout_s, losses=self._losses)
            except Lost:  # It may not be dead, and all the others may not have missed it: the first word counts.
                said = self._store.compare_set(key, "", json.dumps([False, step + 1])).decode()
        stops, self._next = json.loads(said)
        return stops

    def _steps(self, step: int) -> int:
        """After how many steps to look again."""
        now = self._now()
        last, self._last = self._last, (now, step)
        if last is None or step <= last[1]:
            return 1
        steps = step - last[1]
        return max(1, min(int(LOOK_S / max(1e-9, (now - last[0]) / steps)), 2 * steps))


class PassOn:
    """A handler of SIGTERM that sends it on to these processes, once."""

    def __init__(self, processes: Mapping[int, BaseProcess]) -> None:
        self._processes = processes

    def __call__(self, number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        for process in self._processes.values():
            if process.pid is not None and process.exitcode is None:
                os.kill(process.pid, number)


@contextmanager
def passing_on(settings: Checkpoints | None, processes: Mapping[int, BaseProcess]) -> Generator[None]:
    """On SIGTERM the workers, which are these processes, save the run.

    A second SIGTERM ends this process, and so theirs.
    """
    is_free = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if settings is None or not settings.sigterm or not is_free:
        yield
        return
    signal.signal(signal.SIGTERM, PassOn(processes))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def leave_passing_on() -> None:
    """This process was forked from one that passes SIGTERM on, and is one of its workers."""
    if isinstance(signal.getsignal(signal.SIGTERM), PassOn):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
