"""Heart: how a process lets others know that it lives, whatever it is busy with, and how they notice that it is silent.

A process of the same host that dies is noticed at once.  A host that is cut off or without power says nothing, and nor does a process
that was stopped: both are found out by their silence.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import zmq

UNSENT = 2  # Beats that may wait for a connection; nobody wants old ones.


class Heartbeat(threading.Thread):
    """Sends the same frame again and again to some sockets, which are from now on its own."""

    def __init__(self, sockets: Sequence[zmq.SyncSocket], beat: bytes, name: str, *, every_s: float) -> None:
        super().__init__(name=name, daemon=True)
        self._sockets, self._beat, self._every_s = list(sockets), beat, every_s
        self._stopped = threading.Event()

    def add(self, sockets: Sequence[zmq.SyncSocket]) -> None:
        """Others that are from now on to hear it, and its own to use."""
        self._sockets.extend(sockets)

    def run(self) -> None:
        while not self._stopped.wait(self._every_s):
            for socket in list(self._sockets):
                with suppress(zmq.Again):
                    socket.send(self._beat, zmq.NOBLOCK)
        for socket in self._sockets:
            socket.close(linger=0)

    def stop(self) -> None:
        self._stopped.set()
        self.join()


class FailureDetector:
    """Who has said nothing for `limit_s` seconds, of those who have said something."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._heard: dict[int, float] = {}
        self._looked = time.monotonic()

    def is_due(self) -> bool:
        """Whether it is time to look."""
        return time.monotonic() - self._looked >= self.look_s

    @property
    def look_s(self) -> float:
        """How often to look."""
        return self.limit_s / 4

    def hear(self, rank: int) -> None:
        self._heard[rank] = time.monotonic()

    def forget(self, rank: int) -> None:
        self._heard.pop(rank, None)

    def found(self) -> list[int]:
        """Those who have just become silent; to be asked once all has been read."""
        now = time.monotonic()
        if now - self._looked > 2 * self.look_s:  # This process was away itself, and others may have spoken meanwhile.
            self._heard = dict.fromkeys(self._heard, now)
        self._looked = now
        silent = [rank for rank, heard in self._heard.items() if now - heard > self.limit_s]
        for rank in silent:
            del self._heard[rank]
        return silent


def is_under_way(address: str) -> bool:
    """Whether the kernel has bytes for an address of this host that nobody has read, or an end that nobody has seen."""
    port = f":{int(address.rpartition(':')[2]):04X}"
    lines: list[str] = []
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            lines += Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    connections = [line.split()[1:5] for line in lines]
    # 08 is CLOSE_WAIT: all that the other end had to say is here, and whoever reads it has not come to its end.
    return any(
        port in (mine[-5:], theirs[-5:]) and (state == "08" or queues != "00000000:00000000")
        for mine, theirs, state, queues in connections
    )
