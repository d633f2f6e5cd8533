"""Broadcast log: each message of each worker is delivered to all others exactly once, in any order.

Messages may be lost or doubled, and workers may die and join.

A sender numbers its messages from 1.  Each message tells its receiver up to which number the sender has the receiver's
own messages, so acknowledgements rarely need messages of their own.  A sender keeps a message until all peers have
acknowledged it, so that a receiver that finds a gap can request it again.  A receiver keeps a message too, until the
sender says that all have it: if the sender dies, each message that one worker has received is relayed to all others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from paceline.families.peers import Peers, Service
from paceline.protocol.messages import Message, Number, Rank, Rate, Version

# A worker keeps what a silent peer has missed, up to so many bytes; then that peer cannot come back.
KEPT_NBYTES = 2**28
# After so many messages of a sender, send an acknowledgement of its own.  Usually this worker's own messages carry it.
ACK_EVERY = 16


class LogMessage(Message):
    """Message `number` of its sender, sent at `step`.

    The sender has the receiver's messages up to `acked`.  All workers have the sender's own messages up to `stable`.
    `rate` is the factor with which the data counts.  `era` is the sender's when it first sent the message.
    """

    data: Tensor
    number: Number
    acked: Number = 0
    stable: Number = 0
    step: Version = 0
    rate: Rate = 1.0
    era: Number = 0


class LogAck(Message):
    """The sender has the receiver's messages up to that number."""

    number: Number


class LogResend(Message):
    """The sender requests these messages: pairs of a sender and a number."""

    missing: Tensor


class LogRelay(Message):
    """A message of a third worker, which is dead."""

    data: Tensor
    sender: Rank
    number: Number
    rate: Rate = 1.0


class Entry(NamedTuple):
    """The content of a message, and its era."""

    data: Tensor
    rate: float
    era: int = 0


class Numbers:
    """The numbers of the messages that were received from one sender.

    >>> numbers = Numbers()
    >>> for number in (1, 2, 5): numbers.add(number)
    >>> numbers.upto, numbers.beyond, numbers.missing(7)
    (2, {5}, [3, 4, 6, 7])
    """

    def __init__(self, upto: int = 0) -> None:
        self.upto = upto  # All numbers up to this one,
        self.beyond: set[int] = set()  # and these, after a gap.

    def __contains__(self, number: int) -> bool:
        return number <= self.upto or number in self.beyond

    def add(self, number: int) -> None:
        self.beyond.add(number)
        while self.upto + 1 in self.beyond:
            self.upto += 1
            self.beyond.remove(self.upto)

    def missing(self, count: int) -> list[int]:
        """The numbers up to `count` that are not here."""
        return [number for number in range(self.upto + 1, count + 1) if number not in self.beyond]


NONE = Numbers()


