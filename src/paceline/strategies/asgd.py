"""Asynchronous SGD with local optimizers, as in CNTK (DataParallelASGD on Multiverso).

Workers push their delta since the last pull, and pull what the shards then hold.  No worker waits for another.  With a
pipeline the exchange runs during the next steps, and the pulled model is one exchange older.  With one worker and no
pipeline it is plain training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from paceline.families.ramped_steps import RampedSteps
from paceline.families.server_strategy import ServerStrategy
from paceline.needs import Needs
from paceline.op import Op, Ready
from paceline.server.rules import Rule, Sgd
from paceline.server.store import Store
from paceline.state import per_worker
from paceline.worker.replica import Replica


@dataclass(frozen=True)
class ASGD(ServerStrategy):
    """Train by the local optimizer, and exchange the delta every `period` steps or every `samples` samples.

    If neither is given, exchange every 256 samples.  With `pipeline` the exchange runs during the next steps.

    Late updates do most harm at the beginning, so the learning rate can start lower, with a factor that rises from
    `ramp_from` to 1.  A staircase rises by `ramp_from` every `ramp` minibatches of the worker, as CNTK's manual says; a
    linear ramp reaches 1 after `ramp` of them.  With `ramp_of="delta"` it is as in CNTK's code: `ramp` counts
    exchanges, and the factor scales what is pushed.
    """

    period: int | None = None
    samples: int | None = None
    pipeline: bool = False
    ramp: int = 0
    ramp_from: float = 0.1
    ramp_kind: Literal["staircase", "linear"] = "staircase"
    ramp_of: Literal["rate", "delta"] = "rate"
    needs: ClassVar[Needs] = Needs(collectives=False, servers=True, rests=True)
    pushes_gradients: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.period is not None and self.samples is not None:
            raise ValueError(
                f"ASGD(period={self.period}, samples={self.samples}): the time between two exchanges is given "
                f"in steps or in samples, not in both"
            )
        for name, value in (("period", self.period), ("samples", self.samples)):
            if value is not None and value < 1:
                raise ValueError(f"ASGD({name}={value}): it must be at least 1")
        if self.ramp < 0 or not 0 < self.ramp_from <= 1 or self.ramp_kind not in ("staircase", "linear"):
            raise ValueError(
                f"ASGD(ramp={self.ramp}, ramp_from={self.ramp_from}, ramp_kind={self.ramp_kind!r}): a ramp is a "
                f"'staircase' or 'linear', lasts 0 or more minibatches or exchanges, and begins in (0, 1]"
            )
        if self.ramp_of not in ("rate", "delta"):
            raise ValueError(
                f"ASGD(ramp_of={self.ramp_of!r}): a ramp is of the learning 'rate', by minibatches, or of the 'delta' "
                f"that is pushed, by exchanges"
            )

    def shard_rule(self, workers: int) -> Rule:
        return Sgd(lr=1.0)  # A delta contains the learning rate already.

    async def worker(self, w: Replica) -> None:
        store = self.store(w)
        pulled = await store.pull()
        if not store.saves.continues:
            w.params.copy_(pulled)
        deltas = DeltaExchange(self, w, store)
        local_step = RampedSteps(self.factor, w).step if self.ramp and self.ramp_of == "rate" else w.local_step
        while await store.next(before_waiting=deltas.exchange):
            await local_step()
            store.count_step()
            if self.is_due(store.unpushed.steps, store.unpushed.samples):
                await deltas.exchange()
        await deltas.in_flight
        w.params.copy_(await store.leave())

    def is_due(self, steps: int, samples: float) -> bool:
        """Whether to exchange so many steps and samples after the last exchange."""
        if self.period is not None:
            return steps >= self.period
        return samples >= (self.samples or 256)

    def factor(self, passed: int) -> float:
        """The ramp's factor after so many minibatches, or at the exchange of that number, counted from 1.

        >>> [ASGD(ramp=1024, ramp_from=0.2).factor(c) for c in (0, 1023, 1024, 4095, 4096)]
        [0.2, 0.2, 0.4, 0.8, 1.0]
        """
        if not self.ramp:
            return 1.0
        if self.ramp_kind == "staircase":
            return min(1.0, self.ramp_from * (passed // self.ramp + 1))
        return min(1.0, self.ramp_from + (1 - self.ramp_from) * passed / self.ramp)


class DeltaExchange:
    """A worker's exchanges with the shards: `base` is the model that it pulled last."""

    def __init__(self, strategy: ASGD, w: Replica, store: Store) -> None:
        self.strategy = strategy
        self.w = w
        self.store = store
        first = w.learner.flat.round(w.params.clone())
        self.m = w.state("deltas", rule=per_worker, base=first, exchanges=0)
        if not store.saves.continues:
            self.m.base.copy_(first)
        self.base: Tensor = self.m.base
        self.in_flight: Op[Tensor] = Ready("pull", self.base)
        self._delta = store.send_buffer()
        store.forget = self._forget
        store.saves.settle = self._settle

    def _forget(self) -> None:
        """Go back to `base`: other workers do what this one has done since then."""
        self.w.params.copy_(self.w.learner.flat.round(self.base))

    async def _settle(self) -> None:
        await self.in_flight

    async def exchange(self) -> None:
        """Push the delta since `base` and continue from the shards' model, or with a pipeline from the one before."""
        store = self.store
        params = self.w.params
        self.m.exchanges += 1
        if self.strategy.pipeline:
            await self.in_flight
        self._delta = torch.sub(self.base, params, out=store.send_buffer(self._delta))
        if self.strategy.ramp_of == "delta":
            self._delta.mul_(self.strategy.factor(self.m.exchanges))
        if self.strategy.pipeline:
            self.base.copy_(store.value)
            self.in_flight = store.exchange(self._delta, store.unpushed.take())
        else:
            self.base.copy_(await store.exchange(self._delta, store.unpushed.take()))
        params.copy_(self.w.learner.flat.round(self.base))
