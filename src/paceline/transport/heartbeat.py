"""Heartbeats: a thread sends them, so that a process that is busy computing is not taken for a failed one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress

import zmq

MAX_UNSENT = 2  # Heartbeats that may wait for a connection; old ones are of no use.


class HeartbeatSender(threading.Thread):
    """Sends the same frame every `every_s` seconds to some ranks, on sockets that only this thread uses from now on."""

    def __init__(self, sockets: Mapping[int, zmq.SyncSocket], frame: bytes, name: str, *, every_s: float) -> None:
        super().__init__(name=name, daemon=True)
        self.ranks = set(sockets)
        self._sockets = dict(sockets)
        self._added = deque[tuple[int, zmq.SyncSocket]]()
        self._frame = frame
        self._every_s = every_s
        self._stopped = threading.Event()

    def add(self, sockets: Mapping[int, zmq.SyncSocket]) -> None:
        """Send on these sockets too, in the place of those to the same ranks."""
        self.ranks.update(sockets)
        self._added.extend(sockets.items())

    def run(self) -> None:
        while True:  # The first one is sent at once: a rank that was never heard of is not missed.
            while self._added:
                rank, socket = self._added.popleft()
                if rank in self._sockets:
                    self._sockets[rank].close(linger=0)
                self._sockets[rank] = socket
            for socket in self._sockets.values():
                with suppress(zmq.Again):
                    socket.send(self._frame, zmq.NOBLOCK)
            if self._stopped.wait(self._every_s):
                break
        for socket in [*self._sockets.values(), *(socket for _, socket in self._added)]:
            socket.close(linger=0)

    def stop(self) -> None:
        self._stopped.set()
        self.join()
