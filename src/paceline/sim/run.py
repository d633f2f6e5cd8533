"""simulate: a strategy on a cluster that is not there, with real gradients and virtual time."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Coroutine
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from paceline.endpoint import Layout
from paceline.needs import Offers, check
from paceline.op import Op
from paceline.pipeline.stand_in import check_stages, count
from paceline.pipeline.timing import Pipeline, pipelined
from paceline.run import Run
from paceline.server.shard import Shard
from paceline.sim.cluster import Cluster
from paceline.sim.endpoint import SimEndpoint
from paceline.sim.faults import Faults
from paceline.sim.shared_vector import change
from paceline.sim.simulator import Simulator
from paceline.sim.world import World
from paceline.strategy import Stopped, Strategy
from paceline.task import Batch, Task, Trainee
from paceline.worker.batch import NonFinite
from paceline.worker.flat import Bucket
from paceline.worker.learner import TaskLearner
from paceline.worker.replica import Replica
from paceline.worker.run import WorkerRun


class SimLearner(TaskLearner):
    """Computes a worker's gradients for real and lets the virtual time of its machine pass."""

    def __init__(
        self,
        trainee: Trainee,
        endpoint: SimEndpoint,
        cluster: Cluster,
        pipeline: Pipeline | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        super().__init__(trainee)
        self.endpoint, self.cluster, self.pipeline, self.progress = endpoint, cluster, pipeline, progress
        self._rng = Random(f"{cluster.seed}/{trainee.rank}")

    def gradient(self, replica: Replica, each: Callable[[Bucket], None] | None) -> Op[Tensor]:
        return self.endpoint.spawn(self._gradient(replica, each), kind="gradient")

    async def _gradient(self, replica: Replica, each: Callable[[Bucket], None] | None) -> Tensor:
        flat, batch = self.flat, self._begin(replica)
        if batch is None:
            flat.emit_zeros(each)
            return flat.grads
        seconds = self._backward(batch)
        flat.collect_all()
        if each is None:
            await self.endpoint.busy(seconds, kind="gradient")
            if not replica.batch.accept(flat.first_nonfinite):
                flat.grads.zero_()
        elif self.pipeline is not None:  # Every stage adds up its gradient until the last microbatch.
            await self.endpoint.busy(seconds, kind="gradient")
            for bucket in flat.buckets:
                each(bucket)
        else:
            await self.endpoint.busy(seconds * self.cluster.forward_share, kind="gradient")
            for bucket in flat.buckets:
                share = (1 - self.cluster.forward_share) * bucket.grad.numel() / flat.numel
                await self.endpoint.busy(seconds * share, kind="gradient")
                each(bucket)
        self._note(replica, batch)
        return flat.grads

    def local_step(self, replica: Replica) -> Op[None]:
        return self.endpoint.spawn(self._local_step(replica), kind="local step")

    async def _local_step(self, replica: Replica) -> None:
        batch = self._begin(replica)
        if batch is not None:
            await self.endpoint.busy(self._backward(batch), kind="gradient")
            if replica.batch.accept(self.flat.first_nonfinite_grad):
                await self._step()
            self._note(replica, batch)

    async def _step(self) -> None:
        if self.flat.is_shared:
            await change(self.endpoint, self.flat.params, self.trainee.optimizer.step)
        else:
            self.trainee.optimizer.step()

    def _begin(self, replica: Replica) -> Batch | None:
        batch = self.trainee.draw(replica.cursor.step, replica.cursor.shard)
        replica.batch.begin(0 if batch is None else len(batch[0]))
        return batch

    def _backward(self, batch: Batch) -> float:
        """Compute the gradient; the seconds that it takes on this worker's machine."""
        began = time.perf_counter()
        self.trainee.backward(batch)
        seconds = self.cluster.computing.seconds(self.trainee.rank, time.perf_counter() - began, self._rng)
        if self.pipeline is None:
            return seconds
        samples, now = len(batch[0]), self.endpoint.now()
        self.endpoint.trace.span(self.trainee.rank, "stages", now, now, self.pipeline.nbytes(samples))
        return self.pipeline.seconds(seconds, samples)

    def _note(self, replica: Replica, batch: Batch) -> None:
        self.endpoint.trace.point(
            self.endpoint.now(), replica.rank, replica.cursor.step, len(batch[0]), self.trainee.loss
        )
        if replica.rank == 0 and self.progress:
            self.progress(replica.cursor.step)


def simulate(
    task: Task,
    strategy: Strategy,
    cluster: Cluster,
    *,
    strict: bool = True,
    nonfinite: NonFinite = "skip",
    stop_at: int | None = None,
    resume: list[dict[str, Any]] | None = None,
    faults: Faults = Faults(),  # noqa: B008 (frozen)
    progress: Callable[[int], None] | None = None,
) -> Run:
    """Train `task` by `strategy` on `cluster`.

    `stop_at` breaks off before that step; `resume` takes such a run's states, `resized` if there are now more or fewer workers.
    `faults` says what goes wrong.
    """
    is_faulty = bool(faults.deaths or faults.joins or faults.suspicions or faults.is_lossy)
    is_unbroken = resume is None and stop_at is None
    check(strategy, Offers("simulate", fixed_workers=not is_faulty, unbroken=is_unbroken))
    if resume is not None and len(resume) != cluster.workers:
        raise ValueError(
            f"simulate: {len(resume)} workers' states for {cluster.workers} workers; give resized(states, {cluster.workers})"
        )
    layout = Layout(cluster.workers, strategy.servers)
    joining = [layout.size + i for i in range(len(faults.joins))]
    _check(faults, strategy, [*layout.worker_ranks, *joining])
    check_stages("simulate", strategy, cluster.stages, cluster.microbatches)
    simulator, model, pipeline = Simulator(layout.name), task.build(), None
    if count(cluster.stages) > 1:
        pipeline, cluster = pipelined(task, model, cluster)
    world = World(simulator, cluster, layout, strict=strict, faults=faults)
    runs: list[WorkerRun] = []
    learners: list[SimLearner] = []
    for rank in (*layout.worker_ranks, *joining):
        trainee = Trainee(task, copy.deepcopy(model), rank, cluster.workers)
        endpoint = SimEndpoint(world, rank)
        learners.append(SimLearner(trainee, endpoint, cluster, pipeline, progress))
        runs.append(WorkerRun(strategy, endpoint, learners[-1], nonfinite=nonfinite, plan=task.plan))
        if resume is not None:
            runs[-1].load_state_dict(resume[rank])

    def evaluate(k: int) -> None:
        """What the model is worth, in no virtual time: what the strategy deploys, or the mean of what the workers have now."""
        vector = first().published
        if vector is None and k < task.total_steps:
            vector = torch.stack(
                [r.replica.params for r in runs if r.rank not in world.dead and r.replica.cursor.has_started]
            ).mean(0)
        values = learners[runs.index(first())].trainee.evaluate(vector)
        simulator.trace.evaluation(simulator.now, k * task.batch, values)

    def first() -> WorkerRun:
        """Of those that live."""
        return next((r for r in runs if r.rank not in world.dead), runs[0])

    def on_step(run: WorkerRun, k: int) -> None:
        if (
            task.evaluate is not None
            and 0 < k < task.total_steps
            and k % task.evaluation_period == 0
            and run is first()
        ):
            evaluate(k)
        if k == stop_at:
            raise Stopped

    for run in runs:
        run.on_step = partial(on_step, run)
    roles: dict[int, Coroutine[Op[Any], Any, Any]] = {r.rank: r.run() for r in runs[: cluster.workers]}

    spare: list[WorkerRun] = []
    places = {r.rank: r.rank for r in runs}  # Whose data each has, where it has data of its own,
    vacant: list[int] = []  # and which nobody has.

    def join(run: WorkerRun) -> None:
        if not strategy.servers:
            spare.append(run)
            replace()
        elif any(simulator.is_running(r.rank) for r in runs):
            simulator.begin(run.rank, run.run(), simulator.now)

    def die(rank: int) -> None:
        world.kill(rank)
        if world.dead.get(rank) == simulator.now:
            vacant.append(places[rank])
            replace()

    def replace() -> None:
        """As a launcher does that starts another worker in the place of one that died."""
        while spare and vacant and any(simulator.is_running(r.rank) for r in runs):
            run = spare.pop(0)
            run.replica.cursor.shard = places[run.rank] = vacant.pop(0)
            world.members_ever.append(run.rank)
            simulator.begin(run.rank, run.run(), simulator.now)

    for run, time_of in zip(runs[cluster.workers :], faults.joins, strict=True):
        simulator.at(time_of, join, run)
    for rank, time_of in faults.deaths.items():
        simulator.at(time_of, die, rank)
    for rank, time_of in faults.suspicions:
        simulator.at(time_of, world.suspect, rank)
    for rank in layout.server_ranks:
        roles[rank] = strategy.server(
            Shard(SimEndpoint(world, rank), grace_s=10.0, takes_nonfinite=nonfinite == "pass")
        )
    if task.evaluate is not None:
        roles[0] = _evaluated_at_the_end(roles[0], lambda: evaluate(task.total_steps))
    simulator.run(roles)
    run = first()
    trainee = learners[runs.index(run)].trainee
    if task.evaluate is not None and run is not runs[0]:
        evaluate(task.total_steps)
    states = [r.state_dict() for r in runs]
    return Run(trainee.flat.model, run.replica.params.clone(), simulator.trace, states, simulator.waits)


def _check(faults: Faults, strategy: Strategy, workers: list[int]) -> None:
    if faults.suspicions and not strategy.servers:
        raise ValueError(
            f"simulate({faults}): servers take a worker for dead who lives, and {type(strategy).__name__} has none"
        )
    for rank in (*faults.deaths, *(rank for rank, _ in faults.suspicions)):
        if rank not in workers:
            raise ValueError(f"simulate({faults}): rank {rank} is none of the workers {workers}")


async def _evaluated_at_the_end(role: Coroutine[Op[Any], Any, bool], evaluate: Callable[[], None]) -> None:
    if await role:
        evaluate()
