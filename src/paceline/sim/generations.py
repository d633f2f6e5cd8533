"""The rendezvous of elastic runs in virtual time: the agreement of real processes, on a store in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from paceline.elastic import Agreement, Arrival, ElasticEndpoint, Generation, Proposal
from paceline.errors import ClusterError
from paceline.op import Op
from paceline.sim.endpoint import SimEndpoint
from paceline.sim.faults import Cut, Faults
from paceline.sim.generation import GenerationEndpoint, SimGeneration
from paceline.sim.world import World

LOOK_S = 0.005  # How often a machine looks into the store.
MOST_LOOKS = 100_000


class MemoryStore:
    """A store as torch's, in memory."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def get(self, key: str) -> bytes:
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        now = int(self._values.get(key, b"0")) + value
        self._values[key] = str(now).encode()
        return now

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self._values.get(key, b"") == expected.encode():
            self._values[key] = desired.encode()
        return self._values.get(key, b"")


def keeper_of(faults: Faults, workers: int) -> int:
    """The machine beside which the job's store is: the first one that does not die."""
    return min([rank for rank in range(workers) if rank not in faults.deaths], default=0)


class Meeting:
    """What the machines of an elastic run share: the store, which is beside one of them, and their heartbeats."""

    def __init__(self, world: World, workers: int) -> None:
        self.world = world
        self.workers = workers
        self.keeper = keeper_of(world.faults, workers)
        self.store = MemoryStore()
        self.beats: dict[int, int] = {}  # Of each process, how often it has written that it is alive.
        self.machine_of: dict[int, int] = {}  # Of each process.
        self.suspected: set[int] = set()  # Processes that count as dead for all others.
        self._generations: dict[int, SimGeneration] = {}

    def generation(self, number: int, proposal: Proposal) -> SimGeneration:
        if number not in self._generations:
            machines = [self.machine_of.get(process, process) for process in proposal.processes]
            seed = f"{self.world.machines.cluster.seed}/generation/{number}"
            self._generations[number] = SimGeneration(self.world, proposal, machines, look_s=LOOK_S, seed=seed)
        return self._generations[number]

    def suspect(self, machine: int) -> None:
        """All others believe that a machine is dead."""
        self.suspected |= {process for process, its in self.machine_of.items() if its == machine}

    def cut_until(self, machine: int) -> float:
        """Until when a machine cannot reach the store; now, if it can."""
        now = self.world.simulator.now
        until = now
        for cut in self.world.faults.cuts:
            if cut.start <= now < cut.start + cut.seconds and _parts(cut, machine, self.keeper):
                until = max(until, cut.start + cut.seconds)
        return until


def _parts(cut: Cut, a: int, b: int) -> bool:
    """Whether a connection between two machines stands still: in one direction is enough."""
    return (a in cut.senders and b in cut.receivers) or (b in cut.senders and a in cut.receivers)


