"""Elastic runs under faults: what a synchronous strategy promises when workers die in its collectives, and join.

In the task each sample counts in a value of its own, and each minibatch changes the model by the same total, whichever
of its samples count.  So the final model shows which samples were lost with a worker, and that the others count for
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from paceline.sim.cluster import Cluster, Constant
from paceline.sim.elastic_run import ElasticSimulation
from paceline.sim.fault_schedule import check_faults
from paceline.sim.faults import Faults
from paceline.strategy import Strategy
from paceline.study.elastic_witness import ElasticWitness
from paceline.study.fault_plans import end_of
from paceline.study.played import played
from paceline.study.witness import Violation
from paceline.task import Batch, Task

STEPS, BATCH = 12, 8
GRACE_S = 5.0


class Shares(nn.Module):
    """A parameter for each sample, whose gradient is minus its share in the minibatch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(STEPS * BATCH, dtype=torch.float64))


def count_shares(model: nn.Module, batch: Batch) -> Tensor:
    return -(batch[0] @ next(model.parameters())).mean()


def shares_task() -> Task:
    rows = torch.eye(STEPS * BATCH, dtype=torch.float64)
    return Task(Shares, count_shares, [rows], BATCH, lambda p: torch.optim.SGD(p, lr=0.5), steps=STEPS)


def slow_cluster(seed: int, workers: int) -> Cluster:
    """Workers of unequal speed, on a network so slow that a worker may well die in a collective."""
    chance = Random(f"torture/elastic/{seed}")
    compute = Constant([round(chance.uniform(0.002, 0.02), 5) for _ in range(workers)])
    return Cluster(workers, compute, latency=chance.choice([5e-5, 5e-4, 2e-3]), seed=seed)


@dataclass(frozen=True)
class ElasticPromise:
    """What runs of 4, 3 and 2 workers without faults have shown.

    - `seconds`: how long they take.
    - `totals`: by how much each minibatch changes the model; None if that depends on the workers.
    - `period`: the largest number of steps between two commits.
    """

    seconds: float
    totals: Tensor | None
    period: int


@dataclass(frozen=True)
class Ended:
    """A run that has ended."""

    simulation: ElasticSimulation
    witness: ElasticWitness
    models: dict[int, Tensor]  # Of the workers that have finished with the others.
    has_residuals: bool  # Whether a lost worker takes with it what its codec has left out of earlier messages.


class ElasticOrdeal:
    """Runs a synchronous strategy whose workers die and join."""

    def __init__(self, strategy: Strategy, task: Task | None, workers: int) -> None:
        self.strategy = strategy
        self.workers = workers
        self.task = task or shares_task()
        self.counts_shares = task is None
        self.virtual_s = 0.0

    @cached_property
    def promise(self) -> ElasticPromise:
        ended = [self._run(1, workers, Faults()) for workers in range(2, self.workers + 1)]
        totals = [self._totals(next(iter(e.models.values()))) for e in ended]
        counts = self.counts_shares and not any(e.has_residuals for e in ended)
        is_same = counts and all(torch.allclose(t, totals[0], rtol=1e-9) for t in totals)
        return ElasticPromise(
            seconds=max(e.simulation.simulator.now for e in ended),
            totals=totals[0] if is_same else None,
            period=max(e.witness.longest_period() for e in ended),
        )

    def check(self, seed: int, faults: Faults) -> None:
        """Run with these faults; raise Violation for the first invariant that is broken."""
        seconds = self.promise.seconds
        ended = self._run(seed, self.workers, faults, limit_s=end_of(faults) + 20 * seconds + GRACE_S)
        self._check(ended)

    def _totals(self, params: Tensor) -> Tensor:
        """By how much each minibatch has changed the model."""
        task = self.task
        return torch.stack([params[task.part(k, 0, 1)[0].argmax(1)].sum() for k in range(task.total_steps)])

    def _run(self, seed: int, workers: int, faults: Faults, limit_s: float | None = None) -> Ended:
        check_faults(faults, self.strategy, workers, 1, elastic=True)
        simulation = ElasticSimulation(
            self.task,
            self.strategy,
            slow_cluster(seed, workers),
            strict=False,
            nonfinite="skip",
            stop_at=None,
            faults=faults,
            progress=None,
        )
        if limit_s is not None:
            simulation.simulator.limit_s = limit_s
        witness = ElasticWitness(simulation)
        try:
            run = played(simulation)
        finally:
            self.virtual_s = simulation.simulator.now
        models = {
            worker.rank: state["slots"]["model"]["values"]["params"]
            for worker, state in zip(simulation.workers, run.states, strict=True)
            if simulation.has_finished(worker)
        }
        return Ended(simulation, witness, models, _has_residuals(run.states))

    def _check(self, ended: Ended) -> None:
        now = ended.simulation.simulator.now
        if not ended.models:
            raise Violation("some worker finishes", "no worker that is alive has finished with the run", now)
        first, *others = ended.models
        params = ended.models[first]
        if unlike := [rank for rank in others if not torch.equal(ended.models[rank], params)]:
            seen = f"workers {unlike} differ from worker {first}"
            raise Violation("all workers end with the same model", seen, now)
        ended.witness.check_end(list(ended.models))
        if (expected := self.promise.totals) is None:
            return
        totals = self._totals(params)
        off = (totals - expected).abs().gt(1e-9 * expected.abs()).nonzero().flatten().tolist()
        if off:
            seen = f"the minibatches of steps {off[:6]} count {(totals / expected)[off[:6]].tolist()} times"
            raise Violation("each minibatch counts once", seen, now)
        lost = int((params == 0).sum())
        losses = len(ended.simulation.world.dead) + ended.witness.times_out
        # The others finish their period without the lost worker's part, and begin anew after the next commit.
        most = losses * 2 * self.promise.period * BATCH // 2
        if lost > most:
            seen = f"{lost} samples do not count, after {losses} losses of a worker; at most {most} may be lost"
            raise Violation("at most one period of a lost worker's work is lost", seen, now)


def _has_residuals(states: list[dict[str, Any]]) -> bool:
    return any(name.endswith(".residuals") for state in states for name in state["slots"])
