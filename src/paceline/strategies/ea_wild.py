"""EA-wild: elastic averaging without a lock on the centre (You, Buluc and Demmel 2017), with synchronous groups.

A worker reads the centre, steps by its gradient, and moves towards the centre; the centre moves towards the worker.
Other workers may do the same at any time.  A group acts as one worker: its members hold the same parameters and step by
the mean of their gradients, and one of them meets the centre for all.  On one host the centre is in shared memory; with
`servers` it is on shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

import torch
from torch import Tensor

from paceline.endpoint import Endpoint
from paceline.families.centre import Centre, InMemory, OnShards, begin_alone
from paceline.families.elastic import Elastic, check_period, groups_of
from paceline.needs import Needs
from paceline.op import Op
from paceline.server.rules import Attract
from paceline.server.shard import Shard
from paceline.state import per_worker
from paceline.strategy import Durability, Strategy, check_durability
from paceline.worker.replica import Replica

# The number of random partitions into groups that are used in turn.  It is bounded, since every group has connections
# of its own.
PARTITIONS = 8


@dataclass(frozen=True, kw_only=True)
class EAWild(Elastic, Strategy):
    """Meet the centre every `period` steps, without a lock, in groups of `group` workers that act as one.

    The groups are "fixed", of neighbouring ranks, or drawn at "random" every `regroup` steps; the members of a new
    group begin with the mean of their parameters.  `servers` is the number of shards that hold the centre; with 0 the
    centre is in shared memory, on one host.
    """

    period: int = 1
    group: int = 1
    groups: Literal["fixed", "random"] = "fixed"
    regroup: int = 64
    servers: int = 0
    durability: Durability = "none"

    def __post_init__(self) -> None:
        self.check_force()
        check_period(self, self.period)
        check_durability(self)
        if self.group < 1 or self.regroup < 1 or self.servers < 0:
            raise ValueError(
                f"EAWild(group={self.group}, regroup={self.regroup}, servers={self.servers}): a group has at least 1 "
                f"worker and lasts at least 1 step, and the number of servers is at least 0"
            )
        if self.groups not in ("fixed", "random"):
            raise ValueError(f"EAWild(groups={self.groups!r}): groups are 'fixed' or 'random'")

    @property
    def needs(self) -> Needs:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Needs(
            collectives=not self.is_elastic,
            servers=self.servers > 0,
            shared_memory=not self.servers,
            global_data=self.groups == "random",
            rests=self.group == 1,
        )

    @property
    def is_elastic(self) -> bool:
        """Whether workers meet nothing but the shared memory, so that they may die."""
        return self.group == 1 and not self.servers

    async def worker(self, w: Replica) -> None:
        if self.is_elastic:
            return await self._alone(w)
        groups = groups_of(w.workers, self.group)
        self.warn_if_unstable(w, groups)
        everyone = w.endpoint
        m = w.state("meetings", rule=per_worker, seen=w.params, has_begun=0)
        centre = await (OnShards.of(w, moves=not m.has_begun) if self.servers else InMemory.of(w))
        # The centre at the last meeting of this worker's group.
        w.published = seen = m.seen if m.has_begun else m.seen.copy_(w.params)
        before = torch.empty_like(w.params)
        group = everyone.group((w.rank,)) if m.has_begun else None
        m.has_begun = 1
        for k in w.steps():
            meets = group is not None and k % self.period == 0
            alpha = await self.coming_share(w, groups) if meets else 0.0
            if group is None or (self.groups == "random" and k % self.regroup == 0):
                group = everyone.group(self.group_of(w.rank, everyone.ranks, k))
                await group.all_reduce(w.params.div_(self.group))
            await self._step(w, group, centre, seen, before, alpha=alpha, meets=meets)
        if group is not None and w.rank == group.ranks[0]:  # The last steps move the centre too.
            await centre.meet(w.params.clone(), self.share(w, groups), seen)
        seen.copy_(await centre.end())
        await w.mean_of_buffers()

    async def _alone(self, w: Replica) -> None:
        """A worker that is a group of its own, and waits for no other."""
        company, seen, first = await begin_alone(w)
        self.warn_if_unstable(w, w.cursor.shards)
        centre = InMemory(company.vector, w.endpoint)
        w.published = seen
        before = torch.empty_like(w.params)
        for k in w.steps_alone():
            await company.look_around()
            meets = k > first and k % self.period == 0
            alpha = await self.coming_share(w, w.cursor.shards) if meets else 0.0
            met = centre.meet(before.copy_(w.params), alpha, seen) if meets else None
            await w.local_step()
            if met is not None:
                await met
                w.params.sub_(before.sub_(seen), alpha=alpha)
        if w.cursor.step > first:  # The last steps move the centre too.
            await centre.meet(w.params.clone(), self.share(w, w.cursor.shards), seen)
        await company.wait_for_all()
        seen.copy_(company.vector.values)

    async def _step(
        self, w: Replica, group: Endpoint, centre: Centre, seen: Tensor, before: Tensor, *, alpha: float, meets: bool
    ) -> None:
        """A step by the mean gradient of the group; if it `meets`, its first rank meets the centre meanwhile."""
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
        """The ranks in the group of this rank at that step."""
        order = list(ranks)
        if self.groups == "random":
            order = Random(f"EAWild/{step // self.regroup % PARTITIONS}").sample(order, len(order))
        first = order.index(rank) // self.group * self.group
        return tuple(sorted(order[first : first + self.group]))

    async def server(self, s: Shard) -> None:
        await s.serve(Attract(alpha=1.0))  # Each worker sends its own alpha.
