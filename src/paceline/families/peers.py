"""Peers: the other workers, where there is no server that knows who is there and when all is done.

Everybody writes to everybody.  A process answers between two gradients and never waits for another while it has data, so nothing
that others do or leave undone can hold it up.  Who dies is struck off by each that hears of it; who comes in the place of a dead one
tells all, and then begins with the model of one of them.  At the end all wait until all are done, and have been heard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.endpoint import Message
from paceline.op import Op
from paceline.strategy import MissedEnd
from paceline.worker.replica import Replica

LINGERS = 12  # How often one asks that is done whether it was heard, before it leaves all the same.


class Peers(ABC):
    """What a method without servers is made of: it says what to do with its own messages, and what a newcomer must know."""

    def __init__(self, replica: Replica) -> None:
        self.replica, self.endpoint = replica, replica.endpoint
        self.rank, self.data_shard = (
            replica.rank,
            replica.rank if replica.cursor.shard is None else replica.cursor.shard,
        )
        ranks = self.endpoint.layout.worker_ranks
        self.is_new = self.rank not in ranks
        self.data_shards = (
            {} if self.is_new else {rank: rank for rank in ranks if rank != self.rank}
        )  # Who lives, and has whose data.
        self._sending: list[Op[None]] = []
        self._early: deque[Message] = deque()  # What came before this worker had a model.
        self._welcomed: dict[int, bool] = {}  # Who has noted this newcomer, and whether it has a model.
        self._model: Message | None = None
        self._request: tuple[int, Message] | None = None  # What this worker waits to be answered.
        self._silent: set[int] = set()  # Taken for dead, and perhaps alive.
        self._is_in = not self.is_new
        self._is_done = False
        self._done: dict[int, Message] = {}  # The accounts of those who are done,
        self._complete: set[int] = set()  # of whom all has come,
        self._heard: set[int] = set()  # and who have all of this worker's.
        self._ends: dict[int, Tensor] = {}  # What others have in the end,
        self._mean: Tensor | None = None  # the mean of it all,
        self._left: set[int] = set()  # and who has got that.

    @abstractmethod
    async def handle(self, message: Message) -> None:
        """Do what one of the method's own messages, or the "gone" of a peer, asks for."""

    async def repeat(self) -> None:  # noqa: B027 (not every method has anything to say)
        """What was waited for has not come for a long time: say again what may not have been heard."""

    def model(self) -> tuple[Tensor, ...]:
        """What a newcomer begins with."""
        return (self.replica.params,)

    def begin_with(self, message: Message) -> None:
        """Begin with what another's `model` gave."""
        self.replica.params.copy_(message.tensors[0])

    def account(self) -> Message:
        """What the others must have before this worker may leave."""
        return Message("done")

    def has_all(self, done: Message) -> bool:
        """Whether all that a peer's account speaks of is here."""
        return True

    async def want(self, done: Message) -> None:  # noqa: B027 (nor to ask for)
        """Ask the peer for what is not."""

    # Messages.

    async def send(self, dst: int, message: Message) -> None:
        """Begin to send; the time it takes passes while this worker does other things."""
        self._sending.append(self.endpoint.send(dst, message))

    def here(self, x: Tensor) -> Tensor:
        """What has come, where the model is."""
        return x.to(self.replica.params.device)

    async def flush(self) -> None:
        """Wait until all has been sent."""
        while self._sending:
            await self._sending.pop(0)

    async def take(self, timeout: float | None) -> bool:
        """Take in a message; False if there was none in time."""
        if self._early and self._is_in:
            message = self._early.popleft()
            await self.handle(message)
            await self._acknowledge(message.src)
            return True
        try:
            message = await self.endpoint.recv(timeout=timeout)
        except TimeoutError:
            return False
        if await self._is_news(message):
            return True
        if self._is_in:
            await self.handle(message)
            await self._acknowledge(message.src)
        else:
            self._early.append(message)
        return True

    async def take_all(self) -> None:
        """Take in what has come meanwhile."""
        await self.flush()
        while await self.take(0.0):
            pass

    async def until(self, is_so: Callable[[], bool], tries: int | None = None) -> None:
        """Take in messages until something is so, saying now and then again what may be lost; at most so many times."""
        now, retransmit_s = self.endpoint.now, self.endpoint.retransmit_s
        due = now() + (retransmit_s or 0.0)
        await self.flush()
        while not is_so() and tries != 0:
            await self.take(None if retransmit_s is None else max(0.0, due - now()))
            if retransmit_s is not None and now() >= due:
                tries = None if tries is None else tries - 1
                await self.repeat()
                await self._repeat_news()
                due = now() + retransmit_s
            await self.flush()

    # Who is there.

    async def enter(self) -> None:
        """A newcomer tells all that it is here, and begins with the model of one of them."""
        if not self.is_new:
            return
        self.data_shards = {rank: -1 for rank in self.endpoint.members_ever() if rank != self.rank}
        for rank in self.data_shards:
            await self._join(rank)
        await self.until(lambda: self.data_shards.keys() <= self._welcomed.keys())
        # Only now, when all keep for this worker what they say from here on, is a model as good as theirs.
        while self._model is None and (having := [rank for rank in self.data_shards if self._welcomed.get(rank)]):
            await self._ask(min(having), Message("model?"), lambda: self._model is not None)
        if self._model is not None:
            self.begin_with(self._model)
            self.replica.cursor.resume_at(self._model.steps)
            self._model = None
        self._is_in = True
        for done in list(self._done.values()):
            await self._settle(done)

    async def _ask(self, rank: int, message: Message, is_answered: Callable[[], bool]) -> None:
        """Ask one of the others for something, until it has answered or is gone."""
        self._request = rank, message
        await self.send(rank, message)
        await self.until(lambda: is_answered() or rank not in self.data_shards)
        self._request = None

    async def _join(self, rank: int) -> None:
        await self.send(rank, Message("join", samples=self.data_shard))

    async def _is_news(self, message: Message) -> bool:
        """Whether a message is of who is there and who is done, and not one of the method's own."""
        kind, src = message.kind, message.src
        if kind in ("gone", "silent"):
            if kind == "silent":
                self._silent.add(src)
            elif not self._is_done and self.endpoint.has_ended(src):
                await self._be_late()
            await self._strike_off(src)
        elif src in self._silent:
            await self.send(src, Message("away"))
        elif kind == "away":
            await self._be_late()
        elif kind == "join":
            for rank in [r for r, data_shard in self.data_shards.items() if data_shard == message.samples and r != src]:
                await self._strike_off(rank)  # Another is in its place: it must be dead.
            self.data_shards[src] = message.samples
            self._welcomed.setdefault(src, False)  # Two that come at once need not ask each other in.
            await self.send(src, Message("welcome", samples=self.data_shard, steps=int(self._is_in)))
            await self._say_done(src)
            await self._tell_mean()
        elif kind == "welcome":
            if src in self.data_shards:
                self.data_shards[src], self._welcomed[src] = message.samples, bool(message.steps)
        elif kind == "model?":
            if self._is_in:
                await self.send(
                    src, Message("model", tuple(t.clone() for t in self.model()), steps=self.replica.cursor.step)
                )
        elif kind == "model":
            self._model = message
        elif kind == "done":
            self._done[src] = message
            await self._settle(message)
        elif kind == "heard":
            self._heard.add(src)
        elif kind == "end":
            self._ends[src] = message.tensors[0]
            if self._mean is not None:
                await self.send(src, Message("mean", (self._mean,)))
        elif kind == "mean":
            self._left.add(src)
            if self._mean is None:
                self._mean = message.tensors[0].to(
                    self.replica.params.device, copy=True
                )  # Its sender may be gone before it is read.
                for rank in self.data_shards:
                    await self.send(rank, Message("bye"))
            else:
                await self.send(src, Message("bye"))
        elif kind == "bye":
            self._left.add(src)
        else:
            return False
        return True

    async def _be_late(self) -> None:
        """The others have ended, or gone on for long, without this worker, as it came too late or was silent: leave it to them."""
        await self.flush()
        raise MissedEnd

    async def _strike_off(self, rank: int) -> None:
        self.data_shards.pop(rank, None)
        self._ends.pop(rank, None)
        self._done.pop(rank, None)
        if self._is_in:
            await self.handle(Message("gone", src=rank))
            for done in list(self._done.values()):  # What one has that is gone cannot be had from itself any more.
                await self._settle(done)
            await self._tell_mean()
            await self.account_anew()

    def at(self, data_shard: int) -> int | None:
        """Who works on a part of the data; None if nobody does."""
        return next((rank for rank, s in self.data_shards.items() if s == data_shard), None)

    def is_done(self, rank: int) -> bool:
        return rank in self._done

    # The end.

    async def finish(self) -> None:
        """Wait until everybody is done, and all have all."""
        self._is_done = True
        await self.account_anew()
        await self.until(lambda: self.data_shards.keys() <= self._complete)
        await self.until(lambda: self.data_shards.keys() <= self._complete & self._heard, tries=LINGERS)

    async def _settle(self, done: Message) -> None:
        """Ask for what there is in another's account and not here, or tell it that nothing is missing."""
        self._complete.discard(done.src)
        if self._is_in:
            await self.want(done)
            await self._acknowledge(done.src)

    async def _acknowledge(self, peer: int) -> None:
        if (done := self._done.get(peer)) is not None and peer not in self._complete and self.has_all(done):
            self._complete.add(peer)
            await self.send(peer, Message("heard"))

    async def account_anew(self) -> None:
        """Let all know what this worker has now, if it is done."""
        for rank in self.data_shards:
            await self._say_done(rank)

    async def _say_done(self, rank: int) -> None:
        if self._is_done:
            self._heard.discard(rank)
            await self.send(rank, self.account())

    async def agree(self) -> None:
        """All take the mean of their models, which the first of those who live works out, once nobody's changes any more."""
        params = self.replica.params
        while self._mean is None and (first := min((self.rank, *self.data_shards))) != self.rank:
            await self._ask(first, Message("end", (params,)), lambda: self._mean is not None)
        if self._mean is None:
            await self.until(lambda: self.data_shards.keys() <= self._ends.keys())
            ends = {self.rank: params, **{rank: self._ends[rank] for rank in self.data_shards}}
            total = torch.zeros_like(params)
            for rank in sorted(ends):
                total.add_(self.here(ends[rank]))
            self._mean = total.div_(len(ends))
            await self._tell_mean()
        # Whoever has it stays until all do: the first may die while it tells them.
        await self.until(lambda: self.data_shards.keys() <= self._left, tries=LINGERS)
        params.copy_(self._mean)

    async def _tell_mean(self) -> None:
        if self._mean is not None:
            for rank in [rank for rank in self.data_shards if rank not in self._left]:
                await self.send(rank, Message("mean", (self._mean,)))

    async def _repeat_news(self) -> None:
        for rank in list(self.data_shards):
            if not self._is_in and rank not in self._welcomed:
                await self._join(rank)
            elif rank not in self._heard:
                await self._say_done(rank)
        if self._request is not None:
            await self.send(*self._request)
        await self._tell_mean()
