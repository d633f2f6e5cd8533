"""Elastic runs in the simulator: the code by which `train(elastic=True)` outlives deaths, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import torch

from paceline.elastic import ElasticEndpoint, Members
from paceline.endpoint import Layout
from paceline.errors import ClusterError
from paceline.monitor.monitor import Monitors
from paceline.op import Op
from paceline.run import Run
from paceline.sim.endpoint import SimEndpoint
from paceline.sim.faults import Faults
from paceline.sim.generations import Meeting, SimGenerations
from paceline.sim.learner import SimLearner
from paceline.sim.run import Simulation, SimWorker
from paceline.strategy import Strategy
from paceline.task import Task, Trainee
from paceline.worker.flat import untie
from paceline.worker.run import WorkerRun


class ElasticSimulation(Simulation):
    """A run of a synchronous strategy whose workers may die, stop for a while, come back and join.

    The rank of a worker is that of its machine here; in its collectives it has the rank of its generation.
    """

    meeting: Meeting

    def first_ranks(self, layout: Layout, faults: Faults) -> list[int]:
        self.meeting = Meeting(self.world, layout.workers)
        self.members: dict[int, SimGenerations] = {}  # By machine.
        self.endpoints: dict[int, ElasticEndpoint] = {}
        self.on_worker: Callable[[int, ElasticEndpoint], None] = lambda machine, endpoint: None
        return list(layout.worker_ranks)  # The others are there when they join.

    def _worker(self, rank: int, model: torch.nn.Module) -> SimWorker:
        workers = self.cluster.workers
        machine = SimEndpoint(self.world, rank, (rank,))
        member = self.members[rank] = SimGenerations(self.meeting, machine, is_newcomer=rank >= workers)
        endpoint = self.endpoints[rank] = member.first()
        trainee = Trainee(self.task, model, endpoint.rank, workers)
        learner = SimLearner(trainee, machine, self.cluster, None, self.progress)
        run = WorkerRun(self.strategy, endpoint, learner, nonfinite=self.nonfinite, plan=trainee.plan, trainee=trainee)
        Members(run, endpoint, on_change=trainee.take_place)
        self.on_worker(rank, endpoint)
        worker = SimWorker(run, trainee, rank)
        run.on_step = partial(self._before_step, worker)
        return worker

    def run(self, monitors: Monitors) -> Run:
        """Run every worker to its end."""
        self._schedule(self.world.faults)
        roles: dict[int, Coroutine[Op[Any], Any, Any]] = {w.rank: self._role(w) for w in self.workers}
        for rank in roles:
            self.simulator.at(0.0, self.members[rank].start)
        self.simulator.run(roles)
        first = self._first_alive()
        self._evaluate(first.trainee.timetable.total_steps)
        states = [worker.run.state_dict() for worker in self.workers]
        flat = first.trainee.flat
        params = flat.round(flat.params.clone())
        untie(flat.parameters)
        return Run(flat.model, params, self.simulator.trace, states, self.simulator.waits)

    async def _role(self, worker: SimWorker) -> None:
        member = self.members[worker.rank]
        try:
            await worker.run.run()
        except ClusterError:
            if not member.is_newcomer:
                raise
            worker.run.missed_end = True  # All that knew the state of the run were dead, or silent.
        member.close()

    def _first_alive(self) -> SimWorker:
        """The first worker that is alive and takes part in the run."""
        return next((w for w in self.workers if self.has_finished(w)), self.workers[0])

    def has_finished(self, worker: SimWorker) -> bool:
        """Whether a worker has come to the end of the run with the others."""
        rank = worker.rank
        return rank not in self.world.dead and not (worker.run.missed_end or self.members[rank].is_newcomer)

    # Faults.

    def _schedule(self, faults: Faults) -> None:
        at = self.simulator.at
        for rank, time in zip(faults.joining_ranks(self.world.layout), faults.joins, strict=True):
            at(time, self._join, rank)
        for rank, time in faults.deaths.items():
            at(time, self._die, rank)
        for rank, time in faults.suspicions:
            at(time, self.meeting.suspect, rank)
        for pause in faults.pauses:
            at(pause.start, self.world.pause, pause)
        for jump in faults.clock_jumps:
            at(jump.time, self.world.jump, jump, is_background=True)

    def _join(self, rank: int) -> None:
        if not any(self.simulator.is_running(w.rank) for w in self.workers):
            return
        worker = self._worker(rank, self.task.build())
        self.workers.append(worker)
        self.simulator.begin(rank, self._role(worker), self.simulator.now)
        self.simulator.at(self.simulator.now, self.members[rank].start)

    def _die(self, rank: int) -> None:
        if self.world.kill(rank):
            self.members[rank].die()


def check_elastic(strategy: Strategy, task: Task, faults: Faults, given: dict[str, bool]) -> None:
    """Raise ValueError for what does not go together with `simulate(elastic=True)`."""
    name = type(strategy).__name__
    if strategy.needs.elastic:
        raise ValueError(
            f"simulate(elastic=True) with {name}: its workers do not wait for each other, so the others go on anyway "
            "if one of them dies; leave elastic out"
        )
    if not strategy.needs.ordered:
        raise ValueError(
            f"simulate(elastic=True) with {name}: what its workers share beside collectives is lost with a worker; use "
            "a synchronous method, such as AllReduceSGD or PeriodicAveraging"
        )
    if task.is_controlled:
        raise ValueError(
            "simulate(elastic=True) with a Task that has AutoAdjust or AutoBatch: what they decide is about the "
            "workers of the beginning; use a Schedule and a GrowingBatch, or leave elastic out"
        )
    if task.has_own_data:
        raise ValueError(
            "simulate(elastic=True) with data of each worker's own: with a worker its data would be lost; give the "
            "Task data=[...], or leave elastic out"
        )
    if faults.lost or faults.doubled:
        raise ValueError(
            f"simulate({faults}, elastic=True): collectives run on TCP, which repeats what is lost; leave lost and "
            "doubled out, and give `delayed` or `cuts`"
        )
    for what in (what for what, is_given in given.items() if is_given):
        raise ValueError(f"simulate({what}=..., elastic=True) is not possible; leave one of them out")
