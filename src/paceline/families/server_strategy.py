"""ServerStrategy: the common part of all methods with a parameter server."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from paceline.codecs.codec import Codec, check_one_to_one
from paceline.needs import Needs
from paceline.server.gates import Free, Gate
from paceline.server.rule import Rule
from paceline.server.shard import Shard
from paceline.server.store import Store
from paceline.strategy import Durability, Strategy
from paceline.worker.replica import Replica


@dataclass(frozen=True, kw_only=True)
class ServerStrategy(Strategy):
    """Workers push updates to shards, and pull the new parameters.

    A method chooses the rule by which shards apply updates, and the gate that decides when they answer.  By default a
    worker pushes every gradient and continues from the answer.  `codec` encodes pushes; `pulls` encodes what has
    changed since the worker's last pull.  With `sparse=True`, parameters with sparse gradients
    (nn.Embedding(sparse=True)) are pushed and pulled by rows: only the rows that were touched are sent.

    With `durability="process"` a shard that is killed comes back as it was, and no acknowledged update is lost.

    Where the rule takes the steps, and not the workers' optimizers, its learning rate follows the schedule.
    """

    servers: int = 2
    codec: Codec | None = None
    pulls: Codec | None = None
    sparse: bool = False
    durability: Durability = "none"
    needs: ClassVar[Needs] = Needs(collectives=False, servers=True, optimizer=False, rests=True)
    pushes_gradients: ClassVar[bool] = True  # One at a time, of which rows may be sent alone.

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.servers < 1:
            raise ValueError(f"{name}(servers={self.servers}): at least 1 shard must hold the parameters")
        if self.sparse and not self.pushes_gradients:
            raise ValueError(
                f"{name}(sparse=True): what its workers push changes every parameter, so there are no rows to send; "
                "leave out sparse, or use ParameterServer(sparse=True)"
            )
        if self.sparse and not self.shard_rule(2).is_elementwise:
            raise ValueError(
                f"{name}(sparse=True): {self.shard_rule(2)} needs all rows, and cannot update only some; leave out "
                "sparse, or the rule's weight_decay, Every or Quorum"
            )
        if self.sparse and (self.codec or self.pulls):
            raise ValueError(
                f"{name}(sparse=True, codec={self.codec}, pulls={self.pulls}): sparse rows are sent without a codec; "
                "leave out codec and pulls, or sparse"
            )
        for what, codec in (("codec", self.codec), ("pulls", self.pulls)):
            check_one_to_one(f"{name}({what}={codec})", codec)
        if self.codec is not None:
            self.codec.check_optimizer([{"momentum": _momentum(self.shard_rule(2))}], kind="rule")

    def samples_of_rate(self, samples: float, workers: int) -> float:
        return self.samples_of_step(samples, workers) * self.shard_rule(workers).updates_in_step(workers)

    @abstractmethod
    def shard_rule(self, workers: int) -> Rule:
        """How shards apply an update."""

    def shard_gate(self) -> Gate:
        """When shards answer a worker."""
        return Free()

    def store(self, w: Replica) -> Store:
        rule = self.shard_rule(w.endpoint.layout.workers)
        return Store(
            w,
            codec=self.codec,
            pulls=self.pulls,
            is_scheduled=not self.needs.optimizer,
            weighs_samples=rule.weighs_samples,
            is_locked=self.shard_gate().is_lock,
        )

    async def worker(self, w: Replica) -> None:
        store = self.store(w)
        w.learner.flat.sparse_rows = self.sparse
        if not store.saves.has_value or self.pulls is not None:  # What a worker knows by a codec is in no saved state.
            await store.pull(into=w.params)
        store.saves.again = lambda: store.pull(into=w.params)
        room: Tensor | None = None
        while await store.next():
            w.learner.flat.rebind_grads(room := store.send_buffer(room))
            g = await w.gradient()
            await store.exchange(g, into=w.params, runs=w.learner.flat.touched_runs() if self.sparse else None)
        await store.leave(into=w.params)

    async def server(self, s: Shard) -> None:
        workers = s.endpoint.layout.workers
        pulls = self.pulls if workers > 1 else None  # A single worker uses no codec.
        gate = self.shard_gate()
        if gate.is_lock and s.endpoint.rank != s.endpoint.layout.server_ranks[0]:
            gate = Free()
        await s.serve(self.shard_rule(workers), gate, codec=self.codec, pulls=pulls)


def _momentum(rule: object) -> float:
    """The momentum of a rule, or of the rule that it wraps."""
    while (inner := getattr(rule, "rule", None)) is not None:
        rule = inner
    return getattr(rule, "momentum", 0.0)
