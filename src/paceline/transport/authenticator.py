"""Which keys may connect to a mailbox, and what each rank publishes so that others can."""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import zmq
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from paceline.transport.job_key import ForeignValue
from paceline.transport.strangers import Strangers

FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
KEYS = "mail/key/"  # The prefix under which the store has the rank of a public key.


class PeerAddress(NamedTuple):
    """What a rank publishes: the address of its mailbox, its public key, its process and its memory domain."""

    address: str
    key: str
    pid: int
    domain: str

    @classmethod
    def of(cls, store: Store, rank: int) -> PeerAddress:
        address, key, pid, domain = store.get(f"mail/{rank}").decode().split(" ")
        return cls(address, key, int(pid), domain)

    def __str__(self) -> str:
        return f"{self.address} {self.key} {self.pid} {self.domain}"


class Authenticator(threading.Thread):
    """Answers ZeroMQ's question about each new connection (ZAP, RFC 27): is this key admitted, and which rank has it?

    It is a thread, so that a rank that is busy computing still admits connections.  zmq.auth's authenticator is a
    thread too, with an asyncio loop, and does not report strangers that offer no key.
    """

    def __init__(
        self,
        inbox: zmq.SyncSocket,
        store: Store,
        size: float,
        peers: dict[int, PeerAddress],
        refuse: Callable[[str], None],
        name: str,
    ) -> None:
        super().__init__(name=name, daemon=True)
        # While one thread waits on a store, another cannot use it; torch before 2.8 has no clone().
        self._store: Store = getattr(store, "clone", lambda: store)()
        self._size = size
        self._peers = peers
        self._refuse = refuse
        self._admitted: dict[bytes, bytes] = {}
        self._requests = inbox.context.socket(zmq.REP)
        self._requests.bind("inproc://zeromq.zap.01")
        self.strangers = Strangers()
        inbox.monitor("inproc://connections", FAILED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._events = inbox.context.socket(zmq.PAIR)
        self._events.connect("inproc://connections")

    def run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._requests, self._events):
            poller.register(socket, zmq.POLLIN)
        # The mailbox closes by terminating its context, which waits for these sockets.
        with suppress(zmq.ContextTerminated), self._requests, self._events:
            while True:
                ready = dict(poller.poll())
                # First: a connection that asks has been accepted before.
                while self._events.poll(0):
                    self._take_event()
                if self._requests in ready:
                    self._answer()

    def _take_event(self) -> None:
        message = recv_monitor_message(self._events)
        event, file = message["event"], message["value"]
        if event == zmq.EVENT_ACCEPTED:
            self.strangers.accepted(file)
        elif event == zmq.EVENT_DISCONNECTED:
            self.strangers.closed(file)
        elif event & FAILED:
            self._refuse("a stranger did not complete CURVE's handshake: it has no key, or not this rank's")

    def _answer(self) -> None:
        version, request, _domain, address, _identity, _mechanism, key = self._requests.recv_multipart()
        status, reason = b"400", "no rank of this job has published its key"
        try:
            # Once every rank is admitted no other can be, and a stranger causes no access to the store.
            if key not in self._admitted and len(self._admitted) < self._size and self._store.check([KEYS + key.hex()]):
                rank = int(self._store.get(KEYS + key.hex()))
                if 0 <= rank < self._size and self._store.check([f"mail/{rank}"]):
                    peer = PeerAddress.of(self._store, rank)
                    if hmac.compare_digest(peer.key.encode(), z85.encode(key)):
                        self._peers[rank] = peer
                        self._admitted[key] = f"{rank} {peer.pid}".encode()
        except ForeignValue as error:
            reason = str(error)
        except ValueError:
            reason = "what the store has about its key is damaged"
        except RuntimeError as error:  # The store's; status 300 lets the peer try again.
            status, reason = b"300", f"its key could not be looked up in the store: {error}"
        if key in self._admitted:
            status = b"200"
        else:
            self._refuse(f"a stranger at {address.decode()}: {reason}")
        self._requests.send_multipart([version, request, status, b"", self._admitted.get(key, b""), b""])
