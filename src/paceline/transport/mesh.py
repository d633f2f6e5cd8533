"""A mesh of unix sockets between the ranks of one host.

It carries notices, each with a file if need be, and knows who is gone.  The sockets have abstract names, so that nothing is
left on a disk, however a rank ends.
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

SPIN_S = (
    50e-6  # How long to ask for news before sleeping, with a core for every rank: waking a sleeper takes about as long.
)

DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}

HELLO = struct.Struct("<16sI")
CREDENTIALS = struct.Struct("iii")
FILE_SIZE = socket.CMSG_SPACE(array.array("i").itemsize)


class Kind(IntEnum):
    """What a notice tells of: the start of a collective, or one of the last four."""

    all_reduce = 0
    all_gather = 1
    all_to_all = 2
    broadcast = 3
    added = 4
    fetched = 5
    arena = 6
    lost = 7


class Notice(NamedTuple):
    """All that goes through the sockets.  `finished` is the last collective whose slots the sender will not read again."""

    kind: int
    dtype: int = 0
    number: int = 0
    finished: int = 0
    rank: int = -1
    nbytes: int = 0
    extras: int = 0
    offset: int = 0

    def counting(self, kind: Kind, count: int, finished: int) -> Notice:
        """How far the sender has come with the blocks of the collective that this one began."""
        return Notice(kind, number=self.number, finished=finished, offset=count)

    def agrees(self, other: Notice) -> bool:
        if self.kind == other.kind == Kind.all_to_all:
            return True
        return self._replace(finished=0, offset=0) == other._replace(finished=0, offset=0)

    def __str__(self) -> str:
        extras = f" and {self.extras} of tail" if self.extras else ""
        src = f" from rank {self.rank}" if self.kind == Kind.broadcast else ""
        return f"{Kind(self.kind).name} #{self.number} of {self.nbytes} bytes of {DTYPES[self.dtype]}{extras}{src}"


NOTICE = struct.Struct("<BBxxIQqQQQ")


class Peer:
    """Another rank, by its socket and by its process."""

    def __init__(self, place: int, rank: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.place = place
        self.rank = rank
        self.socket = connection
        # A child that the peer forked (for a DataLoader, say) keeps its socket open after its death; a pidfd is not fooled.
        # There is none for a peer in another pid namespace, or where a sandbox forbids it; then the socket must do.
        self.files = [connection.fileno()]
        with suppress(OSError):
            self.files.append(os.pidfd_open(pid_and_user(connection)[0]))

    def close(self) -> None:
        self.socket.close()
        for file in self.files[1:]:
            os.close(file)
        self.files = []


class Mesh:
    """One rank's sockets to all others of `ranks`, which it knows by their place in it."""

    def __init__(self, peers: Sequence[Peer], *, timeout_s: float) -> None:
        self.peers = {peer.place: peer for peer in peers}
        self.inbox: deque[tuple[int, Notice, int | None]] = deque()
        self.gone: list[int] = []  # Places, the first to go first.
        self._timeout_s = timeout_s
        # Ranks that share a core only hold up one another: a sleeper is preferred when there is news, one who yields is not.
        self._spin_s = SPIN_S if len(peers) < len(os.sched_getaffinity(0)) else 0.0
        self._poll = select.poll()
        self._by_file = {file: peer for peer in peers for file in peer.files}
        for file in self._by_file:
            self._poll.register(file, select.POLLIN)

    def tell(self, place: int, notice: Notice, file: int | None = None) -> None:
        """Send; to one who is gone, nothing."""
        peer = self.peers[place]
        message = NOTICE.pack(*notice)
        deadline = None
        while place not in self.gone:
            try:
                if file is None:
                    peer.socket.send(message)
                else:
                    socket.send_fds(peer.socket, [message], [file])
                return
            except BlockingIOError:
                # It has hundreds of notices to read, and may be in this very place because of ours.
                deadline = deadline or time.monotonic() + self._timeout_s
                if not self.listen(1e-3) and time.monotonic() > deadline:
                    raise ClusterError(
                        f"rank {peer.rank} has read none of its notices for {self._timeout_s:.1f} s"
                    ) from None
            except ConnectionError:
                self._lose(peer)

    def listen(self, timeout_s: float) -> bool:
        """Put what has come into the inbox; False if nothing came within the time."""
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

    def _lose(self, peer: Peer) -> None:
        """Lose a peer, but nothing of what it said before it went."""
        while peer.place not in self.gone and self._read(peer):
            pass
        self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        if peer.place not in self.gone:
            self.gone.append(peer.place)
            for file in peer.files:
                self._poll.unregister(file)
                del self._by_file[file]

    def _read(self, peer: Peer) -> bool:
        # Linux takes a message this small whole or not at all, so a buffer for whole notices receives whole notices;
        # and it goes no further than the first with a file.
        try:
            data, extra, _, _ = peer.socket.recvmsg(64 * NOTICE.size, FILE_SIZE)
        except BlockingIOError:
            return False
        except ConnectionError:
            data, extra = b"", []
        file = array.array("i", extra[0][2])[0] if extra else None
        for fields in NOTICE.iter_unpack(data):
            notice = Notice(*fields)
            if notice.kind == Kind.lost:
                # The teller has given up because of another, who therefore must be the first in `gone`.
                self._lose(next(other for other in self.peers.values() if other.rank == notice.rank))
                self._forget(peer)
            else:
                self.inbox.append((peer.place, notice, file if notice.kind == Kind.arena else None))
        if not data:
            self._forget(peer)
        return bool(data)


