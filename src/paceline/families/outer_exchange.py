"""OuterExchange: a worker pushes its delta to shards with an outer optimizer, and merges their model later."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.codecs.shares import followed
from paceline.op import Op, Ready
from paceline.server.rule import Push as Update
from paceline.server.rules import Rule
from paceline.server.store import Store
from paceline.state import per_worker
from paceline.worker.replica import Replica


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
