"""Peers: the other workers of a method without a server.  Which of them are members, and the messages to and from them.

A worker handles messages between two gradients, and never waits for a peer while it has data.  Each worker keeps its
own roster.  A worker that replaces a dead one says so to all peers, and starts with the model of one of them.

What peers exchange is the task of services: see `BroadcastLog`, `Pairing` and `RunEnd`.
"""

# ruff: noqa: B027 (a service handles only the events that it needs)

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Container, Iterator
from typing import ClassVar

from torch import Tensor

from paceline.op import Op
from paceline.protocol.messages import Count, Message, PeerDied, PeerReturned, PeerSuspected, Version
from paceline.protocol.roster import FINAL, Roster, State
from paceline.strategy import MissedEnd
from paceline.worker.replica import Replica


class PeerJoin(Message):
    """The sender is a new worker.  It replaces the worker that had this data shard."""

    data_shard: Count


class Welcome(Message):
    """The sender has the new worker in its roster.  Its own data shard, and whether it has a model to send."""

    data_shard: Count
    has_model: bool = False


class GetModel(Message):
    """The sender needs the receiver's model to start with."""


class Model(Message):
    """The sender's model and step, and the state of its services: what a new worker starts with."""

    params: Tensor
    state: tuple[Tensor, ...] = ()
    step: Version = 0


class NotAPeer(Message):
    """The sender continues without the receiver, which was silent for too long to get what it has missed."""


class Service(ABC):
    """A protocol between peers.  `Peers` passes it the messages of its `types` and the changes of the membership."""

    types: ClassVar[tuple[type[Message], ...]] = ()
    needs_model: ClassVar[bool] = True  # Messages are kept until this worker has a model.

    @abstractmethod
    async def handle(self, message: Message) -> None:
        """Handle a message of one of the `types`."""

    async def handled(self, src: int) -> None:
        """Another service has handled a message from a peer."""

    async def joined(self) -> None:
        """This worker has a model now."""

    async def peer_joined(self, rank: int) -> None:
        """A peer is a new member."""

    async def peer_died(self, rank: int) -> None:
        """A peer is no longer a member."""

    async def peer_ended(self, rank: int) -> None:
        """A peer has finished its work, and ended."""
        await self.peer_died(rank)

    async def peer_suspected(self, rank: int) -> None:
        """A peer is silent, and no member for now.  It may come back as it was."""
        await self.peer_died(rank)

    async def peer_returned(self, rank: int) -> None:
        """A suspected peer is a member again, with all that it knew before."""
        await self.peer_joined(rank)

    async def retransmit(self) -> None:
        """A timeout has passed: send again what may have been lost."""

    def snapshot(self) -> list[Tensor]:
        """The state that a new worker needs in addition to the model."""
        return []

    def restore(self, state: Iterator[Tensor]) -> None:
        """Take the tensors of a peer's `snapshot` from the iterator."""


