"""Workers that die, stop and join at any moment of synchronous training: a world in one process, ordered by a seed.

It runs the code of real runs, on endpoints and a rendezvous of its own. Every result of a collective arrives at each
worker at a moment of its own, or not at all if a worker of the generation is gone. So a commit can end on some workers
and not on others.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from torch import Tensor

import paceline as pl
from paceline.elastic import (
    Arrival,
    ElasticEndpoint,
    Generation,
    LeftOut,
    Members,
    Over,
    Proposal,
    following,
)
from paceline.endpoint import Layout
from paceline.errors import ClusterError, PeerLost
from paceline.op import Op, Ready
from paceline.session.process_learner import ProcessLearner
from paceline.task import Trainee
from paceline.trace import Trace
from paceline.worker.run import WorkerRun


class Cell(Op[Any]):
    """An Op that the world ends."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.done = False
        self.value: Any = None
        self.error: Exception | None = None

    def end(self, value: Any = None, error: Exception | None = None) -> None:
        self.done, self.value, self.error = True, value, error


@dataclass(eq=False)
class Task:
    """A coroutine of a worker, and the cell that its end fills."""

    worker: Worker
    coroutine: Coroutine[Op[Any], Any, Any]
    cell: Cell
    waits: Op[Any] = field(default_factory=lambda: Ready("start", None))

    @property
    def is_ready(self) -> bool:
        return not isinstance(self.waits, Cell) or self.waits.done


@dataclass
class Meeting:
    """A collective of a generation while its ranks arrive, and then while its results are on the way."""

    given: dict[int, list[Tensor]] = field(default_factory=dict[int, list[Tensor]])
    cells: dict[int, Cell] = field(default_factory=dict[int, Cell])
    apply: dict[int, Callable[[], Any]] = field(default_factory=dict[int, Callable[[], Any]])


class Worker:
    """A process: its number changes when it comes back after it was left out."""

    def __init__(self, world: World, process: int, rank: int, *, is_newcomer: bool) -> None:
        self.world = world
        self.process = process
        self.is_newcomer = is_newcomer
        self.number = 0  # Of its generation,
        self.now = Proposal.first(world.workers)  # which is this one.
        self.broken: set[int] = set()  # Generations in which a collective has failed here.
        self.is_dead = self.is_silent = self.has_ended = False
        first = Inner(self, "alone", 0, [0], Layout(1)) if is_newcomer else self.inner()
        self.endpoint = ElasticEndpoint(self, first)
        self.begin()

    def begin(self) -> None:
        """Start to run a task."""
        world = self.world
        assert world.task is not None
        trainee = Trainee(world.task, world.task.build(), self.endpoint.rank, world.workers)
        learner = ProcessLearner(trainee, self.endpoint)
        self.run = WorkerRun(world.strategy, self.endpoint, learner, plan=trainee.plan, trainee=trainee)
        Members(self.run, self.endpoint, on_change=trainee.take_place)
        world.tasks.append(Task(self, self.run.run(), Cell("run")))

    def inner(self) -> Inner:
        now = self.now
        rank = now.ranks[now.processes.index(self.process)]
        return Inner(self, str(self.number), rank, list(now.ranks), Layout(now.workers))

    # The rendezvous.

    def has_newcomers(self) -> bool:
        return self.world.asked > self.now.newcomers

    def meet(self, arrival: Arrival) -> Op[Generation]:
        return self.world.arrive(self, arrival)

    def why_lost(self, rank: int) -> str | None:
        return None

    def come_back(self) -> None:
        self.is_newcomer = True
        self.process = self.world.new_process()

    def leave(self, committed: int) -> None:
        if self.number + 1 in self.world.agreed:
            raise LeftOut("the others went on")
        self.has_ended = True
        self.world.left[self.process] = committed


