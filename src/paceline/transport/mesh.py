"""A mesh of unix sockets between the ranks of one host.

The sockets carry notices, some with a file, and report which peers are lost.  They have abstract names, so nothing
stays on a disk, however a rank ends.
"""

from __future__ import annotations

import array
import hmac
import math
import os
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from typing import NamedTuple

import torch
from torch.distributed.distributed_c10d import Store

from paceline.errors import ClusterError

# How long to poll before sleeping, if every rank has a core: to wake a sleeping process takes about as long.
SPIN_S = 50e-6

DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}

HELLO = struct.Struct("<16sI")
CREDENTIALS = struct.Struct("iii")
FILE_SIZE = socket.CMSG_SPACE(array.array("i").itemsize)


class Kind(IntEnum):
    """What a notice reports: the start of a collective (the first four), or an event (the last four)."""

    all_reduce = 0
    all_gather = 1
    all_to_all = 2
    broadcast = 3
    added = 4
    fetched = 5
    arena = 6
    lost = 7


class Notice(NamedTuple):
    """The one message format of the mesh.

    `finished` is the last collective whose slots the sender will not read again.
    """

    kind: int
    dtype: int = 0
    number: int = 0
    finished: int = 0
    rank: int = -1
    nbytes: int = 0
    extras: int = 0
    offset: int = 0

    def counting(self, kind: Kind, count: int, finished: int) -> Notice:
        """A notice that the sender has processed `count` blocks of the collective that this notice started."""
        return Notice(kind, number=self.number, finished=finished, offset=count)

    def agrees(self, other: Notice) -> bool:
        """Whether both ranks have started the same collective."""
        if self.kind == other.kind == Kind.all_to_all:
            return True
        return self._replace(finished=0, offset=0) == other._replace(finished=0, offset=0)

    def __str__(self) -> str:
        extras = f" and {self.extras} bytes of extras" if self.extras else ""
        src = f" from rank {self.rank}" if self.kind == Kind.broadcast else ""
        return f"{Kind(self.kind).name} #{self.number} of {self.nbytes} bytes of {DTYPES[self.dtype]}{extras}{src}"


NOTICE = struct.Struct("<BBxxIQqQQQ")


