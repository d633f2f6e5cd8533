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

from paceline.op import Op
from paceline.protocol.messages import Count, Message, PeerDied, PeerSuspected, Version
from paceline.protocol.roster import Roster, State
from paceline.strategy import MissedEnd
from paceline.worker.replica import Replica

LINGERS = 12  # How often one asks that is done whether it was heard, before it leaves all the same.


class PeerJoin(Message):
    """A new worker is here, in the place of the one that had this data shard."""

    data_shard: Count


class Welcome(Message):
    """The sender has noted the new worker.  Its own data shard, and whether it has a model to give."""

    data_shard: Count
    has_model: bool = False


class GetModel(Message):
    """Wants the receiver's model to begin with."""


class Model(Message):
    """A model to begin with, at the step that its sender has come to."""

    params: Tensor
    step: Version = 0


class Finished(Message):
    """The sender has no data left."""


class HasAll(Message):
    """The sender has all that the receiver's `Finished` speaks of."""


class FinalModel(Message):
    """The sender's model at the end, for the mean of all."""

    params: Tensor


class FinalMean(Message):
    """The mean of all models at the end."""

    mean: Tensor


class HasMean(Message):
    """The sender has the mean."""


class NotAPeer(Message):
    """The sender has declared the receiver dead, and goes on without it."""


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
        self._model: Model | None = None
        self._request: tuple[int, Message] | None = None  # What this worker waits to be answered.
        self._roster = Roster(self.data_shards)
        self._is_in = not self.is_new
        self._is_done = False
        self._done: dict[int, Finished] = {}  # The accounts of workers that have finished,
        self._complete: set[int] = set()  # of whom all has come,
        self._heard: set[int] = set()  # and who have all of this worker's.
        self._ends: dict[int, Tensor] = {}  # What others have in the end,
        self._mean: Tensor | None = None  # the mean of it all,
        self._left: set[int] = set()  # and who has got that.

    @abstractmethod
    async def handle(self, message: Message) -> None:
        """Do what one of the method's own messages asks for; `PeerDied` says that a peer is dead."""

    async def repeat(self) -> None:  # noqa: B027 (not every method has anything to say)
        """What was waited for has not come for a long time: say again what may not have been heard."""

    def model(self) -> Model:
        """What a new worker begins with."""
        return Model(self.replica.params)

    def begin_with(self, model: Model) -> None:
        """Begin with another worker's model."""
        self.replica.params.copy_(model.params)

    def account(self) -> Finished:
        """What the others must have before this worker may leave."""
        return Finished()

    def has_all(self, done: Finished) -> bool:
        """Whether all that a peer's account speaks of is here."""
        return True

    async def want(self, done: Finished) -> None:  # noqa: B027 (nor to ask for)
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
        self._roster = Roster(self.data_shards)
        for rank in self.data_shards:
            await self._join(rank)
        await self.until(lambda: self.data_shards.keys() <= self._welcomed.keys())
        # Only now, when all keep for this worker what they say from here on, is a model as good as theirs.
        while self._model is None and (having := [rank for rank in self.data_shards if self._welcomed.get(rank)]):
            await self._ask(min(having), GetModel(), lambda: self._model is not None)
        if self._model is not None:
            self.begin_with(self._model)
            self.replica.cursor.resume_at(self._model.step)
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
        await self.send(rank, PeerJoin(self.data_shard))

    async def _is_news(self, message: Message) -> bool:
        """Whether a message is of who is there and who is done, and not one of the method's own."""
        src = message.src
        if isinstance(message, (PeerDied, PeerSuspected)):
            if isinstance(message, PeerSuspected):
                self._roster.suspect(src)
            elif not self._is_done and self.endpoint.has_ended(src):
                await self._be_late()
            else:
                self._roster.die(src)
            await self._strike_off(src)
            return True
        if self._roster.state(src) is State.SUSPECTED:
            await self.send(src, NotAPeer())
            return True
        match message:
            case NotAPeer():
                await self._be_late()
            case PeerJoin():
                await self._note_join(src, message.data_shard)
            case Welcome():
                if src in self.data_shards:
                    self.data_shards[src], self._welcomed[src] = message.data_shard, message.has_model
            case GetModel():
                if self._is_in:
                    model = self.model()
                    model = model.with_tensors([t.clone() for t in model.tensors()])
                    model.step = self.replica.cursor.step
                    await self.send(src, model)
            case Model():
                self._model = message
            case Finished():
                self._done[src] = message
                await self._settle(message)
            case HasAll():
                self._heard.add(src)
            case FinalModel():
                self._ends[src] = message.params
                if self._mean is not None:
                    await self.send(src, FinalMean(self._mean))
            case FinalMean():
                await self._note_mean(src, message.mean)
            case HasMean():
                self._left.add(src)
            case _:
                return False
        return True

    async def _note_join(self, src: int, data_shard: int) -> None:
        self._roster.join(src)
        if not self._roster.is_member(src):
            return
        for rank in [r for r, shard in self.data_shards.items() if shard == data_shard and r != src]:
            self._roster.die(rank)  # Another worker is in its place.
            await self._strike_off(rank)
        self.data_shards[src] = data_shard
        self._welcomed.setdefault(src, False)  # Two that join at once need not ask each other in.
        await self.send(src, Welcome(self.data_shard, self._is_in))
        await self._say_done(src)
        await self._tell_mean()

    async def _note_mean(self, src: int, mean: Tensor) -> None:
        self._left.add(src)
        if self._mean is not None:
            return await self.send(src, HasMean())
        self._mean = mean.to(self.replica.params.device, copy=True)  # Its sender may be dead before it is read.
        for rank in self.data_shards:
            await self.send(rank, HasMean())

    async def _be_late(self) -> None:
        """The others have ended, or gone on for long, without this worker, as it came too late or was silent: leave it to them."""
        await self.flush()
        raise MissedEnd

    async def _strike_off(self, rank: int) -> None:
        self.data_shards.pop(rank, None)
        self._ends.pop(rank, None)
        self._done.pop(rank, None)
        if self._is_in:
            await self.handle(PeerDied(src=rank))
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

    async def _settle(self, done: Finished) -> None:
        """Ask for what there is in another's account and not here, or tell it that nothing is missing."""
        self._complete.discard(done.src)
        if self._is_in:
            await self.want(done)
            await self._acknowledge(done.src)

    async def _acknowledge(self, peer: int) -> None:
        if (done := self._done.get(peer)) is not None and peer not in self._complete and self.has_all(done):
            self._complete.add(peer)
            await self.send(peer, HasAll())

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
            await self._ask(first, FinalModel(params), lambda: self._mean is not None)
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
                await self.send(rank, FinalMean(self._mean))

    async def _repeat_news(self) -> None:
        for rank in list(self.data_shards):
            if not self._is_in and rank not in self._welcomed:
                await self._join(rank)
            elif rank not in self._heard:
                await self._say_done(rank)
        if self._request is not None:
            await self.send(*self._request)
        await self._tell_mean()
