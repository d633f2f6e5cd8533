"""Asynchronous SGD with local optimizers, as CNTK has it (DataParallelASGD on Multiverso).

Every so often a worker pushes the way it has gone since it last loaded the model, and loads what the shards then hold: nobody waits for
another.  With a pipeline the exchange runs behind the next steps, and the model loaded is one exchange older.  With one worker and no
pipeline it is plain training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from paceline.families.server_strategy import ServerStrategy
from paceline.needs import Needs
from paceline.op import Op, Ready
from paceline.server.rules import Rule, Sgd
from paceline.worker.replica import Replica


@dataclass(frozen=True)
class ASGD(ServerStrategy):
    """Train by the local optimizer, and every `samples` (256, unless they or a `period` in steps are given) exchange the way gone.

    What is pushed first counts for less, since late updates do most harm at the beginning: `ramp_from` of it, growing over
    `ramp` exchanges, in a staircase of as many steps as it has parts of that size (CNTK's), or linearly.
    """

    period: int | None = None
    samples: int | None = None
    pipeline: bool = False
    ramp: int = 0
    ramp_from: float = 0.1
    ramp_kind: Literal["staircase", "linear"] = "staircase"
    needs: ClassVar[Needs] = Needs(collectives=False, servers=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.period is not None and self.samples is not None:
            raise ValueError(
                f"ASGD(period={self.period}, samples={self.samples}): exchanges are counted in steps or in samples, not in both"
            )
        for name, value in (("period", self.period), ("samples", self.samples)):
            if value is not None and value < 1:
                raise ValueError(f"ASGD({name}={value}): there must be at least 1 between two exchanges")
        if self.ramp < 0 or not 0 < self.ramp_from <= 1 or self.ramp_kind not in ("staircase", "linear"):
            raise ValueError(
                f"ASGD(ramp={self.ramp}, ramp_from={self.ramp_from}, ramp_kind={self.ramp_kind!r}): a 'staircase' or 'linear' ramp over "
                "0 or more exchanges begins in (0, 1]"
            )

    def shard_rule(self, workers: int) -> Rule:
        return Sgd(lr=1.0)  # What is pushed are steps, learning rate and all.

    async def worker(self, w: Replica) -> None:
        store = self.store(w)
        base = (await store.pull()).clone()
        w.params.copy_(base)
        coming: Op[Tensor] = Ready("pull", base)
        delta = store.send_buffer()
        seen, exchanges, since = 0.0, 0, 0

        async def exchange() -> None:
            nonlocal coming, delta, seen, exchanges, since
            exchanges += 1
            if self.pipeline:  # What the last exchange has brought, without what this one will.
                await coming
            delta = torch.sub(base, w.params, out=store.send_buffer(delta)).mul_(self.share(exchanges))
            if self.pipeline:
                base.copy_(store.value)
                coming = store.exchange(delta, seen)
            else:
                base.copy_(await store.exchange(delta, seen))
            w.params.copy_(base)
            seen, since = 0.0, 0

        while await store.next(before_waiting=exchange):
            await w.local_step()
            seen, since = seen + w.batch.samples, since + 1
            if since >= self.period if self.period is not None else seen >= (self.samples or 256):
                await exchange()
        await coming
        w.params.copy_(await store.leave())

    def share(self, exchange: int) -> float:
        """How much of the way gone is pushed at an exchange, counted from 1.

        >>> [ASGD(ramp=1024, ramp_from=0.2).share(c) for c in (1, 1023, 1024, 4095, 4096)]
        [0.2, 0.2, 0.4, 0.8, 1.0]
        """
        if not self.ramp:
            return 1.0
        if self.ramp_kind == "staircase":
            return min(1.0, self.ramp_from * (exchange // self.ramp + 1))
        return min(1.0, self.ramp_from + (1 - self.ramp_from) * exchange / self.ramp)
