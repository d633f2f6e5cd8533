"""Ordeal: a strategy on a small task, run without faults to learn what it promises, and then with plans of faults."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from paceline.run import Run
from paceline.sim.cluster import Cluster, Constant
from paceline.sim.fault_schedule import check_faults
from paceline.sim.faults import Faults
from paceline.sim.run import Simulation
from paceline.strategy import Strategy
from paceline.study.elastic_ordeal import ElasticOrdeal
from paceline.study.fault_plans import end_of
from paceline.study.peer_witness import PeerWitness
from paceline.study.played import played
from paceline.study.witness import Violation, Witness
from paceline.task import Batch, Task

WORKERS = 4
STEPS, BATCH = 8, 8
GRACE_S = 30.0  # A shard waits 10 s for a replacement, and as long for a worker that takes no final value.


class Counters(nn.Module):
    """A parameter for each sample, whose gradient is minus the number of times that the sample was read."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(STEPS * BATCH, dtype=torch.float64))


def count_samples(model: nn.Module, batch: Batch) -> Tensor:
    return -(batch[0] @ next(model.parameters())).sum()


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.linspace(-1, 1, 16, dtype=torch.float64))


def distance(model: nn.Module, batch: Batch) -> Tensor:
    return 0.5 * (next(model.parameters()) - batch[0]).square().sum(1).mean()


def counting_task() -> Task:
    """Each sample counts in a parameter of its own, so that the final model says which samples were used how often."""
    rows = torch.eye(STEPS * BATCH, dtype=torch.float64)
    return Task(Counters, count_samples, [rows], BATCH, lambda p: torch.optim.SGD(p, lr=0.5), steps=STEPS)


