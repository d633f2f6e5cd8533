"""Heartbeats: simulated workers send them, and the failure detector of real mailboxes suspects the silent ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from paceline.protocol.messages import PeerReturned, PeerSuspected
from paceline.transport.failure_detector import FailureDetector

if TYPE_CHECKING:
    from paceline.sim.world import World


class Heartbeats:
    """Workers send heartbeats to all servers, or without servers to each other.

    Heartbeats share the faults of the network, and take no bandwidth.  Their receivers read their own clocks.
    """

    def __init__(self, world: World, silent_s: float) -> None:
        self._world = world
        self._simulator = world.simulator
        self._every_s = silent_s / 4
        self._silent_s = silent_s
        self._detectors: dict[int, FailureDetector] = {}
        self._checking: set[int] = set()
        self._unread: dict[int, set[int]] = {}  # Of each paused rank: from which ranks heartbeats have arrived.

    def start(self, rank: int) -> None:
        """A rank starts: it sends heartbeats if it is a worker, and waits for those of others if no other rank does."""
        layout = self._world.layout
        if rank in layout.server_ranks or not layout.servers:
            self._detectors[rank] = FailureDetector(self._world.clock(rank), silent_s=self._silent_s)
            self._unread[rank] = set()
            if rank not in self._checking:  # Otherwise an earlier process of it was killed.
                self._checking.add(rank)
                self._later(self._check, rank)
        if rank not in layout.server_ranks:
            self._beat(rank)

    def expect(self, rank: int, members: Iterable[int]) -> None:
        """A rank is to miss these others, also if it hears nothing of them."""
        for member in members:
            self._detectors[rank].heartbeat(member, self._world.clock(rank))

    def _later(self, action: Callable[[int], None], rank: int) -> None:
        # A little later than is due, so that rounding does not double the time between two checks.
        self._simulator.at(self._simulator.now + 1.001 * self._every_s, action, rank, is_background=True)

    def _beat(self, rank: int) -> None:
        simulator, world = self._simulator, self._world
        if not simulator.is_running(rank):
            return
        if not simulator.is_paused(rank):
            for dst in world.layout.server_ranks or world.members_ever:
                if dst != rank:
                    latency = world.machines.link(rank, dst).latency
                    for arrival in world.network.arrivals(rank, dst, simulator.now, latency):
                        simulator.at(arrival, self._arrive, rank, dst, is_background=True)
        self._later(self._beat, rank)

    def _arrive(self, src: int, dst: int) -> None:
        if self._simulator.is_paused(dst):
            self._unread[dst].add(src)
        elif dst in self._detectors and self._simulator.is_running(dst):
            self._hear(src, dst)

    def suspect(self, rank: int) -> None:
        """Make all others that wait for its heartbeats believe that a rank is silent, until they hear from it."""
        for dst, detector in self._detectors.items():
            if dst != rank and self._simulator.is_running(dst) and not detector.is_suspected(rank):
                detector.suspect(rank)
                self._world.deliver(dst, PeerSuspected(src=rank))

    def note_message(self, src: int, dst: int) -> None:
        """Any message of a suspected rank shows that it is alive."""
        if dst in self._detectors and self._detectors[dst].is_suspected(src):
            self._hear(src, dst)

    def _hear(self, src: int, dst: int) -> None:
        detector = self._detectors[dst]
        detector.heartbeat(src, self._world.clock(dst))
        self._report_returned(dst)

    def _report_returned(self, dst: int) -> None:
        for returned in self._detectors[dst].returned():
            self._world.deliver(dst, PeerReturned(src=returned))

    def _check(self, rank: int) -> None:
        if self._world.has_ended(rank) or rank in self._world.dead:
            return
        detector, now = self._detectors[rank], self._world.clock(rank)
        is_there = self._simulator.is_running(rank) and not self._simulator.is_paused(rank)
        if is_there and detector.is_due(now):
            for src in sorted(self._unread[rank]):
                self._hear(src, rank)
            self._unread[rank].clear()
            for silent in detector.check(now):
                self._world.deliver(rank, PeerSuspected(src=silent))
        self._later(self._check, rank)
