"""Mailbox: a rank's letters to and from the other ranks of its job, over ZeroMQ.

Every rank binds one PULL socket and pushes to the others' over TCP, encrypted and authenticated by CURVE with a key pair
made for this rank of this job; a key that no rank has published in the store gets nothing through.  The mailbox is as
trustworthy as that store: whoever can write there can join the job.  A letter is delivered once or, if a connection
breaks on the way, not at all; letters between two ranks keep their order.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Literal, TypeVar, get_args

import msgspec
import torch
import zmq
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from paceline.endpoint import Message
from paceline.errors import ClusterError
from paceline.op import Op

T = TypeVar("T")

Name = Literal["float32", "float16", "bfloat16", "float64", "uint8", "int8", "int16", "int32", "int64", "bool"]
Shape = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=2**62)], ...], msgspec.Meta(max_length=64)]
DTYPES: dict[Name, torch.dtype] = {name: getattr(torch, name) for name in get_args(Name)}
NAMES: dict[torch.dtype, Name] = {dtype: name for name, dtype in DTYPES.items()}

# Smaller tensors are copied: up to here, lending a buffer to ZeroMQ and hearing of its return costs more.
COPY_BELOW = 2**20
# Letters of one peer that may wait unread; then its awaited sends slow down to the reader's pace and spare its memory.
UNREAD = 16
KEYS = "mail/key/"  # Where the store keeps the rank that a public key belongs to.


class _Header(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    kind: str
    src: int
    version: int
    samples: int
    tensors: tuple[tuple[Name, Shape], ...]


class _Begun(Op[T]):
    """Finished by a call, in the thread of whoever waits first."""

    def __init__(self, kind: str, finish: Callable[[], T]) -> None:
        super().__init__(kind)
        self._finish: Callable[[], T] | None = finish

    def wait(self) -> T:
        if self._finish is not None:
            self._value, self._finish = self._finish(), None
        return self._value


class _Door(threading.Thread):
    """Answers the one question ZeroMQ asks of a newcomer (ZAP, RFC 27): may this key come in, and who is it?

    In a thread of its own, so that a rank deep in a computation still admits those who write to it.  zmq.auth's
    authenticator takes a thread too, with an asyncio loop in it, and never hears of strangers who offer no key.
    """

    def __init__(self, inbox: zmq.SyncSocket, store: Store, size: int, refuse: Callable[[str], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        # A store that one thread blocks on makes the other wait; torch before 2.8 has no clone().
        self._store: Store = getattr(store, "clone", lambda: store)()
        self._size, self._refuse = size, refuse
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
                if self._failures in ready and recv_monitor_message(self._failures)["event"] != zmq.EVENT_MONITOR_STOPPED:
                    self._refuse("a stranger did not complete CURVE's handshake: it has no key, or not this rank's")

    def _answer(self) -> None:
        version, request, _domain, address, _identity, _mechanism, key = self._asked.recv_multipart()
        status, reason = b"400", "no rank of this job has published its key"
        try:
            # Once every rank is known nobody else can be admitted, and strangers cost the store nothing.
            if key not in self._admitted and len(self._admitted) < self._size and self._store.check([KEYS + key.hex()]):
                self._admitted[key] = self._store.get(KEYS + key.hex())
        except RuntimeError as error:  # The store's; 300 lets the peer try again.
            status, reason = b"300", f"the store could not be asked about its key: {error}"
        if key in self._admitted:
            status = b"200"
        else:
            self._refuse(f"a stranger at {address.decode()}: {reason}")
        self._asked.send_multipart([version, request, status, b"", self._admitted.get(key, b""), b""])


class Mailbox:
    """What arrives for `rank` of `size`, and the way to the others; for the process and thread that made it.

    `store` holds one mailbox a rank: give each job a PrefixStore of its own.  `bind` is this machine's address or interface.
    `timeout_s` bounds every wait that names no time of its own, `max_nbytes` every tensor, the same at all ranks.
    """

    def __init__(
        self, store: Store, rank: int, size: int, *, bind: str = "127.0.0.1", timeout_s: float = 60, max_nbytes: int | None = None
    ) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"Mailbox(rank={rank}, size={size}): a rank counts from 0 and is below the size")
        self.rank, self.size, self.timeout_s, self.max_nbytes = rank, size, timeout_s, max_nbytes
        self.refused = 0
        self.last_refusal: str | None = None
        self._refusing, self._store, self._pid = threading.Lock(), store, os.getpid()
        self._public, self._secret = zmq.curve_keypair()
        self._arrived: deque[Message] = deque()
        self._outboxes: dict[int, zmq.SyncSocket] = {}
        self._context = zmq.Context()
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
        self._door = _Door(self._inbox, store, size, self._refuse, f"mailbox-{rank}-door")
        self._door.start()
        try:
            self._inbox.bind(endpoint)
            self.address = self._inbox.get_string(zmq.LAST_ENDPOINT)
            if self.address.startswith(("tcp://0.0.0.0:", "tcp://[::]:")):
                raise ValueError(f"Mailbox(bind={bind!r}): name the one address at which the other ranks reach this one")
            entry = f"{self.address} {self._public.decode()}"
            if store.compare_set(f"mail/{rank}", "", entry) != entry.encode():
                raise ValueError(f"Mailbox(rank={rank}): the store has a mailbox of this rank; give each job a PrefixStore of its own")
            store.set(KEYS + z85.decode(self._public).hex(), str(rank))
        except BaseException:
            self.close(linger_s=0)
            raise

    def send(self, dst: int, message: Message) -> Op[None]:
        """Begin to send; once it was awaited the tensors may be overwritten, whether or not they have arrived."""
        self._check_call("send", dst)
        flat = [_flat_bytes(tensor, self.max_nbytes) for tensor in message.tensors]
        forms = tuple[tuple[Name, Shape], ...]((NAMES[tensor.dtype], tuple(tensor.shape)) for tensor in message.tensors)
        header = _Header(message.kind, self.rank, message.version, message.samples, forms)
        socket = self._outbox(dst)
        socket.send(msgspec.msgpack.encode(header), zmq.SNDMORE if flat else 0)
        lent: list[zmq.MessageTracker] = []
        for i, (raw, tensor) in enumerate(zip(flat, message.tensors, strict=True), start=1):
            tracker = socket.send(raw.numpy().data, zmq.SNDMORE if i < len(flat) else 0, copy=False, track=True)
            if raw.data_ptr() == tensor.data_ptr() and not tracker.done:
                lent.append(tracker)
        return _Begun("send", partial(self._get_back, zmq.MessageTracker(*lent), dst, message.kind, time.monotonic() + self.timeout_s))

    def recv(self, src: int | None = None, timeout: float | None = None) -> Op[Message]:
        """The next message when it is waited for, from `src` if given; its tensors own their memory and may be written to."""
        self._check_call("recv", src)
        limit = self.timeout_s if timeout is None else timeout
        return _Begun("recv", partial(self._next, src, limit, time.monotonic() + limit))

    def close(self, linger_s: float = 5) -> None:
        """Flush what was sent, and lose what a peer has not taken in after `linger_s` seconds; leave no thread or port behind."""
        if self._context.closed:
            return
        self._check_call("close")
        for socket in self._outboxes.values():
            socket.close(linger=math.ceil(1000 * linger_s))
        self._inbox.close(linger=0)
        self._context.term()
        self._door.join()

    def _check_call(self, call: str, rank: int | None = None) -> None:
        if os.getpid() != self._pid or self._context.closed:
            raise RuntimeError(f"{call}: rank {self.rank}'s mailbox is closed, or not of this process ({self._pid}, not {os.getpid()})")
        if rank is not None and not 0 <= rank < self.size:
            raise ValueError(f"{call}: rank {rank} is none of this job's, which are 0 to {self.size - 1}")

    def _refuse(self, reason: str) -> None:
        with self._refusing:  # The door refuses too.
            self.refused += 1
            self.last_refusal = reason

    def _socket(self, kind: int, address: str) -> zmq.SyncSocket:
        socket = self._context.socket(kind)
        socket.curve_publickey, socket.curve_secretkey = self._public, self._secret
        socket.ipv6 = "[" in address
        socket.copy_threshold = COPY_BELOW
        # Ranks may be silent for longer than a firewall remembers an idle connection.
        socket.tcp_keepalive, socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = 1, 30, 10, 3
        # send() must not block, or two ranks that both write first would; what queues here is the caller's own tensors.
        socket.sndhwm = 0
        return socket

    def _outbox(self, dst: int) -> zmq.SyncSocket:
        if dst not in self._outboxes:
            try:
                address, key = self._store.get(f"mail/{dst}").decode().split(" ")
            except RuntimeError as error:
                raise ClusterError(f"rank {self.rank} found no mailbox of rank {dst} in the store: {error}") from error
            socket = self._socket(zmq.PUSH, address)
            socket.curve_serverkey = key.encode()
            socket.connect(address)
            self._outboxes[dst] = socket
        return self._outboxes[dst]

    def _get_back(self, lent: zmq.MessageTracker, dst: int, kind: str, deadline: float) -> None:
        self._check_call("send")
        while not lent.done:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ClusterError(f"rank {self.rank} could not send '{kind}' to rank {dst} within {self.timeout_s:g} s")
            with suppress(zmq.NotDone):
                lent.wait(min(left, 0.02))
                return
            while self._take(0):
                pass  # Were two ranks both to wait here without reading, neither would go on.

    def _next(self, src: int | None, limit: float, deadline: float) -> Message:
        self._check_call("recv")
        while True:
            for i, message in enumerate(self._arrived):
                if src is None or message.src == src:
                    del self._arrived[i]
                    return message
            if not self._take(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"rank {self.rank} waited {limit:g} s for a message from {'any rank' if src is None else f'rank {src}'}")

    def _take(self, timeout_s: float) -> bool:
        """Take in one message, good or bad; False if none came in time."""
        if not self._inbox.poll(math.ceil(1000 * min(timeout_s, 1e6))):
            return False
        try:
            frames = self._inbox.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:  # A connection that breaks within a message makes the socket readable, and there is nothing.
            return True
        try:
            self._arrived.append(_read(frames, self.size))
        except (msgspec.MsgspecError, ValueError) as error:
            self._refuse(f"a message from rank {frames[0].get('User-Id')}: {error}")
        return True


def _flat_bytes(tensor: Tensor, max_nbytes: int | None) -> Tensor:
    """The tensor's own memory as bytes; a copy's if it is not contiguous or not on the CPU."""
    if tensor.dtype not in NAMES:
        raise ValueError(f"send of a {tensor.dtype} tensor: a mailbox carries {', '.join(DTYPES)}")
    if max_nbytes is not None and tensor.nbytes > max_nbytes:
        raise ValueError(f"send of a tensor of {tensor.nbytes} bytes: this mailbox was made with max_nbytes={max_nbytes}")
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _read(frames: Sequence[zmq.Frame], size: int) -> Message:
    """The message in these frames, or an error that says what is wrong with them."""
    header = msgspec.msgpack.decode(frames[0].buffer, type=_Header)
    # The key that CURVE has verified says who wrote: a header cannot speak for another rank, or for none.
    if not 0 <= header.src < size or str(header.src) != frames[0].get("User-Id"):
        raise ValueError(f"its header says that it is from rank {header.src}")
    if len(header.tensors) != len(frames) - 1:
        raise ValueError(f"its header announces {len(header.tensors)} tensors and {len(frames) - 1} came")
    tensors = tuple(_tensor(frame, name, shape) for (name, shape), frame in zip(header.tensors, frames[1:], strict=True))
    return Message(header.kind, tensors, header.version, header.samples, header.src)


def _tensor(frame: zmq.Frame, name: Name, shape: tuple[int, ...]) -> Tensor:
    """The frame's memory as a tensor, which keeps the frame alive."""
    dtype = DTYPES[name]
    if math.prod(shape) * dtype.itemsize != len(frame):
        raise ValueError(f"a {name} tensor of shape {shape} came with {len(frame)} bytes")
    # torch computes the strides of an empty tensor too, and they must not overflow.
    if math.prod(max(1, n) for n in shape) >= 2**63:
        raise ValueError(f"an empty tensor of shape {shape} has no strides")
    if len(frame) == 0:
        return torch.empty(shape, dtype=dtype)
    raw = torch.frombuffer(frame.buffer, dtype=torch.uint8)
    if dtype is torch.bool and raw.max() > 1:
        raise ValueError("a bool tensor came with bytes other than 0 and 1")
    # ZeroMQ packs small frames into one buffer, wherever they fall.
    return (raw if raw.data_ptr() % dtype.itemsize == 0 else raw.clone()).view(dtype).view(shape)