class BroadcastLog(Service):
    """The messages that this worker has sent and received.

    `deliver` is called once for each message of a peer, with its data and their factor.
    """

    types: ClassVar = (LogMessage, LogAck, LogResend, LogRelay)

    def __init__(self, peers: Peers, deliver: Callable[[Tensor, float], Awaitable[None]]) -> None:
        self.on_message_of_dead: Callable[[], Awaitable[None]] = nothing  # Called after the delivery of such a message.
        self._peers = peers
        self._deliver = deliver
        self._count = 0  # Messages of this worker,
        self._sent: dict[int, Entry] = {}  # those that not all peers have acknowledged,
        self._acked: dict[int, int] = {}  # and up to which number each peer has them.
        self._received: dict[int, Numbers] = {}  # Which messages of each sender are here,
        self._kept: dict[int, dict[int, Entry]] = {}  # those that some peers may not have,
        self._steps: dict[int, int] = {}  # the sender's step at its last message,
        self._unacked: dict[int, int] = {}  # and how many were received since the last acknowledgement.
        peers.add(self)

    async def broadcast(self, data: Tensor, rate: float = 1.0) -> None:
        """Send data to all peers.  The tensor belongs to the log from now on."""
        self._count += 1
        members = self._peers.members
        if not members and not self._peers.suspected:
            return
        self._sent[self._count] = Entry(data, rate, self._peers.era)
        if self._peers.suspected and sum(entry.data.nbytes for entry in self._sent.values()) > KEPT_NBYTES:
            for rank in self._peers.suspected:
                self._peers.give_up(rank)
        stable = min((self._acked.get(rank, 0) for rank in (*members, *self._peers.suspected)), default=self._count)
        for number in [number for number in self._sent if number <= stable]:
            del self._sent[number]
        await self._peers.flush()  # At most one broadcast is being sent.
        for rank in members:
            await self._send(rank, self._count)

    async def _send(self, dst: int, number: int) -> None:
        self._unacked[dst] = 0
        acked = self._received.get(dst, NONE).upto
        stable = min(self._sent) - 1
        step = self._peers.replica.cursor.step
        data, rate, era = self._sent[number]
        await self._peers.send(dst, LogMessage(data, number, acked, stable, step, rate, era=era))

    def step_of(self, rank: int) -> int:
        """The step at which a peer has sent its last message."""
        return self._steps.get(rank, 0)

    # What is here, and what is missing.

    def contents(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        """How many messages this worker has sent, and which messages of others it keeps."""
        return self._count, tuple(sorted((sender, number) for sender, kept in self._kept.items() for number in kept))

    def missing(self, src: int, count: int, kept: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """What a peer's `contents` lists and is not here, as pairs of a sender and a number."""
        return [
            *self._gaps(src, count),
            *((sender, number) for sender, number in kept if not self._has(sender, number)),
        ]

    async def request(self, src: int, missing: list[tuple[int, int]]) -> None:
        """Ask a peer to send these messages again."""
        if missing:
            await self._peers.send(src, LogResend(pairs(missing)))

    def _gaps(self, sender: int, count: int) -> list[tuple[int, int]]:
        return [(sender, number) for number in self._received.get(sender, NONE).missing(count)]

    def _has(self, sender: int, number: int) -> bool:
        return sender == self._peers.rank or number in self._received.get(sender, NONE)

    # Messages and events.

    async def handle(self, message: Message) -> None:
        src = message.src
        if src in self._peers.dead:  # The others may have agreed on what they have of it.
            return
        match message:
            case LogMessage():
                self._note_ack(src, message.acked)
                self._steps[src] = max(self._steps.get(src, 0), message.step)
                await self._receive(src, message.number, Entry(message.data, message.rate))
                self._kept[src] = {n: entry for n, entry in self._kept.get(src, {}).items() if n > message.stable}
                await self.request(src, self._gaps(src, message.number))
                await self._acknowledge(src)
            case LogAck():
                self._note_ack(src, message.number)
            case LogResend():
                for sender, number in message.missing.tolist():
                    await self._send_again(src, sender, number)
            case LogRelay():
                await self._receive(message.sender, message.number, Entry(message.data, message.rate))
            case _:
                pass

    def _note_ack(self, src: int, number: int) -> None:
        self._acked[src] = max(self._acked.get(src, 0), number)

    async def _receive(self, sender: int, number: int, entry: Entry) -> None:
        if self._has(sender, number):
            return
        await self._deliver(entry.data, entry.rate)
        self._kept.setdefault(sender, {})[number] = entry
        self._received.setdefault(sender, Numbers()).add(number)
        if not self._peers.is_member(sender):  # Other peers may need it, and cannot request it from its sender.
            await self.on_message_of_dead()

    async def _acknowledge(self, src: int) -> None:
        """Acknowledge in a message of its own if this worker has sent the peer nothing for long."""
        unacked = self._unacked.get(src, 0) + 1
        if unacked >= ACK_EVERY:
            await self._peers.send(src, LogAck(self._received.get(src, NONE).upto))
        self._unacked[src] = unacked % ACK_EVERY

    async def _send_again(self, dst: int, sender: int, number: int) -> None:
        if sender == self._peers.rank and number in self._sent:
            await self._send(dst, number)
        elif number in self._kept.get(sender, {}):
            data, rate, _ = self._kept[sender][number]
            await self._peers.send(dst, LogRelay(data, sender, number, rate))

    async def peer_died(self, rank: int) -> None:
        self._acked.pop(rank, None)

    async def peer_suspected(self, rank: int) -> None:
        """It may come back, and then it asks for what it has missed."""

    async def peer_returned(self, rank: int) -> None:
        """Each shows the other its last message, so that both see what they have missed."""
        if self._count in self._sent:
            await self._send(rank, self._count)

    def snapshot(self) -> list[Tensor]:
        """Which messages are in the model, and those that some peers may not have."""
        upto = [(self._peers.rank, self._count), *((sender, its.upto) for sender, its in self._received.items())]
        beyond = [(sender, number) for sender, its in self._received.items() for number in its.beyond]
        unstable = {self._peers.rank: self._sent, **self._kept}
        entries = [(sender, n, entry) for sender, its in unstable.items() for n, entry in its.items()]
        names, rates = pairs((sender, n) for sender, n, _ in entries), [entry.rate for _, _, entry in entries]
        return [
            pairs(upto),
            pairs(beyond),
            names,
            torch.tensor(rates, dtype=torch.float64),
            *(entry.data for _, _, entry in entries),
        ]

    def restore(self, state: Iterator[Tensor]) -> None:
        self._received = {sender: Numbers(upto) for sender, upto in next(state).tolist()}
        for sender, number in next(state).tolist():
            self._received.setdefault(sender, Numbers()).add(number)
        names, rates = next(state).tolist(), next(state).tolist()
        for (sender, number), rate in zip(names, rates, strict=True):
            self._kept.setdefault(sender, {})[number] = Entry(next(state), rate)


async def nothing() -> None:
    pass


def pairs(values: Iterable[tuple[int, int]]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64).view(-1, 2)
