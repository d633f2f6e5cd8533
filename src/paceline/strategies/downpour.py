"""Downpour SGD (Dean et al., NIPS 2012): DistBelief's asynchronous SGD, with Adagrad on the shards.

A replica fetches parameters every `fetch` steps and pushes the sum of its gradients every `push` steps, taking plain steps of its own in
between.  Its authors let one replica train alone first: `Then(Replicated(), Downpour(), steps=...)`.  One replica that pushes and
fetches at every step is torch's Adagrad.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.families.server_strategy import ServerStrategy
from paceline.server.rules import Adagrad, Rule
from paceline.worker.replica import Replica


@dataclass(frozen=True)
class Downpour(ServerStrategy):
    """Push the sum of every `push` gradients, fetch parameters every `fetch` steps; shards apply it by Adagrad, or another `rule`."""

    push: int = 1
    fetch: int = 1
    rule: Rule = Adagrad()  # noqa: RUF009 (frozen)
    local_lr: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.push < 1 or self.fetch < 1:
            raise ValueError(f"Downpour(push={self.push}, fetch={self.fetch}): both count steps, from 1")
        if self.local_lr < 0:
            raise ValueError(
                f"Downpour(local_lr={self.local_lr}): the rate of a replica's own steps cannot be negative"
            )

    def shard_rule(self, workers: int) -> Rule:
        return self.rule

    async def worker(self, w: Replica) -> None:
        store = self.store(w)
        w.params.copy_(await store.pull())
        total, seen, count = torch.zeros_like(w.params), 0.0, 0

        async def exchange() -> None:
            nonlocal seen
            w.params.copy_(await store.exchange(total, seen))
            total.zero_()
            seen = 0.0

        while await store.next(before_waiting=exchange):
            g = await w.gradient()
            total.add_(g)
            seen, count = seen + w.batch.samples, count + 1
            if self.local_lr:
                w.params.add_(g, alpha=-self.local_lr)
            pushes, fetches = count % self.push == 0, count % self.fetch == 0
            if pushes and fetches:
                await exchange()
            elif pushes:
                await store.push(total, seen)
                total.zero_()
                seen = 0.0
            elif fetches:
                w.params.copy_(await store.pull())
        w.params.copy_(await store.leave())
