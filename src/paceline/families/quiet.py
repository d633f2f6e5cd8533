"""The quiet point: nothing is in flight between workers without a server, so that their states make a whole.

A worker at this point begins nothing new, and sends a mark to every peer.  When it has the marks of all and
everything that they sent before them, it saves its state and continues.  Messages that a peer sent after the point
have a higher era; they wait until this worker is past the point too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import ClassVar

import torch
from torch import Tensor

from paceline.errors import ClusterError
from paceline.families.broadcast import BroadcastLog
from paceline.families.peers import Peers, Service
from paceline.protocol.messages import Message, Number


class Mark(Message):
    """The sender stands at its quiet point of that number, and has broadcast `count` messages until then.

    With `is_repeat` it still waits for the receiver's mark.
    """

    number: Number
    count: Number = 0
    is_repeat: bool = False


class QuietPoint(Service):
    """Brings this worker's messages to rest.  Create it after the service with the method's own messages.

    `settle` waits until no request of this worker is open.
    """

    types: ClassVar = (Mark,)

    def __init__(
        self, peers: Peers, log: BroadcastLog | None = None, settle: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self._peers = peers
        self._log = log
        self._settle = settle
        self._marks: dict[int, dict[int, Mark]] = {}  # Of each peer, by their numbers; those before `era` are dropped.
        self._sent: dict[int, Mark] = {}  # This worker's, by their numbers.
        self._is_here = False  # Whether this worker stands at the point.
        self._has_ended = False
        self._missing: list[int] = []  # What was missing at the end.
        self._ended: set[int] = set()  # The data shards of workers that had ended before this one.
        peers.add(self)
        peers.on_wait = self._follow_if_finished
        replica = peers.replica
        if replica.cursor.rest is not None:  # This worker starts anew from a saved state, and so do the others.
            peers.era = replica.cursor.rest.number
        replica.cursor.rest = self

    @property
    def number(self) -> int:
        """How many quiet points this worker has passed."""
        return self._peers.era

    @property
    def is_asked(self) -> bool:
        """Whether a peer stands at a quiet point that this worker has not reached."""
        return not self._is_here and any(
            max(marks, default=0) > self._peers.era and self._peers.is_member(rank)
            for rank, marks in self._marks.items()
        )

    def end(self) -> None:
        """All workers have finished: nothing is in flight any more."""
        self._missing = self._missing_shards()
        self._has_ended = True

    async def reach(self) -> None:
        """Return when nothing is in flight between the workers.  ClusterError if a worker is dead and not replaced."""
        if self._has_ended:
            return self._check(self._missing)
        peers = self._peers
        number = peers.era + 1
        self._is_here = True
        try:
            if self._settle is not None:
                await self._settle()
            count = 0 if self._log is None else self._log.contents()[0]
            self._sent[number] = Mark(number=number, count=count)
            for rank in peers.members:
                await peers.send(rank, self._sent[number])
            await peers.wait_until(lambda: all(self._is_quiet(rank, number) for rank in peers.members))
            peers.era = number
        finally:
            self._is_here = False
        self._check(self._missing_shards())

    def _is_quiet(self, rank: int, number: int) -> bool:
        mark = self._marks.get(rank, {}).get(number)
        return mark is not None and (self._log is None or not self._log.missing(rank, mark.count, ()))

    def _missing_shards(self) -> list[int]:
        """The data shards whose workers are dead, and not replaced."""
        peers = self._peers
        there = self._ended | {peers.data_shard, *(peers.data_shard_of(rank) for rank in peers.members)}
        return sorted(set(range(peers.replica.cursor.shards)) - there)

    def _check(self, missing: list[int]) -> None:
        if missing:
            raise ClusterError(
                f"the workers with the data shards {missing} are dead and not replaced, so their states are missing"
            )

    async def _follow_if_finished(self) -> None:
        """A worker that has no data left takes no steps: it is saved while it waits for the others."""
        if self._peers.has_finished and not self._has_ended and self.is_asked:
            asked = self._peers.era + 1
            self._peers.replica.cursor.on_rest()
            if self._peers.era < asked:  # The driver saves nothing by itself.
                await self.reach()

    # Messages and events.

    async def handle(self, message: Message) -> None:
        assert isinstance(message, Mark)
        src = message.src
        era = self._peers.era
        known = {number: mark for number, mark in self._marks.get(src, {}).items() if number > era}
        if message.number > era:
            known[message.number] = message
            if self._log is not None and message.number == era + 1:
                await self._log.request(src, self._log.missing(src, message.count, ()))
        self._marks[src] = known
        if message.is_repeat and (mark := self._sent.get(message.number, None)) is not None:
            await self._peers.send(src, mark)
        elif message.is_repeat and message.number <= era:  # This worker joined later.
            await self._peers.send(src, Mark(number=message.number))

    async def peer_joined(self, rank: int) -> None:
        if self._is_here and (mark := self._sent.get(self._peers.era + 1)) is not None:
            await self._peers.send(rank, mark)

    async def peer_died(self, rank: int) -> None:
        self._marks.pop(rank, None)

    async def peer_ended(self, rank: int) -> None:
        self._ended.add(self._peers.data_shard_of(rank))

    async def peer_suspected(self, rank: int) -> None:
        """What it has marked counts when it is back."""

    async def peer_returned(self, rank: int) -> None:
        """It was left out of quiet points, at which nothing was saved, and passes them now."""
        for mark in self._sent.values():
            await self._peers.send(rank, mark)

    async def retransmit(self) -> None:
        mark = self._sent.get(self._peers.era + 1)
        if self._is_here and mark is not None:
            for rank in self._peers.members:
                if not self._is_quiet(rank, mark.number):
                    await self._peers.send(rank, Mark(number=mark.number, count=mark.count, is_repeat=True))

    def snapshot(self) -> list[Tensor]:
        return [torch.tensor([self._peers.era])]

    def restore(self, state: Iterator[Tensor]) -> None:
        self._peers.era = int(next(state))
