"""Store: all shards as a worker sees them, one vector to pull and to push to, and the work that they share out."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from paceline.codecs import kernels
from paceline.codecs.codec import Codec
from paceline.op import Op
from paceline.protocol.messages import Away, Message, Request
from paceline.protocol.requests import PeerFinished, Requests
from paceline.server.dispatcher import MOST_DRAWN
from paceline.server.messages import (
    AllDone,
    Arrived,
    Bring,
    Bye,
    Deferred,
    DrawNow,
    DrawWork,
    Exchange,
    Idle,
    Join,
    Leave,
    NoWork,
    ProbeExchange,
    ProbePush,
    Pull,
    Push,
    RunEnded,
    SendAgain,
    Start,
    Update,
    Value,
    Wake,
    Work,
)
from paceline.server.work_queue import WorkItem
from paceline.strategy import MissedEnd
from paceline.stripes import stripe_of
from paceline.worker.replica import Replica
from paceline.worker.rows import positions, within

R = TypeVar("R", bound=Request)

# Besides the reply itself, a shard may answer any request by one of these.
ANY = (SendAgain, Away, Bring, RunEnded)
DRAWN = (Work, Deferred, NoWork, AllDone)


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
        self._requests = Requests(self.endpoint)
        self._first_step = replica.cursor.step
        self._hand: deque[WorkItem] = deque()  # What this worker is to work on next.
        self._ahead = 1  # How many tickets it wants to have at hand while it works.
        self._drawn: DrawWork | DrawNow | None = None  # The request for more that was not answered yet.
        self._steps = 0  # begun since the last push

    @property
    def value(self) -> Tensor:
        """What the shards held when they were last asked; where a worker keeps that elsewhere, there is no such vector."""
        if self._value is None:
            self._value = self.replica.params.clone()
        return self._value

    def pull(self, into: Tensor | None = None) -> Op[Tensor]:
        """The parameters as the shards hold them now; in `value`, unless they are to go `into` another vector."""
        return self.endpoint.spawn(self._pull(into), kind="pull")

    def push(self, update: Tensor, samples: float | None = None, *, runs: Tensor | None = None) -> Op[None]:
        """Let the shards have an update, and do not wait for what they make of it.

        Unless `samples` says otherwise, those of the last minibatch are behind it.  `runs` says which parts of it alone matter.
        """
        return self.endpoint.spawn(self._push(update, samples, runs), kind="push")

    async def _push(self, update: Tensor, samples: float | None, runs: Tensor | None) -> None:
        pushes = self._updates(Push, update, samples, runs)
        await self._send(pushes)
        for rank, push in zip(self.shards, pushes, strict=True):
            await self._answer(rank, push, (Arrived,))

    def exchange(
        self, update: Tensor, samples: float | None = None, *, into: Tensor | None = None, runs: Tensor | None = None
    ) -> Op[Tensor]:
        """Push an update and pull what the shards hold after it, in one round trip.

        With `runs` only these parts of the update travel, and back only what has changed since this worker last asked.
        """
        return self.endpoint.spawn(self._exchange(update, samples, into, runs), kind="exchange")

    async def _exchange(
        self, update: Tensor, samples: float | None, into: Tensor | None, runs: Tensor | None
    ) -> Tensor:
        return await self._ask(self._updates(Exchange, update, samples, runs), into)

    async def _pull(self, into: Tensor | None) -> Tensor:
        if self._joined or self.endpoint.rank in self.endpoint.layout.worker_ranks:
            return await self._ask(self._numbered([Pull() for _ in self.shards]), into)
        return await self._ask(self._numbered([Join(self.replica.cursor.shard or 0) for _ in self.shards]), into)

    def send_buffer(self, last: Tensor | None = None) -> Tensor:
        """Memory for an update: what shards of this host read there need not be copied.  The last one, unless it is still read."""
        return (
            last
            if last is not None and not self.endpoint.in_use(last)
            else self.endpoint.send_buffer(self.replica.params)
        )

    async def leave(self, into: Tensor | None = None) -> Tensor:
        """Say goodbye; what the shards hold in the end, once all workers have."""
        all_done = self.replica.learner.has_global_data
        value = await self._ask(self._numbered([Leave(all_done) for _ in self.shards]), into)
        for rank in self.shards:
            await self.endpoint.send(rank, Bye())
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
        self._drawn = self._requests.number(DrawWork(extent, wanted, now))
        await self.endpoint.send(self.shards[0], self._drawn)

    async def _draw(self, before_waiting: Callable[[], Awaitable[None]] | None) -> bool:
        await self._join()
        was_asked, began, is_resting = self._drawn is not None, self.endpoint.now(), False
        while True:
            if self._drawn is None:
                await self._ask_for_tickets(1, now=True)
            assert self._drawn is not None
            answer = await self._answer(self.shards[0], self._drawn, DRAWN)
            assert isinstance(answer, DRAWN)
            if answer.incarnation != self._requests.incarnation:
                self._drawn = None
                continue
            if isinstance(answer, Deferred):
                self._drawn = DrawNow(request_id=answer.request_id, incarnation=answer.incarnation)
                await self.endpoint.send(self.shards[0], self._drawn)
                continue
            if not isinstance(answer, NoWork):
                break
            self._ahead = 1
            if before_waiting is not None and self._steps:
                await before_waiting()
            await self._tell_all(Idle)
            is_resting = True
        self._drawn = None
        if isinstance(answer, AllDone):
            if before_waiting is not None and self._steps:
                await before_waiting()
            return False
        if is_resting:
            await self._tell_all(Wake)
        elif was_asked and self.endpoint.now() - began > 0.001:  # It should have asked earlier, for more.
            self._ahead = min(2 * self._ahead, MOST_DRAWN)
        self._hand.extend(WorkItem(int(step), int(data_shard)) for step, data_shard in answer.items)
        return True

    # Messages.

    async def _tell_all(self, request: type[Idle | Wake]) -> None:
        for rank in self.shards:
            await self.endpoint.send(rank, self._requests.number(request()))

    async def _join(self) -> None:
        """The first worker brings the model along."""
        if not self._joined:
            self._joined = True
            if self.endpoint.rank == 0:
                await self._bring()

    async def _bring(self) -> None:
        for rank, where in zip(self.shards, self.slices, strict=True):
            await self.endpoint.send(rank, Start(self.replica.params[where]))

    def _updates(
        self, of: type[Push | Exchange], update: Tensor, samples: float | None, runs: Tensor | None
    ) -> list[Update]:
        """What to send to each shard."""
        seen = int(self.replica.batch.samples if samples is None else samples)
        steps, self._steps = self._steps, 0
        updates: list[Update] = []
        for where, version in zip(self.slices, self.versions, strict=True):
            data, mine = self._encoded(update, where, runs)
            updates.append(of(data, version, seen, steps, mine))
        return self._numbered(updates)

    def _numbered(self, requests: list[R]) -> list[R]:
        """The same number for what is sent to all shards."""
        self._requests.number(requests[0])
        for request in requests[1:]:
            request.request_id = requests[0].request_id
            request.incarnation = requests[0].incarnation
        return requests

    async def _send(self, requests: Sequence[Request]) -> None:
        await self._join()
        sends = [self.endpoint.send(rank, request) for rank, request in zip(self.shards, requests, strict=True)]
        for send in sends:
            await send

    def _encoded(self, update: Tensor, where: slice, runs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What a shard gets of an update, and where."""
        if runs is not None:
            mine = within(runs, where)
            return update[where][positions(mine)], mine
        return update[where] if self._codec_state is None else self._codec_state[where].encode(update[where]), None

    async def _ask(self, requests: Sequence[Request], into: Tensor | None) -> Tensor:
        await self._send(requests)
        for j, (rank, where) in enumerate(zip(self.shards, self.slices, strict=True)):
            answer = await self._answer(rank, requests[j], (Value,))
            assert isinstance(answer, Value)
            if isinstance(requests[j], Join) and j == 0 and answer.steps_done:
                self.replica.cursor.resume_at(answer.steps_done)
            self._take(answer, j, where, into)
            del answer  # It may lie in the shard's own memory, which is not to be kept.
        return self.value if into is None else into

    def _take(self, answer: Value, shard: int, where: slice, into: Tensor | None) -> None:
        """What a shard holds, or what of it has changed."""
        values, target = answer.value, (self.value if into is None else into)[where]
        if answer.runs is not None:
            target[positions(answer.runs)] = values
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

    async def _answer(self, rank: int, request: Request, replies: tuple[type[Message], ...]) -> Message:
        """The reply of a shard to a request, once all has been done that the shard asks for before."""
        while True:
            try:
                answer = await self._requests.reply(rank, request, *replies, *ANY, probe=_probe_of(request))
            except PeerFinished:
                answer = RunEnded()
            if isinstance(answer, RunEnded):  # A worker that comes too late has nothing to do.
                raise MissedEnd
            if isinstance(answer, Bring):
                await self._bring()
            elif isinstance(answer, Away):
                request, replies = await self._come_back(rank, request, replies)
            elif isinstance(answer, SendAgain):
                await self.endpoint.send(rank, request)
            else:
                return answer

    async def _come_back(
        self, rank: int, request: Request, replies: tuple[type[Message], ...]
    ) -> tuple[Request, tuple[type[Message], ...]]:
        """It was silent for so long that it was declared dead: others do its work, and what it has pushed does not count.

        What it asks for now, instead.
        """
        if request.incarnation == self._requests.incarnation:
            self._requests.incarnation += 1
            self._hand.clear()
            self._drawn, self._steps = None, 0
            await self._tell_all(Wake)
        if isinstance(request, (DrawWork, DrawNow)):
            await self._ask_for_tickets(1, now=True)
            assert self._drawn is not None
            return self._drawn, replies
        again = self._requests.number(Pull())
        await self.endpoint.send(rank, again)
        return again, (Value,)


def _probe_of(request: Request) -> Request | None:
    """Send a large request again only if the shard has not seen it."""
    if isinstance(request, Update):
        probe = ProbePush if isinstance(request, Push) else ProbeExchange
        return probe(request_id=request.request_id, incarnation=request.incarnation)
    return None
