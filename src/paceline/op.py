"""Op: the one thing a strategy can wait for.

An Op is started when it is called for and finished when it is awaited; between the two the rank may do other work.
Strategies await Ops; whoever drives the strategy decides what waiting means: virtual time in the simulator, blocking in
a real process, the user's next `backward()` or `step()` in an attached loop.  This is not asyncio: there is no event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")


class Op(Generic[T]):
    """Something begun on one rank, whose result is had by `await` (in a strategy) or `wait()` (outside of one)."""

    __slots__ = ("kind",)

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __await__(self) -> Generator[Op[T], T, T]:
        return (yield self)

    def wait(self) -> T:
        """Block until it is finished; only real backends can."""
        raise RuntimeError(f"'{self.kind}' can only be awaited: its driver decides when it is finished")

    def __repr__(self) -> str:
        return f"<Op {self.kind}>"


class Ready(Op[T]):
    """An Op that was finished when it was started."""

    __slots__ = ("value",)

    def __init__(self, kind: str, value: T) -> None:
        super().__init__(kind)
        self.value = value

    def wait(self) -> T:
        return self.value


class Begun(Op[T]):
    """Finished by a call, in the thread of whoever waits first."""

    def __init__(self, kind: str, finish: Callable[[], T]) -> None:
        super().__init__(kind)
        self._finish: Callable[[], T] | None = finish

    def wait(self) -> T:
        if self._finish is not None:
            self._value, self._finish = self._finish(), None
        return self._value


class Routine(Op[T]):
    """A coroutine begun at once and carried on, in the caller's own thread, by whoever waits for it.

    Nothing runs behind the caller's back, so the ranks of a job start their collectives in one and the same order.
    """

    __slots__ = ("_coroutine", "_error", "_pending", "_result")

    def __init__(self, kind: str, coroutine: Coroutine[Op[Any], Any, T]) -> None:
        super().__init__(kind)
        self._coroutine: Coroutine[Op[Any], Any, T] | None = coroutine
        self._pending: Op[Any] | None = None
        self._error: Exception | None = None
        try:
            self._advance(None)
        except Exception as error:  # Begun here, but told where it is awaited.
            self._coroutine, self._error = None, error

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
        assert self._coroutine is not None
        try:
            self._pending = self._coroutine.throw(error) if error is not None else self._coroutine.send(value)
        except StopIteration as stop:
            self._coroutine, self._pending, self._result = None, None, stop.value


async def and_then(coroutine: Coroutine[Op[Any], Any, S], then: Callable[[S], T]) -> T:
    """What `then` makes of a coroutine's result."""
    return then(await coroutine)


def drive(coroutine: Coroutine[Op[Any], Any, T]) -> T:
    """Run a coroutine to its end, waiting for each Op in turn.

    >>> async def twice(op): return 2 * await op
    >>> drive(twice(Ready("number", 21)))
    42
    """
    return Routine("drive", coroutine).wait()
