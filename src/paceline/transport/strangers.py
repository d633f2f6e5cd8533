"""Connections to a mailbox that have not said who they are: only so many are kept, and the oldest are closed.

Each costs a file and a few kilobytes.  Without a limit any program that reaches the port could use up all files of this
process.  ZeroMQ itself limits only the time that a connection may take to authenticate.
"""

from __future__ import annotations

import os
import resource
import socket
import struct
import sys
from contextlib import suppress
from ipaddress import IPv6Network, ip_address

MOST = 256
SHARE = 4  # At most this part of the files that this process may have open.
# Authenticating takes more bytes than these: a greeting of 64, a HELLO of 202 and an INITIATE of at least 259.
HANDSHAKE_NBYTES = 500
RECEIVED = struct.Struct("128xQ")  # tcpi_bytes_received in Linux's struct tcp_info.


class Strangers:
    """The connections that a mailbox has accepted; those that have authenticated are left out when their turn comes.

    When there are too many, the oldest of the address that has the most must go: so one host cannot close another's.
    """

    def __init__(self) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most = MOST if limit == resource.RLIM_INFINITY else max(1, min(MOST, limit // SHARE))
        self.port = 0  # Where the mailbox listens; 0: not yet.
        self._origins: dict[int, str] = {}  # The addresses of the connections, by their files.
        self._files: dict[str, dict[int, None]] = {}  # Of each address, in the order in which they were accepted.

    def accepted(self, file: int) -> None:
        """ZeroMQ has accepted a connection; call this before any that was accepted later can be authenticated."""
        self.closed(file)
        self._origins[file] = origin = _origin(file)
        self._files.setdefault(origin, {})[file] = None
        while len(self._origins) > self.most:
            oldest = next(iter(max(self._files.values(), key=len)))
            self.closed(oldest)
            if sys.platform == "linux":
                _close_silent(oldest, self.port)

    def closed(self, file: int) -> None:
        origin = self._origins.pop(file, None)
        if origin is not None:
            del self._files[origin][file]
            if not self._files[origin]:
                del self._files[origin]


def _origin(file: int) -> str:
    """The address of a connection's other end; of IPv6 its network, in which one host may have any number."""
    with suppress(OSError, ValueError), socket.socket(fileno=os.dup(file)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return ""
        host = connection.getpeername()[0]
        address = ip_address(host.partition("%")[0])
        return str(IPv6Network((address, 64), strict=False)) if address.version == 6 else host
    return ""  # ZeroMQ has closed it, and another file may have its number by now.


def _close_silent(file: int, port: int) -> None:
    """End a connection that has not authenticated.

    ZeroMQ may have closed this file, and another connection to this port may have its number by now.  But one that has
    received less than authenticating takes carries no message; should it be a rank's, that one connects again.
    """
    with suppress(OSError), socket.socket(fileno=os.dup(file)) as connection:
        is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
        if not is_tcp or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED.size)
        is_silent = len(info) == RECEIVED.size and RECEIVED.unpack(info)[0] < HANDSHAKE_NBYTES
        if is_silent and connection.getsockname()[1] == port:
            connection.shutdown(socket.SHUT_RDWR)
