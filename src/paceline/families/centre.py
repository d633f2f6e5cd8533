"""The centre of elastic averaging, where no worker locks it: in shared memory, or on shards."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from paceline.collectives import barrier
from paceline.endpoint import Endpoint, SharedVector
from paceline.op import Op
from paceline.server.store import Store
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

    def meet(self, x: Tensor, alpha: float, into: Tensor) -> Op[None]:
        return self.endpoint.spawn(self._meet(x, alpha, into), kind="meet")

    async def _meet(self, x: Tensor, alpha: float, into: Tensor) -> None:
        await self.shared_vector.read(into)
        await self.shared_vector.draw(x, alpha)

    async def end(self) -> Tensor:
        await barrier(self.endpoint)
        return self.shared_vector.values


class OnShards:
    """A centre on shards, which apply the pushes of workers one after another."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @classmethod
    async def of(cls, w: Replica) -> OnShards:
        """The centre, and all workers, start at the first worker's parameters."""
        store = Store(w)
        await store.pull(into=w.params)
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
