"""Machines: how long the processors, network cards and the bus of a simulated cluster are busy.

A rank has one processor and one full-duplex network card.  Work that needs a busy one waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline import units
from paceline.costs import Link
from paceline.sim.cluster import Cluster


class Machines:
    """For every rank, the virtual times at which its processor and its card are free again."""

    def __init__(self, cluster: Cluster, ranks: int) -> None:
        self.cluster = _in_numbers(cluster)
        self._processor_free = [0.0] * ranks
        self._sending_free = [0.0] * ranks
        self._receiving_free = [0.0] * ranks
        self._bus_free = 0.0
        self.has_bus = cluster.bus is not None
        self._usual_link = None if cluster.links else cluster.link(0, 0)

    def link(self, a: int, b: int) -> Link:
        return self._usual_link or self.cluster.link(a, b)

    def compute(self, rank: int, now: float, seconds: float) -> tuple[float, float]:
        """Take a rank's processor: the times at which the work starts and stops."""
        start = max(now, self._processor_free[rank])
        stop = start + seconds
        self._processor_free[rank] = stop
        return start, stop

    def send(self, src: int, dst: int, now: float, nbytes: int) -> tuple[float, float]:
        """Take the sender's and the receiver's card: the times at which the first and the last byte leave."""
        start = max(now, self._sending_free[src], self._receiving_free[dst])
        if self.has_bus:
            start, stop = self._take_bus(start, nbytes)
        else:
            stop = start + nbytes / self.link(src, dst).bandwidth
        self._sending_free[src] = stop
        self._receiving_free[dst] = stop
        return start, stop

    def meet(self, ranks: Sequence[int], now: float, seconds: float, nbytes: int) -> float:
        """Take the cards of all ranks of a collective, which together send `nbytes`: the time at which it ends."""
        sending_free = self._sending_free
        receiving_free = self._receiving_free
        start = max(now, *[sending_free[r] for r in ranks], *[receiving_free[r] for r in ranks])
        stop = start + seconds
        if self.has_bus:
            stop = max(stop, self._take_bus(start, nbytes)[1])
        for r in ranks:
            sending_free[r] = stop
            receiving_free[r] = stop
        return stop

    def move(self, kind: str, now: float, nbytes: int) -> tuple[float, float]:
        """Copy bytes between a rank and memory that ranks share: the times at which that starts and stops."""
        if self.has_bus:
            return self._take_bus(now, nbytes)
        return now, now + self.cluster.work_seconds(kind, nbytes)

    def _take_bus(self, earliest: float, nbytes: int) -> tuple[float, float]:
        start = max(earliest, self._bus_free)
        self._bus_free = start + nbytes / units.bytes_per_second(self.cluster.bus or 0.0)
        return start, self._bus_free


def _in_numbers(cluster: Cluster) -> Cluster:
    """The same cluster with its quantities as numbers, so that they are parsed only once."""
    return replace(
        cluster,
        bandwidth=units.bytes_per_second(cluster.bandwidth),
        latency=units.seconds(cluster.latency),
        codec_bandwidth=units.bytes_per_second(cluster.codec_bandwidth),
        memory_bandwidth=units.bytes_per_second(cluster.memory_bandwidth),
        bus=None if cluster.bus is None else units.bytes_per_second(cluster.bus),
    )
