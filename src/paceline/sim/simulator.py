"""Simulator: one heap, one virtual clock, every rank a coroutine in one thread.

Time passes only where an Op is awaited.  Ties are broken by order of creation, so a run is a function of its inputs alone.
It is strict: a deadlock, an Op that nobody awaited and an error on any rank are told with names.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Any, TypeVar

from paceline.errors import ClusterError
from paceline.op import Op, Ready
from paceline.trace import Trace

T = TypeVar("T")


class SimOp(Op[T]):
    """An Op in virtual time: done when the simulator says so."""

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
    """A coroutine of a rank's, and the Op that it will fulfil."""

    __slots__ = ("coroutine", "is_dead", "op", "waits_for")

    def __init__(self, coroutine: Coroutine[Op[Any], Any, Any], op: SimOp[Any]) -> None:
        self.coroutine = coroutine
        self.op = op
        self.waits_for: SimOp[Any] | None = None
        self.is_dead = False


class Simulator:
    """The clock and the queue.  What ranks can do is in `sim/endpoint.py`."""

    def __init__(self, name_of: Callable[[int], str] = "rank {}".format) -> None:
        self.now = 0.0
        self.waits = 0
        self.trace = Trace()
        self.name_of = name_of
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0
        self._processes: dict[int, Process] = {}
        self._unawaited: set[SimOp[Any]] = set()

    def op(self, kind: str, rank: int, *detail: object) -> SimOp[Any]:
        """A new Op; `detail` is written out behind its kind wherever it must be named."""
        op: SimOp[Any] = SimOp(kind, rank, detail)
        self._unawaited.add(op)
        return op

    def at(self, time: float, action: Callable[..., None], *args: Any) -> None:
        self._serial += 1
        heappush(self._heap, (time, self._serial, action, args))

    def finish(self, op: SimOp[Any], value: Any = None, error: BaseException | None = None) -> None:
        op.done, op.value, op.error = True, value, error
        if op.waiter is not None:
            self._resume(op.waiter, value, error)

    def spawn(self, rank: int, coroutine: Coroutine[Op[Any], Any, T], kind: str) -> SimOp[T]:
        """Begin a coroutine at once."""
        op = self.op(kind, rank)
        process = Process(coroutine, op)
        self._processes[id(process)] = process
        self._resume(process, None, None)
        return op

    def run(self, roles: dict[int, Coroutine[Op[Any], Any, Any]]) -> None:
        """Run every rank's coroutine to its end."""
        for rank, coroutine in roles.items():
            self.begin(rank, coroutine)  # All start before any time passes.
        heap = self._heap
        try:
            with gc_frozen():
                while heap:
                    self.now, _, action, args = heappop(heap)
                    action(*args)
            self._check_end()
        finally:
            for process in self._processes.values():
                process.coroutine.close()

    def begin(self, rank: int, coroutine: Coroutine[Op[Any], Any, Any], time: float = 0.0) -> None:
        """Let a rank begin its role at some time; nobody awaits a rank itself."""
        process = Process(coroutine, SimOp("role", rank))
        self._processes[id(process)] = process
        self.at(time, self._resume, process, None, None)

    def is_running(self, rank: int) -> bool:
        """Whether a rank has begun its role and not ended it."""
        return any(p.op.rank == rank and p.op.kind == "role" for p in self._processes.values())

    def kill(self, rank: int) -> bool:
        """End all that a rank is doing, wherever it stands; whether it was doing anything."""
        dying = [p for p in self._processes.values() if p.op.rank == rank]
        for process in dying:
            process.is_dead = True
            del self._processes[id(process)]
            process.coroutine.close()
        self._unawaited -= {op for op in self._unawaited if op.rank == rank}
        return bool(dying)

    def _resume(self, process: Process, value: Any, error: BaseException | None) -> None:
        if process.is_dead:
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
                    raise TypeError(f"the simulator was asked to wait for {op!r}, which is no Op of its own")
        except StopIteration as stop:
            del self._processes[id(process)]
            self.finish(process.op, stop.value)
        except Exception as failure:
            self._processes.pop(id(process), None)
            if process.op.kind != "role":  # Told where it is awaited.
                self.finish(process.op, error=failure)
                return
            failure.add_note(f"on {self.name_of(process.op.rank)} at virtual time {self.now:g} s")
            raise

    def _check_end(self) -> None:
        for op in self._unawaited:
            if op.error is not None:
                op.error.add_note(f"in '{op!r}' on {self.name_of(op.rank)}, which was never awaited")
                raise op.error
        if self._processes:
            waiting = [
                f"  {self.name_of(p.op.rank)} waits for {p.waits_for!r}"
                for p in self._processes.values()
                if p.waits_for and not p.waits_for.done
            ]
            raise ClusterError(
                f"deadlock at virtual time {self.now:g} s: nothing more can happen, but\n" + "\n".join(sorted(waiting))
            )
        if self._unawaited:
            forgotten = sorted({f"  {self.name_of(op.rank)}: {op!r}" for op in self._unawaited})
            raise RuntimeError("started but never awaited:\n" + "\n".join(forgotten[:20]))


@contextmanager
def gc_frozen() -> Generator[None]:
    """Let the garbage collector look only at what is made from now on.

    A thousand ranks that meet make it walk over everything torch has imported, again and again: a third of the time went there.
    """
    if gc.get_freeze_count():  # Someone else has set them aside, and knows until when.
        yield
        return
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(
        100 * thresholds[0], *thresholds[1:]
    )  # What a step makes is dropped by the next; hardly anything is a cycle.
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
