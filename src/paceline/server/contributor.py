"""Contributor: a worker's part in a pass over all of the data.

It works on the portions that the coordinator gives it, adds up their gradients, and pushes the sum to the shards now and then.
"""

from __future__ import annotations

from collections import deque

import torch

from paceline.collectives import stripe_of
from paceline.endpoint import Message
from paceline.replica import Replica
from paceline.server.asking import HasEnded, answered
from paceline.strategy import Ended

ORDERS = ("bring", "work", "push", "over", "away", "bye", "late")


class Contributor:
    """A worker that has nothing to say: it does what the coordinator tells it, and pushes after every `push` portions."""

    def __init__(self, w: Replica, *, push: int) -> None:
        if not w.learner.is_shared_out:
            raise ValueError(
                "Sandblaster in a loop of your own: it works on the same data again and again, in portions that it hands out; "
                "give the data to train() or simulate() as a Task"
            )
        self.w, self.endpoint, self._every = w, w.endpoint, push
        self.coordinator, *self.shards = self.endpoint.layout.server_ranks
        numel = w.params.numel()
        if len(self.shards) > numel:
            raise ValueError(f"{len(self.shards)} shards for {numel} parameters: there must be at least one parameter a shard")
        self.slices = [stripe_of(j, numel, len(self.shards)) for j in range(len(self.shards))]
        self._steps = w.plan.asked("steps_per_epoch", "Sandblaster")
        self._first, self._last = -(-w.k // self._steps), (w.last_step or w.plan.asked("steps", "Sandblaster")) // self._steps
        if self._first >= self._last:
            raise ValueError(
                f"Sandblaster on steps {w.k} to {w.last_step}: it works on whole epochs, of {self._steps} steps, and there is none"
            )
        self._serial = 0
        self._number, self._sum = 0, 0  # The pass that it is in, and which of its sums it is adding to.
        self._hand: deque[int] = deque()
        self._total, self._last_one = torch.zeros_like(w.params), torch.zeros_like(w.params)
        self._kept, self._loss, self._samples = 0, 0.0, 0  # What is in the sum.
        self._reported: Message | None = None  # What was not answered yet,
        self._last_loss, self._last_samples = 0.0, 0  # and what is behind it.

    async def work(self) -> None:
        """Until the coordinator says that all is done; then the parameters are what the shards hold."""
        try:
            order = await self._draw()
            while order.kind != "over":
                if order.kind == "away":  # It was taken for dead, and others do its work.
                    order = await self._draw()
                elif order.kind == "bring":
                    await self._ask_shards("start", "begun", self.w.params)
                    order = await self._ask(Message("brought"))
                elif order.kind == "push" or (self._kept >= self._every and self._reported is None):
                    order = await self._push()
                else:
                    order = await self._compute()
            await self._pull()
            await self._ask(Message("bye"))
        except HasEnded:
            self._end()

    def _end(self) -> None:
        """It has come too late, and has nothing to do."""
        self.w.is_late = True
        raise Ended

    async def _compute(self) -> Message:
        """The gradient of the next portion, while the coordinator says whether the last one counts."""
        w, number, portion = self.w, self._number, self._hand.popleft()
        step, seat = divmod(portion, w.seats)
        w.turn_to((self._first + number - 1) * self._steps + step, seat)
        g = await w.gradient()
        if self._reported is not None:
            order = await self._heard(self._reported)
            if order.kind != "work" or self._number != number:
                return order
        self._last_samples = int(w.samples_at_hand)
        self._last_loss = self._last_samples * (w.learner.loss or 0.0) if self._last_samples else 0.0
        torch.mul(g, self._last_samples, out=self._last_one)
        self._reported = self._numbered(Message("report", (torch.tensor([number, portion]),)))
        await self.endpoint.send(self.coordinator, self._reported)
        return Message("work") if self._hand else await self._heard(self._reported)

    async def _heard(self, asked: Message) -> Message:
        """What the coordinator says to a request."""
        order = await answered(self.endpoint, self.coordinator, asked, ORDERS)
        self._reported = None
        if order.kind == "late":
            self._end()
        if order.kind in ("work", "push"):
            number, which, counts, *portions = order.tensors[0].tolist()
            if number != self._number:
                self._number = number
                self._hand.clear()
                await self._pull()
                self._begin_sum(which)
            elif which != self._sum:
                self._begin_sum(which)
            if counts:
                self._total.add_(self._last_one)
                self._kept, self._loss, self._samples = self._kept + 1, self._loss + self._last_loss, self._samples + self._last_samples
            self._hand.extend(portions)
        return order

    def _begin_sum(self, which: int) -> None:
        self._sum, self._kept, self._loss, self._samples = which, 0, 0.0, 0
        self._total.zero_()

    async def _push(self) -> Message:
        """Let the shards have the sum, and the coordinator know that all of them do."""
        await self._ask_shards("push", "held", self._total)
        numbers, loss = torch.tensor([self._number, self._sum]), torch.tensor([self._loss], dtype=torch.float64)
        return await self._ask(Message("pushed", (numbers, loss), samples=self._samples))

    async def _draw(self) -> Message:
        self._number = 0
        self._hand.clear()
        return await self._ask(Message("draw", (torch.tensor([self._first, self._last, self._steps, self.w.seats]),)))

    async def _pull(self) -> None:
        """The parameters as the shards hold them now."""
        values = await self._ask_shards("get", "value")
        for where, value in zip(self.slices, values, strict=True):
            self.w.params[where] = value.tensors[0]

    # Messages.

    def _numbered(self, message: Message) -> Message:
        self._serial += 1
        message.serial = self._serial
        return message

    async def _ask(self, message: Message) -> Message:
        await self.endpoint.send(self.coordinator, self._numbered(message))
        return await self._heard(message)

    async def _ask_shards(self, kind: str, answer: str, vector: torch.Tensor | None = None) -> list[Message]:
        parts = [() if vector is None else (vector[where],) for where in self.slices]
        asked = [self._numbered(Message(kind, part, self._number, steps=self._sum)) for part in parts]
        sends = [self.endpoint.send(rank, message) for rank, message in zip(self.shards, asked, strict=True)]
        for send in sends:
            await send
        return [await answered(self.endpoint, rank, message, (answer,)) for rank, message in zip(self.shards, asked, strict=True)]
