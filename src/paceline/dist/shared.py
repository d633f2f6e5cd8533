"""Shared memory: collectives between the ranks of one host.

A rank copies what it gives into its arena, memory that its peers have mapped, and tells them where by a small notice on a unix
socket; they sum or copy straight out of it.  Arenas and sockets have no name on any disk, so a killed rank leaves nothing
behind, and its peers learn of its death from its socket.  Sums are taken in the order of the ranks on every rank alike, so
they equal `((x0 + x1) + x2) + ...` to the last bit.
"""

from __future__ import annotations

import array
import hmac
import math
import mmap
import os
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed
from torch import Tensor

from paceline.endpoint import check_summable
from paceline.errors import ClusterError, PeerLost
from paceline.op import Op, Ready

T = TypeVar("T")

LINE = 64  # Bytes of a cache line; slots and stripes begin at one.
CHUNK = 1 << 18  # Bytes summed at a time, so that running sums stay in the second-level cache.
STRIPED_FROM = 1 << 18  # Bytes from which sharing the additions out is worth a second notice.
SPIN_S = 100e-6  # How long to ask for news before sleeping; a sleeper takes some 50 us to wake.

DTYPES = tuple(sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str))

# What a collective does, from copying into its slot (before the first yield) to its end.  What it yields is the
# collection that must hold every peer before it can go on.
Steps = Generator[Collection[int], None, None]


class Kind(IntEnum):
    """What a notice tells of: the start of a collective, or one of the last three."""

    all_reduce = 0
    all_gather = 1
    all_to_all = 2
    broadcast = 3
    striped = 4
    arena = 5
    lost = 6


class Notice(NamedTuple):
    """All that goes through the sockets.  `finished` is the last collective whose slots the sender will not read again."""

    kind: int
    dtype: int = 0
    number: int = 0
    finished: int = 0
    rank: int = -1
    nbytes: int = 0
    tail: int = 0
    offset: int = 0

    def agrees(self, other: Notice) -> bool:
        if self.kind == other.kind == Kind.all_to_all:
            return True
        return self._replace(finished=0, offset=0) == other._replace(finished=0, offset=0)

    def __str__(self) -> str:
        tail = f" and {self.tail} of tail" if self.tail else ""
        src = f" from rank {self.rank}" if self.kind == Kind.broadcast else ""
        return f"{Kind(self.kind).name} #{self.number} of {self.nbytes} bytes of {DTYPES[self.dtype]}{tail}{src}"


NOTICE = struct.Struct("<BBxxIQqQQQ")
HELLO = struct.Struct("<16sI")


class Collective(Op[T]):
    """One collective of one rank, under way or finished."""

    __slots__ = ("awaited", "finish", "heard", "notice", "result", "slot", "steps", "striped")

    def __init__(self, notice: Notice, slot: Tensor, result: T, finish: Callable[[int], None]) -> None:
        super().__init__(Kind(notice.kind).name)
        self.notice = notice
        self.slot = slot
        self.result = result
        self.finish = finish
        self.steps: Steps | None = None  # None once finished.
        self.awaited: Collection[int] = ()
        self.heard: dict[int, Tensor] = {}  # What each peer gives, by its place.
        self.striped: set[int] = set()  # The peers whose stripe of the sum is ready.

    def wait(self) -> T:
        if self.steps is not None:
            self.finish(self.notice.number)
        return self.result


