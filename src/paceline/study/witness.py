"""Witness: watches a simulated run from outside, and raises `Violation` as soon as an invariant is broken."""

from __future__ import annotations

from collections import Counter, defaultdict

from paceline.families.server_strategy import ServerStrategy
from paceline.protocol.messages import Message
from paceline.protocol.roster import State
from paceline.server.gates import Bound
from paceline.server.messages import Arrived, Update, Value
from paceline.server.shard import Shard
from paceline.sim.run import Simulation

MOST_WAITING = 256  # Messages that a rank has not received yet.

UpdateId = tuple[int, int, int]  # The rank, the incarnation and the number of a request.


class Violation(AssertionError):
    """An invariant was broken: its name, what was seen, and the virtual time."""

    def __init__(self, invariant: str, seen: str, time: float) -> None:
        super().__init__(f"{invariant}; at virtual time {time:.4f} s: {seen}")
        self.invariant = invariant
        self.seen = seen
        self.time = time


class ShardWitness:
    """Which updates a shard has applied, and a count of its own of the workers' clocks."""

    def __init__(self, simulation: Simulation, shard: Shard) -> None:
        self.name = simulation.world.layout.name(shard.endpoint.rank)
        self.applied: set[UpdateId] = set()
        self.updates = 0  # Those with samples.
        self.samples = 0
        self._simulator = simulation.simulator
        self._ranks = range(len(simulation.world.names))
        self._clocks: dict[int, int] = {}
        self._incarnations: dict[int, int] = {}
        self._version = 0
        self._answered: dict[int, int] = defaultdict(int)  # The version in the last answer to each worker.
        strategy = simulation.strategy
        gate = strategy.shard_gate() if isinstance(strategy, ServerStrategy) else None
        self._bound = gate.bound if isinstance(gate, Bound) else None
        self._again: set[UpdateId] = set()  # Updates that another process of the shard has not got from its log yet.
        self._is_coming_back = False
        self.watch(shard)

    def watch(self, shard: Shard) -> None:
        self.shard = shard
        shard.held.on_applied = self._on_applied
        shard.held.on_answer = self._on_answer

    def come_back(self, shard: Shard) -> None:
        """The shard was killed, and another process of it begins: it applies again what is in its log."""
        self._again = set(self.applied)
        self._is_coming_back = True
        self.watch(shard)

    def is_back(self) -> None:
        """The other process has all that was in its log: it must have applied what the first one has."""
        self._again.clear()
        self._is_coming_back = False
        if self.shard.held.updates != self.updates:
            seen = f"it has applied {self.shard.held.updates} updates, and had {self.updates} when it was killed"
            self._fail("a shard comes back as it was", seen)

    @property
    def has_lost_members(self) -> bool:
        """Whether the shard has declared a worker dead."""
        roster = self.shard.members.roster
        return any(roster.incarnation(rank) or roster.state(rank) is State.DEAD for rank in self._ranks)

    def incarnation(self, rank: int) -> int:
        return self.shard.members.roster.incarnation(rank)

    def _fail(self, invariant: str, seen: str) -> None:
        raise Violation(invariant, f"{self.name}: {seen}", self._simulator.now)

    def follow_members(self) -> None:
        """A worker that becomes active begins with the slowest, and one that is not has no clock."""
        if self._is_coming_back:
            return
        roster = self.shard.members.roster
        active = {rank: roster.incarnation(rank) for rank in roster.active}
        gone = [rank for rank in self._clocks if active.get(rank) != self._incarnations[rank]]
        for rank in gone:
            del self._clocks[rank]
        for rank in sorted(active.keys() - self._clocks.keys()):
            self._clocks[rank] = min(self._clocks.values(), default=0)
        self._incarnations = active

    def _on_applied(self, update: Update) -> None:
        which = update.src, update.incarnation, update.request_id
        if which in self._again:
            return self._again.remove(which)
        if which in self.applied:
            self._fail("no update is applied twice", f"request {which[2]} of worker {which[0]} was applied again")
        self.applied.add(which)
        self.updates += update.samples > 0
        self.samples += update.samples
        self.follow_members()
        if update.src in self._clocks:
            self._clocks[update.src] += 1
        if self.shard.version < self._version:
            self._fail("versions are monotone", f"version {self.shard.version} follows version {self._version}")
        self._version = self.shard.version

    def _on_answer(self, reply: Value, worker: int) -> None:
        if self._is_coming_back:  # It is not sent, or was sent before.
            return
        if reply.version < self._answered[worker]:
            last = self._answered[worker]
            self._fail("versions are monotone", f"worker {worker} gets version {reply.version}, after version {last}")
        self._answered[worker] = reply.version
        self.follow_members()
        if self._bound is None or worker not in self._clocks:
            return
        ahead = self._clocks[worker] - min(self._clocks.values())
        if ahead > self._bound:
            seen = f"worker {worker} goes on {ahead} updates ahead, and the bound is {self._bound}"
            self._fail("the staleness bound holds", seen)


class Witness:
    """Watches the shards and all messages of a run."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._world = simulation.world
        self.shards = {shard.endpoint.rank: ShardWitness(simulation, shard) for shard in simulation.shards}
        self._arrived: dict[int, set[UpdateId]] = {rank: set() for rank in self.shards}
        self._acknowledged: dict[int, set[UpdateId]] = {rank: set() for rank in self.shards}
        self.most_waiting = 0
        self._world.on_message = self._on_message
        simulation.on_shard_back = lambda shard: self.shards[shard.endpoint.rank].come_back(shard)
        simulation.on_caught_up = lambda shard: self.shards[shard.endpoint.rank].is_back()

    @property
    def has_lost_members(self) -> bool:
        return any(shard.has_lost_members for shard in self.shards.values())

    def _fail(self, invariant: str, seen: str) -> None:
        raise Violation(invariant, seen, self._simulation.simulator.now)

    def _on_message(self, dst: int, message: Message) -> None:
        waiting = len(self._world.inboxes[dst])
        if waiting > self.most_waiting:
            self.most_waiting = waiting
            if waiting > MOST_WAITING:
                tags = Counter(m.tag for m in self._world.inboxes[dst]).most_common(3)
                self._fail("memory is bounded", f"{waiting} messages wait at {self._world.names[dst]}: {tags}")
        if dst in self.shards:
            self.shards[dst].follow_members()
        if isinstance(message, Update):
            if message.samples and dst in self.shards:
                self._arrived[dst].add((message.src, message.incarnation, message.request_id))
        elif isinstance(message, (Value, Arrived)) and message.src in self.shards:
            self._acknowledge(message.src, (dst, message.incarnation, message.request_id), isinstance(message, Value))

    def _acknowledge(self, server: int, which: UpdateId, is_answer: bool) -> None:
        if which not in self._arrived[server]:
            return
        if is_answer and which not in self.shards[server].applied:
            self._fail_lost(server, which)
        self._acknowledged[server].add(which)

    def _fail_lost(self, server: int, which: UpdateId) -> None:
        name = self._world.names[server]
        seen = f"{name} has acknowledged request {which[2]} of worker {which[0]}, and not applied it"
        self._fail("no acknowledged update is lost", seen)

    def check_end(self) -> None:
        """What must hold once the run has ended.  What a worker had sent before it was declared dead does not count."""
        for server, acknowledged in self._acknowledged.items():
            shard = self.shards[server]
            for which in sorted(acknowledged - shard.applied):
                is_void = shard.incarnation(which[0]) > which[1] or which[0] in self._world.dead
                if not is_void:
                    self._fail_lost(server, which)
