"""What one rank sends: a socket for each receiver, segments for receivers on this host, and flow control."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import zmq
from torch import Tensor

from paceline.protocol.messages import Message
from paceline.transport.segments import InFlight, SegmentWriter
from paceline.transport.wire import flat_bytes, header_of

# From this size on it is faster to send a rank of the same host the location of a tensor than the tensor.
SHARED_FROM = 2**16
# Bytes that may be in flight to a receiver, or not opened by it, before awaited sends to it wait.
UNREAD_NBYTES = 2**29
SENT = zmq.MessageTracker()  # Tracks no frame: always done.


class PendingSend(NamedTuple):
    """A message that was sent.  It is done when its tensors may be overwritten and the receiver keeps up."""

    dst: int
    frames: zmq.MessageTracker  # The frames that ZeroMQ reads from the sender's tensors.
    max_unread: float  # How many bytes the receiver may not have opened.


class Outbox:
    """Sends messages to other ranks; `connect(rank)` makes the socket for the first of them."""

    def __init__(self, connect: Callable[[int], zmq.SyncSocket]) -> None:
        self._connect = connect
        self._sockets: dict[int, zmq.SyncSocket] = {}
        self._segments = SegmentWriter()
        self._in_flight = InFlight()

    def send(self, dst: int, message: Message, tensors: Sequence[Tensor], *, is_local: bool) -> PendingSend:
        """Start to send a message with these tensors; `is_local`: the receiver can map this rank's segments."""
        socket = self.socket(dst)
        if not tensors:  # Most messages: a request, or a reply without values.
            socket.send(header_of(message, ()))
            return PendingSend(dst, SENT, math.inf)
        locations = [self._segments.write(t, dst) if is_local and t.nbytes >= SHARED_FROM else None for t in tensors]
        framed = [t for t, location in zip(tensors, locations, strict=True) if location is None]
        socket.send(header_of(message, locations), zmq.SNDMORE if framed else 0)
        frames = self._send_frames(socket, dst, framed)
        shared = sum(location.nbytes for location in locations if location is not None)
        # A message of any size may be sent if the receiver has opened all others.
        max_unread = max(UNREAD_NBYTES, shared) if shared else math.inf
        return PendingSend(dst, frames, max_unread)

    def is_done(self, pending: PendingSend) -> bool:
        """Whether an awaited send may return."""
        if not pending.frames.done:
            return False
        return pending.max_unread == math.inf or self._segments.unread_nbytes(pending.dst) <= pending.max_unread

    def socket(self, dst: int) -> zmq.SyncSocket:
        if dst not in self._sockets:
            self._sockets[dst] = self._connect(dst)
        return self._sockets[dst]

    def send_buffer(self, like: Tensor) -> Tensor | None:
        """Memory that ranks of this host read without a copy; None if the tensor is small or there is no memory."""
        if like.nbytes >= SHARED_FROM:
            with suppress(OSError):
                return self._segments.send_buffer(like.nbytes).view(like.dtype).view(like.shape)
        return None

    def in_use(self, x: Tensor) -> bool:
        """Whether another rank may still read what was sent from a send buffer, or a socket may still send it."""
        return self._segments.is_unread(x) or self._in_flight.overlaps(x)

    def has_unread(self) -> bool:
        """Whether any receiver has not opened what it was sent in a segment."""
        return self._segments.unread_nbytes() > 0

    def drop(self, dst: int) -> None:
        """A receiver is dead: free what it was sent, and discard what waits in its socket."""
        self._segments.release(dst)
        if dst in self._sockets:
            self._sockets.pop(dst).close(linger=0)

    def close_sockets(self, linger_s: float) -> None:
        """Send what still waits, for at most `linger_s` seconds."""
        for socket in self._sockets.values():
            socket.close(linger=math.ceil(1000 * linger_s))

    def close_segments(self) -> None:
        self._segments.close()

    def _send_frames(self, socket: zmq.SyncSocket, dst: int, tensors: list[Tensor]) -> zmq.MessageTracker:
        """Send each tensor as a frame; tracks the frames that an awaited send must wait for."""
        lent: list[zmq.MessageTracker] = []
        for i, tensor in enumerate(tensors, start=1):
            raw = flat_bytes(tensor)
            tracker = socket.send(raw.numpy().data, zmq.SNDMORE if i < len(tensors) else 0, copy=False, track=True)
            if raw.data_ptr() == tensor.data_ptr() and not tracker.done:
                if self._segments.has(tensor) and self._in_flight.nbytes(dst) < UNREAD_NBYTES:
                    self._in_flight.add(tracker, dst, tensor)
                else:
                    lent.append(tracker)
        return zmq.MessageTracker(*lent)
