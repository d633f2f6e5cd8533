"""Mailbox: a rank's messages to and from the other ranks of its job, over ZeroMQ.

Messages travel over encrypted and authenticated TCP (`connections`).  Large tensors for a rank of the same host stay
in memory that it can map (`segments`), and only their location is sent.  The mailbox is as trustworthy as its store: in
a `SignedStore` only ranks with the job's key can publish one.  A message is delivered once or, if a connection breaks,
not at all; messages between two ranks keep their order.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial

import msgspec
import torch
import zmq
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from paceline.errors import ClusterError
from paceline.op import Begun, Op, Ready
from paceline.protocol.messages import Beat, Message, PeerDied, PeerReturned, PeerSuspected, UnknownType
from paceline.protocol.requests import Reason, Refusals
from paceline.transport.connections import Connections
from paceline.transport.contents import check_tensor, message_in, sender_of
from paceline.transport.heartbeat import MAX_UNSENT, HeartbeatSender
from paceline.transport.outbox import Outbox, PendingSend
from paceline.transport.peer_monitor import PeerMonitor
from paceline.transport.returning import Returning
from paceline.transport.segments import SegmentReader, memory_domain
from paceline.transport.wire import header_of


class Mailbox:
    """Receives what arrives for `rank` of `size`, and sends to the others; for the process and thread that made it.

    `store` has one mailbox for each rank: give each job a PrefixStore of its own.  `bind` is this machine's address or
    interface.  `timeout_s` limits every wait without a limit of its own, and `max_nbytes` every tensor, the same on
    all ranks.  If it `is_open`, other ranks may join the first ones, and the last message from a process of this host
    is `PeerDied`.  `PeerSuspected` says that a rank has sent no heartbeat for `silent_s` seconds.  With `beat_s` the
    mailbox sends heartbeats to all ranks that it sends messages to, and `PeerReturned` ends a suspicion.

    `returning` ranks may be killed and come back as other processes (`returning`).  With `replaces` this process is
    such another one.
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
        returning: Collection[int] = (),
        replaces: bool = False,
    ) -> None:
        self.size: float = math.inf if is_open else size
        if not 0 <= rank < self.size:
            raise ValueError(f"Mailbox(rank={rank}, size={size}): a rank counts from 0 and is below the size")
        self.rank = rank
        self.timeout_s = timeout_s
        self.max_nbytes = max_nbytes
        self.is_open = is_open
        self.refusals = Refusals()
        self._pid = os.getpid()
        self._arrived: deque[Message] = deque()
        self._domain = memory_domain()
        self._readers: dict[int, SegmentReader | None] = {}  # None: the rank is on another host, or dead.
        self._heartbeats: HeartbeatSender | None = None
        self._beat_s = beat_s
        self._connections = Connections(
            store,
            rank,
            math.inf if returning else self.size,
            bind=bind,
            domain=self._domain,
            max_nbytes=max_nbytes,
            refuse=self._refuse,
            replaces=replaces,
        )
        self.address = self._connections.address
        self._inbox = self._connections.inbox
        self._outbox = Outbox(self._connect)
        self._returning = Returning(
            returning,
            self._connections,
            turn=self._turn_to_new,
            drop=self._outbox.drop,
            give_up=lambda rank: self._arrived.append(PeerDied(src=rank)),
        )
        self._monitor = PeerMonitor(self._inbox, self.address, self._receive, silent_s=silent_s)

    def send(self, dst: int, message: Message) -> Op[None]:
        """Start to send.  Once this was awaited the tensors may be overwritten; for send buffers see `in_use`."""
        self._check_call("send", dst)
        tensors = message.tensors()
        for tensor in tensors:
            check_tensor(tensor, self.max_nbytes)
        if dst in self._monitor.dead:
            return Ready("send", None)
        if dst in self._returning.lost:
            self._returning.look_for(dst)
        pending = self._outbox.send(dst, message, tensors, is_local=self._reader(dst) is not None)
        if self._outbox.is_done(pending):
            return Ready("send", None)
        return Begun("send", partial(self._wait_for_send, pending, message.tag, time.monotonic() + self.timeout_s))

    def recv(
        self, src: int | None = None, timeout: float | None = None, types: tuple[type[Message], ...] | None = None
    ) -> Op[Message]:
        """The next message when this is awaited, from `src` and of one of `types` if given.

        Its tensors may be written to, except those in their sender's send buffers.
        """
        self._check_call("recv", src)
        limit = self.timeout_s if timeout is None else timeout
        return Begun("recv", partial(self._next, src, types, limit, time.monotonic() + limit))

    def send_buffer(self, like: Tensor) -> Tensor:
        """Memory for a tensor that ranks of this host read without a copy, and that no send waits for: see `in_use`."""
        self._check_call("send_buffer")
        buffer = self._outbox.send_buffer(like) if self._domain else None
        return torch.empty(like.shape, dtype=like.dtype) if buffer is None else buffer

    def in_use(self, x: Tensor) -> bool:
        """Whether another rank may still read what was sent from a send buffer, so that it must not be overwritten."""
        self._check_call("in_use")
        return self._outbox.in_use(x)

    def watch(self, rank: int, pid: int) -> None:
        """Watch a process of this host that was, is or will be a rank: its end is reported by a message."""
        self._returning.watch(rank, pid, self._monitor)

    def expect(self, rank: int) -> None:
        """Watch a rank from which nothing has come yet: its process, or its heartbeats."""
        if self._connections.is_there(rank):
            self._reader(rank)
            self._monitor.heartbeat(rank)

    def beat(self, ranks: Sequence[int], every_s: float) -> None:
        """From now on send heartbeats to these ranks."""
        sockets = {rank: self._connections.connect(rank, max_unsent=MAX_UNSENT) for rank in ranks}
        if self._heartbeats is not None:
            return self._heartbeats.add(sockets)
        frame = header_of(Beat(), ())
        self._heartbeats = HeartbeatSender(sockets, frame, f"mailbox-{self.rank}-heartbeat", every_s=every_s)
        self._heartbeats.start()

    def close(self, linger_s: float = 5) -> None:
        """Send what still waits, for at most `linger_s` seconds; leave no thread, port or file behind."""
        if self._connections.is_closed:
            return
        self._check_call("close")
        deadline = time.monotonic() + linger_s
        if self._heartbeats is not None:
            self._heartbeats.stop()
        self._outbox.close_sockets(linger_s)
        # Receivers can open a segment only while this process has it.  Receive meanwhile: others may wait for the same.
        while time.monotonic() < deadline and (self._take(0) or self._outbox.has_unread()):
            self._take(0.002)
        self._monitor.close()
        self._outbox.close_segments()
        self._arrived.clear()
        self._readers.clear()
        self._connections.close()

    def _check_call(self, call: str, rank: int | None = None) -> None:
        if os.getpid() != self._pid or self._connections.is_closed:
            raise RuntimeError(
                f"{call}: rank {self.rank}'s mailbox is closed, "
                f"or belongs to another process ({self._pid}, not {os.getpid()})"
            )
        if rank is not None and not 0 <= rank < self.size:
            raise ValueError(f"{call}: rank {rank} is not in this job, whose ranks are 0 to {self.size - 1}")

    @property
    def refused(self) -> int:
        """How many connections and messages were refused."""
        return self.refusals.total

    @property
    def last_refusal(self) -> str | None:
        return self.refusals.last

    def _refuse(self, text: str, reason: Reason = "stranger") -> None:
        self.refusals.add(reason, text)  # In the authenticator's thread too.

    def _connect(self, dst: int) -> zmq.SyncSocket:
        # send() must not block: two ranks that both send first would wait for each other.  The socket queues any number
        # of messages; they refer to the caller's own tensors.
        socket = self._connections.connect(dst, max_unsent=0)
        if self._beat_s is not None:
            self.beat([dst], self._beat_s)
        return socket

    def _reader(self, rank: int) -> SegmentReader | None:
        """Reads the segments of a rank on this host, which then can read those of this one; None for other ranks."""
        if rank not in self._readers:
            peer = self._connections.peer(rank)
            self._returning.met(rank, peer.pid)
            is_local = bool(self._domain) and peer.domain == self._domain
            self._readers[rank] = SegmentReader(peer.pid) if is_local else None
            if is_local and self.is_open and rank != self.rank:
                self.watch(rank, peer.pid)
        return self._readers[rank]

    def _wait_for_send(self, pending: PendingSend, tag: str, deadline: float) -> None:
        self._check_call("send")
        while not self._outbox.is_done(pending):
            left = deadline - time.monotonic()
            if left <= 0:
                raise ClusterError(
                    f"rank {self.rank} could not send '{tag}' to rank {pending.dst} within {self.timeout_s:g} s"
                )
            with suppress(zmq.NotDone):
                pending.frames.wait(min(left, 0.02))
            # Receive meanwhile: two ranks that both wait here without reading would wait forever.
            while self._take(0.001 if pending.frames.done else 0):
                pass

    def _next(self, src: int | None, types: tuple[type[Message], ...] | None, limit: float, deadline: float) -> Message:
        self._check_call("recv")
        while True:
            for i, message in enumerate(self._arrived):
                if (src is None or message.src == src) and (types is None or isinstance(message, types)):
                    del self._arrived[i]
                    return message
            if not self._take(max(0.0, deadline - time.monotonic())):
                self._returning.look(src)
                sender = "any rank" if src is None else f"rank {src}"
                raise TimeoutError(f"rank {self.rank} waited {limit:g} s for a message from {sender}")

    def _take(self, timeout_s: float) -> bool:
        """Wait for a message, valid or not, or for the failure of a rank; False if there was none in time."""
        events = self._monitor.wait(timeout_s)
        self._arrived.extend(PeerSuspected(src=rank) for rank in events.suspected)
        if self._beat_s is not None:  # Workers among each other; on servers a suspected worker joins again.
            self._arrived.extend(PeerReturned(src=rank) for rank in events.returned)
        for rank in events.dead:
            if rank in self._returning.ranks:
                self._returning.ended(rank, self._monitor)
                continue
            self._readers[rank] = None
            self._outbox.drop(rank)
            self._arrived.append(PeerDied(src=rank))
        if events.has_message:
            self._receive()
        return events.is_any

    def _turn_to_new(self, rank: int) -> None:
        """There is another process of a rank: nothing of the old one is of use."""
        self._outbox.drop(rank)
        self._readers.pop(rank, None)
        self._reader(rank)
        if self._heartbeats is not None and rank in self._heartbeats.ranks:
            self._heartbeats.add({rank: self._connections.connect(rank, max_unsent=MAX_UNSENT)})

    def _receive(self) -> int | None:
        """Receive a message from the inbox; its sender, or None if there was none, it was refused or a heartbeat."""
        try:
            frames = self._inbox.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:  # A connection that breaks within a message makes the socket readable without a message.
            return None
        try:
            src = self._returning.checked(*sender_of(frames[0]))
            if src in self._monitor.dead:
                raise ValueError("it arrived after the death of its sender was reported")
            # The reader is made even if there is nothing to read: from now on the sender's process is watched.
            message = message_in(frames, self._reader(src), self.max_nbytes)
        except (msgspec.MsgspecError, ValueError) as error:
            reason: Reason = "unknown type" if isinstance(error, UnknownType) else "malformed"
            self._refuse(f"a message from rank {sender_of(frames[0])[0]}: {error}", reason)
            return None
        if isinstance(message, Beat):
            return self._monitor.heartbeat(src)
        self._monitor.note_message(src)
        self._arrived.append(message)
        return src
