"""Mailbox: a rank's letters to and from the other ranks of its job, over ZeroMQ.

Every rank binds one PULL socket and pushes to the others' over TCP, encrypted and authenticated by CURVE with a key pair
made for this rank of this job; a key that no rank has published in the store gets nothing through.  Large tensors for a rank of the
same host lie in memory that it can map (`parcels`), and only where they lie travels.  The mailbox is as
trustworthy as that store: whoever can write there can join the job.  A letter is delivered once or, if a connection
breaks on the way, not at all; letters between two ranks keep their order.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import torch
import zmq
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
from zmq.utils import z85

from paceline.errors import ClusterError
from paceline.op import Begun, Op, Ready
from paceline.protocol.messages import Beat, Message, PeerDied, PeerSuspected, UnknownType, decode
from paceline.protocol.requests import Reason, Refusals
from paceline.transport.authenticator import KEYS, Authenticator, Peer
from paceline.transport.heartbeat import UNSENT, FailureDetector, Heartbeat, is_under_way
from paceline.transport.segments import Location, OnTheWay, Receiver, Sender, here
from paceline.transport.wire import DTYPES, NAMES, Header, Name, check_form, flat_bytes, header_of, in_frame, typed

# Smaller tensors are copied: up to here, lending a buffer to ZeroMQ and hearing of its return costs more.
COPY_BELOW = 2**20
# From here on it is worth telling a rank of the same host where a tensor lies, instead of sending it.
PARCEL_FROM = 2**16
# Letters of one peer that may wait unread; then its awaited sends slow down to the reader's pace and spare its memory.
UNREAD = 16
# Bytes that one reader may have been told of and not opened, or that are on the way, before awaited sends to it do the same.
UNREAD_NBYTES = 2**29
# Seconds without a word of a dead process after which no more is expected, whatever others may have on its way to this one.
LAST_WORDS_S = 1.0
# Messages that are taken in at most before somebody is taken to be silent.
LOOKED_THROUGH = 1000


class Mailbox:
    """What arrives for `rank` of `size`, and the way to the others; for the process and thread that made it.

    `store` holds one mailbox a rank: give each job a PrefixStore of its own.  `bind` is this machine's address or interface.
    `timeout_s` bounds every wait that names no time of its own, `max_nbytes` every tensor, the same at all ranks.  If it `is_open`,
    other ranks may join the first ones, and the last message of a process of this host is `PeerDied`; `PeerSuspected` says that a rank
    has sent no heartbeat for `silent_s` seconds.  With `beat_s` it beats to all it writes to.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        bind: str = "127.0.0.1",
        timeout_s: float = 60,
        max_nbytes: int | None = None,
        is_open: bool = False,
        silent_s: float | None = None,
        beat_s: float | None = None,
    ) -> None:
        if not 0 <= rank < (math.inf if is_open else size):
            raise ValueError(f"Mailbox(rank={rank}, size={size}): a rank counts from 0 and is below the size")
        self.rank, self.timeout_s, self.max_nbytes, self.is_open = rank, timeout_s, max_nbytes, is_open
        self.size: float = math.inf if is_open else size
        self.refusals = Refusals()
        self._refusing, self._store, self._pid = threading.Lock(), store, os.getpid()
        self._public, self._secret = zmq.curve_keypair()
        self._arrived: deque[Message] = deque()
        self._peers: dict[int, Peer] = {}
        self._outboxes: dict[int, zmq.SyncSocket] = {}
        self._here = here()
        self._near: dict[int, Receiver | None] = {}  # How ranks of this host are read; None: it is elsewhere.
        self._parcels, self._on_the_way = Sender(), OnTheWay()
        self._watched: dict[int, int] = {}  # The ranks whose processes are watched, by their pidfds.
        self._gone: set[int] = set()
        self._heart: Heartbeat | None = None
        self._beat_s = beat_s
        self._silence = None if silent_s is None else FailureDetector(silent_s)
        self._poller, self._context = zmq.Poller(), zmq.Context()
        self._context.linger = 0
        endpoint = f"tcp://[{bind}]:*" if ":" in bind else f"tcp://{bind}:*"
        self._inbox = self._socket(zmq.PULL, endpoint)
        self._inbox.curve_server = True
        # Without the enforcement ZeroMQ lets everybody in while nobody answers for the domain.
        self._inbox.zap_domain, self._inbox.zap_enforce_domain = b"paceline", 1
        self._inbox.rcvhwm = UNREAD
        self._inbox.handshake_ivl = 5_000  # A stranger that connects and says nothing.
        if max_nbytes is not None:
            self._inbox.maxmsgsize = max_nbytes + 2**16  # CURVE adds a nonce and a MAC, and the header is a frame too.
        self._poller.register(self._inbox, zmq.POLLIN)
        self._door = Authenticator(self._inbox, store, self.size, self._peers, self._refuse, f"mailbox-{rank}-door")
        self._door.start()
        try:
            self._inbox.bind(endpoint)
            self.address = self._inbox.get_string(zmq.LAST_ENDPOINT)
            if self.address.startswith(("tcp://0.0.0.0:", "tcp://[::]:")):
                raise ValueError(
                    f"Mailbox(bind={bind!r}): name the one address at which the other ranks reach this one"
                )
            entry = f"{self.address} {self._public.decode()} {os.getpid()} {self._here}"
            if store.compare_set(f"mail/{rank}", "", entry) != entry.encode():
                raise ValueError(
                    f"Mailbox(rank={rank}): the store has a mailbox of this rank; give each job a PrefixStore of its own"
                )
            store.set(KEYS + z85.decode(self._public).hex(), str(rank))
        except BaseException:
            self.close(linger_s=0)
            raise

    def send(self, dst: int, message: Message) -> Op[None]:
        """Begin to send; once it was awaited the tensors may be overwritten, whether or not they have arrived, but for `room`."""
        self._check_call("send", dst)
        tensors = message.tensors()
        for tensor in tensors:
            self._check_tensor(tensor)
        if dst in self._gone:
            return Ready("send", None)
        socket, is_near = self._outbox(dst), self._reader(dst) is not None
        places = [self._parcels.pack(t, dst) if is_near and t.nbytes >= PARCEL_FROM else None for t in tensors]
        flat = [(flat_bytes(tensor), tensor) for tensor, place in zip(tensors, places, strict=True) if place is None]
        socket.send(header_of(message, places), zmq.SNDMORE if flat else 0)
        lent: list[zmq.MessageTracker] = []
        for i, (raw, tensor) in enumerate(flat, start=1):
            tracker = socket.send(raw.numpy().data, zmq.SNDMORE if i < len(flat) else 0, copy=False, track=True)
            if raw.data_ptr() == tensor.data_ptr() and not tracker.done:
                if self._parcels.has(tensor) and self._on_the_way.nbytes(dst) < UNREAD_NBYTES:
                    self._on_the_way.add(tracker, dst, tensor)
                else:
                    lent.append(tracker)
        # However large it is, a message need not be opened before its sender goes on, if all others have been.
        unread = max(UNREAD_NBYTES, packed) if (packed := sum(p.nbytes for p in places if p is not None)) else math.inf
        deadline = time.monotonic() + self.timeout_s
        return Begun("send", partial(self._get_back, zmq.MessageTracker(*lent), unread, dst, message.tag, deadline))

    def recv(
        self, src: int | None = None, timeout: float | None = None, types: tuple[type[Message], ...] | None = None
    ) -> Op[Message]:
        """The next message when it is waited for, from `src` and of one of `types` if given.

        Its tensors may be written to, but for those that lie in their sender's `room`.
        """
        self._check_call("recv", src)
        limit = self.timeout_s if timeout is None else timeout
        return Begun("recv", partial(self._next, src, types, limit, time.monotonic() + limit))

    def send_buffer(self, like: Tensor) -> Tensor:
        """Memory for a tensor that ranks of this host read without a copy, and no send waits for: see `in_use`."""
        self._check_call("room")
        if self._here and like.nbytes >= PARCEL_FROM:
            with suppress(OSError):  # There may be no memory for it that others can map.
                return self._parcels.send_buffer(like.nbytes).view(like.dtype).view(like.shape)
        return torch.empty(like.shape, dtype=like.dtype)

    def in_use(self, x: Tensor) -> bool:
        """Whether another rank may still read what was sent out of `room`, so that it must not be written to."""
        self._check_call("is_read")
        return self._parcels.is_lent(x) or self._on_the_way.holds(x)

    def watch(self, rank: int, pid: int) -> None:
        """Hear of it when a process of this host has ended that was, or is to be, a rank."""
        if rank in self._gone or rank in self._watched.values():
            return
        try:
            watched = os.pidfd_open(pid)
        except ProcessLookupError:
            watched = os.eventfd(1)  # It has ended already, which is to be heard of in the same way.
        except (AttributeError, OSError):  # There are systems without.
            return
        self._watched[watched] = rank
        self._poller.register(watched, zmq.POLLIN)

    def beat(self, ranks: Sequence[int], every_s: float) -> None:
        """From now on let these ranks know, every so often, that this one lives."""
        sockets = [self._connected(rank, unsent=UNSENT) for rank in ranks]
        if self._heart is not None:
            return self._heart.add(sockets)
        self._heart = Heartbeat(sockets, header_of(Beat(), ()), f"mailbox-{self.rank}-heart", every_s=every_s)
        self._heart.start()

    def close(self, linger_s: float = 5) -> None:
        """Flush what was sent, and lose what a peer has not taken in after `linger_s` seconds; leave no thread, port or file behind."""
        if self._context.closed:
            return
        self._check_call("close")
        deadline = time.monotonic() + linger_s
        if self._heart is not None:
            self._heart.stop()
        for socket in self._outboxes.values():
            socket.close(linger=math.ceil(1000 * linger_s))
        # A parcel can be opened only while its sender is there.  Who waits for this takes in what others wait to see opened.
        while time.monotonic() < deadline and (self._take(0) or self._parcels.unread()):
            self._take(0.002)
        self._inbox.close(linger=0)
        for watched in self._watched:
            os.close(watched)
        self._parcels.close()
        self._arrived.clear()
        self._near.clear()
        self._context.term()
        self._door.join()

    def _check_call(self, call: str, rank: int | None = None) -> None:
        if os.getpid() != self._pid or self._context.closed:
            raise RuntimeError(
                f"{call}: rank {self.rank}'s mailbox is closed, or not of this process ({self._pid}, not {os.getpid()})"
            )
        if rank is not None and not 0 <= rank < self.size:
            raise ValueError(f"{call}: rank {rank} is none of this job's, which are 0 to {self.size - 1}")

    def _check_tensor(self, tensor: Tensor) -> None:
        if tensor.dtype not in NAMES:
            raise ValueError(f"send of a {tensor.dtype} tensor: a mailbox carries {', '.join(DTYPES)}")
        if self.max_nbytes is not None and tensor.nbytes > self.max_nbytes:
            raise ValueError(
                f"send of a tensor of {tensor.nbytes} bytes: this mailbox was made with max_nbytes={self.max_nbytes}"
            )

    @property
    def refused(self) -> int:
        """How many connections and messages were refused."""
        return self.refusals.total

    @property
    def last_refusal(self) -> str | None:
        return self.refusals.last

    def _refuse(self, text: str, reason: Reason = "stranger") -> None:
        with self._refusing:  # The door refuses too.
            self.refusals.add(reason, text)

    def _socket(self, kind: int, address: str) -> zmq.SyncSocket:
        socket = self._context.socket(kind)
        socket.curve_publickey, socket.curve_secretkey = self._public, self._secret
        socket.ipv6 = "[" in address
        socket.copy_threshold = COPY_BELOW
        # Ranks may be silent for longer than a firewall remembers an idle connection.
        socket.tcp_keepalive, socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = (
            1,
            30,
            10,
            3,
        )
        return socket

    def _peer(self, rank: int) -> Peer:
        if rank not in self._peers:
            try:
                self._peers[rank] = Peer.of(self._store, rank)
            except RuntimeError as error:
                raise ClusterError(f"rank {self.rank} found no mailbox of rank {rank} in the store: {error}") from error
        return self._peers[rank]

    def _outbox(self, dst: int) -> zmq.SyncSocket:
        if dst not in self._outboxes:
            # send() must not block, or two ranks that both write first would; what queues here is the caller's own tensors.
            self._outboxes[dst] = self._connected(dst, unsent=0)
            if self._beat_s is not None:
                self.beat([dst], self._beat_s)
        return self._outboxes[dst]

    def _connected(self, dst: int, *, unsent: int) -> zmq.SyncSocket:
        """A way to another rank; on it may lie so many messages, any number for 0."""
        peer = self._peer(dst)
        socket = self._socket(zmq.PUSH, peer.address)
        socket.sndhwm = unsent
        socket.curve_serverkey = peer.key.encode()
        socket.connect(peer.address)
        return socket

    def _reader(self, rank: int) -> Receiver | None:
        """How to read what lies in a rank's own memory, if it is on this host: and then it can read what lies in ours."""
        if rank not in self._near:
            peer = self._peer(rank)
            is_near = bool(self._here) and peer.host == self._here
            self._near[rank] = Receiver(peer.pid) if is_near else None
            if is_near and self.is_open and rank != self.rank:
                self.watch(rank, peer.pid)
        return self._near[rank]

    def _get_back(self, lent: zmq.MessageTracker, unread: float, dst: int, tag: str, deadline: float) -> None:
        self._check_call("send")
        while not lent.done or self._parcels.unread(dst) > unread:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ClusterError(f"rank {self.rank} could not send '{tag}' to rank {dst} within {self.timeout_s:g} s")
            with suppress(zmq.NotDone):
                lent.wait(min(left, 0.02))
            # Were two ranks both to wait here without reading, neither would go on.
            while self._take(0.001 if lent.done else 0):
                pass

    def _next(self, src: int | None, types: tuple[type[Message], ...] | None, limit: float, deadline: float) -> Message:
        self._check_call("recv")
        while True:
            for i, message in enumerate(self._arrived):
                if (src is None or message.src == src) and (types is None or isinstance(message, types)):
                    del self._arrived[i]
                    return message
            if not self._take(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(
                    f"rank {self.rank} waited {limit:g} s for a message from {'any rank' if src is None else f'rank {src}'}"
                )

    def _take(self, timeout_s: float) -> bool:
        """Take in a message, good or bad, or somebody's end; False if there was none in time."""
        before, ready = len(self._arrived), self._wait(timeout_s)
        ended = [watched for watched in self._watched if watched in ready]
        for watched in ended:
            self._bury(watched)
        if self._inbox in ready and not ended:
            self._take_in()
        return bool(ready) or len(self._arrived) > before

    def _wait(self, timeout_s: float) -> dict[Any, int]:
        """What there is to be taken in."""
        end = time.monotonic() + min(timeout_s, 1e6)
        while True:
            left = max(0.0, end - time.monotonic())
            ready = dict(
                self._poller.poll(
                    math.ceil(1000 * (left if self._silence is None else min(left, self._silence.look_s)))
                )
            )
            if self._find_silence() or ready or left <= 0:
                return ready

    def _find_silence(self) -> bool:
        """Now and then take in the news of those who have been silent for too long; whether there was any."""
        if self._silence is None or not self._silence.is_due():
            return False
        for _ in range(LOOKED_THROUGH):  # They may have spoken, and nobody has read it.
            if not self._inbox.poll(0):
                break
            self._take_in()
        silent = self._silence.found()
        self._arrived.extend(PeerSuspected(src=rank) for rank in silent)
        return bool(silent)

    def _take_in(self) -> Message | None:
        try:
            frames = self._inbox.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:  # A connection that breaks within a message makes the socket readable, and there is nothing.
            return None
        try:
            message = self._read(frames)
        except (msgspec.MsgspecError, ValueError) as error:
            reason: Reason = "unknown type" if isinstance(error, UnknownType) else "malformed"
            self._refuse(f"a message from rank {frames[0].get('User-Id')}: {error}", reason)
            return None
        if isinstance(message, Beat):
            if self._silence is not None:
                self._silence.hear(message.src)
            return None
        self._arrived.append(message)
        return message

    def _bury(self, watched: int) -> None:
        """A process has ended: hear what it has said before, free what it was still to read, and drop what is for it."""
        rank = self._watched[watched]
        end = time.monotonic() + LAST_WORDS_S
        # Once more after the kernel has been asked: what has left it since then is in the inbox.
        while time.monotonic() < end and (self._inbox.poll(0) or is_under_way(self.address) or self._inbox.poll(0)):
            if self._inbox.poll(1) and (message := self._take_in()) is not None and message.src == rank:
                end = time.monotonic() + LAST_WORDS_S
        del self._watched[watched]
        self._poller.unregister(watched)
        os.close(watched)
        self._gone.add(rank)
        if self._silence is not None:
            self._silence.forget(rank)
        self._near[rank] = None
        self._parcels.release(rank)
        if rank in self._outboxes:
            self._outboxes.pop(rank).close(linger=0)
        self._arrived.append(PeerDied(src=rank))

    def _read(self, frames: Sequence[zmq.Frame]) -> Message:
        """The message in these frames, or an error that says what is wrong with them."""
        header = msgspec.msgpack.decode(frames[0].buffer, type=Header)
        src = int(str(frames[0].get("User-Id")))  # Its key, which CURVE has verified, says who wrote it.
        if src in self._gone:
            raise ValueError("it came after the end of its sender")
        sent = [form for form in header.tensors if form[2] is None]
        if len(sent) != len(frames) - 1:
            raise ValueError(f"its header announces {len(sent)} tensors and {len(frames) - 1} came")
        rest = iter(frames[1:])
        reader = self._reader(src)  # Even if there is nothing to read: from now on it is watched.
        tensors = [
            in_frame(next(rest), name, shape) if place is None else self._in_parcel(reader, place, name, shape)
            for name, shape, place in header.tensors
        ]
        return decode(header.body, tensors, src)

    def _in_parcel(self, reader: Receiver | None, place: Location, name: Name, shape: tuple[int, ...]) -> Tensor:
        if reader is None:
            raise ValueError("it tells of a tensor in memory of its sender, which is not on this host")
        if self.max_nbytes is not None and place.nbytes > self.max_nbytes:
            raise ValueError(
                f"it tells of a tensor of {place.nbytes} bytes: this mailbox was made with max_nbytes={self.max_nbytes}"
            )
        check_form(name, shape, place.nbytes)
        return typed(reader.open(place), name, shape)