class Peer:
    """Another member: its socket, its arena, and how far it has read mine."""

    def __init__(self, place: int, rank: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.place = place
        self.rank = rank
        self.socket = connection
        self.arena = NOTHING
        self.finished = 0
        # A child that the peer forked (for a DataLoader, say) keeps its socket open after its death; a pidfd is not fooled.
        self.process = os.pidfd_open(credentials(connection).pid)

    def close(self) -> None:
        self.socket.close()
        os.close(self.process)


class SharedMemory:
    """One rank's part in a group on one host.  The caller's own thread does all the work, while it starts and waits."""

    def __init__(self, rank: int, ranks: Sequence[int], peers: Sequence[Peer], *, timeout_s: float) -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self._place = self.ranks.index(rank)
        self._peers = {peer.place: peer for peer in peers}
        self._timeout_s = timeout_s
        self._number = 0
        self._finished = 0
        self._pending: dict[int, Collective[Any]] = {}
        self._early: dict[int, list[tuple[Peer, Notice, Tensor]]] = {}
        self._arena = NOTHING
        self._slots: deque[tuple[int, int, int]] = deque()  # Number, start and stop of those that a peer may yet read.
        self._gone: list[int] = []  # Ranks, the first to go first.
        self._broken: ClusterError | None = None
        self._poll = select.poll()
        self._files: dict[int, Peer] = {}
        for peer in peers:
            for file in (peer.socket.fileno(), peer.process):
                self._files[file] = peer
                self._poll.register(file, select.POLLIN)

    @classmethod
    def connect(cls, store: torch.distributed.Store, rank: int, ranks: Sequence[int], *, timeout_s: float) -> SharedMemory:
        """Meet the other `ranks` through the store, whose keys must be this group's own (a PrefixStore)."""
        if rank not in ranks or len(set(ranks)) < len(ranks) or timeout_s <= 0:
            raise ValueError(
                f"SharedMemory.connect(rank={rank}, ranks={list(ranks)}, timeout_s={timeout_s}): "
                "the rank must be one of the ranks, no rank may occur twice, and the timeout must be above 0"
            )
        peers = meet(store, rank, ranks, deadline=time.monotonic() + timeout_s) if len(ranks) > 1 else []
        return cls(rank, ranks, peers, timeout_s=timeout_s)

    def all_reduce(self, x: Tensor, tail: Tensor | None = None) -> Op[Tensor]:
        """The sum over the group, in place.  `tail`, a few float64 numbers, travels and is summed along."""
        check_summable(x)
        values = flat(x, "all_reduce")
        tail = NO_TAIL if tail is None else flat(tail, "all_reduce")
        if tail.dtype != torch.float64:
            raise ValueError(f"all_reduce with a tail of {tail.dtype}: it must be torch.float64")
        if not self._peers:
            return Ready("all_reduce", x)
        op = self._collective(Kind.all_reduce, x, values, tail=tail.nbytes, room=aligned(values.nbytes) + tail.nbytes)
        sum_up = self._sum_stripes if values.nbytes >= STRIPED_FROM else self._sum_whole
        return self._start(op, sum_up(op, values, tail))

    def all_gather(self, data: Tensor) -> Op[list[Tensor]]:
        """Every member's `data`, in the order of the ranks; all of one size."""
        values = flat(data.contiguous(), "all_gather")
        gathered = torch.empty((len(self.ranks), values.numel()), dtype=values.dtype)
        result = [row.view(data.shape) for row in gathered]
        op = self._collective(Kind.all_gather, result, values, room=values.nbytes)
        return self._start(op, self._gather(op, values, gathered))

    def all_to_all(self, parts: Sequence[Tensor]) -> Op[list[Tensor]]:
        """Give the j-th member `parts[j]`; get what each member had for this rank.  Parts are bytes, of any sizes."""
        if len(parts) != len(self.ranks) or any(part.dtype != torch.uint8 for part in parts):
            raise ValueError(
                f"all_to_all of {len(parts)} parts of {[part.dtype for part in parts]}: "
                f"it takes one of torch.uint8 for each of the {len(self.ranks)} ranks"
            )
        pieces = [flat(part.contiguous(), "all_to_all") for part in parts]
        result: list[Tensor] = []
        op = self._collective(Kind.all_to_all, result, pieces[self._place], room=sum(aligned(p.nbytes) for p in pieces))
        return self._start(op, self._exchange(op, pieces, result), [p.nbytes for p in pieces])

    def broadcast(self, x: Tensor, src: int) -> Op[Tensor]:
        """What rank `src` has in `x`, into every member's `x`."""
        if src not in self.ranks:
            raise ValueError(f"broadcast(src={src}): the ranks of this group are {list(self.ranks)}")
        values = flat(x, "broadcast")
        op = self._collective(Kind.broadcast, x, values, rank=src, room=values.nbytes if src == self.rank else 0)
        return self._start(op, self._spread(op, values, self.ranks.index(src)))

    def poll(self) -> None:
        """Carry on with what was started, as far as that goes without waiting."""
        self._listen(0)
        self._progress()

    def close(self) -> None:
        """Leave the group.  What peers still have to read of this rank's stays readable to them."""
        self._broken = self._broken or ClusterError(f"rank {self.rank} has closed its shared memory")
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._pending.clear()
        self._arena = NOTHING

    # The collectives.

    def _sum_whole(self, op: Collective[Tensor], x: Tensor, tail: Tensor) -> Steps:
        """Everyone sums everything: one notice to each peer, and so the least latency."""
        split(op.slot, x, tail)
        yield op.heard

    ...
