"""Strom's decentralised asynchronous SGD (Interspeech 2015): workers send each other the values that changed enough.

There is no server.  Each worker has the whole model.  It encodes its update by a threshold, applies what it has
encoded, and sends the same bytes to all others, which apply them when they arrive.  What is below the threshold waits
in the sender's residual.  Updates are only added, so their order does not matter: once all messages have arrived, all
models are equal, up to rounding, and have moved by all updates except the residuals.

For this reason receivers do not step with their own optimizers: momentum depends on the order.  With `lr` a worker
sends gradients, and all step by `lr` times these, and times the factor of the sender's schedule.  Without, it sends the
steps of its own optimizer, with momentum and schedule.  The threshold is in the units of what is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from torch import Tensor

from paceline.codecs.codec import Codec, check_one_to_one
from paceline.families.broadcast import BroadcastLog
from paceline.families.local_updates import LocalUpdates
from paceline.families.peers import Peers
from paceline.families.quiet import QuietPoint
from paceline.families.run_end import RunEnd
from paceline.needs import Needs
from paceline.strategy import Strategy
from paceline.worker.replica import Replica, train_alone


@dataclass(frozen=True)
class Strom(Strategy):
    """Send every update, encoded by `codec` (None: as it is), to all other workers, and apply theirs when they arrive.

    With `lr` updates are gradients and are applied with this learning rate, otherwise they are steps of the local
    optimizer.  Updates are added, not averaged: with N workers, divide the learning rate by N.  For the first
    `few_steps` steps only the first `few` workers train, on all data shards of each minibatch; the others apply what
    these send.
    """

    codec: Codec | None
    lr: float | None = None
    few: int = 1
    few_steps: int = 0

    @property
    def needs(self) -> Needs:  # pyright: ignore[reportIncompatibleVariableOverride]
        # Workers that wait for the few stand at no step, and cannot be saved there.
        return Needs(collectives=False, messages=True, optimizer=self.lr is None, rests=not self.few_steps)

    def __post_init__(self) -> None:
        check_one_to_one(f"Strom(codec={self.codec})", self.codec)
        if self.lr is not None and not self.lr > 0:
            raise ValueError(f"Strom(lr={self.lr}): a learning rate is positive; None: send the optimizer's steps")
        if self.few < 1 or self.few_steps < 0:
            raise ValueError(f"Strom(few={self.few}, few_steps={self.few_steps}): need few >= 1 and few_steps >= 0")

    async def worker(self, w: Replica) -> None:
        run = StromWorker(self, w)
        if w.cursor.shards == 1 and self.lr is None:
            return await train_alone(w)
        await run.peers.join()
        if w.cursor.step < self.few_steps and w.cursor.shards > 1:
            await run.start_with_few()
        for _ in w.steps_alone():
            await run.step()
        await run.end.wait_for_all()
        run.quiet.end()


class StromWorker:
    """One worker's loop: compute an update, send it to all, apply those that have arrived."""

    def __init__(self, strategy: Strom, w: Replica) -> None:
        self.strategy = strategy
        self.w = w
        self.codec_state = w.codec_state(strategy.codec)
        self.local = LocalUpdates(w)
        self.peers = Peers(w)
        self.log = BroadcastLog(self.peers, self.apply_received)
        self.quiet = QuietPoint(self.peers, self.log)
        self.end = RunEnd(self.peers, self.log)

    async def step(self) -> None:
        update = await (self.local.next() if self.strategy.lr is None else self.w.gradient())
        if self.w.batch.samples:
            data = await self.encode(update)
            rate = 1.0 if self.strategy.lr is None else self.w.cursor.rate
            self.apply(data, rate)
            await self.log.broadcast(data, rate)
        await self.peers.handle_all()

    async def encode(self, update: Tensor) -> Tensor:
        state = self.codec_state
        if state is None:
            return update.clone()
        return await self.w.endpoint.compute(lambda: state.encode(update), kind="encode", nbytes=update.nbytes)

    def apply(self, data: Tensor, rate: float) -> None:
        data, scale = data.to(self.w.params.device), -(self.strategy.lr or 1.0) * rate
        for vector in self.local.vectors:
            if self.codec_state is None:
                vector.add_(data, alpha=scale)
            else:
                self.codec_state.add(data, vector, scale)

    async def apply_received(self, data: Tensor, rate: float) -> None:
        await self.w.endpoint.compute(lambda: self.apply(data, rate), kind="decode", nbytes=data.nbytes)

    async def start_with_few(self) -> None:
        """Train as one of the few, or wait for them."""
        w = self.w
        few, steps = self.strategy.few, self.strategy.few_steps
        data_shard = w.cursor.shard
        if self.peers.data_shard >= few:
            await self.peers.wait_until(self.few_are_done)
        elif w.learner.has_global_data:  # In the user's own loop each worker has only its own data shard.
            for k, shard in product(range(w.cursor.step, steps), range(self.peers.data_shard, w.cursor.shards, few)):
                if w.cursor.has_data(k):
                    w.cursor.seek(k, shard)
                    await self.step()
        else:
            return
        w.cursor.shard = data_shard
        w.cursor.resume_at(steps)

    def few_are_done(self) -> bool:
        few = [rank for rank in self.peers.members if self.peers.data_shard_of(rank) < self.strategy.few]
        return all(self.end.has_finished(rank) or self.log.step_of(rank) >= self.strategy.few_steps for rank in few)
