"""Lane: the one thread through which a rank communicates over the network, in the order in which it was asked to.

Every rank asks in the same order, so nothing that has several parts can meet another's part on the way; and nothing waits for
the trainer to come by before it goes on.  Collectives chained from callbacks have neither property.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from paceline.errors import ClusterError
from paceline.op import Op

T = TypeVar("T")


class Asked(Op[T]):
    """Work that the thread does."""

    __slots__ = ("_future",)

    def __init__(self, kind: str, future: Future[T]) -> None:
        super().__init__(kind)
        self._future = future

    def wait(self) -> T:
        return self._future.result()


class CommThread:
    """A thread and the queue of what it still has to do; it starts with the first thing that it is asked for."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def is_here(self) -> bool:
        """Whether the caller is the lane's own thread."""
        return threading.current_thread() is self._thread

    def ask(self, kind: str, work: Callable[[], T]) -> Op[T]:
        """Do `work` after all that was asked before."""
        if self._is_closed:
            raise ClusterError(f"'{kind}' was begun after the job was closed: nobody would do it")
        if self._thread is None:
            # A daemon: whoever hangs in a collective that never ends must not keep the process from doing so.
            self._thread = threading.Thread(target=self._run, name="paceline-lane", daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._queue.put((future, work))
        return Asked(kind, future)

    def _run(self) -> None:
        while (asked := self._queue.get()) is not None:
            future, work = asked
            try:
                future.set_result(work())
            except BaseException as error:  # Told to whoever waits for it.
                future.set_exception(error)
            del asked, future, work  # What was exchanged must not live until the next exchange.

    def close(self, *, patience_s: float = 1.0) -> None:
        """No more is asked; what still hangs is left to the end of the process."""
        self._is_closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(patience_s)
