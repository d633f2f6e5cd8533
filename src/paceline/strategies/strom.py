"""Strom's decentralised asynchronous SGD (Interspeech 2015): everybody tells everybody the few values that have changed enough.

There is no server: each worker has the whole model, encodes its update by a threshold, applies what it has said itself and sends the
same bytes to all others, which apply them when they arrive.  What is below the threshold waits in the sender's residual.  Since an update
is only ever added, the order in which it arrives does not matter: once all messages are in, all models are equal, up to the rounding of
sums in different orders, and have moved by all that was found but for what the residuals hold.

That is why it is not the receivers' optimizers that step by what arrives: momentum depends on the order.  With `lr` a worker sends
gradients, and everybody steps by `lr` times what they say; without, it sends the step of its own optimizer, momentum, schedule and all,
as it is, and momentum stays its owner's.  The threshold is in the units of what is sent.

A message has a number and says how far its receiver's own have been heard.  Each sender keeps its messages until all have them, so
that a lost one is asked for again, and every receiver keeps them until it knows that all have them: of a worker that dies, whatever
one of the others has heard they all have in the end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from paceline.codecs.codec import Codec, check_one_to_one
from paceline.endpoint import Message
from paceline.families.peers import Peers
from paceline.needs import Needs
from paceline.strategy import Strategy
from paceline.worker.replica import Replica, train_alone

MOST_OWED = (
    16  # Messages of a sender after which it is told that they have come, if this worker says nothing else to it.
)


@dataclass(frozen=True)
class Strom(Strategy):
    """Send every update, encoded by `codec` (None: as it is), to all other workers, and apply theirs as they come.

    With `lr` updates are gradients and applied by it, otherwise steps of the local optimizer.  As they are added up and not averaged, N
    workers want an N-th of the learning rate.  For the first `few_steps` steps only the first `few` workers train, and share out all
    parts of each minibatch among them; the others apply what these send.
    """

    codec: Codec | None
    lr: float | None = None
    few: int = 1
    few_steps: int = 0

    @property
    def needs(self) -> Needs:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Needs(collectives=False, messages=True, optimizer=self.lr is None)

    def __post_init__(self) -> None:
        check_one_to_one(f"Strom(codec={self.codec})", self.codec)
        if self.lr is not None and not self.lr > 0:
            raise ValueError(
                f"Strom(lr={self.lr}): a learning rate is positive; None leaves the steps to the optimizer"
            )
        if self.few < 1 or self.few_steps < 0:
            raise ValueError(
                f"Strom(few={self.few}, few_steps={self.few_steps}): at least 1 worker begins, for 0 or more steps"
            )

    async def worker(self, w: Replica) -> None:
        flood = Flood(w, self.codec, scale=1.0 if self.lr is None else self.lr)
        if w.cursor.shards == 1 and self.lr is None:
            return await train_alone(w)
        before = torch.empty_like(w.params if self.lr is None else w.params[:0])

        async def step() -> None:
            if self.lr is None:
                before.copy_(w.params)
                await w.local_step()
                update = before - w.params
                w.params.copy_(before)
            else:
                update = await w.gradient()
            if w.batch.samples:
                await flood.spread(update)
            await flood.take_all()

        await flood.enter()
        if w.cursor.step < self.few_steps and w.cursor.shards > 1:
            await self._begin(w, flood, step)
        for _ in w.steps_alone():
            await step()
        await flood.finish()

    async def _begin(self, w: Replica, flood: Flood, step: Callable[[], Awaitable[None]]) -> None:
        """Train as one of the few, or wait for them."""
        data_shard = w.cursor.shard
        if flood.data_shard >= self.few:
            await flood.until(lambda: flood.have_come(self.few, self.few_steps))
        elif w.learner.has_global_data:  # In the user's own loop each worker has its own part, and no other.
            for k, part in product(
                range(w.cursor.step, self.few_steps), range(flood.data_shard, w.cursor.shards, self.few)
            ):
                if w.cursor.has_data(k):
                    w.cursor.seek(k, part)
                    await step()
        else:
            return
        w.cursor.shard = data_shard
        w.cursor.resume_at(self.few_steps)


class Flood(Peers):
    """What a worker has said and heard: each message is applied once by everybody."""

    def __init__(self, replica: Replica, codec: Codec | None, scale: float) -> None:
        super().__init__(replica)
        self.codec_state, self.scale = replica.codec_state(codec), scale
        self.count = 0  # Messages of this worker,
        self._said: dict[int, Tensor] = {}  # those that not all have yet,
        self._acked: dict[int, int] = {}  # and up to which of them each peer has all.
        self._upto: dict[int, int] = {}  # Up to which message all of a sender's have been applied,
        self._beyond: dict[int, set[int]] = {}  # which after a gap,
        self._steps: dict[int, int] = {}  # at which step the last was,
        self._owed: dict[int, int] = {}  # and how many since it was told of them.
        self._kept: dict[int, dict[int, Tensor]] = {}  # What others have said that not all may have.

    async def spread(self, update: Tensor) -> None:
        """Say an update, and apply what was said of it."""
        data, codec_state = update, self.codec_state
        if codec_state is not None:
            data = await self.endpoint.compute(lambda: codec_state.encode(update), kind="encode", nbytes=update.nbytes)
        self._apply(data)
        self.count += 1
        if not self.data_shards:
            return
        self._said[self.count] = data = data.clone() if codec_state is None else data
        stable = min(self._acked.get(rank, 0) for rank in self.data_shards)
        for number in [n for n in self._said if n <= stable]:
            del self._said[number]
        await self.flush()  # What was said last, at the latest now.
        for rank in self.data_shards:
            await self.send(rank, self._update(rank, self.count))

    def _update(self, dst: int, number: int) -> Message:
        self._owed[dst] = 0
        heard, stable = self._upto.get(dst, 0), min(self._said) - 1
        return Message(
            "update",
            (self._said[number],),
            serial=number,
            version=heard,
            samples=stable,
            steps=self.replica.cursor.step,
        )

    def _apply(self, data: Tensor) -> None:
        params = self.replica.params
        if self.codec_state is None:
            params.add_(self.here(data), alpha=-self.scale)
        else:
            self.codec_state.add(self.here(data), params, -self.scale)

    async def handle(self, message: Message) -> None:
        kind, src = message.kind, message.src
        if kind in ("update", "ack"):
            self._acked[src] = max(self._acked.get(src, 0), message.version)
        if kind == "update":
            self._steps[src] = max(self._steps.get(src, 0), message.steps)
            await self._hear(src, message.serial, message.tensors[0])
            self._kept[src] = {n: data for n, data in self._kept.get(src, {}).items() if n > message.samples}
            await self.want(Message("done", serial=message.serial, src=src))
            if (owed := self._owed.get(src, 0) + 1) >= MOST_OWED:  # This worker has nothing to say itself.
                await self.send(src, Message("ack", version=self._upto[src]))
            self._owed[src] = owed % MOST_OWED
        elif kind == "again":
            for sender, number in message.tensors[0].tolist():
                if sender == self.rank and number in self._said:
                    await self.send(src, self._update(src, number))
                elif number in self._kept.get(sender, {}):
                    await self.send(src, Message("relay", (self._kept[sender][number],), version=sender, serial=number))
        elif kind == "relay":
            await self._hear(message.version, message.serial, message.tensors[0])
        elif kind == "gone":
            self._acked.pop(src, None)

    async def _hear(self, sender: int, number: int, data: Tensor) -> None:
        """Apply a message, unless that was done before."""
        if self._has(sender, number):
            return
        await self.endpoint.compute(lambda: self._apply(data), kind="decode", nbytes=data.nbytes)
        self._kept.setdefault(sender, {})[number] = data
        beyond = self._beyond.setdefault(sender, set())
        beyond.add(number)
        while self._upto.setdefault(sender, 0) + 1 in beyond:
            self._upto[sender] += 1
            beyond.remove(self._upto[sender])
        if sender not in self.data_shards:  # Others may not have heard it, and nobody can ask its sender.
            await self.account_anew()

    def _has(self, sender: int, number: int) -> bool:
        return number <= self._upto.get(sender, 0) or number in self._beyond.get(sender, ()) or sender == self.rank

    def account(self) -> Message:
        """How many messages there were, and which there are of those who are gone that not all may have."""
        gone = pairs((s, n) for s, kept in self._kept.items() if s not in self.data_shards for n in kept)
        return Message("done", (gone,), serial=self.count)

    def has_all(self, done: Message) -> bool:
        return not self._missing(done)

    async def want(self, done: Message) -> None:
        if missing := self._missing(done):
            await self.send(done.src, Message("again", (pairs(missing),)))

    def _missing(self, done: Message) -> list[tuple[int, int]]:
        """What a sender has said, and those that are gone and can no longer be asked, and has not come."""
        gone = done.tensors[0].tolist() if done.tensors else []
        own = [(done.src, number) for number in range(self._upto.get(done.src, 0) + 1, done.serial + 1)]
        return [(sender, number) for sender, number in (*own, *gone) if not self._has(sender, number)]

    def have_come(self, few: int, steps: int) -> bool:
        """Whether the first workers have come to that step, or are gone or done."""
        waited = [rank for rank, data_shard in self.data_shards.items() if data_shard < few and not self.is_done(rank)]
        return all(self._steps.get(rank, 0) >= steps for rank in waited)

    def model(self) -> tuple[Tensor, ...]:
        """And which messages are in it."""
        upto = [(self.rank, self.count), *self._upto.items()]
        beyond = [(sender, number) for sender, numbers in self._beyond.items() for number in numbers]
        return self.replica.params, pairs(upto), pairs(beyond)

    def begin_with(self, message: Message) -> None:
        super().begin_with(message)
        self._upto = dict(message.tensors[1].tolist())
        for sender, number in message.tensors[2].tolist():
            self._beyond.setdefault(sender, set()).add(number)


def pairs(values: Iterable[tuple[int, int]]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64).view(-1, 2)
