"""Op: the one thing that a strategy waits for.

An Op starts when it is created and ends when it is awaited.  Between the two, the rank may do other work.  A strategy
awaits Ops; its driver decides what waiting means: virtual time in the simulator, blocking in a real process, the user's
next `backward()` or `step()` in an attached loop.  This is not asyncio: there is no event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Op(Generic[T]):
    """An operation in flight on one rank.  In a strategy, `await` it for its result; elsewhere call `wait()`."""

    __slots__ = ("kind",)

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __await__(self) -> Generator[Op[T], T, T]:
        return (yield self)

    def wait(self) -> T:
        """Block until the operation ends.  Only Ops of real processes support this."""
        raise RuntimeError(f"'{self.kind}' can only be awaited: its driver decides when it ends")

    def __repr__(self) -> str:
        return f"<Op {self.kind}>"


class Ready(Op[T]):
    """An Op that ended when it was started."""

    __slots__ = ("value",)

    def __init__(self, kind: str, value: T) -> None:
        super().__init__(kind)
        self.value = value

    def wait(self) -> T:
        return self.value


class Begun(Op[T]):
    """An Op that a function call ends, in the thread of the first caller of `wait`."""

    def __init__(self, kind: str, finish: Callable[[], T]) -> None:
        super().__init__(kind)
        self._finish: Callable[[], T] | None = finish

    def wait(self) -> T:
        if self._finish is not None:
            self._value = self._finish()
            self._finish = None
        return self._value


class Routine(Op[T]):
    """A coroutine that starts at once and continues in `wait`, in the caller's own thread.

    Nothing runs in the background, so all ranks of a job start their collectives in the same order.
    """

    __slots__ = ("_coroutine", "_error", "_pending", "_result")

    def __init__(self, kind: str, coroutine: Coroutine[Op[Any], Any, T]) -> None:
        super().__init__(kind)
        self._coroutine: Coroutine[Op[Any], Any, T] | None = coroutine
        self._pending: Op[Any] | None = None
        self._error: Exception | None = None
        self._advance(None)

    def wait(self) -> T:
        while self._coroutine is not None:
            assert self._pending is not None
            try:
                value = self._pending.wait()
            except BaseException as error:
                self._advance(None, error)
            else:
                self._advance(value)
        if self._error is not None:
            raise self._error
        return self._result

    def _advance(self, value: Any, error: BaseException | None = None) -> None:
        """Run the coroutine to its next Op that has not ended.

        An error that leaves the coroutine is kept, and raised by every `wait`.
        """
        assert self._coroutine is not None
        try:
            pending = self._coroutine.throw(error) if error is not None else self._coroutine.send(value)
            while isinstance(pending, Ready):
                pending = self._coroutine.send(pending.value)
            self._pending = pending
            return
        except StopIteration as stop:
            self._result = stop.value
        except Exception as failure:
            self._error = failure
        self._coroutine = None
        self._pending = None


def drive(coroutine: Coroutine[Op[Any], Any, T]) -> T:
    """Run a coroutine to its end, waiting for each Op in turn.

    >>> async def twice(op): return 2 * await op
    >>> drive(twice(Ready("number", 21)))
    42
    """
    return Routine("drive", coroutine).wait()
