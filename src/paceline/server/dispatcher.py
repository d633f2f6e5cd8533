"""Desk: where the first shard gives out work and notes what is done."""

from __future__ import annotations

from dataclasses import replace

import torch

from paceline.endpoint import Endpoint, Message
from paceline.server.shard_state import Refused
from paceline.server.work_queue import WorkItem, WorkQueue

MOST_DRAWN = 64  # Parts of minibatches that a worker is given at once.


class Dispatcher:
    """Workers draw tickets; in a user's own loop, where each has data of its own, it is counted how far each part of them has come."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._tickets: WorkQueue | None = None
        self._drawn: dict[int, tuple[int, list[WorkItem]]] = {}  # What each was given last, and for which request.
        self.drawing: list[Message] = []  # Who wants a ticket, and there was none.
        self._later: dict[int, Message] = {}  # What each wanted in advance when there was little left.
        self._data_shards: dict[
            int, int
        ] = {}  # Whose part of the data those work on who have taken a dead one's place,
        self._done: dict[int, int] = {}  # and how many minibatches were done of each part.

    async def draw(self, message: Message, workers: int) -> None:
        """A worker wants to know what to do next, now (`steps`) or in advance."""
        src, serial = message.src, message.serial
        if src in self._drawn and self._drawn[src][0] == serial:  # Its answer was lost.
            return await self._give(src, *self._drawn[src])
        if any(m.src == src and m.serial == serial for m in self.drawing):
            return await self.endpoint.send(src, Message("idle", serial=serial))
        if message.samples < 1 or [(t.dtype, t.shape) for t in message.tensors] != [(torch.int64, (3,))]:
            told = ", ".join(f"{t.dtype} of shape {tuple(t.shape)}" for t in message.tensors) or "nothing"
            raise Refused(
                f"it wants {message.samples} parts, of which three int64 numbers say of what, and at least 1: it gave {told}"
            )
        first, last, data_shards = message.tensors[0].tolist()
        if data_shards != self.endpoint.layout.workers:
            raise Refused(
                f"it wants minibatches cut into {data_shards} parts, and they are cut into {self.endpoint.layout.workers}"
            )
        if self._tickets is None:
            try:
                self._tickets = WorkQueue(first, last, data_shards)
            except ValueError as error:
                raise Refused(str(error)) from error
        # Few at the end, and none in advance, so that all end at the same time.
        left, workers = self._tickets.left, max(1, workers)
        if left <= workers and not message.steps and self._tickets.held(src):
            self._later[src] = message
            return await self.endpoint.send(src, Message("later", serial=serial))
        fair = max(1, left // (2 * workers))
        if taken := self._tickets.take(src, min(message.samples, fair, MOST_DRAWN)):
            await self._give(src, serial, taken)
        elif self._tickets.is_over:
            await self.endpoint.send(src, Message("over", serial=serial))
        else:
            self.drawing = [*(m for m in self.drawing if m.src != src), message]
            await self.endpoint.send(src, Message("idle", serial=serial))

    async def hurry(self, message: Message, workers: int) -> None:
        """A worker needs now what it has wanted in advance."""
        wanted = self._later.get(message.src)
        if wanted is None or wanted.serial != message.serial:
            raise Refused("it has not wanted anything before")
        await self.draw(replace(wanted, steps=1), workers)

    async def _give(self, src: int, serial: int, tickets: list[WorkItem]) -> None:
        self._drawn[src] = serial, tickets
        await self.endpoint.send(src, Message("tickets", (torch.tensor(tickets, dtype=torch.int64),), serial=serial))

    def check(self, push: Message) -> None:
        """Refuse an update that claims more work than its sender was given."""
        if self._tickets is not None and push.steps > self._tickets.held(push.src):
            raise Refused(f"it says that it has done {push.steps} parts, and was given {self._tickets.held(push.src)}")

    async def note(self, push: Message) -> None:
        """What an update says is done."""
        if not push.steps:
            return
        if self._tickets is not None:
            self._tickets.do(push.src, push.steps)
            await self._say_if_over()
        else:
            data_shard = self._data_shards.get(push.src, push.src)
            self._done[data_shard] = self._done.get(data_shard, 0) + push.steps

    def data_shard(self, worker: int, data_shard: int) -> int:
        """A worker takes the place of another; how far that one's part of the data has come."""
        self._data_shards[worker] = data_shard
        return self._done.get(data_shard, 0)

    def leave(self, worker: int) -> None:
        """A worker that has gone wants nothing more."""
        self.drawing = [m for m in self.drawing if m.src != worker]
        self._later.pop(worker, None)

    async def hand_on(self, dead: int) -> None:
        """What a dead worker has not done is for those who have nothing to do."""
        if self._tickets is not None:
            self._tickets.lose(dead)
            self._drawn.pop(dead, None)
            while self.drawing and self._tickets.left:
                message = self.drawing.pop(0)
                await self._give(message.src, message.serial, self._tickets.take(message.src))
            await self._say_if_over()

    async def _say_if_over(self) -> None:
        if self._tickets is not None and self._tickets.is_over:
            while self.drawing:
                message = self.drawing.pop(0)
                await self.endpoint.send(message.src, Message("over", serial=message.serial))
