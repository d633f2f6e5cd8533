"""The one thread in which a rank communicates over the network, in the order of the calls.

Every rank calls in the same order.  So the parts of an exchange of several collectives cannot meet the parts of
another exchange, and no exchange waits for the training thread before it continues.  Collectives chained by callbacks
have neither property.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from paceline.errors import ClusterError, ExchangeFailed
from paceline.op import Op

T = TypeVar("T")


class Submitted(Op[T]):
    """Work that the thread does."""

    __slots__ = ("_future",)

    def __init__(self, kind: str, future: Future[T]) -> None:
        super().__init__(kind)
        self._future = future

    def wait(self) -> T:
        return self._future.result()


class CommThread:
    """A thread and the queue of its work; it starts with the first work.

    If it `stops_at_error`, nothing is done after a failure of the cluster: the other ranks do not take part in it.
    """

    def __init__(self, *, stops_at_error: bool = False) -> None:
        self._stops_at_error = stops_at_error
        self._failure: ClusterError | None = None
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def submit(self, kind: str, work: Callable[[], T]) -> Op[T]:
        """Do `work` after all that was submitted before."""
        if self._is_closed:
            raise ClusterError(f"'{kind}' was started after the job was closed: it would never be done")
        if self._thread is None:
            # A daemon: a collective that never ends must not keep the process from ending.
            self._thread = threading.Thread(target=self._run, name="paceline-comm", daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._queue.put((future, work))
        return Submitted(kind, future)

    def _run(self) -> None:
        while (submitted := self._queue.get()) is not None:
            future, work = submitted
            try:
                if self._failure is not None:
                    raise ExchangeFailed(f"an exchange before this one failed: {self._failure}")
                future.set_result(work())
            except BaseException as error:  # Raised again where the Op is awaited.
                if self._stops_at_error and isinstance(error, ClusterError):
                    self._failure = self._failure or error
                future.set_exception(error)
            del submitted, future, work  # These refer to tensors, and must not live until the next work.

    def close(self, *, timeout_s: float = 1.0) -> None:
        """Accept no more work.  A collective that still hangs after `timeout_s` ends with the process."""
        self._is_closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_s)

    @property
    def is_idle(self) -> bool:
        """Whether it has ended, or never began."""
        return self._thread is None or not self._thread.is_alive()
