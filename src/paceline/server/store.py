"""Store: all shards as a worker sees them, one vector to pull and to push to, and the work that they share out."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Collection

import torch
from torch import Tensor

from paceline.codecs import kernels
from paceline.codecs.codec import Codec
from paceline.endpoint import LIFE, Message
from paceline.op import Op
from paceline.server.dispatcher import MOST_DRAWN
from paceline.server.requests import HasEnded, answered
from paceline.server.work_queue import WorkItem
from paceline.strategy import MissedEnd
from paceline.stripes import stripe_of
from paceline.worker.replica import Replica
from paceline.worker.rows import positions, within

# What requests are answered by.
ALIVE = ("again", "away", "bring", "ended")
VALUES, HEARD, TICKETS = ("value", *ALIVE), ("heard", *ALIVE), ("tickets", "later", "idle", "over", "away", "ended")


class Store:
    """A worker's view of the parameter server.

    Shards act independently: at one moment they may have seen different numbers of updates, so `versions` has one entry a
    shard, and every push says which version of that shard it was computed from.  `codec` encodes what is pushed, with what a
    message leaves out said in the next; `pulls`, by which the shards say what has changed.
    """

    def __init__(self, replica: Replica, *, codec: Codec | None = None, pulls: Codec | None = None) -> None:
        self.replica = replica
        self.endpoint = replica.endpoint
        self.shards = list(self.endpoint.layout.server_ranks)
        if len(self.shards) > replica.params.numel():
            raise ValueError(
                f"{len(self.shards)} servers for {replica.params.numel()} parameters: there must be at least one parameter a shard"
            )
        unit = 1 if codec is None else codec.unit
        self.slices = [
            stripe_of(j, replica.params.numel(), len(self.shards), unit=unit) for j in range(len(self.shards))
        ]
        self.versions = [0] * len(self.shards)
        self._value: Tensor | None = None
        self._codec_state, self._pulls = replica.codec_state(codec), pulls
        self._joined = False
        self._serial, self._life = 0, 0
        self._first_step = replica.cursor.step
        self._hand: deque[WorkItem] = deque()  # What this worker is to work on next.
        self._ahead = 1  # How many tickets it wants to have at hand while it works.
        self._drawn: Message | None = None  # The request for more that was not answered yet.
        self._steps = 0  # begun since the last push

    @property
    def value(self) -> Tensor:
        """What the shards held when they were last asked; where a worker keeps that elsewhere, there is no such vector."""
        if self._value is None:
            self._value = self.replica.params.clone()
        return self._value

    def pull(self, into: Tensor | None = None) -> Op[Tensor]:
        """The parameters as the shards hold them now; in `value`, unless they are to go `into` another vector."""
        return self.endpoint.spawn(self._ask("pull", None, into=into), kind="pull")

    def push(self, update: Tensor, samples: float | None = None, *, runs: Tensor | None = None) -> Op[None]:
        """Let the shards have an update, and do not wait for what they make of it.

        Unless `samples` says otherwise, those of the last minibatch are behind it.  `runs` says which parts of it alone matter.
        """
        return self.endpoint.spawn(self._push(update, samples, runs), kind="push")

    async def _push(self, update: Tensor, samples: float | None, runs: Tensor | None) -> None:
        messages = self._messages("push", update, samples, runs)
        await self._send(messages)
        for rank, message in zip(self.shards, messages, strict=True):
            await self._answer(rank, message, HEARD)

    def exchange(
        self, update: Tensor, samples: float | None = None, *, into: Tensor | None = None, runs: Tensor | None = None
    ) -> Op[Tensor]:
        """Push an update and pull what the shards hold after it, in one round trip.

        With `runs` only these parts of the update travel, and back only what has changed since this worker last asked.
        """
        return self.endpoint.spawn(self._ask("exchange", update, samples, into, runs), kind="exchange")

    def send_buffer(self, last: Tensor | None = None) -> Tensor:
        """Memory for an update: what shards of this host read there need not be copied.  The last one, unless it is still read."""
        return (
            last
            if last is not None and not self.endpoint.in_use(last)
            else self.endpoint.send_buffer(self.replica.params)
        )

    async def leave(self, into: Tensor | None = None) -> Tensor:
        """Say goodbye; what the shards hold in the end, once all workers have."""
        value = await self._ask("leave", None, into=into)
        for rank in self.shards:
            await self.endpoint.send(rank, Message("bye"))
        return value

    # Work.

    async def next(self, before_waiting: Callable[[], Awaitable[None]] | None = None) -> bool:
        """Turn to the next minibatch; False if there is none left for anybody.

        If there is nothing to do for now, as others have the last ones, a worker waits, to take over should one of them die.  What it
        has not pushed until then it must push `before_waiting`.
        """
        w = self.replica
        if not w.learner.has_global_data:  # The user's loop has data of its own.
            if w.cursor.advance():
                self._steps += 1
                return True
            if before_waiting is not None and self._steps:
                await before_waiting()
            return False
        if not self._hand and not await self._draw(before_waiting):
            return False
        w.cursor.seek(*self._hand.popleft())
        self._steps += 1
        if self._drawn is None and len(self._hand) < self._ahead:
            await self._ask_for_tickets(self._ahead - len(self._hand))
        return True

    async def _ask_for_tickets(self, wanted: int, *, now: bool = False) -> None:
        end = self.replica.cursor.last_step
        assert end is not None
        extent = torch.tensor([self._first_step, end, self.replica.cursor.shards])
        self._drawn = Message("draw", (extent,), samples=wanted, steps=int(now), serial=self._next_serial())
        await self.endpoint.send(self.shards[0], self._drawn)

    async def _draw(self, before_waiting: Callable[[], Awaitable[None]] | None) -> bool:
        await self._join()
        was_asked, began, is_resting = self._drawn is not None, self.endpoint.now(), False
        while True:
            if self._drawn is None:
                await self._ask_for_tickets(1, now=True)
            assert self._drawn is not None
            answer = await self._answer(self.shards[0], self._drawn, TICKETS)
            if answer.life != self._life:
                self._drawn = None
                continue
            if answer.kind == "later":
                self._drawn = Message("now", serial=answer.serial)
                await self.endpoint.send(self.shards[0], self._drawn)
                continue
            if answer.kind != "idle":
                break
            self._ahead = 1
            if before_waiting is not None and self._steps:
                await before_waiting()
            await self._tell_all("rest")
            is_resting = True
        self._drawn = None
        if answer.kind == "over":
            if before_waiting is not None and self._steps:
                await before_waiting()
            return False
        if is_resting:
            await self._tell_all("wake")
        elif was_asked and self.endpoint.now() - began > 0.001:  # It should have asked earlier, for more.
            self._ahead = min(2 * self._ahead, MOST_DRAWN)
        self._hand.extend(WorkItem(int(step), int(data_shard)) for step, data_shard in answer.tensors[0])
        return True

    # Messages.

    def _next_serial(self) -> int:
        self._serial += 1
        return (self._life << LIFE) + self._serial

    async def _tell_all(self, kind: str) -> None:
        for rank in self.shards:
            await self.endpoint.send(rank, Message(kind, serial=self._next_serial()))

    async def _join(self) -> None:
        """The first worker brings the model along."""
        if not self._joined:
            self._joined = True
            if self.endpoint.rank == 0:
                await self._bring()

    async def _bring(self) -> None:
        for rank, where in zip(self.shards, self.slices, strict=True):
            await self.endpoint.send(rank, Message("start", (self.replica.params[where],)))

    def _messages(
        self, kind: str, update: Tensor | None, samples: float | None = None, runs: Tensor | None = None
    ) -> list[Message]:
        """What to send to each shard."""
        seen = int(self.replica.batch.samples if samples is None else samples) if update is not None else 0
        parts = (
            [()] * len(self.shards) if update is None else [self._said(update, where, runs) for where in self.slices]
        )
        serial, steps = self._next_serial(), 0
        if update is not None:
            steps, self._steps = self._steps, 0
        return [
            Message(kind, part, version, seen, serial, steps)
            for part, version in zip(parts, self.versions, strict=True)
        ]

    async def _send(self, messages: list[Message]) -> None:
        await self._join()
        sends = [self.endpoint.send(rank, message) for rank, message in zip(self.shards, messages, strict=True)]
        for send in sends:
            await send

    def _said(self, update: Tensor, where: slice, runs: Tensor | None) -> tuple[Tensor, ...]:
        if runs is not None:
            mine = within(runs, where)
            return update[where][positions(mine)], mine
        return (update[where] if self._codec_state is None else self._codec_state[where].encode(update[where]),)

    async def _ask(
        self,
        kind: str,
        update: Tensor | None,
        samples: float | None = None,
        into: Tensor | None = None,
        runs: Tensor | None = None,
    ) -> Tensor:
        if kind == "pull" and not self._joined and self.endpoint.rank not in self.endpoint.layout.worker_ranks:
            kind = "join"
        messages = self._messages(kind, update, samples, runs)
        for message in messages:
            if kind == "join":
                message.samples = self.replica.cursor.shard or 0
            elif kind == "leave":  # Whether that means that all work is done.
                message.steps = int(self.replica.learner.has_global_data)
        await self._send(messages)
        for j, (rank, where) in enumerate(zip(self.shards, self.slices, strict=True)):
            answer = await self._answer(rank, messages[j], VALUES)
            if kind == "join" and j == 0 and answer.steps:
                self.replica.cursor.resume_at(answer.steps)
            self._take(answer, j, where, into)
            del answer  # It may lie in the shard's own memory, which is not to be kept.
        return self.value if into is None else into

    def _take(self, answer: Message, shard: int, where: slice, into: Tensor | None) -> None:
        """What a shard holds, or what of it has changed."""
        values, *runs = answer.tensors
        target = (self.value if into is None else into)[where]
        if runs:
            target[positions(runs[0])] = values
        elif self._pulls is not None:  # What this worker was told is what the next answer is the difference to.
            if values.dtype == torch.uint8:
                kernels.add(self._pulls, values, self.value[where], 1.0, False)
            else:
                self.value[where] = values
            if into is not None:
                target.copy_(self.value[where])
        else:
            target.copy_(values)
        self.versions[shard] = answer.version

    async def _answer(self, rank: int, asked: Message, kinds: Collection[str]) -> Message:
        """What a shard answers to a request, once all has been done that it asks for before."""
        while True:
            # What is large is sent again only if it has not been heard.
            again = Message(f"ask {asked.kind}", serial=asked.serial) if asked.kind in ("push", "exchange") else None
            try:
                answer = await answered(self.endpoint, rank, asked, kinds, again=again)
            except HasEnded:
                answer = Message("ended")
            if answer.kind == "ended":  # Whoever comes too late has nothing to do.
                raise MissedEnd
            if answer.kind == "bring":
                await self._bring()
            elif answer.kind == "away":
                asked, kinds = await self._come_back(rank, asked, kinds)
            elif answer.kind == "again":
                await self.endpoint.send(rank, asked)
            else:
                return answer

    async def _come_back(self, rank: int, asked: Message, kinds: Collection[str]) -> tuple[Message, Collection[str]]:
        """It was silent for so long that it was taken for dead: others do its work, and what it has pushed does not count.

        What it asks for now, instead.
        """
        if asked.life == self._life:
            self._life += 1
            self._hand.clear()
            self._drawn, self._steps = None, 0
            await self._tell_all("wake")
        if asked.kind in ("draw", "now"):
            await self._ask_for_tickets(1, now=True)
            assert self._drawn is not None
            return self._drawn, kinds
        again = Message("pull", serial=self._next_serial())
        await self.endpoint.send(rank, again)
        return again, VALUES
