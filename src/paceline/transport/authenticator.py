"""Door: who may write to a mailbox, and what ranks publish of themselves so that others may."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import zmq
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
from zmq.utils.monitor import recv_monitor_message

KEYS = "mail/key/"  # Where the store keeps the rank that a public key belongs to.


class Peer(NamedTuple):
    """What a rank has published of itself: the address of its mailbox, its key, its process and its host."""

    address: str
    key: str
    pid: int
    host: str

    @classmethod
    def of(cls, store: Store, rank: int) -> Peer:
        address, key, pid, host = store.get(f"mail/{rank}").decode().split(" ")
        return cls(address, key, int(pid), host)


class Authenticator(threading.Thread):
    """Answers the one question ZeroMQ asks of a newcomer (ZAP, RFC 27): may this key come in, and who is it?

    In a thread of its own, so that a rank deep in a computation still admits those who write to it.  zmq.auth's
    authenticator takes a thread too, with an asyncio loop in it, and never hears of strangers who offer no key.
    """

    def __init__(
        self,
        inbox: zmq.SyncSocket,
        store: Store,
        size: float,
        peers: dict[int, Peer],
        refuse: Callable[[str], None],
        name: str,
    ) -> None:
        super().__init__(name=name, daemon=True)
        # A store that one thread blocks on makes the other wait; torch before 2.8 has no clone().
        self._store: Store = getattr(store, "clone", lambda: store)()
        self._size, self._peers, self._refuse = size, peers, refuse
        self._admitted: dict[bytes, bytes] = {}
        self._asked = inbox.context.socket(zmq.REP)
        self._asked.bind("inproc://zeromq.zap.01")
        inbox.monitor("inproc://failures", zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        self._failures = inbox.context.socket(zmq.PAIR)
        self._failures.connect("inproc://failures")

    def run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._asked, self._failures):
            poller.register(socket, zmq.POLLIN)
        # The mailbox closes by ending its context, which waits for these sockets.
        with suppress(zmq.ContextTerminated), self._asked, self._failures:
            while True:
                ready = dict(poller.poll())
                if self._asked in ready:
                    self._answer()
                if (
                    self._failures in ready
                    and recv_monitor_message(self._failures)["event"] != zmq.EVENT_MONITOR_STOPPED
                ):
                    self._refuse("a stranger did not complete CURVE's handshake: it has no key, or not this rank's")

    def _answer(self) -> None:
        version, request, _domain, address, _identity, _mechanism, key = self._asked.recv_multipart()
        status, reason = b"400", "no rank of this job has published its key"
        try:
            # Once every rank is known nobody else can be admitted, and strangers cost the store nothing.
            if key not in self._admitted and len(self._admitted) < self._size and self._store.check([KEYS + key.hex()]):
                rank = int(self._store.get(KEYS + key.hex()))
                if 0 <= rank < self._size and self._store.check([f"mail/{rank}"]):
                    self._peers[rank] = Peer.of(self._store, rank)
                    self._admitted[key] = str(rank).encode()
        except RuntimeError as error:  # The store's; 300 lets the peer try again.
            status, reason = b"300", f"the store could not be asked about its key: {error}"
        if key in self._admitted:
            status = b"200"
        else:
            self._refuse(f"a stranger at {address.decode()}: {reason}")
        self._asked.send_multipart([version, request, status, b"", self._admitted.get(key, b""), b""])
