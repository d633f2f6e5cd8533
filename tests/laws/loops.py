"""Users' own loops in the world of `mortal`: each worker runs a script that attaches its model.

A script waits where it calls the session. So each runs in a thread of its own, and only one of them at a time: to the
world it is a coroutine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import paceline as pl
from paceline.elastic import LeftOut, Over
from paceline.endpoint import Layout
from paceline.op import Op
from paceline.trace import Trace
from paceline.transport.journal import Journal
from tests.laws.mortal import Cell, Task, Worker, World, trained

Script = Callable[["LoopWorker"], None]
here = threading.local()  # The fiber that runs in this thread.


class Killed(BaseException):
    """Ends the thread of a worker that was killed."""


class Fiber:
    """A function as a coroutine: what it waits for goes to the one that resumes it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._turn = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._value: Any = None
        self._error: BaseException | None = None
        self._waits: Op[Any] | None = None
        self._end: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._has_begun = False

    def _run(self) -> None:
        here.fiber = self
        self._turn.acquire()
        try:
            if self._error is not None:
                raise self._error
            self._work()
            self._end = StopIteration()
        except BaseException as error:
            self._end = error
        self._back.release()

    def wait_for(self, op: Op[Any]) -> Any:
        """In the function: wait for an Op of the world."""
        self._waits = op
        self._back.release()
        self._turn.acquire()
        if self._error is not None:
            raise self._error
        return self._value

    def send(self, value: Any) -> Op[Any]:
        return self._resume(value, None)

    def throw(self, error: BaseException) -> Op[Any]:
        return self._resume(None, error)

    def close(self) -> None:
        while self._end is None:  # Its `with` blocks may wait once more.
            try:
                self._resume(None, Killed())
            except BaseException as error:
                assert isinstance(error, Killed), error

    def _resume(self, value: Any, error: BaseException | None) -> Op[Any]:
        self._value, self._error = value, error
        if not self._has_begun:
            self._has_begun = True
            self._thread.start()
        self._turn.release()
        self._back.acquire()
        if self._end is not None:
            self._thread.join()
            raise self._end
        assert self._waits is not None
        return self._waits


class LoopWorker(Worker):
    """A process that runs the script."""

    script: Script
    result: Any = None

    def begin(self) -> None:
        self.run: Any = SimpleNamespace(missed_end=False)
        self.world.tasks.append(Task(self, Fiber(self._run), Cell("run")))  # pyright: ignore[reportArgumentType]

    def _run(self) -> None:
        here.worker = self
        try:
            type(self).script(self)
        except Over:
            self.run.missed_end = True
        except LeftOut:  # Its launcher starts another process in its place.
            self.is_dead = True
            self.world.join()

    def job(self) -> Any:
        """What `attach` needs of a Job."""
        world = self.world
        endpoint = SimpleNamespace(
            journal=Journal(), trace=Trace(), now=self.endpoint.now, missed_end=False, ranks=[0], rank=0
        )
        return SimpleNamespace(
            rank=self.process,
            workers=world.workers,
            store=world.store,  # pyright: ignore[reportAttributeAccessIssue]
            elastic=self.endpoint,
            endpoint=endpoint,
            layout=Layout(world.workers),
            is_one_host=True,
            timeout_s=60.0,
            hosts=SimpleNamespace(own=0),
            close=lambda failed=False: None,
        )


@contextmanager
def attached(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In this block `attach` makes a worker of the world."""

    def wait(cell: Cell) -> Any:
        return here.fiber.wait_for(cell)

    with monkeypatch.context() as patch:
        patch.setattr(import_module("paceline.session.attach"), "Job", lambda *_, **__: here.worker.job())
        patch.setattr(Cell, "wait", wait)
        yield


def looped(
    script: Script, strategy: pl.Strategy, seed: str, *, deaths: int, stops: int, joins: int, moments: int
) -> World:
    """A run of the script by four workers, some of which die, stop for a while, or join."""

    class Kind(LoopWorker):
        pass

    Kind.script = staticmethod(script)
    World.store = dist.HashStore()  # pyright: ignore[reportAttributeAccessIssue]
    return trained(None, strategy, seed, deaths=deaths, stops=stops, joins=joins, moments=moments, kind=Kind)
