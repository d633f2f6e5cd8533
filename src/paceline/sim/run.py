"""simulate: a strategy on a simulated cluster, with real gradients and virtual time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from paceline.checked import check_arguments, instance_of
from paceline.endpoint import Endpoint, Layout
from paceline.monitor.monitor import INSTEAD, Monitor, Monitors, Watch
from paceline.monitor.watched import Facts
from paceline.needs import Offers, check
from paceline.op import Op
from paceline.pipeline.stand_in import check_stages, count
from paceline.pipeline.timing import pipelined
from paceline.run import Run
from paceline.server.logged_endpoint import LoggedEndpoint
from paceline.server.messages import SavePoint
from paceline.server.shard import Shard
from paceline.server.shard_log import MemoryArea, ShardLog
from paceline.server.worker_saves import WorkerSaves
from paceline.sim.cluster import Cluster
from paceline.sim.endpoint import SimEndpoint
from paceline.sim.fault_schedule import FaultSchedule, check_faults
from paceline.sim.faults import Faults
from paceline.sim.learner import SimLearner
from paceline.sim.simulator import Simulator
from paceline.sim.watching import watches
from paceline.sim.world import World
from paceline.state import SHARD, resharded
from paceline.strategy import Stopped, Strategy
from paceline.task import Task, Trainee
from paceline.trace import Trace
from paceline.worker.batch import NonFinite
from paceline.worker.flat import untie
from paceline.worker.replica import Replica
from paceline.worker.run import WorkerRun

State = dict[str, Any]


def simulate(
    task: Task,
    strategy: Strategy | str,
    cluster: Cluster,
    *,
    strict: bool = True,
    nonfinite: NonFinite = "skip",
    stop_at: int | None = None,
    resume: list[State] | None = None,
    faults: Faults = Faults(),  # noqa: B008 (frozen)
    progress: Callable[[int], None] | None = None,
    monitor: Monitor | Sequence[Monitor] | None = None,
    elastic: bool = False,
) -> Run:
    """Train `task` by `strategy` on `cluster`.

    `stop_at` stops the run before that step.  `resume` takes the states of a stopped run; use `resized` if the number
    of workers has changed.  `faults` says which failures happen, and when.  `monitor` watches the run while it goes.
    With `elastic` synchronous methods outlive deaths, as with `train(elastic=True)`.
    """
    check_arguments(
        simulate, locals(), {"cluster": (int, "cluster is a Cluster; give Cluster(workers=...)"), **INSTEAD}
    )
    strategy = instance_of("simulate", "strategy", strategy, Strategy)
    is_unbroken = resume is None and stop_at is None
    offers = Offers.of_task("simulate", task)
    if elastic:
        from paceline.sim.elastic_run import ElasticSimulation as Simulated
        from paceline.sim.elastic_run import check_elastic

        stages = count(cluster.stages) > 1
        check_elastic(
            strategy, task, faults, {"stages": stages, "resume or stop_at": not is_unbroken, "monitor": bool(monitor)}
        )
    else:
        Simulated = Simulation
    check(strategy, replace(offers, fixed_workers=elastic or not faults.needs_elastic, unbroken=is_unbroken))
    of_workers = [state for state in resume or () if state.get("strategy") != SHARD]
    if resume is not None and len(of_workers) != cluster.workers:
        raise ValueError(
            f"simulate: {len(of_workers)} workers' states for {cluster.workers} workers; "
            f"give resized(states, {cluster.workers})"
        )
    check_faults(faults, strategy, cluster.workers, count(cluster.stages), elastic=elastic)
    check_stages("simulate", strategy, cluster.stages, cluster.microbatches)
    monitors = Monitors(monitor)
    simulation = Simulated(
        task,
        strategy,
        cluster,
        strict=strict,
        nonfinite=nonfinite,
        stop_at=stop_at,
        faults=faults,
        progress=progress,
    )
    if resume is not None:
        simulation.load(resume)
    with monitors.shown(Facts(repr(strategy), cluster.workers, task.total_steps, is_simulated=True)):
        return simulation.run(monitors)


@dataclass(frozen=True)
class SimWorker:
    """A worker: its run, and the model, data and optimizer behind it."""

    run: WorkerRun
    trainee: Trainee
    rank: int

    @property
    def replica(self) -> Replica:
        return self.run.replica


class Simulation:
    """One run in the simulator: its workers and servers, its faults and evaluations, and its result."""

    def __init__(
        self,
        task: Task,
        strategy: Strategy,
        cluster: Cluster,
        *,
        strict: bool,
        nonfinite: NonFinite,
        stop_at: int | None,
        faults: Faults,
        progress: Callable[[int], None] | None,
    ) -> None:
        layout = Layout(cluster.workers, strategy.servers)
        model = task.build()
        self.task = task
        self.strategy = strategy
        self.pipeline = None
        if count(cluster.stages) > 1:
            self.pipeline, cluster = pipelined(task, model, cluster)
        self.cluster = cluster
        self.nonfinite: NonFinite = nonfinite
        self.stop_at = stop_at
        self.progress = progress
        self.simulator = Simulator(layout.name)
        self.world = World(self.simulator, cluster, layout, strict=strict, faults=faults)
        ranks = self.first_ranks(layout, faults)
        self.faults = faults
        self._areas: dict[int, dict[str, MemoryArea]] = {}  # The log of each server.
        self.shards = [self._shard(rank) for rank in layout.server_ranks]
        self.on_shard_back: Callable[[Shard], None] = lambda shard: None  # Called with the shard of a new process,
        self.on_caught_up: Callable[[Shard], None] = lambda shard: None  # and when that knows what the old one knew.
        self._shard_states: dict[int, State] = {}
        self._stopped: set[int] = set()  # The workers that have stopped before the end.
        if stop_at is not None:
            for index, shard in enumerate(self.shards):
                shard.saves.copy = partial(self._copy_shard, index)
        self._watches: dict[int, Watch] = {}
        self._buffers: dict[int, torch.Tensor] = {}  # Of each worker that has computed its last gradient.
        self.workers = [self._worker(rank, copy.deepcopy(model)) for rank in ranks]

    def first_ranks(self, layout: Layout, faults: Faults) -> list[int]:
        """The ranks of the workers that are made before the run."""
        return [*layout.worker_ranks, *faults.joining_ranks(layout)]

    def _worker(self, rank: int, model: torch.nn.Module) -> SimWorker:
        trainee = Trainee(self.task, model, rank, self.cluster.workers)
        endpoint = SimEndpoint(self.world, rank)
        learner = SimLearner(trainee, endpoint, self.cluster, self.pipeline, self.progress)
        run = WorkerRun(self.strategy, endpoint, learner, nonfinite=self.nonfinite, plan=trainee.plan, trainee=trainee)
        worker = SimWorker(run, trainee, rank)
        run.on_step = partial(self._before_step, worker)
        run.replica.cursor.on_end = partial(self._keep_buffers, worker)
        run.replica.cursor.on_rest = self._stop
        return worker

    def load(self, states: list[State]) -> None:
        """Continue from the states of a stopped run."""
        shards = [state for state in states if state["strategy"] == SHARD]
        for worker, state in zip(self.workers, (s for s in states if s["strategy"] != SHARD), strict=False):
            worker.run.load_state_dict(state)
            worker.replica.cursor.restored = "" if shards else None
        if shards:
            self._load_shards(shards)

    def _load_shards(self, states: list[State]) -> None:
        """Every shard continues with its part of the vectors when the first worker tells it where these are cut."""
        count = len(self.shards)
        for index, shard in enumerate(self.shards):
            shard.read = lambda request, index=index: (
                states[index] if len(states) == count else resharded(states, count, unit=request.unit)[index]
            )

    def _copy_shard(self, index: int, request: SavePoint, dead: list[int]) -> None:
        """The run stops at a save point."""
        shard = self.shards[index]
        self._shard_states[index] = shard.state_dict()
        shard.saves.has_ended = True

    def run(self, monitors: Monitors) -> Run:
        """Run every rank to its end."""
        runs = [(worker.run, worker.trainee) for worker in self.workers]
        self._watches = watches(monitors, self.simulator, self.cluster.workers, runs)
        FaultSchedule(self.world, [w.run for w in self.workers], self._run_worker, self._bring_back).start()
        roles = self._roles()
        for rank in roles:
            self.simulator.at(0.0, self.world.started, rank)
        self.simulator.run(roles)
        first = self._first_alive()
        if first is not self.workers[0]:
            self._end()
        for watch in reversed(self._watches.values()):  # The first worker reports on the others.
            watch.end()
        states = [worker.run.state_dict() for worker in self.workers]
        states += [state for _, state in sorted(self._shard_states.items())]
        flat = first.trainee.flat
        params = flat.round(flat.params.clone())
        untie(flat.parameters)
        return Run(flat.model, params, self.simulator.trace, states, self.simulator.waits)

    def _roles(self) -> dict[int, Coroutine[Op[Any], Any, Any]]:
        """The coroutine of every rank that starts at time 0."""
        layout = self.world.layout
        roles: dict[int, Coroutine[Op[Any], Any, Any]] = {
            rank: self._run_worker(self.workers[rank].run) for rank in layout.worker_ranks
        }
        for shard in self.shards:
            roles[shard.endpoint.rank] = self.strategy.server(shard)
        return roles

    def _shard(self, rank: int) -> Shard:
        """A server's shard; if an earlier process of it was killed, it begins with that one's log."""
        endpoint: Endpoint = SimEndpoint(self.world, rank)
        logged: LoggedEndpoint | None = None
        if self.faults.server_deaths:
            areas = self._areas.setdefault(rank, {})
            log = ShardLog(lambda name: areas.setdefault(name, MemoryArea()))
            peers = partial(self.world.waiting_for, rank)
            logged = LoggedEndpoint(endpoint, log, on_failure=lambda why: None, peers=peers, trace=Trace())
            endpoint = cast("Endpoint", logged)
        shard = Shard(endpoint, grace_s=10.0, takes_nonfinite=self.nonfinite == "pass")
        if logged is not None:
            logged.on_back = lambda: self._caught_up(shard)
        return shard

    def _caught_up(self, shard: Shard) -> None:
        self.world.expect(shard.endpoint.rank, shard.members.roster.members)
        self.on_caught_up(shard)

    def _bring_back(self, rank: int) -> Coroutine[Op[Any], Any, Any]:
        """The role of a server that was killed, in another process."""
        place = self.world.layout.server_ranks.index(rank)
        self.shards[place] = shard = self._shard(rank)
        self.on_shard_back(shard)
        return self.strategy.server(shard)

    async def _run_worker(self, run: WorkerRun) -> None:
        has_finished = await run.run()
        if run.missed_end:  # What it still waits for does not come.
            self.simulator.at(self.simulator.now, self.world.end_early, run.rank)
        if not has_finished:
            self.simulator.at(self.simulator.now, self.simulator.kill, run.rank)
            self._stopped.add(run.rank)
            if self._stopped >= set(self.world.layout.worker_ranks) - self.world.dead.keys():
                for shard in self.shards:  # In a warm start they have not begun.
                    self.simulator.at(self.simulator.now, self.simulator.kill, shard.endpoint.rank)
        if has_finished and run is self.workers[0].run:
            self._end()

    def _keep_buffers(self, worker: SimWorker) -> None:
        """A worker has computed its last gradient, and its method does not average its buffers."""
        self._buffers[worker.rank] = worker.trainee.flat.buffers()

    def _end(self) -> None:
        """The first worker that is alive has finished: all have the mean of their buffers, if they had their own."""
        there = [w for w in self.workers if w.rank in self._buffers and w.replica.batch.total]
        for w in there:
            weights = [other.replica.batch.total for other in there]
            w.trainee.flat.set_buffers([self._buffers[other.rank] for other in there], weights)
        self._evaluate(self._first_alive().trainee.timetable.total_steps)

    def _before_step(self, worker: SimWorker, step: int) -> None:
        if worker is self._first_alive() and self.task.is_evaluation_due(step, worker.trainee.timetable):
            self._evaluate(step)
        if self._watches:
            self._watch(worker, step)
        rest = worker.replica.cursor.rest
        if step == self.stop_at or (self.stop_at is not None and isinstance(rest, WorkerSaves) and rest.has_heard):
            raise Stopped

    def _stop(self) -> None:
        """Others have stopped, and this worker had no data for the step at which they did."""
        if self.stop_at is not None:
            raise Stopped

    def _watch(self, worker: SimWorker, step: int) -> None:
        self._watches[worker.rank].step(step)
        if worker.rank and worker is self._first_alive():  # The first worker is dead, and has the reports.
            self._watches[0].step(step)

    def _first_alive(self) -> SimWorker:
        return next((w for w in self.workers if w.rank not in self.world.dead), self.workers[0])

    def _evaluate(self, step: int) -> None:
        """Evaluate the model, in no virtual time: the published one, or the mean of the workers' parameters."""
        if self.task.evaluate is None:
            return
        first = self._first_alive()
        vector = first.replica.published
        timetable = first.trainee.timetable
        if vector is None and step < timetable.total_steps:
            replicas = [w.replica for w in self.workers if w.rank not in self.world.dead]
            vector = torch.stack([r.params for r in replicas if r.cursor.has_started]).mean(0)
        values = first.trainee.evaluate(vector)
        self.simulator.trace.evaluation(self.simulator.now, timetable.samples_before(step), values)
