"""Served: what methods on a parameter server have in common."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from paceline.codecs.codec import Codec, check_one_to_one
from paceline.needs import Needs
from paceline.server.gates import Free, Gate
from paceline.server.rules import Rule
from paceline.server.shard import Shard
from paceline.server.store import Store
from paceline.strategy import Strategy
from paceline.worker.replica import Replica


@dataclass(frozen=True, kw_only=True)
class ServerStrategy(Strategy):
    """A method whose workers push updates to shards and pull what these make of them.

    A method says by which rule shards apply updates and when they answer; unless it says otherwise, a worker pushes every
    gradient and goes on from the answer.  `codec` encodes what is pushed, `pulls` what has changed since the last pull.  If it is
    `sparse`, of parameters with sparse gradients (nn.Embedding(sparse=True)) only the rows travel that somebody has touched.
    """

    servers: int = 2
    codec: Codec | None = None
    pulls: Codec | None = None
    sparse: bool = False
    needs: ClassVar[Needs] = Needs(collectives=False, servers=True, optimizer=False)

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.servers < 1:
            raise ValueError(f"{name}(servers={self.servers}): at least 1 shard must hold the parameters")
        if self.sparse and not self.shard_rule(2).is_elementwise:
            raise ValueError(f"{name}(sparse=True): {self.shard_rule(2)} cannot be applied to some rows alone")
        if self.sparse and (self.codec or self.pulls):
            raise ValueError(
                f"{name}(sparse=True, codec={self.codec}, pulls={self.pulls}): rows travel as they are, without a codec"
            )
        for what, codec in (("codec", self.codec), ("pulls", self.pulls)):
            check_one_to_one(f"{name}({what}={codec})", codec)

    @abstractmethod
    def shard_rule(self, workers: int) -> Rule:
        """What an update does to a shard."""

    def shard_gate(self) -> Gate:
        """When a shard goes on with what it was asked for."""
        return Free()

    def store(self, w: Replica) -> Store:
        return Store(w, codec=self.codec, pulls=self.pulls)

    async def worker(self, w: Replica) -> None:
        store = self.store(w)
        w.learner.flat.sparse_rows = self.sparse
        await store.pull(into=w.params)
        room: Tensor | None = None
        while await store.next():
            w.learner.flat.rebind_grads(room := store.send_buffer(room))
            g = await w.gradient()
            await store.exchange(g, into=w.params, runs=w.learner.flat.touched_runs() if self.sparse else None)
        await store.leave(into=w.params)

    async def server(self, s: Shard) -> None:
        workers = s.endpoint.layout.workers
        pulls = self.pulls if workers > 1 else None  # One worker alone is not encoded to, nor does it encode.
        await s.serve(self.shard_rule(workers), self.shard_gate(), codec=self.codec, pulls=pulls)
