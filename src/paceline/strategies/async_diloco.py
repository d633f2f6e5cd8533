"""DiLoCo without a barrier (after Decoupled DiLoCo, 2026): workers train alone and push their deltas.

The shards collect deltas until they have a quorum and a short grace time has passed.  Then they take an outer Nesterov
step by the mean delta, weighted by samples.  No worker waits for a slow or dead one: a late delta is part of a later
mean.  With all workers in the quorum and equal speeds it is DiLoCo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.families.outer_exchange import OuterExchange
from paceline.families.server_strategy import ServerStrategy
from paceline.needs import Needs
from paceline.server.rules import Momentum, Quorum, Rule, Sgd
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
