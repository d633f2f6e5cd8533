"""DiLoCo without a barrier (after Decoupled DiLoCo, 2026): islands of workers train alone and hand in how far they have come.

The shards gather displacements until a quorum is there and a short grace has passed, and take an outer Nesterov step by their mean,
weighted by samples.  A worker that is slow, or dead, is not waited for: what it hands in later counts with the next ones.  With all
workers in the quorum and equal speeds it is DiLoCo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from paceline.families.server_strategy import ServerStrategy
from paceline.needs import Needs
from paceline.op import Op
from paceline.server.rules import Momentum, Quorum, Rule, Sgd
from paceline.worker.replica import Replica


@dataclass(frozen=True)
class AsyncDiLoCo(ServerStrategy):
    """Let shards take an outer step by the mean displacement of a `quorum` of workers, and of those who come within `grace` seconds.

    Each hands in its displacement every `period` steps, and for `delay` steps more trains on while the shards gather; what it learns
    meanwhile stays on top.
    """

    period: int = 500
    rate: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    quorum: int | None = None
    grace: float = 1.0
    delay: int = 0
    needs: ClassVar[Needs] = Needs(collectives=False, servers=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.period < 1 or not 0 <= self.delay < max(self.period, 1):
            raise ValueError(
                f"AsyncDiLoCo(period={self.period}, delay={self.delay}): a delay is shorter than the period, which is at least 1"
            )
        self.shard_rule(1)

    def shard_rule(self, workers: int) -> Rule:
        outer = Momentum(self.rate, self.momentum, self.nesterov) if self.momentum else Sgd(self.rate)
        return Quorum(outer, self.quorum, self.grace)

    async def worker(self, w: Replica) -> None:
        store = self.store(w)
        base = (await store.pull()).clone()
        w.params.copy_(base)
        sent, count, seen = base.clone(), 0, 0.0
        coming: Op[Tensor] | None = None

        def hand_in() -> None:
            nonlocal coming, count, seen
            coming = store.exchange(base - sent.copy_(w.params), seen)
            count, seen = 0, 0.0

        async def merge() -> None:
            nonlocal coming
            if coming is not None:
                base.copy_(await coming)
                w.params.add_(base - sent)  # What was learnt meanwhile stays on top.
                coming = None

        async def hand_in_the_rest() -> None:
            await merge()
            hand_in()
            await merge()

        while await store.next(before_waiting=hand_in_the_rest):
            await w.local_step()
            count, seen = count + 1, seen + w.batch.samples
            if count >= self.delay:
                await merge()
            if count >= self.period:
                hand_in()
                if not self.delay:
                    await merge()
        await merge()
        w.params.copy_(await store.leave())
