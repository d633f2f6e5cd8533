"""World: the state that all simulated ranks share, and the delivery of their messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor

from paceline.endpoint import Layout
from paceline.protocol.messages import Event, Message, PeerDied, PeerSuspected
from paceline.sim.cluster import Cluster
from paceline.sim.collectives import Group
from paceline.sim.faults import ClockJump, Faults, Pause
from paceline.sim.heartbeats import Heartbeats
from paceline.sim.machines import Machines
from paceline.sim.network import Network
from paceline.sim.simulator import SimOp, Simulator


class Receiver(NamedTuple):
    """A pending `recv`: the sender and the types of message that it accepts, None for any."""

    src: int | None
    types: tuple[type[Message], ...] | None
    op: SimOp[Message]

    def wants(self, message: Message) -> bool:
        return self.src in (None, message.src) and (self.types is None or isinstance(message, self.types))


class World:
    """The simulator, the machines, the groups, the inboxes and the living and dead workers of one simulated run."""

    def __init__(
        self,
        simulator: Simulator,
        cluster: Cluster,
        layout: Layout,
        *,
        strict: bool,
        faults: Faults = Faults(),  # noqa: B008 (frozen)
    ) -> None:
        size = layout.size + len(faults.joins)
        self.simulator = simulator
        self.machines = Machines(cluster, size)
        self.layout = layout
        self.strict = strict
        self.faults = faults
        self.names = [layout.name(rank) for rank in range(size)]
        self.inboxes: list[deque[Message]] = [deque() for _ in range(size)]
        self.receivers: list[list[Receiver]] = [[] for _ in range(size)]
        self.dead: dict[int, float] = {}  # The time of each worker's death, by rank.
        self.down: set[int] = set()  # Servers that were killed and are not back.
        self.lives = [0] * size  # How often each server was killed,
        self._killed: dict[int, float] = {}  # and when it was last.
        self.members_ever = list(layout.worker_ranks)  # Every worker that ever started.
        self.network = Network(faults, cluster.seed)
        self.on_message: Callable[[int, Message], None] | None = None  # Called with each message that is delivered.
        # By group and number: the values of shared vectors, and what their members have counted.
        self.shared: dict[tuple[tuple[int, ...], int], tuple[Tensor, Tensor, Tensor]] = {}
        self._groups: dict[tuple[int, ...], Group] = {}
        self._heartbeats = None if faults.silent_s is None else Heartbeats(self, faults.silent_s)
        self._clock_offsets = [0.0] * size
        self._paused_until = [0.0] * size
        self._may_end_without = bool(faults.changes_members or faults.pauses or faults.cuts or faults.server_deaths)

    def group(self, ranks: tuple[int, ...]) -> Group:
        if ranks not in self._groups:
            self._groups[ranks] = Group(self.simulator, self.machines, self.network, ranks, strict=self.strict)
        return self._groups[ranks]

    def clock(self, rank: int) -> float:
        """The time that the clock of a rank shows."""
        return self.simulator.now + self._clock_offsets[rank]

    def jump(self, jump: ClockJump) -> None:
        self._clock_offsets[jump.rank] += jump.seconds

    def pause(self, pause: Pause) -> None:
        """Stop a rank, which continues by itself."""
        if pause.rank in self.dead:
            return
        until = self.simulator.now + pause.seconds
        self.simulator.pause(pause.rank)
        self._paused_until[pause.rank] = max(until, self._paused_until[pause.rank])
        self.simulator.at(until, self._wake, pause.rank)

    def _wake(self, rank: int) -> None:
        if self.simulator.now >= self._paused_until[rank]:
            self.simulator.wake(rank)

    def started(self, rank: int) -> None:
        """A rank has started its role."""
        if self._heartbeats is not None:
            self._heartbeats.start(rank)

    def expect(self, server: int, members: Iterable[int]) -> None:
        """A server that is back misses these workers, if it hears nothing of them."""
        if self._heartbeats is not None:
            self._heartbeats.expect(server, members)

    def has_ended(self, rank: int) -> bool:
        return rank not in self.dead and rank not in self.down and not self.simulator.is_running(rank)

    def kill(self, rank: int) -> bool:
        """Kill a worker; False if it does not run.  The servers, or without servers the other workers, notice later."""
        if not self.simulator.kill(rank):
            return False
        self.dead[rank] = self.simulator.now
        self.receivers[rank].clear()
        self.inboxes[rank].clear()
        for other in self.layout.server_ranks or [r for r in self.members_ever if r not in self.dead]:
            self._report_lost(other, rank)
        return True

    def end_early(self, rank: int) -> None:
        """The run has ended without a worker, whose process ends: servers notice, as they notice a death."""
        self.simulator.kill(rank)
        for server in self.layout.server_ranks:
            self._report_lost(server, rank)

    def kill_server(self, rank: int) -> bool:
        """Kill a server; False if it has ended, or is not back from the last time."""
        if rank in self.down or not self.simulator.kill(rank):
            return False
        self.down.add(rank)
        self.lives[rank] += 1
        self._killed[rank] = self.simulator.now
        self.receivers[rank].clear()
        self.inboxes[rank].clear()
        self.simulator.wake(rank)  # The next process is not stopped.
        return True

    def bring_back(self, rank: int) -> None:
        """A server that was killed is there again, and notices which workers have died meanwhile."""
        self.down.discard(rank)
        self.started(rank)
        for worker in self.dead:
            self._report_lost(rank, worker)

    def waiting_for(self, server: int) -> list[int]:
        """The ranks that run, and may wait for a server."""
        return [rank for rank in range(len(self.names)) if rank != server and self.simulator.is_running(rank)]

    def suspect(self, rank: int) -> None:
        """Make the servers, or without servers the other workers, believe that a worker is dead."""
        if not self.layout.servers and self._heartbeats is not None:
            self._heartbeats.suspect(rank)
        for server in self.layout.server_ranks:
            if server not in self.down:
                self.deliver(server, PeerSuspected(src=rank))

    def _report_lost(self, dst: int, lost: int) -> None:
        """Tell a rank, after the notice time, that another one no longer answers."""
        if self.faults.notice is not None:
            self.simulator.at(self.simulator.now + self.faults.notice, self._deliver_lost, dst, lost)

    def _deliver_lost(self, dst: int, lost: int) -> None:
        if dst not in self.dead and dst not in self.down:
            self.deliver(dst, PeerDied(src=lost))

    def arrive(self, dst: int, message: Message, sent: float, lives: tuple[int, int]) -> None:
        """Deliver a message, unless its sender died before the last byte was sent, or its receiver since it began."""
        was, was_to = lives
        if dst in self.down or self.lives[dst] != was_to:
            return
        if self.lives[message.src] != was and self._killed[message.src] < sent:
            return
        if self.dead.get(message.src, sent) < sent or self._returns(dst, message) or dst in self.dead:
            return
        if self._heartbeats is not None:
            self._heartbeats.note_message(message.src, dst)
        self.deliver(dst, message)

    def _returns(self, dst: int, message: Message) -> bool:
        """Between workers: drop a message to one that no longer runs, and report that to the sender."""
        if self.layout.servers or self.faults == Faults() or self.simulator.is_running(dst):
            return False
        self._report_lost(message.src, dst)
        return True

    def deliver(self, dst: int, message: Message) -> None:
        """Give a message to the first receiver that accepts it, or put it into the inbox."""
        servers = self.layout.server_ranks
        is_of_worker = message.src not in servers and not isinstance(message, Event)
        if self._may_end_without and dst in servers and is_of_worker and self.has_ended(dst):
            # A worker that joined, or came back, finds that the server has finished.
            return self.deliver(message.src, PeerDied(src=dst))
        if self.on_message is not None:
            self.on_message(dst, message)
        receivers = self.receivers[dst]
        for i, receiver in enumerate(receivers):
            if receiver.wants(message):
                del receivers[i]
                self.simulator.finish(receiver.op, message)
                return
        self.inboxes[dst].append(message)
