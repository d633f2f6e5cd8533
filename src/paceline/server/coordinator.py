"""Coordinator: the first server of a batch method, which hands out the data in portions and tells the shards what to do.

It holds no vector and sees none: of the shards it hears inner products, of the workers losses.  Workers may join, leave and die at any
time; each portion is counted exactly once in every pass.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from math import inf, isfinite

import torch

from paceline.errors import ClusterError
from paceline.protocol.messages import Away, Message, PeerDied, PeerSuspected, Reply, Request, Wait, reply_to
from paceline.protocol.requests import (
    RETRIES,
    Deduplicator,
    PeerFinished,
    Refusal,
    Requests,
    UnknownRequest,
    Verdict,
    check_reply,
)
from paceline.server.messages import (
    BringOrder,
    Brought,
    End,
    Ended,
    Enlist,
    OverOrder,
    Products,
    Pushed,
    PushOrder,
    Report,
    RunEnded,
    RunProgram,
    SignedOff,
    SignOff,
    WorkerLost,
    WorkOrder,
)
from paceline.server.portions import Portions
from paceline.server.shard import Shard


class Spent(Exception):
    """There are no more passes over the data in the budget."""


class Deserted(Exception):
    """No worker is left, nor will another come."""


class Coordinator:
    """What a batch method's server role works with: `then` and `dot` on all shards together, and `evaluate` on all of the data."""

    def __init__(self, s: Shard, *, push: int, backups: int) -> None:
        self.endpoint, self._s, self._push, self._backups = s.endpoint, s, push, backups
        self.shards = list(s.endpoint.layout.server_ranks)[1:]
        self.passes = 0  # over the data, so far
        self._extent: list[int] | None = (
            None  # The first epoch and the one before which to end, minibatches in each, parts of each.
        )
        self._members = set(s.endpoint.layout.worker_ranks)
        self._dead: set[int] = set()
        self._deserted_at = 0.0  # Until when it waits for others if nobody is there.
        self._received = Deduplicator()
        self._waiting: dict[int, bool] = {}  # Who was not answered yet, and whether what it has last reported counts.
        self._bringer: int | None = None  # Who brings the first value,
        self._is_there = False  # and whether it has.
        self._is_over = False
        self._portions: Portions | None = None
        self._loss, self._samples, self._first_samples = 0.0, 0, 0
        self._requests = Requests(s.endpoint)
        self._later: deque[Message] = deque()  # What was said while it waited for the shards.
        self._unsaid: list[str] = []  # What the shards are to do before anything else.

    # Vectors.

    def then(self, operation: str, *given: str | float) -> None:
        """Let the shards do this next; it is said with whatever must be waited for."""
        self._unsaid.append(" ".join([operation, *(g if isinstance(g, str) else repr(g) for g in given)]))

    async def dot(self, x: str, y: str) -> float:
        return (await self.dots((x, y)))[0]

    async def dots(self, *pairs: tuple[str, str]) -> list[float]:
        """Inner products, of all shards together."""
        for x, y in pairs:
            self.then("dot", x, y)
        return await self._tell()

    async def _tell(self) -> list[float]:
        """Let all shards do what they were not told yet."""
        if not self._unsaid:
            return []
        program = torch.frombuffer(bytearray("\n".join(self._unsaid).encode()), dtype=torch.uint8)
        self._unsaid = []
        answers = await self._ask_shards(self._requests.number(RunProgram(program)))
        return torch.stack([answer.products for answer in answers]).sum(0).tolist()

    async def _ask_shards(self, asked: RunProgram) -> list[Products]:
        """The replies of all shards.  Messages of workers are handled afterwards; a worker that repeats a request is told to wait."""
        endpoint, answers, silences, due = self.endpoint, dict[int, Products](), 0, 0.0
        while missing := [rank for rank in self.shards if rank not in answers]:
            if endpoint.now() >= due:
                for rank in missing:
                    await endpoint.send(rank, asked)
                silences, due = (
                    silences + 1,
                    inf if endpoint.retransmit_s is None else endpoint.now() + endpoint.retransmit_s,
                )
            try:
                message = await endpoint.recv(timeout=None if due == inf else max(0.0, due - endpoint.now()))
            except TimeoutError:
                if silences > RETRIES:
                    raise ClusterError(
                        f"{endpoint.layout.name(missing[0])} has not answered the coordinator: it is dead or stuck"
                    ) from None
                continue
            if message.src in missing and isinstance(message, (Reply, PeerDied)):
                check_reply(endpoint, message)
                if isinstance(message, Products) and message.request_id == asked.request_id:
                    answers[message.src] = message
                    silences = 0
            elif isinstance(message, Request) and self._is_repeated(message):
                await endpoint.send(message.src, reply_to(message, Wait()))
            else:
                self._later.append(message)
        return [answers[rank] for rank in self.shards]

    def _is_repeated(self, request: Request) -> bool:
        waiting = {(m.src, m.request_id) for m in self._later if isinstance(m, Request)}
        return (request.src, request.request_id) in waiting or self._received.judge(request) is Verdict.REPEATED

    # Passes over the data.

    async def begin(self) -> None:
        """Wait until the shards have the first value."""
        while not self._is_there:
            await self._hear()

    async def evaluate(self) -> float:
        """The mean loss at `w`, with its gradient in `g`; infinity if not all samples counted that did at first."""
        assert self._extent is not None
        first, last, steps, data_shards = self._extent
        if first + self.passes >= last:
            raise Spent
        self.then("zero", "g")
        self.then("forget")
        await self._tell()
        self.passes += 1
        self._loss, self._samples = 0.0, 0
        self._portions = Portions(steps * data_shards, self._backups)
        await self._rouse()
        while not self._portions.is_done:
            await self._hear()
        self._first_samples = self._first_samples or self._samples
        if not self._samples or self._samples < self._first_samples:
            return inf
        self.then("scale", 1 / self._samples, "g")
        mean = self._loss / self._samples
        return mean if isfinite(mean) else inf

    async def finish(self) -> None:
        """Let all workers have what `w` is now, and go."""
        await self._tell()
        self._is_over = True
        await self._rouse()
        while self._members:
            await self._hear()
        end = self._requests.number(End())
        for rank in self.shards:
            await self.endpoint.send(rank, end)
        for rank in self.shards:
            with suppress(PeerFinished):  # It may be the reply alone that was lost.
                await self._requests.reply(rank, end, Ended)
        with suppress(TimeoutError):
            while True:  # A worker that came while the others left has nothing to do.
                message = self._later.popleft() if self._later else await self.endpoint.recv(timeout=0.0)
                if message.src not in self.endpoint.layout.server_ranks:
                    await self.endpoint.send(message.src, RunEnded())

    # Workers.

    async def _hear(self) -> None:
        """The next message, and what follows from it."""
        message = await self._next()
        src = message.src
        if src in self.endpoint.layout.server_ranks:
            if isinstance(message, WorkerLost):
                await self._bury(message.worker, is_dead=True)
            return
        if isinstance(message, (PeerDied, PeerSuspected)):
            return await self._bury(src, is_dead=isinstance(message, PeerDied))
        if src in self._dead:
            return
        try:
            if not isinstance(message, Request):
                raise UnknownRequest(message)
            if (verdict := self._received.judge(message)) is Verdict.REPEATED:
                return await self.endpoint.send(src, self._received.reply_again(message))
            if verdict is not Verdict.NEW:
                return
            self._check(message)
        except Refusal as error:
            return await self._s.refuse(message, error)
        self._received.note(message)
        await self._handle(message)

    async def _next(self) -> Message:
        while not self._later:
            timeout = None if self._members else max(0.0, self._deserted_at - self.endpoint.now())
            try:
                return await self.endpoint.recv(timeout=timeout)
            except TimeoutError:
                if not self._members:
                    raise Deserted from None
        return self._later.popleft()

    def _check(self, request: Request) -> None:
        """Refuse a request that makes no sense."""
        match request:
            case Enlist():
                _check_form(request.extent, torch.int64, 4)
                numbers: list[int] = request.extent.tolist()
                first, last, steps, data_shards = numbers
                if not (0 <= first < last and steps >= 1 and data_shards >= 1):
                    raise Refusal(
                        f"it wants epochs {first} to {last} of {steps} minibatches in {data_shards} parts, and there is none"
                    )
                if self._extent not in (None, numbers):
                    raise Refusal(f"it wants epochs, minibatches and parts {numbers}, and they are {self._extent}")
            case Report():
                _check_form(request.which, torch.int64, 2)
            case Pushed():
                _check_form(request.which, torch.int64, 2)
                _check_form(request.loss, torch.float64, 1)
            case Brought() | SignOff():
                pass
            case _:
                raise UnknownRequest(request)

    async def _handle(self, request: Request) -> None:
        src = request.src
        if isinstance(request, SignOff):
            self._members.discard(src)
            return await self._answer(src, SignedOff())
        if isinstance(request, Enlist):
            self._extent = request.extent.tolist()
            self._members.add(src)
        elif src not in self._members:
            return await self._answer(src, Away(reason="it is not, or no longer, among the workers; it may enlist"))
        counts = False
        if isinstance(request, Brought):
            self._is_there = True
        elif isinstance(request, Report):
            number, portion = request.which.tolist()
            counts = number == self.passes and self._portions is not None and self._portions.report(src, portion)
        elif isinstance(request, Pushed):
            await self._count(request)
        self._waiting[src] = counts
        await self._rouse()

    async def _count(self, request: Pushed) -> None:
        """A worker's sum is on all shards; it counts unless another worker has done the same work meanwhile."""
        portions, src = self._portions, request.src
        number, which = request.which.tolist()
        if portions is None or number != self.passes or which != portions.sum_of(src) or not portions.claimed(src):
            return
        self.then("take", str(src), str(number), str(which), "g")
        await self._tell()
        portions.settle(src)
        self._loss += request.loss.item()
        self._samples += request.samples

    async def _rouse(self) -> None:
        """Answer all who wait and for whom there is something to do."""
        for src, counts in list(self._waiting.items()):
            if (answer := self._order(src, counts)) is not None:
                del self._waiting[src]
                await self._answer(src, answer)

    def _order(self, src: int, counts: bool) -> Reply | None:
        """What a worker is to do next; None if there is nothing at the moment."""
        if self._is_over:
            return OverOrder()
        if not self._is_there:
            if self._bringer is not None:
                return None
            self._bringer = src
            return BringOrder()
        portions = self._portions
        if portions is None or portions.is_done:
            return None
        has_enough, portion = portions.claimed(src) >= self._push, None
        if not has_enough:
            portion = portions.take(src)
        if portion is None and portions.claimed(src):  # Before it does what others may be slow to do.
            return PushOrder(torch.tensor([self.passes, portions.sum_of(src), int(counts)]))
        if portion is None and (portion := portions.back_up(src)) is None:
            return None
        return WorkOrder(torch.tensor([self.passes, portions.sum_of(src), int(counts), portion]))

    async def _answer(self, src: int, reply: Reply) -> None:
        await self.endpoint.send(src, self._received.keep(src, reply))

    async def _bury(self, src: int, *, is_dead: bool) -> None:
        """A worker is dead, or taken for dead: what it has not handed in is done by others."""
        if is_dead:
            self._dead.add(src)
        if src not in self._members:
            return
        self._members.discard(src)
        self._deserted_at = self.endpoint.now() + self._s.grace_s
        if self._bringer == src and not self._is_there:
            self._bringer = None
        if self._portions is not None:
            self._portions.lose(src)
        if self._waiting.pop(src, None) is not None and not is_dead:  # It may be alive after all.
            await self._answer(src, Away(reason="it was declared dead; it may enlist again"))
        await self._rouse()


def _check_form(numbers: torch.Tensor, dtype: torch.dtype, count: int) -> None:
    if (numbers.dtype, tuple(numbers.shape)) != (dtype, (count,)):
        raise Refusal(f"it must hold {count} numbers of {dtype}, not {numbers.dtype} of shape {tuple(numbers.shape)}")