def meet(store: Store, rank: int, ranks: Sequence[int], *, timeout_s: float) -> list[Peer]:
    """Connect to the ranks that come before in `ranks`, and accept those that come after."""
    deadline = time.monotonic() + timeout_s
    place = ranks.index(rank)
    # Other users of the host can see the name in /proc/net/unix, but not the token.
    name, token = secrets.token_hex(16), secrets.token_bytes(16)
    peers: list[Peer] = []
    opened: list[socket.socket] = []
    missing = [other for other in ranks if other != rank]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0paceline-{name}")
        listener.listen(len(ranks))
        store.set(f"mesh/{rank}", name + token.hex())
        try:
            for other in ranks[:place]:
                store.wait([f"mesh/{other}"], timedelta(seconds=remaining(deadline)))
                published = store.get(f"mesh/{other}").decode()
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                opened.append(connection)
                connection.connect(f"\0paceline-{published[:32]}")
                connection.send(HELLO.pack(bytes.fromhex(published[32:]), place))
                peers.append(Peer(ranks.index(other), other, connection))
                missing.remove(other)
            while missing:
                listener.settimeout(remaining(deadline))
                connection, _ = listener.accept()
                connection.settimeout(remaining(deadline))
                opened.append(connection)
                if pid_and_user(connection)[1] != os.geteuid():
                    continue  # A stranger, who must not keep us waiting for a token.
                hello = connection.recv(HELLO.size, socket.MSG_WAITALL).ljust(HELLO.size, b"\0")
                claimed, other_place = HELLO.unpack(hello)
                if not hmac.compare_digest(claimed, token):
                    continue
                peers.append(Peer(other_place, ranks[other_place], connection))
                missing.remove(ranks[other_place])
        except (OSError, RuntimeError) as error:
            for peer in peers:
                peer.close()
            peers = []
            raise ClusterError(
                f"rank {rank} did not meet ranks {missing} on this host within {timeout_s:.1f} s: {error}"
            ) from error
        finally:
            kept = [peer.socket for peer in peers]
            for connection in opened:
                if connection not in kept:
                    connection.close()
    return peers


def pid_and_user(connection: socket.socket) -> tuple[int, int]:
    pid, user, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return pid, user


def remaining(deadline: float) -> float:
    return max(deadline - time.monotonic(), 1e-3)
