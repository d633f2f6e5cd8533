"""Coordinator: the first server of a batch method, which hands out the data in portions and tells the shards what to do.

It holds no vector and sees none: of the shards it hears inner products, of the workers losses.  Workers may join, leave and die at any
time; each portion is counted exactly once in every pass.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from math import inf, isfinite

import torch

from paceline.endpoint import Message
from paceline.errors import ClusterError
from paceline.server.portions import Portions
from paceline.server.requests import SILENCES, HasEnded, answered, check_answer
from paceline.server.shard import Shard
from paceline.server.shard_state import Refused

REQUESTS = {
    "draw": (4, 0),
    "brought": (0, 0),
    "report": (2, 0),
    "pushed": (2, 1),
    "bye": (0, 0),
}  # How many int64 and float64 numbers.


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
        self._heard: dict[int, tuple[int, Message | None]] = {}  # The last request of each, and what it was answered.
        self._waiting: dict[int, bool] = {}  # Who was not answered yet, and whether what it has last reported counts.
        self._bringer: int | None = None  # Who brings the first value,
        self._is_there = False  # and whether it has.
        self._is_over = False
        self._portions: Portions | None = None
        self._loss, self._samples, self._first_samples = 0.0, 0, 0
        self._serial = 0
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
        self._serial += 1
        program = torch.frombuffer(bytearray("\n".join(self._unsaid).encode()), dtype=torch.uint8)
        self._unsaid = []
        told = Message("do", (program,), serial=self._serial)
        answers = await self._ask_shards(told)
        return torch.stack([a.tensors[0] for a in answers]).sum(0).tolist()

    async def _ask_shards(self, asked: Message) -> list[Message]:
        """What all shards answer; what workers say meanwhile is heard later, and who says it again is told to wait."""
        endpoint, answers, silences, due = self.endpoint, dict[int, Message](), 0, 0.0
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
                if silences > SILENCES:
                    raise ClusterError(
                        f"{endpoint.layout.name(missing[0])} has not answered the coordinator: it is gone, or stuck"
                    ) from None
                continue
            if message.src in missing and (message.serial == asked.serial or message.kind == "gone"):
                check_answer(endpoint, message)
                answers[message.src], silences = message, 0
            elif not self._is_repeated(message):
                self._later.append(message)
            else:
                await endpoint.send(message.src, Message("wait", serial=message.serial))
        return [answers[rank] for rank in self.shards]

    def _is_repeated(self, message: Message) -> bool:
        known = {(m.src, m.serial) for m in self._later if m.serial} | {
            (src, serial) for src, (serial, _) in self._heard.items()
        }
        return (message.src, message.serial) in known

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
        self._serial += 1
        end = Message("end", serial=self._serial)
        for rank in self.shards:
            await self.endpoint.send(rank, end)
        for rank in self.shards:
            with suppress(HasEnded):  # It may be the answer alone that was lost.
                await answered(self.endpoint, rank, end, ("ended",))
        with suppress(TimeoutError):
            while True:  # Whoever came while all went has nothing to do.
                message = self._later.popleft() if self._later else await self.endpoint.recv(timeout=0.0)
                if message.src not in self.endpoint.layout.server_ranks:
                    await self.endpoint.send(message.src, Message("late", serial=message.serial))

    # Workers.

    async def _hear(self) -> None:
        """The next message, and what follows from it."""
        message = await self._next()
        src, kind = message.src, message.kind
        if src in self.endpoint.layout.server_ranks:
            if kind == "lost":
                await self._bury(message.samples, is_dead=True)
            return
        if kind in ("gone", "silent"):
            return await self._bury(src, is_dead=kind == "gone")
        serial, answer = self._heard.get(src, (0, None))
        if src in self._dead or message.serial < serial:
            return
        if message.serial == serial:
            return await self.endpoint.send(src, answer or Message("wait", serial=serial))
        try:
            numbers = self._numbers(message)
        except Refused as error:
            return await self._s.refuse(message, error)
        self._heard[src] = message.serial, None
        await self._handle(src, kind, numbers, message)

    async def _next(self) -> Message:
        while not self._later:
            timeout = None if self._members else max(0.0, self._deserted_at - self.endpoint.now())
            try:
                return await self.endpoint.recv(timeout=timeout)
            except TimeoutError:
                if not self._members:
                    raise Deserted from None
        return self._later.popleft()

    def _numbers(self, message: Message) -> list[int]:
        """What a request says, if it makes sense."""
        if message.kind not in REQUESTS:
            raise Refused(f"there is no request of the kind '{message.kind}'")
        forms = [(t.dtype, tuple(t.shape)) for t in message.tensors]
        wanted = [
            (dtype, (n,)) for dtype, n in zip((torch.int64, torch.float64), REQUESTS[message.kind], strict=True) if n
        ]
        if forms != wanted:
            raise Refused(f"a '{message.kind}' has {wanted}, not {forms}")
        if message.samples < 0:
            raise Refused(f"there are no {message.samples} samples behind anything")
        numbers: list[int] = message.tensors[0].tolist() if wanted else []
        if message.kind == "draw":
            first, last, steps, data_shards = numbers
            if not (0 <= first < last and steps >= 1 and data_shards >= 1):
                raise Refused(
                    f"it wants epochs {first} to {last} of {steps} minibatches in {data_shards} parts, and there is none"
                )
            if self._extent not in (None, numbers):
                raise Refused(f"it wants epochs, minibatches and parts {numbers}, and they are {self._extent}")
        return numbers

    async def _handle(self, src: int, kind: str, numbers: list[int], message: Message) -> None:
        if kind == "bye":
            self._members.discard(src)
            return await self._answer(src, Message("bye"))
        if kind == "draw":
            self._extent = numbers
            self._members.add(src)
        elif src not in self._members:
            return await self._answer(src, Message("away"))
        counts = False
        if kind == "brought":
            self._is_there = True
        elif kind == "report":
            number, portion = numbers
            counts = number == self.passes and self._portions is not None and self._portions.report(src, portion)
        elif kind == "pushed":
            await self._count(src, numbers, message)
        self._waiting[src] = counts
        await self._rouse()

    async def _count(self, src: int, numbers: list[int], message: Message) -> None:
        """A worker's sum is on all shards; it counts if nobody has done the same work meanwhile."""
        portions, (number, which) = self._portions, numbers
        if portions is None or number != self.passes or which != portions.sum_of(src) or not portions.claimed(src):
            return
        self.then("take", str(src), str(number), str(which), "g")
        await self._tell()
        portions.settle(src)
        self._loss += message.tensors[1].item()
        self._samples += message.samples

    async def _rouse(self) -> None:
        """Answer all who wait and for whom there is something to do."""
        for src, counts in list(self._waiting.items()):
            if (answer := self._order(src, counts)) is not None:
                del self._waiting[src]
                await self._answer(src, answer)

    def _order(self, src: int, counts: bool) -> Message | None:
        """What a worker is to do next; None if there is nothing at the moment."""
        if self._is_over:
            return Message("over")
        if not self._is_there:
            if self._bringer is not None:
                return None
            self._bringer = src
            return Message("bring")
        portions = self._portions
        if portions is None or portions.is_done:
            return None
        has_enough, portion = portions.claimed(src) >= self._push, None
        if not has_enough:
            portion = portions.take(src)
        if portion is None and portions.claimed(src):  # Before it does what others may be slow to do.
            return Message("push", (torch.tensor([self.passes, portions.sum_of(src), int(counts)]),))
        if portion is None and (portion := portions.back_up(src)) is None:
            return None
        return Message("work", (torch.tensor([self.passes, portions.sum_of(src), int(counts), portion]),))

    async def _answer(self, src: int, answer: Message) -> None:
        answer.serial = self._heard[src][0]
        self._heard[src] = answer.serial, answer
        await self.endpoint.send(src, answer)

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
            await self._answer(src, Message("away"))
        await self._rouse()
