"""Coordinator: the first server of a batch method, which hands out the data in portions and tells the shards what to
do.

It holds no vector and sees none: of the shards it hears inner products, of the workers losses.  Workers may join, leave
and die at any time; each portion is counted exactly once in every pass.
"""

from __future__ import annotations

from contextlib import suppress
from math import inf, isfinite

import torch

from paceline.protocol.messages import Away, Message, PeerDied, PeerSuspected, Reply, Request
from paceline.protocol.requests import (
    Deduplicator,
    PeerFinished,
    Refusal,
    UnknownRequest,
    Verdict,
)
from paceline.protocol.roster import Roster, State
from paceline.server.messages import (
    BringOrder,
    Brought,
    End,
    Ended,
    Enlist,
    OverOrder,
    Pushed,
    PushOrder,
    Report,
    RunEnded,
    SignedOff,
    SignOff,
    WorkerLost,
    WorkOrder,
)
from paceline.server.portions import Portions
from paceline.server.shard import Shard
from paceline.server.shard_programs import ShardPrograms


class Spent(Exception):
    """There are no more passes over the data in the budget."""


class Deserted(Exception):
    """No worker is left, nor will another come."""


class Coordinator:
    """What a batch method's server role works with: `then` and `dot` on all shards together, and `evaluate` on all of
    the data."""

    def __init__(self, s: Shard, *, push: int, backups: int) -> None:
        self.endpoint, self._s = s.endpoint, s
        self._push, self._backups = push, backups
        self.shards = list(s.endpoint.layout.server_ranks)[1:]
        self.passes = 0  # over the data, so far
        # The first epoch, the one after the last, the minibatches of each and the parts of these.
        self._extent: list[int] | None = None
        self._roster = Roster(s.endpoint.layout.worker_ranks)
        self._deserted_at = 0.0  # Until when it waits for new workers if there is none.
        self._received = Deduplicator()
        self._programs = ShardPrograms(s.endpoint, self.shards, self._received)
        self._later = self._programs.later
        self._waiting: dict[int, bool] = {}  # Workers that were not answered yet, and whether their last report counts.
        self._bringer: int | None = None  # The worker that brings the first value,
        self._is_there = False  # and whether it has.
        self._is_over = False
        self._portions: Portions | None = None
        self._loss, self._samples = 0.0, 0  # Of this pass,
        self._first_samples = 0  # and of the first one.

    # Vectors.

    def then(self, operation: str, *given: str | float) -> None:
        """Let the shards do this next; it is sent with the next operations that must be waited for."""
        self._programs.then(operation, *given)

    async def dot(self, x: str, y: str) -> float:
        return (await self.dots((x, y)))[0]

    async def dots(self, *pairs: tuple[str, str]) -> list[float]:
        """Inner products, of all shards together."""
        for x, y in pairs:
            self.then("dot", x, y)
        return await self._programs.run()

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
        await self._programs.run()
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
        await self._programs.run()
        self._is_over = True
        await self._rouse()
        while self._roster.members:
            await self._hear()
        end = self._programs.requests.number(End())
        for rank in self.shards:
            await self.endpoint.send(rank, end)
        for rank in self.shards:
            with suppress(PeerFinished):  # It may be the reply alone that was lost.
                await self._programs.requests.reply(rank, end, Ended)
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
        if self._roster.state(src) is State.DEAD:
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
            timeout = None if self._roster.members else max(0.0, self._deserted_at - self.endpoint.now())
            try:
                return await self.endpoint.recv(timeout=timeout)
            except TimeoutError:
                if not self._roster.members:
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
                        f"it wants epochs {first} to {last} of {steps} minibatches in {data_shards} parts, and "
                        f"there is none"
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
            self._roster.leave(src)
            return await self._answer(src, SignedOff())
        if isinstance(request, Enlist):
            self._extent = request.extent.tolist()
            self._roster.join(src, self._roster.incarnation(src))
        elif not self._roster.is_member(src):
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
        await self._programs.run()
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
        changes = self._roster.die(src) if is_dead else self._roster.suspect(src)
        if not any(change.is_loss for change in changes):
            return
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
