"""Tether: how a process on another host notices at once that this one has ended.

A process listens on a port, and accepts nothing.  The kernel completes the connections of the others, and closes them
when the process ends, however it ends.  A connection that has closed proves nothing alone, since a firewall may have
closed it: the process has ended if its host refuses another one.
"""

from __future__ import annotations

import select
import socket
from contextlib import suppress

BACKLOG = 4096
RETRY_S = 1.0
IDLE_S = 60  # After so long a connection is tried by the kernel, so that routers do not forget it.


class Tether:
    """This process's end."""

    def __init__(self, address: str) -> None:
        self._listener = socket.socket()
        self._listener.bind((address, 0))
        self._listener.listen(BACKLOG)
        self.address: tuple[str, int] = self._listener.getsockname()

    def close(self) -> None:
        self._listener.close()


class Tie:
    """A connection to another process's tether."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._has_ended = False
        self._socket = self._connected()

    def has_ended(self) -> bool:
        """Whether the other process has ended, as its host says."""
        if not self._has_ended and self._is_closed():
            self._socket.close()
            try:
                with socket.create_connection(self._address, RETRY_S):
                    pass
            except ConnectionRefusedError:
                self._has_ended = True
            except OSError:  # The host does not answer, so it says nothing.
                pass
            self._socket = self._connected()
        return self._has_ended

    def close(self) -> None:
        self._socket.close()

    def _connected(self) -> socket.socket:
        """A connection, or one on its way."""
        tie = socket.socket()
        tie.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            tie.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
        tie.setblocking(False)
        tie.connect_ex(self._address)
        return tie

    def _is_closed(self) -> bool:
        if not select.select([self._socket], [], [], 0)[0]:
            return False
        with suppress(BlockingIOError):  # Nothing is ever sent on it.
            with suppress(ConnectionError, TimeoutError):
                self._socket.recv(1)
            return True
        return False
