"""BatchWorker: a worker's part in a pass over all of the data.

It works on the portions that the coordinator gives it, adds up their gradients, and pushes the sum to the shards now
and then.  In a pipeline the first stage talks to the coordinator and tells the other stages its orders; each stage
pushes its sum to its own shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

import torch

from paceline.protocol.messages import Away, Reply, Request
from paceline.protocol.requests import PeerFinished, Requests
from paceline.server.messages import (
    BringOrder,
    Brought,
    Enlist,
    GetValue,
    Held,
    Order,
    OverOrder,
    PassOrder,
    Pushed,
    PushOrder,
    PushSum,
    Report,
    RunEnded,
    SetValue,
    SignedOff,
    SignOff,
    Value,
    WorkOrder,
)
from paceline.strategy import MissedEnd
from paceline.stripes import stripe_of
from paceline.worker.replica import Replica

R = TypeVar("R", bound=Reply)

# Orders by the numbers that the first stage of a pipeline tells the others; the next number is `Away`.
ORDERS: tuple[type[Order], ...] = (WorkOrder, PushOrder, BringOrder, OverOrder, SignedOff)


class BatchWorker:
    """A worker that follows the orders of the coordinator."""

    def __init__(self, w: Replica) -> None:
        self.w, self.endpoint = w, w.endpoint
        self.coordinator, *self.shards = self.endpoint.layout.server_ranks
        numel = w.params.numel()
        if len(self.shards) > numel:
            raise ValueError(
                f"Sandblaster(shards={len(self.shards)}) for {numel} parameters: there must be at least one parameter "
                "a shard; give fewer shards"
            )
        self.slices = [stripe_of(j, numel, len(self.shards)) for j in range(len(self.shards))]
        self._steps = w.plan.require("steps_per_epoch", "Sandblaster")
        end = w.plan.require("steps", "Sandblaster") if w.cursor.last_step is None else w.cursor.last_step
        self._first, self._last = -(-w.cursor.step // self._steps), end // self._steps
        if self._first >= self._last:
            raise ValueError(
                f"Sandblaster from step {w.cursor.step} to {end}: it works on whole epochs, of {self._steps} "
                f"steps, and there is none"
            )
        self._requests = Requests(self.endpoint)
        self._number, self._sum = 0, 0  # The pass that it is in, and which of its sums it is adding to.
        self._total = torch.zeros_like(w.params)
        self._loss, self._samples = 0.0, 0  # Of the portions in the sum.

    async def work(self) -> None:
        """Until the coordinator says that all is done; then the parameters are what the shards hold."""
        try:
            order = await self._enlist()
            while not isinstance(order, OverOrder):
                if isinstance(order, WorkOrder):
                    order = await self._compute(order)
                elif isinstance(order, PushOrder):
                    order = await self._push()
                elif isinstance(order, BringOrder):
                    await self._ask_shards([SetValue(self.w.params[where]) for where in self.slices], Held)
                    order = await self._ask(Brought())
                else:  # It was declared dead, and others do its work.
                    order = await self._enlist()
            self.w.cursor.end()
            await self._pull()
            with suppress(PeerFinished):  # Only the reply was lost: the parameters are here.
                await self._ask(SignOff())
        except PeerFinished:
            raise MissedEnd from None

    async def _enlist(self) -> Order | Away:
        self._number = 0
        return await self._ask(Enlist(torch.tensor([self._first, self._last, self._steps, self.w.cursor.shards])))

    async def _compute(self, order: WorkOrder) -> Order | Away:
        """Add the gradient of a portion to the sum, unless another worker has done it meanwhile."""
        w, portion = self.w, order.portion
        number = self._number
        step, data_shard = divmod(portion, w.cursor.shards)
        w.cursor.seek((self._first + number - 1) * self._steps + step, data_shard)
        g, samples = await w.gradient(), int(w.batch.samples)
        answer = await self._ask(Report(torch.tensor([number, portion])))
        if isinstance(answer, PassOrder) and answer.counts and samples:
            assert w.learner.loss is not None
            self._total.add_(g, alpha=samples)
            self._loss, self._samples = self._loss + samples * w.learner.loss, self._samples + samples
        return answer

    async def _push(self) -> Order | Away:
        """Let the shards have the sum, and the coordinator know that all of them do."""
        await self._ask_shards([PushSum(self._total[where], self._number, self._sum) for where in self.slices], Held)
        numbers, loss = torch.tensor([self._number, self._sum]), torch.tensor([self._loss], dtype=torch.float64)
        return await self._ask(Pushed(numbers, loss, self._samples))

    async def _pull(self) -> None:
        """The parameters as the shards hold them now."""
        for where, value in zip(
            self.slices, await self._ask_shards([GetValue() for _ in self.slices], Value), strict=True
        ):
            self.w.params[where] = value.value

    # Messages.

    async def _ask(self, request: Request) -> Order | Away:
        """Ask the coordinator.  In a new pass, get the new parameters and start an empty sum."""
        order = await self._answer(request)
        if isinstance(order, PassOrder):
            number, which = order.pass_number, order.sum_number
            if number != self._number:
                await self._pull()
            if (number, which) != (self._number, self._sum):
                self._number, self._sum = number, which
                self._loss, self._samples = 0.0, 0
                self._total.zero_()
        return order

    async def _answer(self, request: Request) -> Order | Away:
        """The coordinator's answer to the first stage."""
        learner = self.w.learner
        answer: Order | Away | None = None
        if learner.stage == 0:
            given = await self._requests.ask(self.coordinator, request, Order, Away, RunEnded)
            if isinstance(given, RunEnded):
                raise PeerFinished("all work was done before")
            answer = given
        return answer if answer is not None and learner.stages == 1 else await self._told(answer)

    async def _told(self, answer: Order | Away | None) -> Order | Away:
        """The first stage's answer, on every stage; the others give None."""
        numbers = answer.numbers.tolist() if isinstance(answer, PassOrder) else []
        kind = ORDERS.index(type(answer)) if isinstance(answer, Order) else len(ORDERS)
        told = await self.w.learner.of_first_stage([kind, *numbers, *[0] * (4 - len(numbers))])
        which, *given = map(int, told)
        if which == len(ORDERS):
            return Away(reason="the first stage was told so")
        of = ORDERS[which]
        return of(torch.tensor(given[: 4 if of is WorkOrder else 3])) if issubclass(of, PassOrder) else of()

    async def _ask_shards(self, requests: Sequence[Request], reply: type[R]) -> list[R]:
        """Ask each shard, and wait for the replies of all."""
        sends = [
            self._requests.begin(rank, self._requests.number(request))
            for rank, request in zip(self.shards, requests, strict=True)
        ]
        for send in sends:
            await send
        replies = [
            await self._requests.reply(rank, request, reply)
            for rank, request in zip(self.shards, requests, strict=True)
        ]
        await self.w.learner.sum_over_stages([0.0])  # Now the shards of all stages have replied.
        return replies