class HostPeer:
    """Another rank of this host: its index in the group, its socket and its process."""

    def __init__(self, index: int, rank: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.index = index
        self.rank = rank
        self.socket = connection
        # A child that the peer forked (a DataLoader worker, say) keeps the peer's socket open after the peer's death.
        # A pidfd reports the death all the same.  It cannot be opened for a peer in another pid namespace, or where
        # a sandbox forbids it; then only the socket is watched.
        self.files = [connection.fileno()]
        with suppress(OSError):
            self.files.append(os.pidfd_open(pid_and_user(connection)[0]))

    def close(self) -> None:
        self.socket.close()
        for file in self.files[1:]:
            os.close(file)
        self.files = []


class Mesh:
    """One rank's sockets to all others of its group, by their index in it."""

    def __init__(self, peers: Sequence[HostPeer], *, timeout_s: float) -> None:
        self.peers = {peer.index: peer for peer in peers}
        self.inbox: deque[tuple[int, Notice, int | None]] = deque()  # The sender's index, its notice and the file.
        self.lost: list[int] = []  # Indices of peers that have left or died, the first one first.
        self._timeout_s = timeout_s
        # Without a core for every rank do not spin: the scheduler prefers a process that wakes to one that yields.
        self._spin_s = SPIN_S if len(peers) < len(os.sched_getaffinity(0)) else 0.0
        self._poll = select.poll()
        self._by_file = {file: peer for peer in peers for file in peer.files}
        for file in self._by_file:
            self._poll.register(file, select.POLLIN)

    def send(self, index: int, notice: Notice, file: int | None = None) -> None:
        """Send a notice; does nothing if the peer is lost."""
        peer = self.peers[index]
        message = NOTICE.pack(*notice)
        deadline = None
        while index not in self.lost:
            try:
                if file is None:
                    peer.socket.send(message)
                else:
                    socket.send_fds(peer.socket, [message], [file])
                return
            except BlockingIOError:
                # The peer has hundreds of unread notices, and may itself be blocked here by this rank: so receive.
                deadline = deadline or time.monotonic() + self._timeout_s
                if not self.receive(1e-3) and time.monotonic() > deadline:
                    raise ClusterError(
                        f"rank {peer.rank} has read none of its notices for {self._timeout_s:.1f} s"
                    ) from None
            except ConnectionError:
                self._lose(peer)

    def receive(self, timeout_s: float) -> bool:
        """Move arrived notices to the inbox; False if nothing happened within the time."""
        ready = self._poll.poll(0)
        if not ready and timeout_s > 0:
            stop = time.monotonic() + min(timeout_s, self._spin_s)
            while not ready and time.monotonic() < stop:
                os.sched_yield()
                ready = self._poll.poll(0)
            ready = ready or self._poll.poll(math.ceil(timeout_s * 1e3))
        for file, _ in ready:
            peer = self._by_file.get(file)
            if peer is not None and file == peer.files[0]:
                self._read(peer)
            elif peer is not None:
                self._lose(peer)
        return bool(ready)

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()
        for _, _, file in self.inbox:
            if file is not None:
                os.close(file)
        self.inbox.clear()

    def _lose(self, peer: HostPeer) -> None:
        """Mark a peer as lost, after reading all that it sent before."""
        while peer.index not in self.lost and self._read(peer):
            pass
        self._mark_lost(peer)

    def _mark_lost(self, peer: HostPeer) -> None:
        if peer.index not in self.lost:
            self.lost.append(peer.index)
            for file in peer.files:
                self._poll.unregister(file)
                del self._by_file[file]

    def _read(self, peer: HostPeer) -> bool:
        # Linux accepts a message this small whole or not at all, so a buffer for whole notices receives whole notices.
        # One call returns nothing beyond the first notice with a file.
        try:
            data, ancillary, _, _ = peer.socket.recvmsg(64 * NOTICE.size, FILE_SIZE)
        except BlockingIOError:
            return False
        except ConnectionError:
            data, ancillary = b"", []
        file = array.array("i", ancillary[0][2])[0] if ancillary else None
        for fields in NOTICE.iter_unpack(data):
            notice = Notice(*fields)
            if notice.kind == Kind.lost:
                # The sender has given up because of another peer, which must therefore come first in `lost`.
                self._lose(next(other for other in self.peers.values() if other.rank == notice.rank))
                self._mark_lost(peer)
            else:
                self.inbox.append((peer.index, notice, file if notice.kind == Kind.arena else None))
        if not data:
            self._mark_lost(peer)
        return bool(data)


def connect_peers(store: Store, rank: int, ranks: Sequence[int], *, timeout_s: float) -> list[HostPeer]:
    """Connect to the ranks that come earlier in `ranks`, and accept those that come later."""
    deadline = time.monotonic() + timeout_s
    # Other users of the host can see the name in /proc/net/unix, but not the token.
    name = secrets.token_hex(16)
    token = secrets.token_bytes(16)
    peers: list[HostPeer] = []
    opened: list[socket.socket] = []
    missing = [other for other in ranks if other != rank]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0paceline-{name}")
        listener.listen(len(ranks))
        store.set(f"mesh/{rank}", name + token.hex())
        try:
            for other in ranks[: ranks.index(rank)]:
                store.wait([f"mesh/{other}"], timedelta(seconds=remaining(deadline)))
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                opened.append(connection)
                _say_hello(connection, store.get(f"mesh/{other}").decode(), ranks.index(rank))
                peers.append(HostPeer(ranks.index(other), other, connection))
                missing.remove(other)
            while missing:
                listener.settimeout(remaining(deadline))
                connection, _ = listener.accept()
                connection.settimeout(remaining(deadline))
                opened.append(connection)
                index = _hear_hello(connection, token)
                if index is not None:
                    peers.append(HostPeer(index, ranks[index], connection))
                    missing.remove(ranks[index])
        except (OSError, RuntimeError) as error:
            for peer in peers:
                peer.close()
            peers = []
            raise ClusterError(
                f"rank {rank} did not connect to ranks {missing} on this host within {timeout_s:.1f} s: {error}"
            ) from error
        finally:
            kept = [peer.socket for peer in peers]
            for connection in opened:
                if connection not in kept:
                    connection.close()
    return peers


def _say_hello(connection: socket.socket, published: str, index: int) -> None:
    """Connect to a rank by the name that it has published, and prove by its token that this is a rank of its job."""
    connection.connect(f"\0paceline-{published[:32]}")
    if (user := pid_and_user(connection)[1]) != os.geteuid():
        raise OSError(f"a process of another user ({user}) listens in the place of a rank")
    connection.send(HELLO.pack(bytes.fromhex(published[32:]), index))


def _hear_hello(connection: socket.socket, token: bytes) -> int | None:
    """The index of the rank that has connected; None if it is no rank of this group."""
    if pid_and_user(connection)[1] != os.geteuid():
        return None  # Another user's process: do not wait for its token.
    hello = connection.recv(HELLO.size, socket.MSG_WAITALL).ljust(HELLO.size, b"\0")
    claimed, index = HELLO.unpack(hello)
    return index if hmac.compare_digest(claimed, token) else None


def pid_and_user(connection: socket.socket) -> tuple[int, int]:
    pid, user, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return pid, user


def remaining(deadline: float) -> float:
    return max(deadline - time.monotonic(), 1e-3)
