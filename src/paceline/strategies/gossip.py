"""Gossip: workers average with one another in pairs (Lian et al. 2018, AD-PSGD; not AdaptiveAveraging, which is ADPSGD).

There is no server.  A worker sends a copy of its model to a peer and goes on with its next gradient; the peer takes half of the
difference on itself and answers with the other half, which the worker adds to whatever its model has become meanwhile.  So an average
takes as much from one as it gives to the other, and the mean of all models moves by gradients alone.

A copy that is out is a promise: until it is answered a worker takes part in no other average, or two averages of one model would
overlap, and workers that ask each other in a circle could swap their models for ever instead of mixing them.  Nobody waits for that
promise but the exchange itself:

- Two that have asked each other have each other's copies, and need no answer: each takes its half.
- Every question has a lot, drawn from its number.  Who is asked while its own question is out refuses ("busy") if the other's lot is
  the lower one, and otherwise answers once it is free.  So along a chain of those who wait lots fall, and no chain is a circle, however
  questions cross; and as lots are drawn anew each time, nobody is always refused.
- Who has asked one that is gone is free at once, and keeps its own model.

With all pairs averaged after each step (two workers; or 2**n, `Exponential()` and n rounds) and no overlap it is AllReduceSGD.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from paceline.endpoint import Message
from paceline.families.peers import Peers
from paceline.families.topology import Ring, Topology, check_connected, peer_of
from paceline.needs import Needs
from paceline.strategy import Strategy
from paceline.worker.replica import Replica, train_alone


@dataclass(frozen=True)
class Gossip(Strategy):
    """Average with one peer after every `period` steps, chosen by the `topology`, while the next gradient is computed.

    Without `overlap` the average is waited for, and there may be several in a row, in so many `rounds`.
    """

    topology: Topology = Ring()  # noqa: RUF009 (frozen)
    period: int = 1
    rounds: int = 1
    overlap: bool = True
    needs: ClassVar[Needs] = Needs(collectives=False, messages=True)

    def __post_init__(self) -> None:
        if self.period < 1 or self.rounds < 1:
            raise ValueError(
                f"Gossip(period={self.period}, rounds={self.rounds}): steps between averages, and these, count from 1"
            )
        if self.overlap and self.rounds > 1:
            raise ValueError(
                f"Gossip(rounds={self.rounds}): one average is under way while the next gradient is; give overlap=False"
            )

    async def worker(self, w: Replica) -> None:
        if w.cursor.shards == 1:
            return await train_alone(w)
        check_connected(self.topology, w.cursor.shards)
        pair = Pairing(w)
        await pair.enter()
        for k in w.steps_alone():
            await w.local_step()
            await pair.take_all()
            if (k + 1) % self.period:
                continue
            for i in range(self.rounds):
                await pair.ask(
                    peer_of(self.topology, pair.data_shard, w.cursor.shards, k // self.period * self.rounds + i)
                )
                if not self.overlap:
                    await pair.until_free()
        await pair.until_free()
        await pair.finish()
        await pair.agree()


class Pairing(Peers):
    """A worker's averages with others, one at a time."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self.asked: int | None = None  # Who has a copy of this model and has not answered.
        self._copy: Tensor | None = None
        self._serial, self._since = 0, 0.0
        self._held: list[Message] = []  # Who waits until this worker is free.
        self._last_heard: dict[int, int] = {}  # The serial of each peer's last question that was dealt with,
        self._answers: dict[int, Message] = {}  # and the answer, until it has arrived.

    async def ask(self, data_shard: int | None) -> None:
        """Send a copy of the model to whoever has that seat, unless one is out already."""
        peer = None if data_shard is None else self.at(data_shard)
        if self.asked is not None:
            if (
                self.endpoint.retransmit_s is not None
                and self.endpoint.now() - self._since > self.endpoint.retransmit_s
            ):
                await self.repeat()
        elif peer is not None:
            if self._copy is None or self.endpoint.in_use(self._copy):
                self._copy = self.endpoint.send_buffer(self.replica.params)
            self._copy.copy_(self.replica.params)
            self.asked, self._serial = peer, self._serial + 1
            await self.repeat()

    async def repeat(self) -> None:
        if self.asked is not None and self._copy is not None:
            self._since = self.endpoint.now()
            heard = self._last_heard.get(self.asked, 0)
            await self.send(self.asked, Message("ask", (self._copy,), serial=self._serial, version=heard))

    async def until_free(self) -> None:
        await self.until(lambda: self.asked is None)

    async def handle(self, message: Message) -> None:
        kind, src = message.kind, message.src
        if kind == "gone":
            self._held = [m for m in self._held if m.src != src]
            self._answers.pop(src, None)
            if self.asked == src:
                await self._be_free()
        elif src not in self.data_shards:
            return
        elif kind == "ask":
            await self._be_asked(message)
        elif kind == "thanks":
            if (kept := self._answers.get(src)) is not None and kept.serial == message.serial:
                del self._answers[src]
        else:  # An answer, or "busy".
            self._last_heard[src] = max(self._last_heard.get(src, 0), message.version)
            if kind == "answer" and self.endpoint.retransmit_s is not None:
                await self.send(src, Message("thanks", serial=message.serial))
            if self.asked == src and message.serial == self._serial:
                if kind == "answer":
                    self.replica.params.add_(self.here(message.tensors[0]))
                await self._be_free()

    async def _be_asked(self, message: Message) -> None:
        src = message.src
        if message.serial <= self._last_heard.get(src, 0):  # Again: what it was answered may be lost.
            if (kept := self._answers.get(src)) is not None and kept.serial == message.serial:
                await self.send(src, kept)
        elif (
            self.asked == src and message.version < self._serial
        ):  # It asked before it was asked: both know both copies.
            assert self._copy is not None
            half = (self.here(message.tensors[0]) - self._copy).div_(2)
            self.replica.params.add_(half)
            self._note(Message("answer", (half.neg(),), version=self._serial, serial=message.serial, src=src))
            await self._be_free()
        elif self.asked is None:
            half = (self.replica.params - self.here(message.tensors[0])).div_(2)
            self.replica.params.sub_(half)
            await self._answer(Message("answer", (half,), serial=message.serial, src=src))
        elif lot(src, message.serial) < lot(self.rank, self._serial):
            await self._answer(Message("busy", serial=message.serial, src=src))
        elif all(m.src != src for m in self._held):
            self._held.append(message)

    async def _answer(self, answer: Message) -> None:
        self._note(answer)
        await self.send(answer.src, answer)

    def _note(self, answer: Message) -> None:
        self._last_heard[answer.src] = answer.serial
        if self.endpoint.retransmit_s is not None:
            self._answers[answer.src] = answer

    async def _be_free(self) -> None:
        """The copy that was out has come home: those who waited for it are answered."""
        self.asked = None
        held, self._held = self._held, []
        for message in held:
            await self._be_asked(message)


def lot(rank: int, serial: int) -> tuple[int, int]:
    """As good as drawn, and the same wherever it is asked for; no two questions have the same."""
    return zlib.crc32(f"{rank}/{serial}".encode()), rank
