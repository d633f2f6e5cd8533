"""World: what all simulated ranks share, and where their messages and collectives meet."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, NamedTuple

from torch import Tensor

from paceline import costs as network
from paceline import units
from paceline.endpoint import Layout
from paceline.protocol.messages import Message, PeerDied, PeerSuspected
from paceline.sim.cluster import Cluster
from paceline.sim.faults import Faults
from paceline.sim.simulator import SimOp, Simulator

Image = Tensor | list[float]  # What a buffer held at some time.


class Participant(NamedTuple):
    """What a rank brought to a collective, and when; `snapshot` is what it then held, if anyone will look."""

    given: Sequence[Tensor]
    snapshot: Sequence[Image]
    nbytes: int
    since: float
    op: SimOp[Any]


@dataclass(slots=True)
class Rendezvous:
    """A collective while its members arrive."""

    kind: str
    signature: tuple[Any, ...]
    first: int
    members: dict[int, Participant] = field(default_factory=dict[int, Participant])


@dataclass(slots=True)
class Group:
    """Ranks that have collectives of their own: how many each has begun (and channels for more), and which wait for members."""

    ranks: tuple[int, ...]
    pace: network.Link
    begun: dict[int, int]
    channels: dict[int, int]
    meetings: dict[int | str, Rendezvous] = field(default_factory=dict[int | str, Rendezvous])


class Receiver(NamedTuple):
    """A rank that waits for a message: from which sender and of which types, None for any."""

    src: int | None
    types: tuple[type[Message], ...] | None
    op: SimOp[Message]

    def wants(self, message: Message) -> bool:
        return self.src in (None, message.src) and (self.types is None or isinstance(message, self.types))


class World:
    """What all simulated ranks share: the simulator, the cluster, who is busy until when, and who meets whom."""

    def __init__(
        self,
        simulator: Simulator,
        cluster: Cluster,
        layout: Layout,
        *,
        strict: bool,
        faults: Faults = Faults(),  # noqa: B008 (frozen)
    ) -> None:
        self.simulator, self.cluster, self.layout, self.strict = simulator, _in_numbers(cluster), layout, strict
        self.faults, self._chance = faults, Random(f"{cluster.seed}/faults")
        size = layout.size + len(faults.joins)
        self.names = [layout.name(rank) for rank in range(size)]
        self.processor_free = [0.0] * size
        self.sending_free = [0.0] * size
        self.receiving_free = [0.0] * size
        self._bus_free = 0.0
        self.inboxes: list[deque[Message]] = [deque() for _ in range(size)]
        self.receivers: list[list[Receiver]] = [[] for _ in range(size)]
        self.dead: dict[int, float] = {}  # since when
        self.members_ever = list(layout.worker_ranks)  # The workers that have ever begun.
        self._groups: dict[tuple[int, ...], Group] = {}
        self._usual_link = None if cluster.links else cluster.link(0, 0)

    def group(self, ranks: tuple[int, ...]) -> Group:
        if ranks not in self._groups:
            self._groups[ranks] = Group(
                ranks, self.cluster.slowest(ranks), begun=dict.fromkeys(ranks, 0), channels=dict.fromkeys(ranks, 0)
            )
        return self._groups[ranks]

    def link(self, a: int, b: int) -> network.Link:
        return self._usual_link or self.cluster.link(a, b)

    def take_bus(self, earliest: float, nbytes: int) -> tuple[float, float]:
        """When so many bytes begin to pass over the bus that all have in common, and when they have."""
        start = max(earliest, self._bus_free)
        self._bus_free = start + nbytes / units.bytes_per_second(self.cluster.bus or 0.0)
        return start, self._bus_free

    def times(self) -> int:
        """How often a message arrives."""
        faults, chance = self.faults, self._chance
        return (
            1
            if not faults.is_lossy
            else 0
            if chance.random() < faults.lost
            else 2
            if chance.random() < faults.doubled
            else 1
        )

    def kill(self, rank: int) -> None:
        """Let a worker die, if it still lives; the servers will notice, or where there are none the other workers."""
        if self.simulator.kill(rank):
            self.dead[rank] = self.simulator.now
            self.receivers[rank].clear()
            self.inboxes[rank].clear()
            for other in self.layout.server_ranks or [r for r in self.members_ever if r not in self.dead]:
                self.simulator.at(self.simulator.now + self.faults.notice, self._tell_end, other, rank)

    def _tell_end(self, dst: int, gone: int) -> None:
        if dst not in self.dead:
            self.deliver(dst, PeerDied(src=gone))

    def suspect(self, rank: int) -> None:
        """Let the servers take a worker for dead."""
        for server in self.layout.server_ranks:
            self.deliver(server, PeerSuspected(src=rank))

    def has_ended(self, rank: int) -> bool:
        return rank not in self.dead and not self.simulator.is_running(rank)

    def return_to_sender(self, dst: int, message: Message) -> bool:
        """Where workers write to each other: let who writes to one that is gone know of it, and lose what it wrote."""
        if self.layout.servers or self.faults == Faults() or self.simulator.is_running(dst):
            return False
        self.simulator.at(self.simulator.now + self.faults.notice, self._tell_end, message.src, dst)
        return True

    def deliver(self, dst: int, message: Message) -> None:
        comes_late = self.faults.suspicions or self.faults.joins
        if comes_late and dst in self.layout.server_ranks and message.src >= 0 and self.has_ended(dst):
            return self.deliver(message.src, PeerDied(src=dst))  # Who has come, or come back, finds nobody there.
        receivers = self.receivers[dst]
        for i, receiver in enumerate(receivers):
            if receiver.wants(message):
                del receivers[i]
                self.simulator.finish(receiver.op, message)
                return
        self.inboxes[dst].append(message)


def _in_numbers(cluster: Cluster) -> Cluster:
    """The same cluster, its quantities read once and not again for every message."""
    return replace(
        cluster,
        bandwidth=units.bytes_per_second(cluster.bandwidth),
        latency=units.seconds(cluster.latency),
        codec_bandwidth=units.bytes_per_second(cluster.codec_bandwidth),
        memory_bandwidth=units.bytes_per_second(cluster.memory_bandwidth),
        bus=None if cluster.bus is None else units.bytes_per_second(cluster.bus),
    )
