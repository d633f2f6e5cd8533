"""The pause: workers that share memory stop for a moment, so that what is in the memory can be saved.

A worker that is to be saved says so to every peer, and waits until all of them stand too.  Then no worker writes, and
each copies the memory.  When all have copied it, they go on.
"""

from __future__ import annotations

from typing import ClassVar

from paceline.errors import ClusterError
from paceline.families.peers import Peers, Service
from paceline.protocol.messages import Message, Number


class Standing(Message):
    """The sender stands at the pause of that number."""

    number: Number


class Copied(Message):
    """The sender has copied the memory at the pause of that number, or knows of no later one."""

    number: Number


class Pause(Service):
    """One worker's pauses.  It is the `Rest` of the worker's cursor."""

    types: ClassVar = (Standing, Copied)
    needs_model: ClassVar = False

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._number = 0  # Of the last pause.
        self._standing: dict[int, int] = {}  # By peer: the newest pause at which it stood,
        self._copied: dict[int, int] = {}  # and the newest in which it has copied the memory.
        self._at: int | None = None  # The pause at which this worker stands,
        self._has_copied = False  # and whether it has copied the memory.
        self._has_ended = False
        self._missing: list[int] = []  # At the end.
        self._ended: set[int] = set()  # The data shards of workers that had ended before this one.
        peers.add(self)
        peers.on_wait = self._follow_if_finished
        peers.replica.cursor.rest = self

    @property
    def number(self) -> int:
        return self._number

    @property
    def member(self) -> int:
        return self._peers.data_shard

    @property
    def shards(self) -> int:
        return 0

    @property
    def is_asked(self) -> bool:
        """Whether a peer stands at a pause, and this worker does not."""
        return self._at is None and any(self._standing.get(rank, 0) > self._number for rank in self._peers.members)

    def end(self) -> None:
        """All workers have finished: no worker writes any more."""
        self._missing = self._missing_shards()
        self._has_ended = True

    async def reach(self) -> None:
        """Return when all workers stand.  ClusterError if a worker is dead and not replaced."""
        if self._has_ended:
            return self._check(self._missing)
        peers = self._peers
        number = max(self._number + 1, *(self._standing.get(rank, 0) for rank in peers.members), 0)
        self._at, self._has_copied = number, False
        for rank in peers.members:
            await peers.send(rank, Standing(number=number))
        await peers.wait_until(lambda: all(self._standing.get(rank, 0) >= number for rank in peers.members))
        self._number = number
        self._check(self._missing_shards())

    async def go_on(self) -> None:
        """Return when all workers have copied the memory."""
        if self._at is None or self._has_ended:
            return
        peers, number = self._peers, self._at
        self._has_copied = True
        for rank in peers.members:
            await peers.send(rank, Copied(number=number))
        await peers.wait_until(lambda: all(self._copied.get(rank, 0) >= number for rank in peers.members))
        self._at = None

    def _missing_shards(self) -> list[int]:
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
            self._peers.replica.cursor.on_rest()
            if self.is_asked:  # The driver saves nothing by itself.
                await self.reach()
                await self.go_on()

    # Messages and events.

    async def handle(self, message: Message) -> None:
        if isinstance(message, Standing):
            self._standing[message.src] = max(message.number, self._standing.get(message.src, 0))
        elif isinstance(message, Copied):
            self._copied[message.src] = max(message.number, self._copied.get(message.src, 0))
            if self._at is None and not self._peers.replica.cursor.has_started:
                self._number = max(self._number, message.number)

    async def peer_joined(self, rank: int) -> None:
        """A worker that joins during a pause takes part if not all stand yet; later it is not waited for."""
        if self._at is not None and self._number < self._at:
            await self._peers.send(rank, Standing(number=self._at))
        else:
            self._copied[rank] = self._number
            await self._peers.send(rank, Copied(number=self._number))

    async def peer_died(self, rank: int) -> None:
        """A worker that is dead is not waited for, since it is no member."""

    async def peer_ended(self, rank: int) -> None:
        self._ended.add(self._peers.data_shard_of(rank))

    async def retransmit(self) -> None:
        if self._at is not None:
            for rank in self._peers.members:
                await self._peers.send(rank, Standing(number=self._at))
                if self._has_copied:
                    await self._peers.send(rank, Copied(number=self._at))