class Peers:
    """The other workers of a group, as one worker sees them.  Create all services before the first message."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.endpoint = replica.endpoint
        self.rank = replica.rank
        self.data_shard = replica.rank if replica.cursor.shard is None else replica.cursor.shard
        first = self.endpoint.layout.worker_ranks
        self.has_model = self.rank in first
        self.has_finished = False  # This worker has no data left.  A peer that ends now does not end without it.
        self.era = 0  # How many quiet points this worker has passed; see `QuietPoint`.
        self.on_wait: Callable[[], Awaitable[None]] | None = None  # Called again and again while this worker waits.
        self._services: list[Service] = []
        self._sending: list[Op[None]] = []
        self._early: deque[tuple[Service, Message]] = deque()  # Messages that arrived before this worker had a model.
        self._later: deque[Message] = deque()  # Messages of an era that has not begun here.
        self._roster = Roster(rank for rank in first if self.has_model and rank != self.rank)
        self._data_shards = {rank: rank for rank in self.members}
        self.dead: set[int] = set()  # Peers that have died, and not ended.  Nothing of theirs counts from then on.
        self._welcomed: dict[int, bool] = {}  # Peers that have noted this new worker, and whether they have a model.
        self._asked: int | None = None  # The peer that is to send its model.
        self._model: Model | None = None

    def add(self, service: Service) -> None:
        """Services are called in the order in which they were added."""
        self._services.append(service)

    # Messages.

    async def send(self, dst: int, message: Message) -> None:
        """Start to send a message.  The transfer continues while this worker does other work."""
        self._sending.append(self.endpoint.send(dst, message))

    async def flush(self) -> None:
        """Wait until all messages are sent."""
        while self._sending:
            await self._sending.pop(0)

    async def handle_all(self) -> None:
        """Handle the messages that have arrived."""
        await self.flush()
        while await self._handle_next(0.0):
            pass

    async def wait_until(self, condition: Callable[[], bool], timeouts: int | None = None) -> None:
        """Handle messages until the condition holds, or until that many timeouts have passed.

        Retransmit after each timeout.
        """
        retransmit_s = self.endpoint.retransmit_s
        due = self.endpoint.now() + (retransmit_s or 0.0)
        await self.flush()
        while not condition() and timeouts != 0:
            if self.on_wait is not None:
                await self.on_wait()
            await self._handle_next(None if retransmit_s is None else max(0.0, due - self.endpoint.now()))
            if retransmit_s is not None and self.endpoint.now() >= due:
                timeouts = None if timeouts is None else timeouts - 1
                await self._retransmit()
                due = self.endpoint.now() + retransmit_s
            await self.flush()

    async def _handle_next(self, timeout: float | None) -> bool:
        """Handle one message; False if none has arrived in time."""
        if self._early and self.has_model:
            await self._pass_on(*self._early.popleft())
            return True
        if self._later and era_of(self._later[0]) <= self.era:
            message = self._later.popleft()
        else:
            try:
                message = await self.endpoint.recv(timeout=timeout)
            except TimeoutError:
                return False
        if await self._is_about_members(message):
            return True
        if era_of(message) > self.era:
            self._later.append(message)
            return True
        for service in self._services:
            if isinstance(message, service.types):
                if service.needs_model and not self.has_model:
                    self._early.append((service, message))
                else:
                    await self._pass_on(service, message)
                break
        return True

    async def _pass_on(self, service: Service, message: Message) -> None:
        await service.handle(message)
        for other in self._services:
            if other is not service:
                await other.handled(message.src)

    async def _retransmit(self) -> None:
        if not self.has_model:
            for rank in self.members:
                if rank not in self._welcomed:
                    await self.send(rank, PeerJoin(self.data_shard))
        if self._asked is not None:
            await self.send(self._asked, GetModel())
        for service in self._services:
            await service.retransmit()

    # Members.

    @property
    def members(self) -> list[int]:
        """The ranks of all peers that are alive, without this worker."""
        return self._roster.members

    @property
    def suspected(self) -> list[int]:
        """Peers that are silent.  Nobody waits for them, and they may come back."""
        return self._roster.ranks_in(State.SUSPECTED)

    def is_member(self, rank: int) -> bool:
        return self._roster.is_member(rank)

    def give_up(self, rank: int) -> None:
        """A suspected peer cannot come back: what it has missed is no longer here."""
        self._roster.leave(rank)

    def all_in(self, ranks: Container[int]) -> bool:
        """Whether these ranks include all members."""
        return all(rank in ranks for rank in self.members)

    def data_shard_of(self, rank: int) -> int:
        return self._data_shards[rank]

    def with_data_shard(self, data_shard: int) -> int | None:
        """The member that has this data shard; None if it is dead."""
        return next((rank for rank in self.members if self._data_shards[rank] == data_shard), None)

    async def join(self, *, takes_model: bool = True) -> None:
        """Start with the model of a peer, if this worker is new.  Return at once if it was there from the beginning."""
        if self.has_model:
            return
        self._roster = Roster(rank for rank in self.endpoint.members_ever() if rank != self.rank)
        self._data_shards = dict.fromkeys(self.members, -1)  # Not known yet.
        for rank in self.members:
            await self.send(rank, PeerJoin(self.data_shard))
        await self.wait_until(lambda: self.all_in(self._welcomed))
        # Ask for a model only now: all peers know this worker, so each message is in the model or will be sent to it.
        while (
            takes_model
            and self._model is None
            and (having := [rank for rank in self.members if self._welcomed.get(rank)])
        ):
            await self._ask_for_model(min(having))
        if self._model is not None:
            self.replica.params.copy_(self._model.params)
            state = iter(self._model.state)
            for service in self._services:
                service.restore(state)
            self.replica.cursor.resume_at(self._model.step)
            self._model = None
        self.has_model = True
        for service in self._services:
            await service.joined()

    async def _ask_for_model(self, rank: int) -> None:
        self._asked = rank
        await self.send(rank, GetModel())
        await self.wait_until(lambda: self._model is not None or not self.is_member(rank))
        self._asked = None

    async def _is_about_members(self, message: Message) -> bool:
        """Handle a message if it is about the membership; otherwise return False."""
        src = message.src
        if isinstance(message, (PeerDied, PeerSuspected)):
            await self._lose(message)
            return True
        if self._roster.state(src) is State.LEFT:
            await self.send(src, NotAPeer())
            return True
        if self._roster.state(src) is State.SUSPECTED:
            await self._take_back(src)
        if isinstance(message, PeerReturned):
            return True
        match message:
            case NotAPeer():
                await self._miss_end()
            case PeerJoin():
                await self._add_member(src, message.data_shard)
            case Welcome():
                if self.is_member(src):
                    self._data_shards[src] = message.data_shard
                    self._welcomed[src] = message.has_model
            case GetModel():
                if self.has_model:
                    await self._send_model(src)
            case Model():
                self._model = message
            case _:
                return False
        return True

    async def _lose(self, event: PeerDied | PeerSuspected) -> None:
        rank = event.src
        if isinstance(event, PeerSuspected):
            if self._roster.suspect(rank):
                for service in self._services:
                    await service.peer_suspected(rank)
        elif self.endpoint.has_ended(rank) and self._roster.state(rank) not in FINAL:
            if not self.has_finished:
                await self._miss_end()
            self._roster.die(rank)
            for service in self._services:
                await service.peer_ended(rank)
        else:
            await self.note_death(rank)

    async def note_death(self, rank: int) -> None:
        """A peer has died, as this worker has noticed, or has heard from another one."""
        if rank != self.rank and self._roster.state(rank) not in FINAL:
            self._roster.die(rank)
            self.dead.add(rank)
            for service in self._services:
                await service.peer_died(rank)

    async def _take_back(self, rank: int) -> None:
        """A suspected peer is alive.  It has not noticed the suspicion, and goes on as a slow worker does."""
        self._roster.join(rank, self._roster.incarnation(rank))
        for service in self._services:
            await service.peer_returned(rank)

    async def _miss_end(self) -> None:
        """Leave: the peers have ended the run without this worker, or have declared it dead."""
        await self.flush()
        raise MissedEnd

    async def _add_member(self, new: int, data_shard: int) -> None:
        if self._roster.state(new) is State.DEAD:
            return
        for rank in (*self.members, *self.suspected):
            if self._data_shards[rank] == data_shard and rank != new:
                await self.note_death(rank)  # It must be dead: the new worker replaces it.
        self._roster.join(new)
        self._data_shards[new] = data_shard
        self._welcomed.setdefault(new, False)  # Two workers that join at the same time need no welcome from each other.
        await self.send(new, Welcome(self.data_shard, self.has_model))
        for service in self._services:
            await service.peer_joined(new)

    async def _send_model(self, dst: int) -> None:
        state = [tensor.clone() for service in self._services for tensor in service.snapshot()]
        await self.send(dst, Model(self.replica.params.clone(), tuple(state), self.replica.cursor.step))


def era_of(message: Message) -> int:
    """The number of quiet points that its sender had passed; 0 for messages that mean the same in every era."""
    return getattr(message, "era", 0)
