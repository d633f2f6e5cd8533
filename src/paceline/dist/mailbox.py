"""Mailbox: a rank's letters to and from the other ranks of its job, over ZeroMQ.

Every rank binds one PULL socket and pushes to the others' over TCP, encrypted and authenticated by CURVE with a key pair
made for this rank of this job; a key that no rank has published in the store gets nothing through.  The mailbox is as
trustworthy as the store that introduces the ranks to each other: whoever can write there can join the job.

A letter is delivered once or, if a connection breaks on the way, not at all; letters between two ranks keep their order.
A mailbox belongs to the process and the thread that made it.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

import msgspec
import torch
import zmq
from torch import Tensor
from torch.distributed import Store
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from paceline.endpoint import Message
from paceline.errors import ClusterError
from paceline.op import Op, Ready

T = TypeVar("T")

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "float64", "uint8", "int8", "int16", "int32", "int64", "bool")
}
# Below this, handing a buffer over and being told of its release costs more than copying it.
COPY_BELOW = 64 * 1024
# What a frame may carry besides its tensor (a header, or CURVE's nonce and MAC) where the caller limits its size.
ENVELOPE_NBYTES = 64 * 1024
# Letters of one peer that may wait unread; then its awaited sends slow down to its reader's pace, instead of filling
# the reader's memory.
UNREAD = 16


class _Part(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=2**62)], ...], msgspec.Meta(max_length=64)]


class _Header(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    kind: str
    src: int
    version: int
    samples: int
    parts: tuple[_Part, ...]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Header).decode


class _Begun(Op[T]):
    """Finished by a call, in the thread of whoever waits first."""

    __slots__ = ("_finish", "_value")

    def __init__(self, kind: str, finish: Callable[[], T]) -> None:
        super().__init__(kind)
        self._finish: Callable[[], T] | None = finish

    def wait(self) -> T:
        if self._finish is not None:
            self._value = self._finish()
            self._finish = None
        return self._value


class _Door(threading.Thread):
    """Answers the one question ZeroMQ asks of each newcomer (ZAP, RFC 27): may this key come in, and who is it?

    It has a thread of its own, so that a rank deep in a computation still admits those who write to it; zmq.auth's
    authenticator takes one too, runs an asyncio loop in it, and hears nothing of strangers who offer no key at all.
    """

    def __init__(self, context: zmq.Context[zmq.SyncSocket], inbox: zmq.SyncSocket, store: Store, rank: int, size: int) -> None:
        super().__init__(name=f"mailbox-{rank}-door", daemon=True)
        # A store blocked in one thread's get() would keep the other's waiting; torch before 2.8 has no clone().
        self._store: Store = getattr(store, "clone", lambda: store)()
        self._size = size
        self._admitted: dict[bytes, bytes] = {}
        self._asked = context.socket(zmq.REP)
        self._asked.bind("inproc://zeromq.zap.01")
        # ZAP is asked about keys only; strangers that do not get as far are heard of from the monitor.
        inbox.monitor("inproc://failures", zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        self._failures = context.socket(zmq.PAIR)
        self._failures.connect("inproc://failures")
        self._counting = threading.Lock()
        self.refused = 0
        self.last_refusal: str | None = None

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._asked, zmq.POLLIN)
        poller.register(self._failures, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._asked in ready:
                    self._answer()
                if self._failures in ready and recv_monitor_message(self._failures)["event"] != zmq.EVENT_MONITOR_STOPPED:
                    self.refuse("a stranger did not complete CURVE's handshake: no key, or not made for this rank's")
        except zmq.ContextTerminated:
            pass  # The mailbox is closing; its context waits for these two sockets.
        finally:
            self._asked.close(linger=0)
            self._failures.close(linger=0)

    def refuse(self, reason: str) -> None:
        with self._counting:  # The mailbox's thread counts too.
            self.refused += 1
            self.last_refusal = reason

    def _answer(self) -> None:
        version, request, _domain, address, _identity, _mechanism, key = self._asked.recv_multipart()
        try:
            # Once every rank is known nobody else can be admitted, and strangers cost the store nothing.
            if key not in self._admitted and len(self._admitted) < self._size and self._store.check([_key_entry(key)]):
                self._admitted[key] = self._store.get(_key_entry(key))
            status = b"200" if key in self._admitted else b"400"
            reason = "no rank of this job has published its key"
        except RuntimeError as error:  # The store's; 300 lets the peer try again.
            status, reason = b"300", f"the store could not be asked about its key: {error}"
        if status != b"200":
            self.refuse(f"a stranger at {address.decode()}: {reason}")
        self._asked.send_multipart([version, request, status, b"", self._admitted.get(key, b""), b""])


class Mailbox:
    """What arrives for `rank` of `size`, and the way to the others.

    `store` introduces the ranks and holds one mailbox a rank: give each job, or each incarnation of it, a PrefixStore of
    its own.  `bind` is an address of this machine, or the name of an interface, where the others reach it.  `timeout_s`
    is the longest wait for anything that names no time of its own; `max_nbytes` bounds a message, for both sides.
    """

    def __init__(
        self, store: Store, rank: int, size: int, *, bind: str = "127.0.0.1", timeout_s: float = 60, max_nbytes: int | None = None
    ) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"Mailbox(rank={rank}, size={size}): a rank counts from 0 and is below the size")
        self.rank, self.size, self.timeout_s, self.max_nbytes = rank, size, timeout_s, max_nbytes
        self._store, self._pid = store, os.getpid()
        self._public, self._secret = zmq.curve_keypair()
        self._arrived: deque[Message] = deque()
        self._outboxes: dict[int, zmq.SyncSocket] = {}
        self._context = zmq.Context()
        self._inbox = self._socket(zmq.PULL)
        self._door = _Door(self._context, self._inbox, store, rank, size)
        self._door.start()
        try:
            self.address = self._bind(bind)
            self._publish()
        except BaseException:
            self.close(linger_s=0)
            raise

    @property
    def refused(self) -> int:
        """How many strangers were turned away and malformed messages dropped; a stranger counts at every attempt."""
        return self._door.refused

    @property
    def last_refusal(self) -> str | None:
        return self._door.last_refusal

    def send(self, dst: int, message: Message) -> Op[None]:
        """Begin to send; once it was awaited the tensors may be overwritten, whether or not they have arrived."""
        self._check_call("send", dst)
        if self.max_nbytes is not None and message.nbytes > self.max_nbytes:
            raise ValueError(f"send of '{message.kind}', {message.nbytes} bytes: this mailbox was made with max_nbytes={self.max_nbytes}")
        flat = [_flat_bytes(tensor) for tensor in message.tensors]
        parts = tuple(_Part(_name(tensor.dtype), tuple(tensor.shape)) for tensor in message.tensors)
        header = _encode(_Header(message.kind, self.rank, message.version, message.samples, parts))
        socket = self._outbox(dst)
        socket.send(header, zmq.SNDMORE if flat else 0)
        lent: list[zmq.MessageTracker] = []
        for i, (raw, tensor) in enumerate(zip(flat, message.tensors, strict=True), start=1):
            more = zmq.SNDMORE if i < len(flat) else 0
            if raw.numel() < COPY_BELOW:
                socket.send(raw.numpy().data, more)
                continue
            tracker = socket.send(raw.numpy().data, more, copy=False, track=True)
            if raw.data_ptr() == tensor.data_ptr():
                lent.append(tracker)
        if not lent:
            return Ready("send", None)
        deadline = time.monotonic() + self.timeout_s
        return _Begun("send", lambda: self._get_back(lent, dst, message.kind, deadline))

    def recv(self, src: int | None = None, timeout: float | None = None) -> Op[Message]:
        """The next message, from `src` if given; TimeoutError `timeout` seconds after this call.

        Messages go to whoever waits, not to whoever called first.  Their tensors own their memory and may be written to.
        """
        self._check_call("recv", src)
        limit = self.timeout_s if timeout is None else timeout
        deadline = time.monotonic() + limit
        return _Begun("recv", lambda: self._next(src, limit, deadline))

    def close(self, linger_s: float = 5) -> None:
        """Hand what was sent to the network, for at most `linger_s` seconds, and give back every thread and port."""
        if self._context.closed:
            return
        self._check_call("close")
        for socket in self._outboxes.values():
            socket.close(linger=_milliseconds(linger_s))
        self._inbox.close(linger=0)
        self._context.term()
        self._door.join()

    def __enter__(self) -> Mailbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_call(self, call: str, rank: int | None = None) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(f"{call}: rank {self.rank}'s mailbox was made in process {self._pid}, this is {os.getpid()}; make one here")
        if self._context.closed:
            raise RuntimeError(f"{call}: rank {self.rank}'s mailbox is closed")
        if rank is not None and not 0 <= rank < self.size:
            raise ValueError(f"{call}: rank {rank} is none of this job's, which are 0 to {self.size - 1}")

    def _socket(self, kind: int) -> zmq.SyncSocket:
        socket = self._context.socket(kind)
        socket.curve_publickey, socket.curve_secretkey = self._public, self._secret
        # Far-apart ranks may be silent for longer than a firewall remembers an idle connection.
        socket.tcp_keepalive, socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = 1, 30, 10, 3
        # send() must never block, or two ranks that write to each other first would; what waits here is the caller's
        # own memory, of which an awaited send holds the caller to one.
        socket.sndhwm = 0
        return socket

    def _bind(self, bind: str) -> str:
        inbox = self._inbox
        inbox.curve_server = True
        # Without the enforcement ZeroMQ lets everybody in while nobody answers for the domain.
        inbox.zap_domain, inbox.zap_enforce_domain = b"paceline", 1
        inbox.rcvhwm = UNREAD
        inbox.handshake_ivl = 5_000  # A stranger that connects and says nothing.
        if self.max_nbytes is not None:
            inbox.maxmsgsize = self.max_nbytes + ENVELOPE_NBYTES
        inbox.ipv6 = ":" in bind
        try:
            inbox.bind(f"tcp://[{bind}]:*" if ":" in bind else f"tcp://{bind}:*")
        except zmq.ZMQError as error:
            raise ValueError(f"Mailbox(bind={bind!r}): {error}; it must be an address or interface of this machine") from error
        address = inbox.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        if address.startswith(("tcp://0.0.0.0:", "tcp://[::]:")):
            raise ValueError(f"Mailbox(bind={bind!r}): name the one address at which the other ranks reach this one")
        return address

    def _publish(self) -> None:
        entry = f"{self.address} {self._public.decode()}"
        if self._store.compare_set(f"mail/{self.rank}", "", entry) != entry.encode():
            raise ValueError(f"Mailbox(rank={self.rank}): the store has a mailbox of this rank; give each job a PrefixStore of its own")
        self._store.set(_key_entry(z85.decode(self._public)), str(self.rank))

    def _outbox(self, dst: int) -> zmq.SyncSocket:
        if dst not in self._outboxes:
            try:
                entry = self._store.get(f"mail/{dst}")
            except RuntimeError as error:
                raise ClusterError(f"rank {self.rank} found no mailbox of rank {dst} in the store: {error}") from error
            address, _, key = entry.partition(b" ")
            socket = self._socket(zmq.PUSH)
            socket.curve_serverkey = key
            socket.ipv6 = b"[" in address
            socket.connect(address.decode())
            self._outboxes[dst] = socket
        return self._outboxes[dst]

    def _get_back(self, lent: Sequence[zmq.MessageTracker], dst: int, kind: str, deadline: float) -> None:
        self._check_call("send")
        for tracker in lent:
            while not tracker.done:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise ClusterError(f"rank {self.rank} could not send '{kind}' to rank {dst} within {self.timeout_s:g} s")
                try:
                    tracker.wait(min(left, 0.02))
                except zmq.NotDone:
                    # Two ranks that both wait like this would wait forever, were neither to read.
                    while self._take(0):
                        pass

    def _next(self, src: int | None, limit: float, deadline: float) -> Message:
        self._check_call("recv")
        while True:
            for i, message in enumerate(self._arrived):
                if src is None or message.src == src:
                    del self._arrived[i]
                    return message
            if not self._take(max(0.0, deadline - time.monotonic())):
                whom = "any rank" if src is None else f"rank {src}"
                raise TimeoutError(f"rank {self.rank} waited {limit:g} s for a message from {whom}")

    def _take(self, timeout_s: float) -> bool:
        """Take in one message, good or bad; False if there was none in time."""
        if not self._inbox.poll(_milliseconds(timeout_s)):
            return False
        frames = self._inbox.recv_multipart(copy=False)
        try:
            self._arrived.append(_read(frames, self.max_nbytes))
        except (msgspec.MsgspecError, ValueError) as error:
            self._door.refuse(f"a message from rank {frames[0].get('User-Id')}: {error}")
        return True


def _key_entry(key: bytes) -> str:
    return f"mail/key/{key.hex()}"


def _milliseconds(seconds: float) -> int:
    return -1 if seconds == math.inf else math.ceil(1000 * seconds)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _flat_bytes(tensor: Tensor) -> Tensor:
    """The tensor's own memory as bytes, or a copy if it is not contiguous or not on the CPU."""
    if _name(tensor.dtype) not in DTYPES:
        raise ValueError(f"send of a {tensor.dtype} tensor: a mailbox carries {', '.join(DTYPES)}")
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _read(frames: Sequence[zmq.Frame], max_nbytes: int | None) -> Message:
    """The message in these frames, or a ValueError or MsgspecError that says what is wrong with them."""
    header = _decode(frames[0].buffer)
    # The key that CURVE has verified says who wrote, so the header cannot speak for another rank.
    if str(header.src) != frames[0].get("User-Id"):
        raise ValueError(f"its header says that it is from rank {header.src}")
    if len(header.parts) != len(frames) - 1:
        raise ValueError(f"its header announces {len(header.parts)} tensors and {len(frames) - 1} came")
    if max_nbytes is not None and sum(map(len, frames[1:])) > max_nbytes:
        raise ValueError(f"it has more than max_nbytes={max_nbytes}")
    tensors = tuple(_tensor(part, frame) for part, frame in zip(header.parts, frames[1:], strict=True))
    return Message(header.kind, tensors, header.version, header.samples, header.src)


def _tensor(part: _Part, frame: zmq.Frame) -> Tensor:
    """The frame's memory as a tensor, which keeps the frame alive."""
    dtype = DTYPES.get(part.dtype)
    if dtype is None:
        raise ValueError(f"it has a tensor of unknown dtype {part.dtype!r}")
    if math.prod(part.shape) * dtype.itemsize != len(frame):
        raise ValueError(f"a {part.dtype} tensor of shape {part.shape} came with {len(frame)} bytes")
    if len(frame) == 0:
        # torch computes the strides of an empty tensor too, and they must not overflow.
        if math.prod(max(1, n) for n in part.shape) >= 2**63:
            raise ValueError(f"an empty tensor of shape {part.shape} has no strides")
        return torch.empty(part.shape, dtype=dtype)
    raw = torch.frombuffer(frame.buffer, dtype=torch.uint8)
    if dtype is torch.bool and raw.max() > 1:
        raise ValueError("a bool tensor came with bytes other than 0 and 1")
    # ZeroMQ packs small frames into one buffer, wherever they fall.
    return (raw if raw.data_ptr() % dtype.itemsize == 0 else raw.clone()).view(dtype).view(part.shape)