class Inner:
    """An endpoint in one generation."""

    retransmit_s = None
    hosts = None

    def __init__(self, worker: Worker, name: str, rank: int, ranks: Sequence[int], layout: Layout) -> None:
        self.worker = worker
        self.name = name
        self.generation = worker.number
        self.rank = rank
        self.ranks = list(ranks)
        self.layout = layout
        self.trace = worker.world.trace
        self._begun = self._channels = 0

    def now(self) -> float:
        return float(self.worker.world.moments)

    def compute(self, work: Callable[[], Any], *, kind: str = "compute", nbytes: int = 0) -> Op[Any]:
        return Ready(kind, work())

    def run_collectives(
        self, routine: Any, *, kind: str = "exchange", is_single: bool = False, retry: Any = None
    ) -> Any:
        self._channels += 1
        name = f"{self.name}.{self._channels}"
        channel = Inner(self.worker, name, self.rank, self.ranks, self.layout)
        channel.generation = self.generation
        task = Task(self.worker, routine(channel), Cell(kind))
        self.worker.world.tasks.append(task)
        return task.cell

    def group(self, ranks: Sequence[int]) -> Inner:
        group = Inner(self.worker, f"{self.name}:{sorted(ranks)}", self.rank, sorted(ranks), self.layout)
        group.generation = self.generation
        return group

    def all_reduce(self, x: Tensor, extras: Tensor | None = None) -> Op[Any]:
        given = [x] if extras is None else [x, extras]

        def result(everyones: list[list[Tensor]]) -> Tensor:
            for mine, column in zip(given, zip(*everyones, strict=True), strict=True):
                mine.copy_(sum(column[1:], column[0].clone()))
            return x

        return self._join("all_reduce", given, result)

    def reduce(self, x: Tensor, dst: int, extras: Tensor | None = None) -> Op[Any]:
        return self.all_reduce(x, extras)

    def all_gather(self, data: Tensor) -> Op[Any]:
        return self._join("all_gather", [data], lambda everyones: [given[0] for given in everyones])

    def all_to_all(self, parts: Sequence[Tensor], coming: Sequence[int] | None = None) -> Op[Any]:
        mine = self.ranks.index(self.rank)
        return self._join("all_to_all", list(parts), lambda everyones: [given[mine] for given in everyones])

    def broadcast(self, x: Tensor, src: int) -> Op[Any]:
        root = self.ranks.index(src)
        return self._join("broadcast", [x], lambda everyones: x.copy_(everyones[root][0]))

    def _join(self, kind: str, given: list[Tensor], result: Callable[[list[list[Tensor]]], Any]) -> Op[Any]:
        worker, world = self.worker, self.worker.world
        cell = Cell(kind)
        generation = self.generation
        if generation in worker.broken:
            cell.end(error=PeerLost(-1, kind))
            return cell
        key = (generation, f"{self.name}/{self._begun}")
        self._begun += 1
        meeting = world.collectives.setdefault(key, Meeting())
        meeting.given[self.rank] = [t.clone() for t in given]
        meeting.cells[self.rank] = cell
        ranks = self.ranks
        meeting.apply[self.rank] = lambda: result([[t.clone() for t in meeting.given[rank]] for rank in ranks])
        world.in_flight.append((worker, key, self.rank, len(ranks)))
        return cell


