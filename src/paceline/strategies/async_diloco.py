"""DiLoCo without a barrier (after Decoupled DiLoCo, 2026): workers train alone and push their deltas.

The shards collect deltas until they have a quorum and a short grace time has passed.  Then they take an outer Nesterov
step by the mean delta, weighted by samples.  No worker waits for a slow or dead one: a late delta is part of a later
mean.  With all workers in the quorum and equal speeds it is DiLoCo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.codecs.shares import followed
from paceline.families.server_strategy import ServerStrategy
from paceline.needs import Needs
from paceline.op import Op, Ready
from paceline.server.rule import Push as Update
from paceline.server.rules import Momentum, Quorum, Rule, Sgd
from paceline.server.store import Store
from paceline.state import per_worker
from paceline.worker.replica import Replica


@dataclass(frozen=True)
class AsyncDiLoCo(ServerStrategy):
    """Take an outer step by the mean delta of a `quorum` of workers, and of those that follow within `grace` seconds.

    Each worker pushes its delta every `period` steps.  While the shards collect, it trains for `delay` more steps; what
    it learns in them is added to the new model.
    """

    period: int = 500
    rate: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    quorum: int | None = None
    grace: float = 1.0
    delay: int = 0
    needs: ClassVar[Needs] = Needs(collectives=False, servers=True, rests=True)
    pushes_gradients: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.period < 1 or not 0 <= self.delay < max(self.period, 1):
            raise ValueError(
                f"AsyncDiLoCo(period={self.period}, delay={self.delay}): the period must be at least 1, and the "
                f"delay at least 0 and shorter than the period"
            )
        self.shard_rule(1)

    def samples_of_rate(self, samples: float, workers: int) -> float:
        return super().samples_of_rate(samples, workers) * (1 - self.momentum) / self.rate

    def shard_rule(self, workers: int) -> Rule:
        return Quorum(self.outer(), self.quorum, self.grace)

    def outer(self) -> Rule:
        """The outer optimizer of the shards."""
        return Momentum(self.rate, self.momentum, self.nesterov) if self.momentum else Sgd(self.rate)

    async def worker(self, w: Replica) -> None:
        store = self.store(w)
        pulled = await store.pull()
        if not store.saves.continues:
            w.params.copy_(pulled)
        outer = OuterExchange(w, store, self.outer(), waits=not self.delay)
        await outer.go_on()
        while await store.next(before_waiting=outer.push_and_merge):
            await w.local_step()
            store.count_step()
            steps = store.unpushed.steps
            if steps >= self.delay:
                await outer.merge()
            if steps >= self.period:
                outer.push()
                if not self.delay:
                    await outer.merge()
        await outer.merge()
        w.params.copy_(await store.leave())


class OuterExchange:
    """A worker's exchanges with the shards.

    `base` is the shards' model that the worker merged last, `snapshot` its parameters at its last push, and `in_flight`
    the exchange whose answer it has not merged yet.  `effect` is what the outer optimizer would make of `unsent`, which
    the codec has left out.  Divided by the worker's weight, it stays in its parameters as `offset`: see
    `paceline.families.unsent`.
    """

    def __init__(self, w: Replica, store: Store, outer: Rule, *, waits: bool) -> None:
        """`waits` says whether a worker waits for the answer to its push before its next step."""
        self.w = w
        self.store = store
        self.outer = outer
        self.waits = waits
        zero = torch.zeros_like(w.params)
        self.m = w.state(
            "outer exchange",
            rule=per_worker,
            base=w.params,
            snapshot=w.params,
            unsent=zero,
            effect=zero,
            offset=zero,
            value=w.params,  # The answer to the last push, if it `arrived` and is not merged yet.
            arrived=0,
            pending=0,  # Whether the shards hold back the answer.
            weight=0.0,  # The samples of a push; it follows a smaller push slowly.
        )
        self.base: Tensor = self.m.base
        self.snapshot: Tensor = self.m.snapshot
        self.unsent: Tensor = self.m.unsent
        self.effect: Tensor = self.m.effect
        self.offset: Tensor = self.m.offset
        self.memory = w.state("outer exchange.memory", rule=per_worker, **outer.memory(self.effect))
        self.in_flight: Op[Tensor] | None = None
        if not store.saves.continues:  # Also of a worker that was saved among another number of workers.
            for vector in (self.base, self.snapshot):
                vector.copy_(w.params)
            self.m.arrived = self.m.pending = 0
        if self.m.arrived:
            self.in_flight = Ready("exchange", self.m.value)
        store.forget = self._forget
        store.saves.settle = self._settle
        store.saves.again = self.go_on

    async def _settle(self) -> None:
        """The run is saved: wait for the answer that is in flight, which may say that there is none yet."""
        self.m.arrived = 0
        if self.in_flight is not None:
            self.m.value.copy_(await self.in_flight)
            if self.store.saves.is_early:
                self.in_flight, self.m.pending = None, 1
            else:
                self.m.arrived = 1

    async def go_on(self) -> None:
        """After the run was saved, ask again for an answer that the shards hold back."""
        if self.m.pending:
            self.m.pending = 0
            self.in_flight = self.store.pull()
            if self.waits:
                await self.merge()

    def _forget(self) -> None:
        """Go back to the last push: other workers do what this one has done since then."""
        has_pushed = self.in_flight is not None or self.m.pending
        self.w.params.copy_(self.snapshot if has_pushed else self.base + self.offset)

    def push(self) -> None:
        """Push the delta since `base`, or since a push that is not merged, and do not wait for the answer."""
        if self.m.pending:
            delta = self.snapshot.clone() - self.snapshot.copy_(self.w.params)
        else:
            delta = self.base - self.snapshot.copy_(self.w.params) + self.offset
        self.m.pending = 0
        if samples := self.store.unpushed.take():
            self.m.weight = followed(self.m.weight or None, samples)
        self.in_flight = self.store.exchange(delta, samples)

    async def merge(self) -> None:
        """Continue from the shards' model, plus what this worker has learnt since its push."""
        if self.in_flight is not None:
            value = await self.in_flight
            if self.store.saves.is_early and value is self.store.value:
                self.in_flight, self.m.pending = None, 1
                return
            self.base.copy_(value)
            self.w.params.add_(self.base - self.snapshot)
            if (unsent := self.store.unsent()) is not None and self.m.weight:
                change = unsent - self.unsent
                self.unsent.copy_(unsent)
                self.outer.apply(self.effect, change.to(self.effect.dtype), self.memory, Update())
                self.w.params.add_(torch.div(self.effect, self.m.weight, out=self.offset))
            self.in_flight = None

    async def push_and_merge(self) -> None:
        """Merge what is in flight, push the rest, and wait for the answer."""
        await self.merge()
        self.push()
        await self.merge()
