"""The centre of elastic averaging, where no worker locks it: in shared memory, or on shards."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from paceline.collectives import barrier
from paceline.endpoint import Endpoint, SharedVector, WriteCounts
from paceline.families.company import Company
from paceline.op import Op
from paceline.server.store import Store
from paceline.state import per_worker
from paceline.worker.replica import Replica


class Centre(Protocol):
    """The vector that all workers meet."""

    def meet(self, x: Tensor, alpha: float, into: Tensor) -> Op[None]:
        """Read the centre `into` a vector, and then move it by a share `alpha` towards `x`."""
        ...

    async def end(self) -> Tensor:
        """The centre after the last meeting of all workers."""
        ...


class InMemory:
    """A centre in memory that all workers of a host share."""

    def __init__(self, shared_vector: SharedVector, endpoint: Endpoint) -> None:
        self.shared_vector = shared_vector
        self.endpoint = endpoint
        self._others_at_read = 0  # How often other workers had written when this one last read the centre.

    @classmethod
    async def of(cls, w: Replica) -> InMemory:
        """The centre of all workers, which begins as their first one."""
        return cls(await w.endpoint.shared_vector(w.params), w.endpoint)

    def meet(self, x: Tensor, alpha: float, into: Tensor) -> Op[None]:
        return self.endpoint.spawn(self._meet(x, alpha, into), kind="meet")

    async def _meet(self, x: Tensor, alpha: float, into: Tensor) -> None:
        writes = self.shared_vector.writes
        # What a worker writes depends on its read before, as on shards.  The read of this meeting is for the next one.
        before = self._others_at_read
        self._others_at_read = writes.of_others()
        await self.shared_vector.read(into)
        await self.shared_vector.draw(x, alpha)
        note_write(self.endpoint, writes, before, samples=1)

    async def end(self) -> Tensor:
        await barrier(self.endpoint)
        return self.shared_vector.values


class OnShards:
    """A centre on shards, which apply the pushes of workers one after another."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @classmethod
    async def of(cls, w: Replica, *, moves: bool = True) -> OnShards:
        """The centre starts at the first worker's parameters, and so do all workers that it `moves`."""
        store = Store(w)
        await store.pull(into=w.params if moves else None)
        return cls(store)

    def meet(self, x: Tensor, alpha: float, into: Tensor) -> Op[None]:
        return self.store.endpoint.spawn(self._meet(x, alpha, into), kind="meet")

    async def _meet(self, x: Tensor, alpha: float, into: Tensor) -> None:
        # Both requests are sent at once.  Shards answer them in this order, so the pull does not see the push.
        pulled = self.store.pull(into=into)
        pushed = self.store.push(x, 1.0, rate=alpha)
        await pulled
        await pushed

    async def end(self) -> Tensor:
        return await self.store.leave()


def note_write(endpoint: Endpoint, writes: WriteCounts, others_at_read: int, samples: int) -> None:
    """Count a write to shared memory.  Its staleness is the number of writes by others since this worker's read."""
    version = writes.of_all()
    staleness = writes.of_others() - others_at_read
    writes.add_write()
    endpoint.trace.point(endpoint.now(), endpoint.rank, version, samples, None, staleness)


async def begin_alone(w: Replica) -> tuple[Company, Tensor, int]:
    """Map a centre in memory.  Also the centre as this worker has seen it last, and the step before its first meeting.

    A worker that continues from a checkpoint has met the centre before.
    """

    async def copy_centre() -> None:
        m.centre.copy_(company.vector.values)

    m = w.state("centre", rule=per_worker, before_save=copy_centre, centre=w.params, seen=w.params, has_begun=0)
    company = await Company.of(w, m.centre)
    seen = m.seen if m.has_begun else m.seen.copy_(w.params)
    first = w.cursor.step - m.has_begun
    m.has_begun = 1
    return company, seen, first
