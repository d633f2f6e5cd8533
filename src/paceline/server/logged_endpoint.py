"""LoggedEndpoint: a server's endpoint that logs what it receives, so that a killed server comes back as it was.

A server role depends only on what it receives, and when.  So the endpoint writes each message and each timeout, with
its time, to a log before the role sees it.  A new process of the role first gets all of that again: then it holds the
same values to the bit, the same members, clocks and requests, and waits for the next message.  What it sends meanwhile
was sent before, and is dropped.  A worker that has no reply asks again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor

from paceline.endpoint import Endpoint
from paceline.op import Op, Ready
from paceline.protocol.messages import Event, Message, PeerDied, PeerReturned, PeerSuspected, Returned, decode, encode
from paceline.server.shard_log import LogFailed, ShardLog
from paceline.trace import Trace

T = TypeVar("T")
EVENTS: dict[str, type[Event]] = {"died": PeerDied, "suspected": PeerSuspected, "returned": PeerReturned}
NAMES = {cls: name for name, cls in EVENTS.items()}


class LoggedEndpoint:
    """An endpoint between a server role and another one.

    A role that can be saved between two messages sets `save`, which gives its state as plain values; otherwise its log
    is never cut.  `on_failure` is told why nothing is logged any longer.
    """

    def __init__(
        self,
        inner: Endpoint,
        log: ShardLog,
        *,
        on_failure: Callable[[str], None],
        peers: Callable[[], Sequence[int]],
        trace: Trace | None = None,
    ) -> None:
        """`peers` are all ranks that may wait for this one.  `trace` is where points go that are repeated; None: into
        the endpoint's own."""
        self.inner = inner
        self.rank = inner.rank
        self.layout = inner.layout
        self.save: Callable[[], Any] | None = None
        self.on_back: Callable[[], None] = lambda: None  # Called once the role knows what it knew when it was killed.
        self._log: ShardLog | None = log
        self._is_cut_soon = False
        self._on_failure = on_failure
        self._scratch = trace
        self._peers = peers
        self._is_announced = log.is_new
        self._own: deque[Message] = deque()  # What this rank has found out by itself.
        self._old: Iterator[tuple[Any, list[Tensor]]] | None = log.records()
        self._next_old: tuple[Any, list[Tensor]] | None = None
        self._time = inner.now()
        self._advance()
        self.snapshot: Any = None  # The state that the role continues from; None if it begins, or repeats everything.
        if log.snapshot is not None:
            self._time, self.snapshot = log.snapshot["time"], log.snapshot["state"]
        elif self._next_old is not None:
            self._time = self._next_old[0][0]
            self._advance()
        else:
            self._write("began", [], [])

    @property
    def is_repeating(self) -> bool:
        """Whether the role gets what it has got before."""
        return self._old is not None

    # Time, and what is received.

    def now(self) -> float:
        """The time at which the last message came: the role decides nothing by another one."""
        return self._time

    def recv(
        self, *, src: int | None = None, types: tuple[type[Message], ...] | None = None, timeout: float | None = None
    ) -> Op[Message]:
        return self.inner.spawn(self._recv(src, types, timeout), kind="recv")

    async def _recv(self, src: int | None, types: tuple[type[Message], ...] | None, timeout: float | None) -> Message:
        if self._next_old is not None:
            return self._repeat(*self._next_old)
        if not self._is_announced:
            self._is_announced = True
            self.on_back()
            for rank in self._peers():
                await self.inner.send(rank, Returned())
        self._cut()
        for message in self._own:
            if src in (None, message.src) and (types is None or isinstance(message, types)):
                self._own.remove(message)
                return self._noted(message)
        left = None if timeout is None else max(0.0, self._time + timeout - self.inner.now())
        try:
            message = await self.inner.recv(src=src, types=types, timeout=left)
        except TimeoutError:
            self._time = self.inner.now()
            self._write("timeout", [], [])
            raise
        return self._noted(message)

    def _noted(self, message: Message) -> Message:
        self._time = self.inner.now()
        if type(message) in NAMES:
            self._write(NAMES[type(message)], [message.src], [])  # pyright: ignore[reportArgumentType]
        else:
            self._write("message", [message.src, encode(message)], message.tensors())
        return message

    def _repeat(self, record: Any, tensors: list[Tensor]) -> Message:
        self._time, kind, given = record
        self._advance()
        if kind == "timeout":
            raise TimeoutError("as it was")
        if kind in EVENTS:
            return EVENTS[kind](src=given[0])
        return decode(given[1], tensors, given[0])

    def _advance(self) -> None:
        assert self._old is not None
        self._next_old = next(self._old, None)
        if self._next_old is None:
            self._old = None

    # The log.

    def _write(self, kind: str, given: list[Any], tensors: Sequence[Tensor]) -> None:
        if self._log is not None:
            try:
                self._log.append((self._time, kind, given), tensors)
            except LogFailed as error:
                self._give_up(error)

    def _cut(self) -> None:
        """Save the role's state in the place of what it was made of, if that has become long."""
        if self._log is not None and self.save is not None and (self._log.is_long or self._is_cut_soon):
            self._is_cut_soon = False
            try:
                self._log.save({"time": self._time, "state": self.save()})
            except LogFailed as error:
                self._give_up(error)

    def cut_soon(self) -> None:
        """The role has read something that may not be there when the log is read: save its state."""
        self._is_cut_soon = True

    def _give_up(self, error: LogFailed) -> None:
        self._log = None
        self._on_failure(f"{error.filename}: {error.strerror}")

    # What the role does.

    def send(self, dst: int, message: Message) -> Op[None]:
        if self.is_repeating:
            return Ready("send", None)
        return self.inner.send(dst, message)

    def find_out(self, event: Event) -> None:
        """This rank has found something out by itself; the role receives it as its next message."""
        self._own.append(event)

    def compute(self, work: Callable[[], T], *, kind: str = "compute", nbytes: int = 0) -> Op[T]:
        if self.is_repeating:
            return Ready(kind, work())
        return self.inner.compute(work, kind=kind, nbytes=nbytes)

    @property
    def trace(self) -> Trace:
        return self.inner.trace if self._scratch is None or not self.is_repeating else self._scratch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