def descent_task() -> Task:
    """For methods that go through all of the data several times, and stop at a minimum."""
    points = torch.randn(16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return Task(Point, distance, [points], BATCH, lambda p: torch.optim.SGD(p, lr=0.1), steps=12)


def cluster_of(seed: int, workers: int = WORKERS) -> Cluster:
    """Workers of unequal speed."""
    chance = Random(f"torture/cluster/{seed}")
    compute = Constant([round(chance.uniform(0.002, 0.02), 5) for _ in range(workers)])
    return Cluster(workers, compute, seed=seed)


@dataclass(frozen=True)
class Ended:
    """A run that has ended, with what was seen of it."""

    run: Run
    simulation: Simulation
    witness: Witness
    peers: PeerWitness

    @property
    def finished(self) -> list[int]:
        """The places of the workers that have ended their role with the others."""
        dead = self.simulation.world.dead
        return [
            i
            for i, worker in enumerate(self.simulation.workers)
            if worker.rank not in dead and worker.replica.cursor.has_started and not worker.run.missed_end
        ]

    def model(self, worker: int) -> Tensor:
        return self.run.states[worker]["slots"]["model"]["values"]["params"]

    @property
    def unsent(self) -> Tensor | None:
        """The sum of what the workers' codecs have left out; None without error feedback."""
        slots: list[Any] = [state["slots"].get("codec.residuals") for state in self.run.states]
        left = [slot["values"].get("residual") for slot in slots if slot is not None]
        found = [residual.double() for residual in left if isinstance(residual, Tensor)]
        return torch.stack(found).sum(0) if found and len(found) == len(slots) else None


@dataclass(frozen=True)
class Promise:
    """What is true of a strategy's undisturbed runs at any speeds of workers, so that faults must not change it.

    - `model`: the final model, if it does not depend on timing; `is_exact`: to the bit.
    - `mass`: (a, b) so that final model + a * all residuals = b in every value, if there is error feedback.
    - `agrees`: all workers end with the same model.
    - `samples`: how many samples each shard has counted.
    """

    seconds: float
    model: Tensor | None
    is_exact: bool
    mass: tuple[float, float] | None
    agrees: bool
    samples: int | None


class Ordeal:
    """Runs a strategy under plans of faults."""

    def __init__(self, strategy: Strategy, task: Task | None = None, workers: int = WORKERS) -> None:
        self.strategy = strategy
        self.workers = workers
        self.virtual_s = 0.0  # How long the last run has lasted.
        self.has_own_task = task is None
        self.task = task or (descent_task() if strategy.coordinators else counting_task())
        try:
            self.promise = _promise_of([self._run(seed, Faults()) for seed in (1, 2, 3)])
        except Violation as error:
            raise ValueError(f"torture({strategy}): it fails without any fault: {error.seen}") from error.__cause__

    def violation(self, seed: int, faults: Faults) -> Violation | None:
        """Run with these faults on the cluster of this seed; the first invariant that is broken."""
        try:
            if self.strategy.needs.ordered and faults.changes_members:
                self._check_elastic(seed, faults)
            else:
                self._check(self._run(seed, faults))
        except Violation as found:
            return found
        return None

    @cached_property
    def elastic(self) -> ElasticOrdeal:
        """The runs in which workers die in collectives."""
        return ElasticOrdeal(self.strategy, None if self.has_own_task else self.task, self.workers)

    def _check_elastic(self, seed: int, faults: Faults) -> None:
        try:
            self.elastic.check(seed, faults)
        finally:
            self.virtual_s = self.elastic.virtual_s

    def _run(self, seed: int, faults: Faults) -> Ended:
        check_faults(faults, self.strategy, self.workers, 1)
        simulation = Simulation(
            self.task,
            self.strategy,
            cluster_of(seed, self.workers),
            strict=False,
            nonfinite="skip",
            stop_at=None,
            faults=faults,
            progress=None,
        )
        simulator = simulation.simulator
        if faults.has_any:
            simulator.limit_s = end_of(faults) + 20 * self.promise.seconds + GRACE_S
        witness = Witness(simulation)
        peers = PeerWitness(simulation)
        try:
            run = played(simulation)
        finally:
            self.virtual_s = simulator.now
        return Ended(run, simulation, witness, peers)

    # Invariants at the end of a run.

    def _check(self, ended: Ended) -> None:
        promise = self.promise
        ended.witness.check_end()
        time = ended.simulation.simulator.now
        if not ended.finished:
            raise Violation("some worker finishes", "no worker that is alive has finished with the run", time)
        if ended.peers.has_late_suspicion:
            return
        if promise.agrees and (differing := _differing(ended)) is not None:
            raise Violation("all workers end with the same model", differing, time)
        for shard in ended.witness.shards.values():
            if promise.samples is not None and shard.samples != promise.samples:
                seen = f"{shard.name} has counted {shard.samples} samples of {promise.samples}"
                raise Violation("each sample is counted once", seen, time)
        if self.strategy.servers or not ended.simulation.world.dead:
            # Without servers no worker does the rest of a dead one's part.
            self._check_model(ended, time)

    def _check_model(self, ended: Ended, time: float) -> None:
        """The final model, as far as the faults that have happened leave it as it was."""
        params = ended.model(ended.finished[0])
        expected = self.promise.model
        if expected is not None:
            is_same = torch.equal if self.promise.is_exact else _is_near
            if not is_same(params, expected):
                raise Violation("each sample is counted once", _described(params, expected), time)
        has_losses = ended.witness.has_lost_members
        if self.promise.mass is not None and not has_losses and (unsent := ended.unsent) is not None:
            factor, total = self.promise.mass
            mass, whole = params + factor * unsent, torch.full_like(params, total)
            if not _is_near(mass, whole):
                seen = _described(mass, whole)
                raise Violation("model and residuals together lose nothing", seen, time)


def _promise_of(runs: list[Ended]) -> Promise:
    first, *others = runs
    model = first.run.params
    is_same = all(torch.equal(other.run.params, model) for other in others)
    is_near = all(_is_near(other.run.params, model) for other in others)
    counts = {shard.samples for ended in runs for shard in ended.witness.shards.values()}
    return Promise(
        seconds=max(ended.run.seconds for ended in runs),
        model=model if is_near else None,
        is_exact=is_same and not first.simulation.strategy.needs.elastic,
        mass=_mass(runs),
        agrees=all(_differing(ended) is None for ended in runs),
        samples=counts.pop() if len(counts) == 1 and 0 not in counts else None,
    )


def _is_near(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-6, atol=1e-8)


def _differing(ended: Ended) -> str | None:
    """Which workers that have finished end with another model than the first of them."""
    first, *others = ended.finished
    unlike = [i for i in others if not torch.equal(ended.model(i), ended.model(first))]
    ranks = [ended.simulation.workers[i].rank for i in unlike]
    return f"workers {ranks} differ from worker {ended.simulation.workers[first].rank}" if unlike else None


def _mass(runs: list[Ended]) -> tuple[float, float] | None:
    """(a, b) with model + a * residuals = b in every value of every run; None if there are no such numbers."""
    found = [unsent for ended in runs if (unsent := ended.unsent) is not None]
    if len(found) < len(runs) or torch.cat(found).abs().max() < 1e-9:
        return None
    models, unsent = torch.cat([ended.run.params for ended in runs]), torch.cat(found)
    columns = torch.stack([-unsent, torch.ones_like(unsent)], 1)
    a, b = torch.linalg.lstsq(columns, models[:, None]).solution[:, 0].tolist()
    return (a, b) if _is_near(models + a * unsent, torch.full_like(models, b)) else None


def _described(seen: Tensor, expected: Tensor) -> str:
    """Where two models differ; in a counting task, how often samples were counted."""
    off: list[int] = (seen - expected).abs().gt(1e-8 + 1e-6 * expected.abs()).nonzero().flatten().tolist()
    if len(expected) and bool(expected.eq(expected[0]).all()) and expected[0]:
        counted: list[float] = (seen / expected[0]).tolist()
        shown = ", ".join(f"sample {i} {counted[i]:.4g} times" for i in off[:6])
        return f"of {len(expected)} samples, {len(off)} are not counted once: {shown}"
    shown = ", ".join(f"value {i} is {seen[i]:.9g}, not {expected[i]:.9g}" for i in off[:4])
    return f"{len(off)} of {len(expected)} values differ from those without faults: {shown}"
