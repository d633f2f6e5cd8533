"""Cadence: at which steps a run is saved, the same on all workers.

A length in steps, samples or epochs says so by itself.  Of times only the first worker's clock counts.  It looks at it
about twenty times between two checkpoints, and says through the store what the others shall do, and when to look again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from math import ceil

from torch.distributed import Store

from paceline.checkpoint.settings import Checkpoints
from paceline.training.length import Length
from paceline.worker.plan import Plan

LOOKS = 20  # How often the clock is looked at between two checkpoints.
PAUSE_S = 0.002  # Between two looks for a word of another worker,
LOOK_S = 0.1  # and between two looks whether it has died.


class Cadence:
    """Says at each step whether the run is saved there.  All workers ask at the same steps."""

    def __init__(
        self,
        settings: Checkpoints,
        plan: Plan,
        *,
        store: Store | None,
        is_first: bool,
        timeout_s: float,
        now: Callable[[], float] = time.monotonic,
        saved: float | None = None,
        losses: Losses = lambda rank: None,
    ) -> None:
        """`store` is None for one worker alone.  `saved` is the time of the last checkpoint, if there was one."""
        self._losses = losses
        self._length = settings.length
        self._seconds = settings.seconds
        self._plan = plan
        self._store = store
        self._is_first = is_first
        self._timeout_s = timeout_s
        self._now = now
        self._looks = 0
        self._since: tuple[float, int] | None = None  # The time and step of the last look,
        self.saved = saved  # the time of the last checkpoint,
        self._next = 0  # and the step of the next look, or of the next checkpoint.

    def start(self, step: int) -> None:
        """The run begins, or continues, at that step."""
        self._since = None
        self._next = step + 1 if self._length is None else self._after(self._length, step)

    def is_due(self, step: int) -> bool:
        if self._length is None:
            return self._is_time(step)
        if step >= self._next:
            self._next = self._after(self._length, step)
            return True
        # A run that went back to an earlier step is saved at the steps that it repeats.
        self._next = min(self._next, self._after(self._length, step))
        return False

    def _after(self, length: Length, step: int) -> int:
        """The first multiple of the length after a step, in steps."""
        if length.unit == "steps":
            every = ceil(length.value)
            return (step // every + 1) * every
        count = 1
        while (found := self._steps(length, count)) <= step:
            count += max(1, count * (step - found) // max(1, found) // 2)
        while count > 1 and self._steps(length, count - 1) > step:
            count -= 1
        return self._steps(length, count)

    def _steps(self, length: Length, count: int) -> int:
        value = length.value * count
        by = f"Checkpoints(every='{length}')"
        if length.unit == "samples":
            return self._plan.steps_for(samples=ceil(value), by=by)
        return self._plan.steps_for_epochs(value, by=by)

    def _is_time(self, step: int) -> bool:
        if self._since is None:
            self._since = self._now(), step
            if self.saved is None:
                self.saved = self._now()
        if step < self._next:
            return False
        self._looks += 1
        key = f"checkpoint/look/{self._looks}"
        if not self._is_first:
            assert self._store is not None
            try:
                said = awaited(self._store, key, self._timeout_s, losses=self._losses)
            except Lost:  # It may not be dead, and all the others may not have missed it: the first word counts.
                said = self._store.compare_set(key, "", json.dumps([False, step + 1])).decode()
        else:
            said = json.dumps(self._look(step))
            if self._store is not None:
                said = self._store.compare_set(key, "", said).decode()
        is_due, self._next = json.loads(said)
        if is_due:
            self.saved = self._now()
        return is_due

    def _look(self, step: int) -> tuple[bool, int]:
        """Whether a checkpoint is due, and at which step to look again."""
        assert self._since is not None and self.saved is not None
        now = self._now()
        then, last = self._since
        self._since = now, step
        is_due = now - self.saved >= self._seconds
        a_step_s = (now - then) / max(1, step - last)
        steps = self._seconds / LOOKS / a_step_s if a_step_s > 0 else 1.0
        return is_due, step + max(1, min(int(steps), 2 * max(1, step - last)))


class Lost(Exception):
    """The worker whose word is awaited has died."""


Losses = Callable[[int], str | None]
"""Why a worker will say nothing more, by its rank; None if it may."""


def awaited(store: Store, key: str, timeout_s: float, *, of: int = 0, losses: Losses = lambda rank: None) -> str:
    """A value that another worker puts into the store.

    It asks again and again: while one thread waits in a store, no other thread of its process can use it.
    """
    end = time.monotonic() + timeout_s
    looked = time.monotonic()
    while not store.check([key]):
        now = time.monotonic()
        if now > end:
            raise TimeoutError(f"another worker did not answer for {timedelta(seconds=round(timeout_s))} ({key})")
        if now > looked + LOOK_S:
            looked = now
            if (why := losses(of)) is not None and not store.check([key]):
                raise Lost(why)
        time.sleep(PAUSE_S)
    return store.get(key).decode()
