"""EA-wild: elastic averaging whose centre nobody locks, after You, Buluc and Demmel (2017), with groups that go in step inside.

A worker reads the centre as it is, lets itself be pulled to it and the centre to where it stands, and steps by its gradient; others do
the same at any time.  A group is one such worker: its members hold the same parameters and step by the mean of their gradients, and
one of them meets the centre for all.  On one host the centre lies in memory that all workers write to; with `servers` it lies on shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, Protocol

import torch
from torch import Tensor

from paceline.collectives import barrier
from paceline.endpoint import Endpoint, SharedVector
from paceline.needs import Needs
from paceline.op import Op
from paceline.server.rules import Attract
from paceline.server.shard import Shard
from paceline.server.store import Store
from paceline.strategies.easgd import Elastic, check_period
from paceline.strategy import Strategy
from paceline.worker.replica import Replica

PARTITIONS = (
    8  # Random groups are drawn so many times, and then come again: every group that meets has connections of its own.
)


@dataclass(frozen=True, kw_only=True)
class EAWild(Elastic, Strategy):
    """Meet the centre every `period` steps, without a lock; in groups of `group` workers, which are as one.

    The groups are those of neighbouring ranks, or drawn at random every `regroup` steps, whose members then begin with the mean of
    their parameters.  `servers` is the number of shards that hold the centre; with 0 it is in the memory of the one host.
    """

    period: int = 1
    group: int = 1
    groups: Literal["fixed", "random"] = "fixed"
    regroup: int = 64
    servers: int = 0

    def __post_init__(self) -> None:
        self.check_force()
        check_period(self, self.period)
        if self.group < 1 or self.regroup < 1 or self.servers < 0:
            raise ValueError(
                f"EAWild(group={self.group}, regroup={self.regroup}, servers={self.servers}): a group has at least 1 worker and stays "
                "together for at least 1 step, and there are no fewer than 0 servers"
            )
        if self.rho is not None and self.servers:
            raise ValueError(
                f"EAWild(rho={self.rho}, servers={self.servers}): shards do not know the learning rate; give alpha or beta"
            )
        if self.groups not in ("fixed", "random"):
            raise ValueError(f"EAWild(groups={self.groups!r}): they are 'fixed' or 'random'")

    @property
    def needs(self) -> Needs:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Needs(servers=self.servers > 0, shared_memory=not self.servers, global_data=self.groups == "random")

    async def worker(self, w: Replica) -> None:
        pullers = w.workers // self.group
        if w.workers % self.group:
            over = w.workers % self.group
            raise ValueError(
                f"EAWild(group={self.group}): {w.workers} workers make {pullers} such groups, and leave {over} over"
            )
        self.warn_if_unstable(w, pullers)
        everyone = w.endpoint
        centre = await OnShards.of(w) if self.servers else InMemory(await everyone.shared_vector(w.params), everyone)
        seen = w.params.clone()  # The centre, as this worker's group has last seen it.
        w.published = seen
        before = torch.empty_like(w.params)
        group: Endpoint | None = None
        for k in w.steps():
            meets = group is not None and k % self.period == 0
            if group is None or (self.groups == "random" and k % self.regroup == 0):
                group = everyone.group(self.group_of(w.rank, everyone.ranks, k))
                await group.all_reduce(w.params.div_(self.group))
            await self._step(w, group, centre, seen, before, alpha=self.share(w, pullers), meets=meets)
        if group is not None and w.rank == group.ranks[0]:  # What the last steps have found counts too.
            await centre.meet(w.params.clone(), self.share(w, pullers), seen)
        seen.copy_(await centre.end())
        await w.mean_of_buffers()

    async def _step(
        self, w: Replica, group: Endpoint, centre: Centre, seen: Tensor, before: Tensor, *, alpha: float, meets: bool
    ) -> None:
        leader = group.ranks[0]
        if meets:
            before.copy_(w.params)
        met = centre.meet(before, alpha, seen) if meets and w.rank == leader else None
        means: list[Op[Tensor]] = []
        g = await w.gradient(each=lambda bucket: means.append(w.mean(bucket, within=group)))
        for mean in means:
            await mean
        await w.step(g)
        if met is not None:
            await met
        if meets:
            await group.broadcast(seen, leader)
            w.params.sub_(before.sub_(seen), alpha=alpha)

    def group_of(self, rank: int, ranks: Sequence[int], step: int) -> tuple[int, ...]:
        """With whom a worker is in a group at that step."""
        order = list(ranks)
        if self.groups == "random":
            order = Random(f"EAWild/{step // self.regroup % PARTITIONS}").sample(order, len(order))
        first = order.index(rank) // self.group * self.group
        return tuple(sorted(order[first : first + self.group]))

    async def server(self, s: Shard) -> None:
        await s.serve(Attract(self.constant_share(s.endpoint.layout.workers // self.group)))


class Centre(Protocol):
    """Where workers meet."""

    def meet(self, x: Tensor, alpha: float, into: Tensor) -> Op[None]:
        """Read it, and then pull it by a share of the way to `x`; what holds it may have the share from elsewhere."""
        ...

    async def end(self) -> Tensor:
        """What it is when all have left it."""
        ...


class InMemory:
    """A centre in memory that all workers have in common."""

    def __init__(self, common: SharedVector, endpoint: Endpoint) -> None:
        self.shared_vector, self.endpoint = common, endpoint

    def meet(self, x: Tensor, alpha: float, into: Tensor) -> Op[None]:
        return self.endpoint.spawn(self._meet(x, alpha, into), kind="meet")

    async def _meet(self, x: Tensor, alpha: float, into: Tensor) -> None:
        await self.shared_vector.read(into)
        await self.shared_vector.draw(x, alpha)

    async def end(self) -> Tensor:
        await barrier(self.endpoint)
        return self.shared_vector.values


class OnShards:
    """A centre on shards, which apply what they are sent one after the other."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @classmethod
    async def of(cls, w: Replica) -> OnShards:
        """Where the first worker stands, and the others with it."""
        store = Store(w)
        await store.pull(into=w.params)
        return cls(store)

    def meet(self, x: Tensor, alpha: float, into: Tensor) -> Op[None]:
        return self.store.endpoint.spawn(self._meet(x, into), kind="meet")

    async def _meet(self, x: Tensor, into: Tensor) -> None:
        pulled, pushed = (
            self.store.pull(into=into),
            self.store.push(x, 1.0),
        )  # Both on their way at once, and heard in this order.
        await pulled
        await pushed

    async def end(self) -> Tensor:
        return await self.store.leave()
