"""Contributor: a worker's part in a pass over all of the data.

It works on the portions that the coordinator gives it, adds up their gradients, and pushes the sum to the shards now and then.
"""

from __future__ import annotations

import torch

from paceline.endpoint import Message
from paceline.server.requests import HasEnded, answered
from paceline.strategy import MissedEnd
from paceline.stripes import stripe_of
from paceline.worker.replica import Replica

ORDERS = ("bring", "work", "push", "over", "away", "bye", "late")


class BatchWorker:
    """A worker without a will of its own: it does what the coordinator tells it."""

    def __init__(self, w: Replica) -> None:
        self.w, self.endpoint = w, w.endpoint
        self.coordinator, *self.shards = self.endpoint.layout.server_ranks
        numel = w.params.numel()
        if len(self.shards) > numel:
            raise ValueError(
                f"{len(self.shards)} shards for {numel} parameters: there must be at least one parameter a shard"
            )
        self.slices = [stripe_of(j, numel, len(self.shards)) for j in range(len(self.shards))]
        self._steps = w.plan.require("steps_per_epoch", "Sandblaster")
        end = w.plan.require("steps", "Sandblaster") if w.cursor.last_step is None else w.cursor.last_step
        self._first, self._last = -(-w.cursor.step // self._steps), end // self._steps
        if self._first >= self._last:
            raise ValueError(
                f"Sandblaster from step {w.cursor.step} to {end}: it works on whole epochs, of {self._steps} steps, and there is none"
            )
        self._serial = 0
        self._number, self._sum = 0, 0  # The pass that it is in, and which of its sums it is adding to.
        self._total = torch.zeros_like(w.params)
        self._loss, self._samples = 0.0, 0  # What is behind the sum.

    async def work(self) -> None:
        """Until the coordinator says that all is done; then the parameters are what the shards hold."""
        try:
            order = await self._draw()
            while order.kind != "over":
                if order.kind == "work":
                    order = await self._compute(order)
                elif order.kind == "push":
                    order = await self._push()
                elif order.kind == "bring":
                    await self._ask_shards("start", "begun", self.w.params)
                    order = await self._ask(Message("brought"))
                else:  # It was taken for dead, and others do its work.
                    order = await self._draw()
            await self._pull()
            await self._ask(Message("bye"))
        except HasEnded:
            raise MissedEnd from None

    async def _draw(self) -> Message:
        self._number = 0
        return await self._ask(
            Message("draw", (torch.tensor([self._first, self._last, self._steps, self.w.cursor.shards]),))
        )

    async def _compute(self, order: Message) -> Message:
        """Add the gradient of a portion to the sum, unless another worker has done it meanwhile."""
        w, number, portion = self.w, self._number, int(order.tensors[0][3])
        step, data_shard = divmod(portion, w.cursor.shards)
        w.cursor.seek((self._first + number - 1) * self._steps + step, data_shard)
        g, samples = await w.gradient(), int(w.batch.samples)
        order = await self._ask(Message("report", (torch.tensor([number, portion]),)))
        if order.kind in ("work", "push") and order.tensors[0][2] and samples:
            assert w.learner.loss is not None
            self._total.add_(g, alpha=samples)
            self._loss, self._samples = self._loss + samples * w.learner.loss, self._samples + samples
        return order

    async def _push(self) -> Message:
        """Let the shards have the sum, and the coordinator know that all of them do."""
        await self._ask_shards("push", "held", self._total)
        numbers, loss = torch.tensor([self._number, self._sum]), torch.tensor([self._loss], dtype=torch.float64)
        return await self._ask(Message("pushed", (numbers, loss), samples=self._samples))

    async def _pull(self) -> None:
        """The parameters as the shards hold them now."""
        for where, value in zip(self.slices, await self._ask_shards("get", "value"), strict=True):
            self.w.params[where] = value.tensors[0]

    # Messages.

    async def _ask(self, message: Message) -> Message:
        """What the coordinator says to a request; in a new pass the parameters are others, and the sum is empty."""
        await self.endpoint.send(self.coordinator, self._numbered(message))
        order = await answered(self.endpoint, self.coordinator, message, ORDERS)
        if order.kind == "late":
            raise HasEnded("all work was done before")
        if order.kind in ("work", "push"):
            number, which = order.tensors[0][:2].tolist()
            if number != self._number:
                await self._pull()
            if (number, which) != (self._number, self._sum):
                self._number, self._sum, self._loss, self._samples = number, which, 0.0, 0
                self._total.zero_()
        return order

    async def _ask_shards(self, kind: str, answer: str, vector: torch.Tensor | None = None) -> list[Message]:
        parts = [() if vector is None else (vector[where],) for where in self.slices]
        asked = [self._numbered(Message(kind, part, self._number, steps=self._sum)) for part in parts]
        sends = [self.endpoint.send(rank, message) for rank, message in zip(self.shards, asked, strict=True)]
        for send in sends:
            await send
        return [
            await answered(self.endpoint, rank, message, (answer,))
            for rank, message in zip(self.shards, asked, strict=True)
        ]

    def _numbered(self, message: Message) -> Message:
        self._serial += 1
        message.serial = self._serial
        return message
