"""Warm starts: one method first, and another for the rest of the run.

Compressed, block and asynchronous methods are fragile while the model still changes fast.  So a run can start with
another method: with AllReduceSGD, or, as in CNTK, without parallelism (`Replicated`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline import collectives
from paceline.collectives import SyncVote
from paceline.needs import Needs
from paceline.server.shard import Shard
from paceline.strategy import Durability, Strategy
from paceline.worker.learner import optimizer_counters, optimizer_vectors, set_optimizer_vectors
from paceline.worker.replica import Replica, train_alone


@dataclass(frozen=True)
class Then(Strategy):
    """Train with `first` for some steps, samples (of all workers) or epochs, and with `then` after that."""

    first: Strategy
    then: Strategy
    steps: int | None = None
    samples: int | None = None
    epochs: float | None = None
    WITHOUT_CODEC: ClassVar = (
        "each of its two methods has its own; give it to them, as in Then(AllReduceSGD(codec=...), ...)"
    )

    def __post_init__(self) -> None:
        given = {n: v for n in ("steps", "samples", "epochs") if (v := getattr(self, n)) is not None}
        said = ", ".join(f"{n}={v}" for n, v in given.items())
        if len(given) != 1:
            raise ValueError(f"Then({said}): give the length of the first method once, in steps, samples or epochs")
        if any(v < 0 for v in given.values()):
            raise ValueError(f"Then({said}): the length of the first method must be at least 0")
        if isinstance(self.then, Replicated):
            raise ValueError(
                f"{self}: Replicated can only be the first method; as the second, all workers would do the same work"
            )
        if self.first.servers:
            raise ValueError(
                f"{self}: {type(self.first).__name__} has servers, and servers run to the end of a job; use it as the "
                "second method"
            )

    @property
    def servers(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.then.servers

    @property
    def durability(self) -> Durability:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.then.durability

    @property
    def needs(self) -> Needs:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.first.needs.followed_by(self.then.needs)

    @property
    def methods(self) -> Sequence[Strategy]:
        return (*self.first.methods, *self.then.methods)

    @property
    def needs_unscaled(self) -> str | None:
        return self.first.needs_unscaled or self.then.needs_unscaled

    async def worker(self, w: Replica) -> None:
        m = w.state("then", is_second=False)
        if not m.is_second:
            end = self.switch(w)
            if w.plan.steps is not None and end > w.plan.steps:
                raise ValueError(
                    f"{self}: the first method would take {end} steps, but the whole run has only {w.plan.steps}; "
                    "give it fewer, or train longer"
                )
            with w.phase("first", self.first, until=end):
                await self.first.worker(w)
            await agree(w)
            m.is_second = True
        with w.phase("second", self.then):
            await self.then.worker(w)

    async def server(self, s: Shard) -> None:
        await self.then.server(s)  # It starts when the first worker sends the model.

    def switch(self, w: Replica) -> int:
        """The step at which the second method starts."""
        if self.steps is not None:
            return self.steps
        if self.samples is not None:
            return w.plan.steps_for(samples=self.samples, by="Then(samples=...)")
        return w.plan.steps_for_epochs(self.epochs or 0, by="Then(epochs=...)")


@dataclass(frozen=True)
class Replicated(Strategy):
    """Every worker trains on the same whole minibatches: no parallelism and no communication."""

    def samples_of_step(self, samples: float, workers: int) -> float:
        return samples

    async def worker(self, w: Replica) -> None:
        with w.cursor.full_batches():
            await train_alone(w)


async def agree(w: Replica) -> None:
    """Give all workers the first worker's model and buffers, and the mean of their optimizer state.

    If some workers have no optimizer state yet, because they had no data, the state of all is cleared.
    """
    if w.workers == 1:
        return
    endpoint = w.endpoint
    flat = w.learner.flat
    optimizer = w.learner.optimizer
    sums = await endpoint.all_gather(torch.stack([w.params.double().sum(), w.params.double().square().sum()]).cpu())
    if w.rank == endpoint.ranks[0] and any(not torch.equal(s, sums[0]) for s in sums):
        warnings.warn(
            "workers have different models at the end of a warm start, and should have the same: they continue "
            f"with worker {w.rank}'s model.  Did all of them read whole minibatches (session.shard), and count "
            "the same samples?",
            stacklevel=2,
        )
    for values in (w.params, *flat.model.buffers()):
        await endpoint.broadcast(values, endpoint.ranks[0])
    vectors = optimizer_vectors(flat, optimizer)
    counters = optimizer_counters(flat, optimizer)
    sizes = await endpoint.all_gather(torch.tensor([len(vectors), len(counters)]))
    if any(not torch.equal(size, sizes[0]) for size in sizes):
        optimizer.state.clear()
        return
    counts = await endpoint.all_gather(torch.tensor([0.0, *map(float, counters)], dtype=torch.float64))
    for i, counter in enumerate(counters):
        counter.fill_(max(float(count[1 + i]) for count in counts))
    for vector in vectors.values():
        await collectives.mean(endpoint, vector, SyncVote(1.0, rank=w.rank))
    set_optimizer_vectors(flat, optimizer, vectors)
