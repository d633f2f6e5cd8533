"""Elastic averaging (Zhang, Choromanska, LeCun 2015): workers explore alone, tied to a centre by an elastic force.

When they meet, worker and centre move towards each other by a share alpha of their difference, so their sum does not
change.  The centre is the model that is evaluated, not a worker.  alpha is beta/N for N workers; or it is given, or it
is rho times the learning rate, as in the paper.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.families.elastic import Elastic, ElasticServer, check_period
from paceline.server.gates import Gate, Turns
from paceline.state import per_worker
from paceline.strategy import Strategy
from paceline.worker.replica import Replica


@dataclass(frozen=True, kw_only=True)
class EASGD(Elastic, Strategy):
    """The synchronous form: at every `period`-th step all workers meet the centre by one all-reduce, without a server.

    They meet at the steps whose number `period` divides, the first one included.
    The centre becomes (1 - beta) * centre + beta * mean of the workers.  Every worker moves by a share alpha = beta/N
    towards the centre before this change.
    """

    period: int = 4

    def __post_init__(self) -> None:
        self.check_force()
        check_period(self, self.period)

    async def worker(self, w: Replica) -> None:
        m = w.state("centre", centre=w.params)
        w.published = m.centre
        self.warn_if_unstable(w, w.workers, together=True)
        w.batch.track_syncs()
        before = torch.empty_like(w.params)
        delta = torch.empty_like(w.params)
        for k in w.steps():
            meets = k % self.period == 0
            if meets:
                torch.sub(before.copy_(w.params), m.centre, out=delta)
            await w.local_step()
            if not meets:
                continue
            beta = self.share(w, w.workers) * w.workers
            mean = await w.mean(before)
            own = w.batch.mark_sync()
            total = w.batch.update_samples
            if total:  # If all workers have seen the same number of samples, beta * own / total is alpha.
                w.params.sub_(delta, alpha=beta * own / total)
                m.centre.lerp_(mean, beta)
        await w.mean_of_buffers()


@dataclass(frozen=True, kw_only=True)
class AsyncEASGD(ElasticServer):
    """The asynchronous form: each worker meets the centre on shards every `period` of its own steps, and none waits."""


@dataclass(frozen=True, kw_only=True)
class RoundRobinEASGD(ElasticServer):
    """Workers meet the centre in the order of their ranks.

    A worker that has pulled the centre holds it until its force has arrived, as if it held a lock.  The others wait,
    and so all workers go at the speed of the slowest.  This form is for comparison with the others.
    """

    takes_turns: ClassVar[bool] = True

    def shard_gate(self) -> Gate:
        return Turns()


@dataclass(frozen=True, kw_only=True)
class EAMSGD(ElasticServer):
    """`AsyncEASGD` with Nesterov's momentum in every worker; the centre has none.

    The task's optimizer should be plain SGD: its own momentum would be added to this one.
    """

    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"EAMSGD(momentum={self.momentum}): the momentum must be in [0, 1)")

    @property
    def has_own_momentum(self) -> bool:
        return self.momentum > 0

    def local_steps(self, w: Replica) -> Callable[[], Awaitable[None]]:
        return NesterovSteps(w, self.momentum).step if self.momentum else w.local_step


class NesterovSteps:
    """Local steps with Nesterov's momentum: v' = momentum * v - lr * gradient(x + momentum * v), and x' = x + v'."""

    def __init__(self, w: Replica, momentum: float) -> None:
        self.w = w
        self.momentum = momentum
        self._velocity: Tensor = w.state("nesterov", rule=per_worker, velocity=torch.zeros_like(w.params)).velocity
        self._before = torch.empty_like(w.params)

    async def step(self) -> None:
        params = self.w.params
        self._before.copy_(params)
        params.add_(self._velocity, alpha=self.momentum)
        await self.w.local_step()
        torch.sub(params, self._before, out=self._velocity)