class SimGenerations(Agreement):
    """One simulated machine's part."""

    def __init__(self, meeting: Meeting, machine: SimEndpoint, *, is_newcomer: bool) -> None:
        super().__init__(meeting.store, None if is_newcomer else machine.rank, meeting.workers)
        self._meeting = meeting
        self._machine = machine
        self._world = meeting.world
        self._simulator = meeting.world.simulator
        self._current: SimGeneration | None = None
        self._seen: dict[int, tuple[int, float]] = {}  # The last heartbeat of each process, and when it was found.
        self._known = 0  # How many processes have asked to join, as far as this one knows.
        self._chance = Random(f"{meeting.world.machines.cluster.seed}/look/{machine.rank}")
        meeting.machine_of[self._process] = machine.rank

    def first(self) -> ElasticEndpoint:
        """The endpoint for the whole run; a newcomer's is that of one worker until it has joined."""
        if not self.is_newcomer:
            return ElasticEndpoint(self, self._endpoint())
        alone = SimGeneration(self._world, Proposal.first(1), [self._machine.rank], look_s=LOOK_S, seed="")
        return ElasticEndpoint(self, GenerationEndpoint(self._machine, alone, 0, (0,)))

    def start(self) -> None:
        """The machine has started."""
        self._beat()

    def _beat(self) -> None:
        machine = self._machine.rank
        if not self._simulator.is_running(machine):
            return
        if not self._simulator.is_paused(machine) and self._meeting.cut_until(machine) <= self._simulator.now:
            self._meeting.beats[self._process] = self._meeting.beats.get(self._process, 0) + 1
            self._known = self._store.add("newcomers", 0)
        every_s = (self._world.faults.silent_s or 4 * LOOK_S) / 4
        self._simulator.at(self._simulator.now + every_s, self._beat, is_background=True)

    # The rendezvous.

    def has_newcomers(self) -> bool:
        return self._known > self._now.newcomers

    def come_back(self) -> None:
        self.is_newcomer = True
        self._process = self._numbered()
        self._meeting.machine_of[self._process] = self._machine.rank

    def meet(self, arrival: Arrival) -> Op[Generation]:
        return self._simulator.spawn(self._machine.rank, self._meet(arrival), "meet")

    def close(self) -> None:
        """Leave the generation; what was sent in it still arrives, or not."""
        if self._current is not None:
            self._current.close(self._machine.rank)
        self._current = None

    def die(self) -> None:
        """The machine has died; the others notice later."""
        if self._current is not None:
            self._current.leave(self._machine.rank)

    async def _meet(self, arrival: Arrival) -> Generation:
        self.close()
        await self._wait(self.joining() if self.is_newcomer else self.arriving(arrival))
        while (why := await self._why_not_connected()) is not None:
            await self._wait(self.arriving(replace(arrival, cause=why)))
        now = self._now
        return Generation(self._number, self._endpoint(), now.committed, now.pause, now.is_new)

    async def _wait(self, steps: Iterator[list[int] | None]) -> None:
        """Go through the steps of the agreement, with time between any two of them."""
        looks = 0
        while True:
            await self._reach_store()
            try:
                missing = next(steps)
            except StopIteration:
                return
            looks += missing is not None
            if looks > MOST_LOOKS:
                raise ClusterError(f"processes {missing} are alive, and have not met the others")
            await self._pass(LOOK_S if missing is not None else LOOK_S / 10)

    async def _why_not_connected(self) -> str | None:
        """Connect to the other members of the generation; why that has failed, or None."""
        generation = self._meeting.generation(self._number, self._now)
        generation.connected.add(self._machine.rank)
        while not generation.is_connected:
            await self._reach_store()
            if (why := self._gone_among(self._now.ranks)) is not None:
                generation.close(self._machine.rank)
                return why
            await self._pass(LOOK_S / 2)
        return None

    async def _reach_store(self) -> None:
        while (until := self._meeting.cut_until(self._machine.rank)) > self._simulator.now:
            await self._pass(until - self._simulator.now)

    async def _pass(self, seconds: float) -> None:
        op = self._simulator.op("look", self._machine.rank)
        until = self._simulator.now + seconds * self._chance.uniform(0.5, 1.5)
        self._simulator.at(until, self._simulator.finish, op, is_background=True)
        await op

    def _endpoint(self) -> GenerationEndpoint:
        now = self._now
        rank = now.ranks[now.processes.index(self._process)]
        self._current = self._meeting.generation(self._number, now)
        self._current.look[self._machine.rank] = self._dead_among
        return GenerationEndpoint(self._machine, self._current, rank, tuple(now.ranks))

    # Who is dead.

    def _why_dead(self, process: int) -> str | None:
        if process == self._process:
            return None
        meeting, faults = self._meeting, self._world.faults
        now = self._simulator.now
        died = self._world.dead.get(meeting.machine_of.get(process, process))
        if died is not None and faults.notice is not None and now >= died + faults.notice:
            return "its process has ended"
        if process in meeting.suspected:
            return "it is suspected"
        if faults.silent_s is None or meeting.cut_until(self._machine.rank) > now:
            return None
        beats = meeting.beats.get(process, 0)
        last, since = self._seen.setdefault(process, (beats, now))
        if beats != last:
            self._seen[process] = (beats, now)
            return None
        return f"it was silent for {now - since:.3f} s" if now - since > faults.silent_s else None
