"""ElasticEndpoint: collectives that outlive the death of a worker.

What was exchanged is used only after a commit: a small collective behind all exchanges that were started before one of
them was awaited.  If any worker gets to the end of a commit, then all have come to its start, and have all results.
So after a death the workers that are left meet, and compare how often they have committed.  Who is one behind commits
alone.  What none has committed is undone and exchanged again among those that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from paceline.elastic.rendezvous import Arrival, Generation, LeftOut, Over, Rendezvous
from paceline.elastic.undo import Copies
from paceline.endpoint import Endpoint, Layout, Retry, SharedVector
from paceline.errors import ClusterError, DifferentCollectives
from paceline.op import Op, drive
from paceline.protocol.messages import Message
from paceline.state import Slot
from paceline.trace import Trace

T = TypeVar("T")
MOST_IN_VAIN = 3  # Meetings in a row after which the same workers fail again: then no death is the cause.


class Failed(Op[Any]):
    """An Op that failed when it was started."""

    __slots__ = ("error",)

    def __init__(self, kind: str, error: ClusterError) -> None:
        super().__init__(kind)
        self.error = error

    def __await__(self) -> Generator[Op[Any], Any, Any]:
        raise self.error
        yield self  # A generator, as every __await__.

    def wait(self) -> Any:
        raise self.error


class Exchange(Op[T]):
    """What is exchanged between two commits, or a part of it; awaiting it commits all that has been started."""

    def __init__(
        self,
        endpoint: ElasticEndpoint,
        kind: str,
        start: Callable[[Endpoint], Op[T]],
        again: Callable[[Endpoint], Op[T]] | None,
        copies: Copies,
    ) -> None:
        super().__init__(kind)
        self.value: Any = None
        self.start = start
        self.again = again  # None: it cannot be exchanged again.
        self.copies = copies
        self.op: Op[T]
        self._endpoint = endpoint

    def __await__(self) -> Generator[Op[Any], Any, T]:
        yield from self._endpoint.commit().__await__()
        return self.value

    def wait(self) -> T:
        drive(self._endpoint.commit())
        return self.value


class Deferred(Op[T], Generic[T]):
    """A coroutine that runs when it is awaited."""

    def __init__(self, kind: str, routine: Coroutine[Op[Any], Any, T]) -> None:
        super().__init__(kind)
        self._routine = routine

    def __await__(self) -> Generator[Op[Any], Any, T]:
        return (yield from self._routine.__await__())

    def wait(self) -> T:
        return drive(self._routine)

    def __del__(self) -> None:
        self._routine.close()  # It may never have been awaited: its worker failed before that.


class ElasticEndpoint:
    """A worker's endpoint in a run whose workers may die and join.

    `inner` is its endpoint in the current generation.
    """

    def __init__(self, rendezvous: Rendezvous, inner: Endpoint) -> None:
        self.rendezvous = rendezvous
        self.inner = inner
        self.has_joined_late = rendezvous.is_newcomer
        self.number = 0  # Of the last generation that began with a pause of all its workers.
        self.committed = 0
        self.pause: int | None = None  # The commit after which all workers pause at their next step.
        self.is_broken = False  # A worker of this generation has died, so that no codec can be used.
        self.step: Callable[[], int] = lambda: 0  # The step that this worker is at, for the trace.
        self.slots: Callable[[], Sequence[Slot]] = list  # The slots of state that exchanges change.
        self.on_commit: Callable[[int, list[tuple[str, Any]]], None] | None = None  # Gets its number and its exchanges.
        self._open: list[Exchange[Any]] = []  # Not committed.
        self._in_vain = 0
        self._renewed = 0  # The count of commits at the last change of the workers.

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def ranks(self) -> Sequence[int]:
        return self.inner.ranks

    @property
    def layout(self) -> Layout:
        return self.inner.layout

    @property
    def hosts(self) -> Sequence[Sequence[int]] | None:
        return self.inner.hosts

    @property
    def trace(self) -> Trace:
        return self.inner.trace

    @property
    def retransmit_s(self) -> float | None:
        return self.inner.retransmit_s

    @property
    def is_newcomer(self) -> bool:
        """Whether this worker has yet to join the run."""
        return self.rendezvous.is_newcomer

    @property
    def is_due(self) -> bool:
        """Whether all workers pause at the next step."""
        if len(self.ranks) == 1 and self.rendezvous.has_newcomers():
            self.pause = self.committed
        return self.pause is not None and self.committed >= self.pause

    # Commits.

    async def commit(self) -> None:
        """Finish and commit all exchanges that have been started."""
        while self._open:
            try:
                for exchange in self._open:
                    exchange.value = await exchange.op
                has_newcomers = await self._meet_all()
            except (LeftOut, Over, DifferentCollectives):
                raise
            except ClusterError as error:
                await self._go_on(error)
            else:
                self._in_vain = 0
                self._end_commit()
                if has_newcomers and self.pause is None:
                    self.pause = self.committed

    async def _meet_all(self) -> bool:
        """The collective of a commit: whether any worker knows of one that waits to join."""
        if len(self.ranks) == 1:
            return self.rendezvous.has_newcomers()
        known = torch.tensor([float(self.rendezvous.has_newcomers())], dtype=torch.float64)
        return bool(await self.inner.all_reduce(known))

    def _end_commit(self) -> None:
        self.committed += 1
        if self.on_commit is not None:
            self.on_commit(self.committed, [(exchange.kind, exchange.value) for exchange in self._open])
        self._open.clear()

    async def _go_on(self, error: ClusterError) -> None:
        """Meet the workers that are left, and begin again what none of them has committed."""
        if any(exchange.again is None for exchange in self._open):
            raise error
        before = self.ranks
        began = self.now()
        self.enter(await self.rendezvous.meet(self.arrival(cause=str(error))))
        self._in_vain = 0 if len(self.ranks) < len(before) else self._in_vain + 1
        if self._in_vain > MOST_IN_VAIN:
            raise error
        self.note("lost", cause=str(error), before=len(before), workers=len(self.ranks), pause_s=self.now() - began)
        if self._open and self.last_committed > self.committed:
            self._end_commit()
            return
        for exchange in self._open:
            exchange.copies.restore()
        for exchange in self._open:
            self._start(exchange)

    def arrival(self, *, is_paused: bool = False, cause: str = "") -> Arrival:
        """What this worker says when it meets the others."""
        return Arrival(self.committed, self._renewed, self.pause, is_paused, cause)

    def enter(self, generation: Generation) -> None:
        """From now on take part in this generation."""
        self.inner = generation.endpoint
        self.last_committed = generation.committed
        self.pause = generation.pause
        self.is_broken = not generation.is_new
        if generation.is_new:
            self.number = generation.number

    def renew(self, committed: int) -> None:
        """All workers of this generation have agreed on a state; their strategies start anew."""
        assert not self._open
        self.committed = self._renewed = committed
        if not self.is_broken:
            self.pause = None

    def note(self, kind: str, **values: Any) -> None:
        """Note a change of the workers in the trace, on the first of them."""
        if self.rank == self.ranks[0]:
            self.trace.decision(self.now(), self.step(), kind, values)

    def come_back(self) -> None:
        """The others went on without this worker, which joins them again."""
        self._open.clear()
        self.pause = None
        self.rendezvous.come_back()

    # Exchanges.

    def _begin(
        self,
        kind: str,
        start: Callable[[Endpoint], Op[T]],
        retry: Callable[[Endpoint], Op[T]] | None,
        changes: Sequence[Tensor] = (),
    ) -> Op[T]:
        slots = () if self._open else self.slots()  # As they were before the first of them.
        exchange = Exchange(self, kind, start, retry, Copies(changes, slots))
        self._start(exchange)
        self._open.append(exchange)
        return exchange

    def _start(self, exchange: Exchange[Any]) -> None:
        start = exchange.again if self.is_broken and exchange.again is not None else exchange.start
        try:
            exchange.op = start(self.inner)
        except DifferentCollectives:
            raise
        except ClusterError as error:
            exchange.op = Failed(exchange.kind, error)

    def run_collectives(
        self,
        routine: Callable[[Endpoint], Coroutine[Op[Any], Any, T]],
        *,
        kind: str = "exchange",
        is_single: bool = False,
        retry: Retry | None = None,
    ) -> Op[T]:
        def start(endpoint: Endpoint) -> Op[T]:
            return endpoint.run_collectives(routine, kind=kind, is_single=is_single)

        if retry is None:
            return self._begin(kind, start, None)
        again = retry.routine
        return self._begin(kind, start, lambda e: e.run_collectives(again, kind=kind), changes=retry.changes)

    def all_reduce(self, x: Tensor, extras: Tensor | None = None) -> Op[Tensor]:
        def start(endpoint: Endpoint) -> Op[Tensor]:
            return endpoint.all_reduce(x, extras)

        return self._begin("all_reduce", start, start, changes=[x] if extras is None else [x, extras])

    def all_gather(self, data: Tensor) -> Op[list[Tensor]]:
        def start(endpoint: Endpoint) -> Op[list[Tensor]]:
            return endpoint.all_gather(data)

        return self._begin("all_gather", start, start)

    def all_to_all(self, parts: Sequence[Tensor], coming: Sequence[int] | None = None) -> Op[list[Tensor]]:
        each = dict(zip(self.ranks, parts, strict=True))
        sizes = None if coming is None else dict(zip(self.ranks, coming, strict=True))

        def start(endpoint: Endpoint) -> Op[list[Tensor]]:
            own = None if sizes is None else [sizes[rank] for rank in endpoint.ranks]
            return endpoint.all_to_all([each[rank] for rank in endpoint.ranks], own)

        return self._begin("all_to_all", start, start)

    def broadcast(self, x: Tensor, src: int) -> Op[Tensor]:
        def start(endpoint: Endpoint) -> Op[Tensor]:
            return endpoint.broadcast(x, src if src in endpoint.ranks else endpoint.ranks[0])

        return self._begin("broadcast", start, start, changes=[x])

    def reduce(self, x: Tensor, dst: int, extras: Tensor | None = None) -> Op[Tensor]:
        raise _unsupported("reduce")

    def group(self, ranks: Sequence[int]) -> Endpoint:
        raise _unsupported("group")

    def shared_vector(self, first: Tensor, member: int | None = None) -> Op[SharedVector]:
        raise _unsupported("shared_vector")

    # Of this rank alone.

    def now(self) -> float:
        return self.inner.now()

    def compute(self, work: Callable[[], T], *, kind: str = "compute", nbytes: int = 0) -> Op[T]:
        return self.inner.compute(work, kind=kind, nbytes=nbytes)

    def spawn(self, routine: Coroutine[Op[Any], Any, T], *, kind: str = "routine") -> Op[T]:
        return Deferred(kind, routine)  # Were it started now, it would commit before others are started.

    def send(self, dst: int, message: Message) -> Op[None]:
        raise _unsupported("send")

    def recv(
        self, *, src: int | None = None, types: tuple[type[Message], ...] | None = None, timeout: float | None = None
    ) -> Op[Message]:
        raise _unsupported("recv")

    def has_ended(self, rank: int) -> bool:
        return False

    def members_ever(self) -> Sequence[int]:
        return self.ranks

    def send_buffer(self, like: Tensor) -> Tensor:
        return torch.empty_like(like)

    def in_use(self, x: Tensor) -> bool:
        return False


def _unsupported(call: str) -> TypeError:
    return TypeError(
        f"{call}() of a worker's endpoint with elastic=True: a method may use all_reduce, all_gather, all_to_all and "
        "broadcast there, and anything within run_collectives(..., retry=...)"
    )
