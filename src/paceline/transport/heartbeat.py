"""Heartbeats: a thread sends them, so that a process that is busy computing is not taken for a failed one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

import zmq

MAX_UNSENT = 2  # Heartbeats that may wait for a connection; old ones are of no use.


class HeartbeatSender(threading.Thread):
    """Sends the same frame every `every_s` seconds on some sockets, which only this thread uses from now on."""

    def __init__(self, sockets: Sequence[zmq.SyncSocket], frame: bytes, name: str, *, every_s: float) -> None:
        super().__init__(name=name, daemon=True)
        self._sockets = list(sockets)
        self._frame = frame
        self._every_s = every_s
        self._stopped = threading.Event()

    def add(self, sockets: Sequence[zmq.SyncSocket]) -> None:
        """Send on these sockets too."""
        self._sockets.extend(sockets)

    def run(self) -> None:
        while True:  # The first one is sent at once: a rank that was never heard of is not missed.
            for socket in list(self._sockets):
                with suppress(zmq.Again):
                    socket.send(self._frame, zmq.NOBLOCK)
            if self._stopped.wait(self._every_s):
                break
        for socket in self._sockets:
            socket.close(linger=0)

    def stop(self) -> None:
        self._stopped.set()
        self.join()