class World:
    """All workers of one run."""

    def __init__(
        self, task: pl.Task | None, strategy: pl.Strategy, workers: int, seed: str, kind: type[Worker] = Worker
    ) -> None:
        """`task` is None if the workers do something else, each as its `kind` says."""
        self.task = task
        self.kind = kind
        self.strategy = strategy
        self.workers = workers
        self.chance = Random(seed)
        self.trace = Trace()
        self.moments = 0
        self.tasks: list[Task] = []
        self.collectives: dict[tuple[int, str], Meeting] = {}
        self.in_flight: list[tuple[Worker, tuple[int, str], int, int]] = []
        self.gone: dict[int, set[int]] = {}  # By generation: the ranks that take part in it no more.
        self.left: dict[int, int] = {}
        self.asked = 0
        self.waiting: dict[int, tuple[Worker, Cell]] = {}  # Newcomers.
        self.arrived: dict[int, dict[int, tuple[Worker, Arrival, Cell]]] = {}  # By generation and process.
        self.agreed: dict[int, Proposal] = {0: Proposal.first(workers)}
        self.by_process: dict[int, Worker] = {}
        self.everyone = [kind(self, p, p, is_newcomer=False) for p in range(workers)]
        self.by_process = {w.process: w for w in self.everyone}

    # Faults.

    def kill(self, worker: Worker) -> None:
        worker.is_dead = True
        for task in [t for t in self.tasks if t.worker is worker]:
            self.tasks.remove(task)
            task.coroutine.close()
        self._go(worker)

    def stop(self, worker: Worker) -> None:
        """The others take it for dead, whether or not it continues."""
        worker.is_silent = True
        self._go(worker)

    def join(self) -> None:
        process = self.new_process()
        worker = self.kind(self, process, 0, is_newcomer=True)
        self.everyone.append(worker)
        self.by_process[process] = worker

    def new_process(self) -> int:
        self.asked += 1
        return self.workers + self.asked - 1

    def _go(self, worker: Worker) -> None:
        """A worker takes part in its generation no more."""
        if worker.process in worker.now.processes:
            rank = worker.now.ranks[worker.now.processes.index(worker.process)]
            self.gone.setdefault(worker.number, set()).add(rank)

    # The rendezvous.

    def arrive(self, worker: Worker, arrival: Arrival) -> Op[Generation]:
        cell = Cell("meet")
        self.by_process[worker.process] = worker
        if worker.is_newcomer:
            self.waiting[worker.process] = (worker, cell)
            return cell
        self._go(worker)
        number = worker.number + 1
        if number in self.agreed:
            cell.end(error=LeftOut("the others went on"))
        else:
            self.arrived.setdefault(number, {})[worker.process] = (worker, arrival, cell)
        return cell

    def _is_lost(self, process: int) -> bool:
        worker = self.by_process.get(process)
        return worker is None or worker.is_dead or worker.is_silent or worker.process != process

    def agree(self) -> None:
        """Whatever can be agreed now."""
        number = max(self.agreed)
        now = self.agreed[number]
        arrived = self.arrived.get(number + 1, {})
        there = {p: a for p, a in arrived.items() if not self._is_lost(p)}
        done = [p for p in now.processes if p in self.left]
        if there and all(p in there or p in done or self._is_lost(p) for p in now.processes):
            waiting = [p for p in self.waiting if not self._is_lost(p)]
            order = {p: there[p][1] for p in now.processes if p in there}
            proposal = following(now, order, [self.left[p] for p in done], lambda: sorted(waiting), self.asked)
            self.agreed[number + 1] = proposal
            for process in proposal.processes:
                worker, cell = (
                    self.waiting.pop(process) if process in self.waiting else (there[process][0], there[process][2])
                )
                worker.is_newcomer = False
                worker.number, worker.now = number + 1, proposal
                generation = Generation(number + 1, worker.inner(), proposal.committed, proposal.pause, proposal.is_new)
                cell.end(generation)
            for worker, _, cell in arrived.values():
                if worker.process not in proposal.processes:
                    cell.end(error=LeftOut("the others went on"))
        elif self.waiting and any(p in self.left for p in now.processes):
            for _, cell in self.waiting.values():
                cell.end(error=Over("the run has ended"))
            self.waiting.clear()
        for process in [p for p in self.waiting if p - self.workers < self.agreed[max(self.agreed)].newcomers]:
            if not self._is_lost(process):
                self.waiting.pop(process)[1].end(error=LeftOut("not taken in"))

    # Time.

    def move(self) -> bool:
        """Let one thing happen, chosen by chance; False if nothing can."""
        self.moments += 1
        self.agree()
        ready = [t for t in self.tasks if t.is_ready and not t.worker.is_silent]
        arriving = [i for i, f in enumerate(self.in_flight) if self._outcome(*f) is not None]
        if not ready and not arriving:
            return False
        if self.chance.random() * (len(ready) + len(arriving)) < len(ready):
            self._resume(self.chance.choice(ready))
        else:
            self._deliver(*self.in_flight.pop(self.chance.choice(arriving)))
        return True

    def _outcome(self, worker: Worker, key: tuple[int, str], rank: int, count: int) -> bool | None:
        """Whether a collective can now end for a rank by its result (True) or by an error."""
        if worker.is_dead or worker.is_silent:
            return None
        meeting = self.collectives[key]
        is_lost = bool(self.gone.get(key[0])) or key[0] in worker.broken
        if len(meeting.given) == count and key[0] not in worker.broken:
            return not is_lost or self.chance.random() < 0.5
        return False if is_lost else None

    def _deliver(self, worker: Worker, key: tuple[int, str], rank: int, count: int) -> None:
        meeting = self.collectives[key]
        cell = meeting.cells[rank]
        if self._outcome(worker, key, rank, count):
            cell.end(meeting.apply[rank]())
        else:
            worker.broken.add(key[0])
            cell.end(error=PeerLost(-1, cell.kind))

    def _resume(self, task: Task) -> None:
        op, send = task.waits, task.coroutine.send
        try:
            if isinstance(op, Cell):
                task.waits = send(op.value) if op.error is None else task.coroutine.throw(op.error)
            else:
                task.waits = send(op.wait())
        except StopIteration as stop:
            self.tasks.remove(task)
            task.cell.end(stop.value)
        except ClusterError as error:
            self.tasks.remove(task)
            if task.cell.kind == "run":
                raise
            task.cell.end(error=error)


def trained(
    task: pl.Task | None,
    strategy: pl.Strategy,
    seed: str,
    *,
    deaths: int,
    stops: int,
    joins: int,
    moments: int,
    kind: type[Worker] = Worker,
) -> World:
    """A run in which so many of four workers die, stop for a while or join, all within the first `moments`."""
    world = World(task, strategy, 4, seed, kind)
    chance = world.chance
    events: list[tuple[int, Callable[[], None]]] = []

    def strike(how: Callable[[Worker], None]) -> None:
        alive = [w for w in world.everyone if not (w.is_dead or w.is_silent or w.has_ended)]
        holding = [w for w in alive if not w.is_newcomer]
        victim = chance.choice(alive) if alive else None
        if victim is not None and (victim.is_newcomer or len(holding) > 1):
            how(victim)

    def stop(worker: Worker) -> None:
        world.stop(worker)
        events.append((world.moments + chance.randrange(1, moments), lambda: setattr(worker, "is_silent", False)))

    events += [(chance.randrange(moments), lambda: strike(world.kill)) for _ in range(deaths)]
    events += [(chance.randrange(moments), lambda: strike(stop)) for _ in range(stops)]
    events += [(chance.randrange(moments), world.join) for _ in range(joins)]
    while world.tasks:
        for event in [e for e in events if e[0] <= world.moments]:
            events.remove(event)
            event[1]()
        if not world.move() and world.tasks:
            late = [e for e in events if e[0] > world.moments]
            assert late, f"seed {seed}: nothing can happen: {[(t.worker.process, t.waits) for t in world.tasks]}"
            world.moments = min(e[0] for e in late)
    return world
