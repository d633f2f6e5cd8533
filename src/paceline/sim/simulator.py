"""Simulator: one event queue, one virtual clock; every rank is a coroutine in one thread.

Time passes only where an Op is awaited.  Events at the same time happen in the order in which they were scheduled, so a
run depends on its inputs alone.  A deadlock, an Op that was never awaited and an error on a rank are errors that name
the rank and the Op.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from heapq import heappop, heappush
from math import inf
from typing import Any, TypeVar

from paceline.errors import ClusterError
from paceline.op import Op, Ready
from paceline.trace import Trace

T = TypeVar("T")
Event = tuple[float, int, Callable[..., object], tuple[Any, ...]]  # When, in which order, and what.

QUIET_S = 60.0  # Seconds without any event but those in the background after which nothing more can happen.


class SimOp(Op[T]):
    """An Op in virtual time; the simulator ends it."""

    __slots__ = ("awaited", "detail", "done", "error", "rank", "value", "waiter")

    def __init__(self, kind: str, rank: int, detail: tuple[object, ...] = ()) -> None:
        self.kind = kind
        self.rank = rank
        self.detail = detail
        self.done = False
        self.awaited = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.waiter: Process | None = None

    def __repr__(self) -> str:
        return self.kind + "".join(map(str, self.detail))


class Process:
    """A coroutine of a rank, and the Op that ends when the coroutine ends."""

    __slots__ = ("coroutine", "is_dead", "op", "waits_for")

    def __init__(self, coroutine: Coroutine[Op[Any], Any, Any], op: SimOp[Any]) -> None:
        self.coroutine = coroutine
        self.op = op
        self.waits_for: SimOp[Any] | None = None
        self.is_dead = False


class Simulator:
    """The clock and the event queue.  For the operations of a rank see `SimEndpoint`."""

    def __init__(self, name_of: Callable[[int], str] = "rank {}".format) -> None:
        self.now = 0.0
        self.waits = 0
        self.limit_s = inf  # A run that lasts longer is an error.
        self.trace = Trace()
        self.name_of = name_of
        self._heap: list[Event] = []
        self._background: list[Event] = []  # Events that go on as long as a role runs.
        self._last_event = 0.0  # The time of the last event that was not in the background.
        self._serial = 0
        self._paused: dict[int, list[tuple[Process, Any, BaseException | None]]] = {}
        self._processes: dict[int, Process] = {}
        self._unawaited: set[SimOp[Any]] = set()

    def op(self, kind: str, rank: int, *detail: object) -> SimOp[Any]:
        """A new Op.  Error texts show its kind followed by `detail`."""
        op: SimOp[Any] = SimOp(kind, rank, detail)
        self._unawaited.add(op)
        return op

    def forget(self, op: SimOp[Any]) -> None:
        """Nothing need await this Op."""
        op.awaited = True
        self._unawaited.discard(op)

    def cancel(self, op: SimOp[Any]) -> None:
        """End the process whose end this Op is, if it still runs."""
        for process in [p for p in self._processes.values() if p.op is op]:
            process.is_dead = True
            del self._processes[id(process)]
            process.coroutine.close()

    def at(self, time: float, action: Callable[..., object], *args: Any, is_background: bool = False) -> None:
        """Schedule a function call.  Events in the background, such as heartbeats, do not keep a run alive."""
        self._serial += 1
        heappush(self._background if is_background else self._heap, (time, self._serial, action, args))

    def finish(self, op: SimOp[Any], value: Any = None, error: BaseException | None = None) -> None:
        """End an Op, and resume the process that awaits it."""
        op.done = True
        op.value = value
        op.error = error
        if op.waiter is not None:
            self._resume(op.waiter, value, error)

    def spawn(self, rank: int, coroutine: Coroutine[Op[Any], Any, T], kind: str) -> SimOp[T]:
        """Start a coroutine at once."""
        op = self.op(kind, rank)
        process = Process(coroutine, op)
        self._processes[id(process)] = process
        self._resume(process, None, None)
        return op

    def run(self, roles: dict[int, Coroutine[Op[Any], Any, Any]]) -> None:
        """Run every rank's coroutine to its end."""
        for rank, coroutine in roles.items():
            self.begin(rank, coroutine)  # All ranks start before any time passes.
        try:
            with gc_frozen():
                self._run_events()
            self._check_end()
        finally:
            for process in self._processes.values():
                process.coroutine.close()

    def _run_events(self) -> None:
        heap = self._heap
        background = self._background
        while heap or self._is_background_due():
            is_background = bool(background) and (not heap or background[0] < heap[0])
            self.now, _, action, args = heappop(background if is_background else heap)
            if self.now > self.limit_s:
                raise ClusterError(
                    f"no end by virtual time {self.limit_s:g} s:\n" + "\n".join(self._waiting() or ["  nobody waits"])
                )
            if not is_background:
                self._last_event = self.now
            action(*args)

    def _is_background_due(self) -> bool:
        """Whether an event in the background may still lead to others, for instance a suspicion."""
        return bool(self._background and self._processes) and self.now - self._last_event < QUIET_S

    def begin(self, rank: int, coroutine: Coroutine[Op[Any], Any, Any], time: float = 0.0) -> None:
        """Start a rank's role at a time.  No process awaits a role."""
        process = Process(coroutine, SimOp("role", rank))
        self._processes[id(process)] = process
        self.at(time, self._resume, process, None, None)

    def is_running(self, rank: int) -> bool:
        """Whether a rank has started its role and not ended it."""
        return any(p.op.rank == rank and p.op.kind == "role" for p in self._processes.values())

    def kill(self, rank: int) -> bool:
        """End all processes of a rank.  False if it had none."""
        dying = [p for p in self._processes.values() if p.op.rank == rank]
        for process in dying:
            process.is_dead = True
            del self._processes[id(process)]
            process.coroutine.close()
        self._unawaited -= {op for op in self._unawaited if op.rank == rank}
        return bool(dying)

    # Pauses.

    def is_paused(self, rank: int) -> bool:
        return rank in self._paused

    def pause(self, rank: int) -> None:
        """Run nothing of a rank until it is woken."""
        self._paused.setdefault(rank, [])

    def wake(self, rank: int) -> None:
        """Run what a paused rank has missed, in order."""
        for missed in self._paused.pop(rank, ()):
            self._resume(*missed)

    def _resume(self, process: Process, value: Any, error: BaseException | None) -> None:
        """Run a process until it awaits an Op that has not ended."""
        if process.is_dead:
            return
        if self._paused and process.op.rank in self._paused:
            self._paused[process.op.rank].append((process, value, error))
            return
        send = process.coroutine.send
        try:
            while True:
                op = send(value) if error is None else process.coroutine.throw(error)
                self.waits += 1
                if isinstance(op, SimOp):
                    if not op.awaited:
                        op.awaited = True
                        self._unawaited.remove(op)
                    if not op.done:
                        if op.waiter is not None:
                            raise RuntimeError(f"{self.name_of(op.rank)}: '{op!r}' is awaited twice at once")
                        op.waiter = process
                        process.waits_for = op
                        return
                    value, error = op.value, op.error
                elif isinstance(op, Ready):
                    value, error = op.value, None
                else:
                    raise TypeError(f"a coroutine awaited {op!r} in the simulator, which can only wait for its own Ops")
        except StopIteration as stop:
            del self._processes[id(process)]
            self.finish(process.op, stop.value)
        except Exception as failure:
            self._processes.pop(id(process), None)
            if process.op.kind != "role":
                self.finish(process.op, error=failure)  # Raised where the Op is awaited.
                return
            failure.add_note(f"on {self.name_of(process.op.rank)} at virtual time {self.now:g} s")
            raise

    def _check_end(self) -> None:
        for op in self._unawaited:
            if op.error is not None:
                op.error.add_note(f"in '{op!r}' on {self.name_of(op.rank)}, which was never awaited")
                raise op.error
        if self._processes:
            raise ClusterError(
                f"deadlock at virtual time {self.now:g} s: nothing more can happen, but\n" + "\n".join(self._waiting())
            )
        if self._unawaited:
            forgotten = sorted({f"  {self.name_of(op.rank)}: {op!r}" for op in self._unawaited})
            raise RuntimeError("started but never awaited:\n" + "\n".join(forgotten[:20]))

    def _waiting(self) -> list[str]:
        """What each process waits for, a line each."""
        return sorted(
            f"  {self.name_of(p.op.rank)} waits for {p.waits_for!r}"
            for p in self._processes.values()
            if p.waits_for and not p.waits_for.done
        )


@contextmanager
def gc_frozen() -> Generator[None]:
    """Let the garbage collector scan only objects that are created from now on.

    With a thousand ranks it scans everything that torch has imported again and again, which took a third of the time.
    """
    if gc.get_freeze_count():  # The caller has frozen the objects, and will unfreeze them.
        yield
        return
    thresholds = gc.get_threshold()
    gc.freeze()
    # The objects of a step are freed by the next one.  Cycles are rare, so collect rarely.
    gc.set_threshold(100 * thresholds[0], *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
