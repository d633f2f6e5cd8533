"""The sockets and keys of a mailbox: its inbox, its connections to other ranks, and their addresses in the store.

Every rank binds one PULL socket, its inbox, and connects a PUSH socket to the inbox of each rank that it sends to.
Connections are TCP, encrypted and authenticated by CURVE with a key pair made for this rank of this job.  A key that
no rank has published in the store is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import zmq
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
from zmq.utils import z85

from paceline.errors import ClusterError
from paceline.transport.authenticator import KEYS, Authenticator, PeerAddress
from paceline.transport.failure_detector import GONE

# Smaller frames are copied: below this size, lending a buffer to ZeroMQ and tracking its return costs more than a copy.
COPY_BELOW = 2**20
# Messages of one sender that may wait unread; then its awaited sends slow down to the receiver's pace, to save memory.
UNREAD = 16
HANDSHAKE_MS = 5_000  # A stranger that connects and sends nothing is disconnected after this time.


class Connections:
    """The sockets of one rank; `size` is the number of ranks, infinite if any number may join.

    `refuse` is called with a text for every connection that is refused.  With `replaces` this is another process of the
    rank, which was killed, and its address takes the place of the old one.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: float,
        *,
        bind: str,
        domain: str,
        max_nbytes: int | None,
        refuse: Callable[[str], None],
        replaces: bool = False,
    ) -> None:
        self.rank = rank
        self.public_key, self.secret_key = zmq.curve_keypair()
        self._store = store
        self._peers: dict[int, PeerAddress] = {}
        self._context = zmq.Context()
        self._context.linger = 0
        endpoint = f"tcp://[{bind}]:*" if ":" in bind else f"tcp://{bind}:*"
        self.inbox = self._make_inbox(endpoint, max_nbytes)
        self.authenticator = Authenticator(
            self.inbox, store, size, self._peers, refuse, f"mailbox-{rank}-authenticator"
        )
        self.authenticator.start()
        try:
            self.inbox.bind(endpoint)
            self.address = self.inbox.get_string(zmq.LAST_ENDPOINT)
            if self.address.startswith(("tcp://0.0.0.0:", "tcp://[::]:")):
                raise ValueError(
                    f"Mailbox(bind={bind!r}): name the one address at which the other ranks reach this one"
                )
            self.authenticator.strangers.port = int(self.address.rpartition(":")[2])
            self._publish(domain, replaces=replaces)
        except BaseException:
            self.close()
            raise

    @property
    def is_closed(self) -> bool:
        return self._context.closed

    def peer(self, rank: int) -> PeerAddress:
        """What a rank has published; waits until it has."""
        if rank not in self._peers:
            try:
                self._peers[rank] = PeerAddress.of(self._store, rank)
            except RuntimeError as error:
                raise ClusterError(f"rank {self.rank} found no mailbox of rank {rank} in the store: {error}") from error
        return self._peers[rank]

    def is_there(self, rank: int) -> bool:
        """Whether a rank has published its address."""
        return self._store.check([f"mail/{rank}"])

    def has_moved(self, rank: int) -> bool:
        """Whether the store has another process of a rank than before."""
        before, now = self.peer(rank), PeerAddress.of(self._store, rank)
        self._peers[rank] = now
        return now != before

    def is_gone(self, rank: int) -> bool:
        """Whether a rank that was killed will not be back."""
        return self._store.check([GONE + str(rank)])

    def connect(self, rank: int, *, max_unsent: int) -> zmq.SyncSocket:
        """A socket to the inbox of a rank; at most `max_unsent` messages wait in it, 0: any number."""
        peer = self.peer(rank)
        socket = self._socket(zmq.PUSH, peer.address)
        socket.sndhwm = max_unsent
        socket.curve_serverkey = peer.key.encode()
        socket.connect(peer.address)
        return socket

    def close(self) -> None:
        """Close the inbox; wait for the sockets that others have closed with a linger."""
        self.inbox.close(linger=0)
        self._context.term()
        self.authenticator.join()

    def _publish(self, domain: str, *, replaces: bool) -> None:
        entry = str(PeerAddress(self.address, self.public_key.decode(), os.getpid(), domain))
        if replaces and self._store.check([f"mail/{self.rank}"]):
            old = PeerAddress.of(self._store, self.rank)
            self._store.set(f"mail/{self.rank}", entry)
            self._store.delete_key(KEYS + z85.decode(old.key).hex())
        elif self._store.compare_set(f"mail/{self.rank}", "", entry) != entry.encode():
            raise ValueError(
                f"Mailbox(rank={self.rank}): the store has a mailbox of this rank; "
                "give each job a PrefixStore of its own"
            )
        self._store.set(KEYS + z85.decode(self.public_key).hex(), str(self.rank))

    def _make_inbox(self, endpoint: str, max_nbytes: int | None) -> zmq.SyncSocket:
        inbox = self._socket(zmq.PULL, endpoint)
        inbox.curve_server = True
        inbox.zap_domain = b"paceline"
        inbox.zap_enforce_domain = 1  # Otherwise ZeroMQ admits every key while no thread answers for the domain.
        inbox.rcvhwm = UNREAD
        inbox.handshake_ivl = HANDSHAKE_MS
        if max_nbytes is not None:
            inbox.maxmsgsize = max_nbytes + 2**16  # CURVE adds a nonce and a MAC, and the header is a frame too.
        return inbox

    def _socket(self, kind: int, address: str) -> zmq.SyncSocket:
        socket = self._context.socket(kind)
        socket.curve_publickey = self.public_key
        socket.curve_secretkey = self.secret_key
        socket.ipv6 = "[" in address
        socket.copy_threshold = COPY_BELOW
        # Ranks may send nothing for longer than a firewall keeps an idle connection.
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle = 30
        socket.tcp_keepalive_intvl = 10
        socket.tcp_keepalive_cnt = 3
        return socket
