"""Downpour SGD (Dean et al., NIPS 2012): DistBelief's asynchronous SGD, with Adagrad on the shards.

A replica fetches parameters every `fetch` steps and pushes the sum of its gradients every `push` steps.  In between it
takes plain SGD steps of its own.  The authors train one replica alone first: `Then(Replicated(), Downpour(),
steps=...)`.  One replica that pushes and fetches at every step is torch's Adagrad.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.families.server_strategy import ServerStrategy
from paceline.server.rules import Adagrad, Rule
from paceline.server.store import Store
from paceline.state import Resize, resize_rule
from paceline.worker.replica import Replica


@resize_rule("dropped")
def dropped(values: Sequence[dict[str, Any]], resize: Resize) -> dict[str, Any]:
    """With another number of workers the gradients that were not pushed are computed again."""
    return {"total": torch.zeros_like(values[0]["total"]), "steps": 0}


@dataclass(frozen=True)
class Downpour(ServerStrategy):
    """Push the sum of every `push` gradients, and fetch the parameters every `fetch` steps.

    Shards apply the sum by Adagrad, or by another `rule`.  `local_lr` is the learning rate of a replica's own steps.
    Both learning rates follow the schedule: the rule's by the mean of its factors at the steps of the sum.
    """

    push: int = 1
    fetch: int = 1
    rule: Rule = Adagrad()  # noqa: RUF009 (frozen)
    local_lr: float = 0.01
    pushes_gradients: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.push < 1 or self.fetch < 1:
            raise ValueError(
                f"Downpour(push={self.push}, fetch={self.fetch}): both are numbers of steps and must be at least 1"
            )
        if self.local_lr < 0:
            raise ValueError(
                f"Downpour(local_lr={self.local_lr}): the learning rate of a replica's own steps must be at least 0"
            )

    def shard_rule(self, workers: int) -> Rule:
        return self.rule

    async def worker(self, w: Replica) -> None:
        store = self.store(w)
        pulled = await store.pull()
        if not store.saves.continues or store.saves.was_early:
            w.params.copy_(pulled)
        m = w.state("sum", rule=dropped, total=torch.zeros_like(w.params), steps=0)
        total: Tensor = m.total  # The sum of the gradients since the last push.
        store.saves.again = lambda: store.pull(into=w.params)
        store.forget = partial(total.fill_, 0.0)
        exchange = partial(self._exchange, w, store, total)
        while await store.next(before_waiting=exchange):
            g = await w.gradient()
            total.add_(g)
            store.count_step()
            m.steps += 1
            if self.local_lr:
                w.params.add_(g, alpha=-self.local_lr * w.cursor.rate)
            pushes = m.steps % self.push == 0
            fetches = m.steps % self.fetch == 0
            if pushes and fetches:
                await exchange()
            elif pushes:
                rate = store.unpushed.rate
                await store.push(total, store.unpushed.take(), rate=rate)
                total.zero_()
            elif fetches:
                w.params.copy_(await store.pull())
        w.params.copy_(await store.leave())

    async def _exchange(self, w: Replica, store: Store, total: Tensor) -> None:
        """Push and fetch in one round trip."""
        rate = store.unpushed.rate
        w.params.copy_(await store.exchange(total, store.unpushed.take(), rate=rate))
        total.zero_()
