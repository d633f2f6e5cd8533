"""Store: all shards as a worker sees them, one vector to pull and to push to."""

from __future__ import annotations

from torch import Tensor

from paceline.collectives import stripe_of
from paceline.endpoint import Message
from paceline.op import Op
from paceline.replica import Replica


class Store:
    """A worker's view of the parameter server.

    Shards act independently: at one moment they may have seen different numbers of updates, so `versions` has one entry a
    shard, and every push says which version of that shard it was computed from.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.endpoint = replica.endpoint
        self.shards = list(self.endpoint.layout.server_ranks)
        self.slices = [stripe_of(j, replica.params.numel(), len(self.shards)) for j in range(len(self.shards))]
        if len(self.shards) > replica.params.numel():
            raise ValueError(
                f"{len(self.shards)} servers for {replica.params.numel()} parameters: there must be at least one parameter a shard"
            )
        self.versions = [0] * len(self.shards)
        self.value = replica.params.clone()
        self._started = False

    def pull(self) -> Op[Tensor]:
        """The parameters as the shards hold them now."""
        return self.endpoint.spawn(self._ask("pull", None), kind="pull")

    def exchange(self, g: Tensor) -> Op[Tensor]:
        """Push a gradient and pull what the shards hold after it, in one round trip."""
        return self.endpoint.spawn(self._ask("push", g), kind="exchange")

    async def leave(self) -> None:
        """Say goodbye, so that the shards know when the last worker is done."""
        for rank in self.shards:
            await self.endpoint.send(rank, Message("leave"))

    async def _ask(self, kind: str, g: Tensor | None) -> Tensor:
        if not self._started and self.endpoint.rank == 0:
            for rank, where in zip(self.shards, self.slices, strict=True):
                await self.endpoint.send(rank, Message("start", (self.value[where],)))
        self._started = True
        samples = int(self.replica.samples_at_hand) if g is not None else 0
        sends = [
            self.endpoint.send(rank, Message(kind, () if g is None else (g[where],), version, samples))
            for rank, where, version in zip(self.shards, self.slices, self.versions, strict=True)
        ]
        for send in sends:
            await send
        for j, (rank, where) in enumerate(zip(self.shards, self.slices, strict=True)):
            answer = await self.endpoint.recv(src=rank)
            self.value[where] = answer.tensors[0]
            self.versions[j] = answer.version
        return self.value
