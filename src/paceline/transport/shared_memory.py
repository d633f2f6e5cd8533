"""Shared memory: collectives between the ranks of one host.

A rank copies what it gives into its arena, memory that its peers have mapped, and tells them where by a small notice on a unix
socket; they sum or copy straight out of it.  A large sum is relayed block by block through the first rank's arena.  Arenas and
sockets have no name on any disk, so a killed rank leaves nothing behind, and its peers learn of its death from its socket.
Sums are taken in the order of the ranks on every rank alike, so they equal `((x0 + x1) + x2) + ...` to the last bit.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from paceline.endpoint import check_summable
from paceline.errors import ClusterError, PeerLost
from paceline.op import Op, Ready
from paceline.transport.arena import NOTHING, Arena, aligned, mapped
from paceline.transport.mesh import CODES, Kind, Mesh, Notice, Peer, meet

T = TypeVar("T")

RELAYED_FROM = 1 << 21  # Bytes from which it is worth a rank's while to wait for the one before it.
BLOCK = 3 << 19  # Bytes that are passed on at a time: few notices, but little enough to find it in the cache again.

NO_EXTRAS = torch.empty(0, dtype=torch.float64)

# What a collective does, from copying into its slot (up to the first yield) to its end.  What it yields tells, whenever it is
# called, the places of the peers that must be heard from before it can go on.
Missing = Callable[[], list[int]]
Steps = Generator[Missing, None, None]


class Collective(Op[T]):
    """One collective of one rank, under way or finished."""

    __slots__ = ("added", "fetched", "finish", "heard", "missing", "notice", "result", "slot", "steps")

    def __init__(self, notice: Notice, slot: Tensor, result: T, finish: Callable[[int], None]) -> None:
        super().__init__(Kind(notice.kind).name)
        self.notice = notice
        self.slot = slot
        self.result = result
        self.finish = finish
        self.steps: Steps | None = None
        self.missing: Missing = list
        self.heard: dict[int, Tensor] = {}  # What each peer gives, by its place.
        self.added: defaultdict[int, int] = defaultdict(
            int
        )  # How many blocks of a relayed sum each rank has added its own to,
        self.fetched: defaultdict[int, int] = defaultdict(int)  # and of how many it has fetched the total.

    def wait(self) -> T:
        self.finish(self.notice.number)
        return self.result


class SharedMemory:
    """One rank's part in a group on one host.  The caller's own thread does all the work, while it starts and waits."""

    def __init__(self, rank: int, ranks: Sequence[int], peers: Sequence[Peer], *, timeout_s: float) -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self._place = self.ranks.index(rank)
        self._others = [place for place in range(len(ranks)) if place != self._place]
        self._mesh = Mesh(peers, timeout_s=timeout_s)
        self._timeout_s = timeout_s
        # A relayed block takes one addition after another and a fetch, while every rank has an addition and a fetch of its own to
        # do for each block.  So half as many blocks as ranks keep all of them busy; the others are for news to be on its way.
        self._windows = 2 + len(ranks) // 2
        self._number = 0
        self._finished = 0
        self._pending: dict[int, Collective[Any]] = {}
        self._early: dict[int, list[tuple[int, Notice, Tensor]]] = {}
        self._arena = Arena(
            lambda file, nbytes: self._tell(dict.fromkeys(self._others, Notice(Kind.arena, nbytes=nbytes)), file)
        )
        self._arenas = {place: NOTHING for place in self._others}
        self._read_by = {place: 0 for place in self._others}  # The last collective that each peer has finished.
        self._broken: ClusterError | None = None

    @classmethod
    def connect(cls, store: Store, rank: int, ranks: Sequence[int], *, timeout_s: float) -> SharedMemory:
        """Meet the other `ranks` through the store, whose keys must be this group's own (a PrefixStore)."""
        if rank not in ranks or len(set(ranks)) < len(ranks) or timeout_s <= 0:
            raise ValueError(
                f"SharedMemory.connect(rank={rank}, ranks={list(ranks)}, timeout_s={timeout_s}): "
                "the rank must be one of the ranks, no rank may occur twice, and the timeout must be above 0"
            )
        return cls(rank, ranks, meet(store, rank, ranks, timeout_s=timeout_s), timeout_s=timeout_s)

    def all_reduce(self, x: Tensor, extras: Tensor | None = None) -> Op[Tensor]:
        """The sum over the group, in place.  `tail`, a few float64 numbers, travels and is summed along."""
        check_summable(x)
        values = flat(x, "all_reduce")
        extras = NO_EXTRAS if extras is None else flat(extras, "all_reduce")
        if extras.dtype != torch.float64:
            raise ValueError(f"all_reduce with a tail of {extras.dtype}: it must be of torch.float64")
        if len(self.ranks) == 1:
            return Ready("all_reduce", x)
        op = self._collective(
            Kind.all_reduce,
            x,
            x.dtype,
            nbytes=x.nbytes,
            room=self._room(self._place, x.nbytes, extras.nbytes),
            extras=extras.nbytes,
        )
        add_up = self._relay if values.nbytes >= RELAYED_FROM else self._add_whole
        return self._start(op, add_up(op, values, extras))

    def all_gather(self, data: Tensor) -> Op[list[Tensor]]:
        """Every member's `data`, in the order of the ranks; all of one size."""
        values = flat(data.contiguous(), "all_gather")
        rows = [values.clone() if rank == self.rank else torch.empty_like(values) for rank in self.ranks]
        result = [row.view(data.shape) for row in rows]
        if len(self.ranks) == 1:
            return Ready("all_gather", result)
        op = self._collective(Kind.all_gather, result, data.dtype, nbytes=data.nbytes, room=data.nbytes)
        return self._start(op, self._gather(op, [row.view(torch.uint8) for row in rows]))

    def all_to_all(self, parts: Sequence[Tensor]) -> Op[list[Tensor]]:
        """Give the j-th member `parts[j]`; get what each member had for this rank.  Parts are bytes, of any sizes."""
        if len(parts) != len(self.ranks) or any(part.dtype != torch.uint8 for part in parts):
            raise ValueError(
                f"all_to_all of {len(parts)} parts of {[part.dtype for part in parts]}: "
                f"it takes one of torch.uint8 for each of the {len(self.ranks)} ranks"
            )
        given = [flat(part.contiguous(), "all_to_all") for part in parts]
        result = [given[self._place].clone()] * len(given)
        if len(self.ranks) == 1:
            return Ready("all_to_all", result)
        starts = list(accumulate((aligned(part.nbytes) for part in given), initial=0))
        op = self._collective(
            Kind.all_to_all, result, torch.uint8, nbytes=sum(part.nbytes for part in given), room=starts.pop()
        )
        notices = {
            i: op.notice._replace(nbytes=given[i].nbytes, offset=op.notice.offset + starts[i]) for i in self._others
        }
        return self._start(op, self._exchange(op, given, starts), notices)

    def broadcast(self, x: Tensor, src: int) -> Op[Tensor]:
        """What rank `src` has in `x`, into every member's `x`."""
        if src not in self.ranks:
            raise ValueError(f"broadcast(src={src}): the ranks of this group are {list(self.ranks)}")
        values = flat(x, "broadcast")
        if len(self.ranks) == 1:
            return Ready("broadcast", x)
        op = self._collective(
            Kind.broadcast, x, x.dtype, nbytes=x.nbytes, room=x.nbytes if src == self.rank else 0, src=src
        )
        return self._start(op, self._spread(op, values.view(torch.uint8), self.ranks.index(src)))

    def poll(self) -> None:
        """Carry on with what was started, as far as that goes without waiting."""
        if self._broken is not None:
            raise self._broken
        self._mesh.listen(0.0)
        self._progress()

    def close(self) -> None:
        """Leave the group.  What this rank has told its peers of stays readable to them."""
        self._broken = self._broken or ClusterError(f"rank {self.rank} has closed its shared memory")
        self._arena.close()
        self._mesh.close()

    def _add_whole(self, op: Collective[Tensor], x: Tensor, extras: Tensor) -> Steps:
        """Every rank adds up everything: one notice to each peer, and so the least latency."""
        op.slot[: x.nbytes].view(x.dtype).copy_(x)
        last(op.slot, extras).copy_(extras)
        yield lambda: self._silent(op)
        slots = self._in_order(op.heard, op.slot)
        add([slot[: x.nbytes].view(x.dtype) for slot in slots], x)
        if extras.numel() > 0:
            add([last(slot, extras) for slot in slots], extras)

    def _relay(self, op: Collective[Tensor], x: Tensor, extras: Tensor) -> Steps:
        """The sum of each block passes from rank to rank, every rank adding its own; the last one's is the total for all.

        However many ranks there are, each goes over its values just twice.  The blocks take turns in few windows of the first
        rank's slot, so that they, and a rank's own values until it fetches their total, stay in the cache.  A window changes
        hands by a notice only: from one rank to the next, from the final one to all, and from all back to the first.
        """
        size = self._block(x.nbytes) // x.itemsize
        blocks = x.split(size)
        me, final = self._place, len(self.ranks) - 1
        added, fetched = op.added, op.fetched
        last(op.slot, extras).copy_(extras)
        yield lambda: self._silent(op)
        slot = op.slot if me == 0 else op.heard[0]
        windows = slot[: min(x.nbytes, self._windows * size * x.itemsize)].view(x.dtype).split(size)

        def missing() -> list[int]:
            if fetched[me] < added[final]:
                return []
            if added[me] == len(blocks):
                return [final]
            if me > 0:
                late = [me - 1] if added[me - 1] == added[me] else []
            else:  # A window must have been read by all before it is used again; if by the final one, then by this one too.
                late = [place for place in self._others if fetched[place] + len(windows) <= added[me]]
            # Nobody ends before this rank has added everything, so whoever is gone now has not done its part.
            return late and [*late, *self._mesh.gone]

        while fetched[me] < len(blocks):
            if fetched[me] < added[final]:
                block = blocks[fetched[me]]
                block.copy_(windows[fetched[me] % len(windows)][: block.numel()])
                fetched[me] += 1
                if me > 0 and fetched[me] % 2 == 0 and fetched[me] - 2 < len(blocks) - len(windows):
                    self._tell({0: op.notice.counting(Kind.fetched, fetched[me], self._finished)})
            elif missing():
                yield missing
            else:
                block = blocks[added[me]]
                window = windows[added[me] % len(windows)][: block.numel()]
                if me == 0:
                    window.copy_(block)
                else:
                    window.add_(block)
                added[me] += 1
                hearers = self._others if me == final else [me + 1]
                self._tell(dict.fromkeys(hearers, op.notice.counting(Kind.added, added[me], self._finished)))
        if extras.numel() > 0:
            add([last(slot, extras) for slot in self._in_order(op.heard, op.slot)], extras)

    def _silent(self, op: Collective[Any]) -> list[int]:
        return [place for place in self._others if place not in op.heard]

    def _in_order(self, theirs: Mapping[int, Tensor], own: Tensor) -> list[Tensor]:
        return [theirs.get(place, own) for place in range(len(self.ranks))]

    def _gather(self, op: Collective[list[Tensor]], rows: list[Tensor]) -> Steps:
        op.slot.copy_(rows[self._place])
        yield lambda: self._silent(op)
        for place, slot in op.heard.items():
            rows[place].copy_(slot)

    def _exchange(self, op: Collective[list[Tensor]], given: list[Tensor], starts: list[int]) -> Steps:
        for place in self._others:
            op.slot[starts[place] : starts[place] + given[place].nbytes].copy_(given[place])
        yield lambda: self._silent(op)
        for place, slot in op.heard.items():
            op.result[place] = slot.clone()

    def _spread(self, op: Collective[Tensor], x: Tensor, root: int) -> Steps:
        if root == self._place:
            op.slot.copy_(x)
        yield lambda: self._silent(op)
        if root != self._place:
            x.copy_(op.heard[root])

    def _collective(
        self, kind: Kind, result: T, dtype: torch.dtype, *, nbytes: int, room: int, extras: int = 0, src: int = -1
    ) -> Collective[T]:
        if self._broken is not None:
            raise self._broken
        self._number += 1
        offset, slot = self._arena.slot(self._number, room, read=min(self._read_by.values()))
        notice = Notice(kind, CODES[dtype], self._number, self._finished, src, nbytes, extras, offset)
        return Collective(notice, slot, result, self._finish)

    def _start(self, op: Collective[T], steps: Steps, notices: Mapping[int, Notice] | None = None) -> Op[T]:
        number = op.notice.number
        op.steps, op.missing = steps, next(steps)
        self._pending[number] = op
        # The notice orders memory as well: sending and receiving it take one lock in the kernel, so whoever has read it sees
        # all that was written to the arena before it was sent.
        self._tell(notices or dict.fromkeys(self._others, op.notice))
        for place, notice, slot in self._early.pop(number, ()):
            self._take(op, place, notice, slot)
        self.poll()
        return op

    def _finish(self, number: int) -> None:
        """Carry on until collective `number` and all before it are finished."""
        while number in self._pending:
            if self._broken is not None:
                raise self._broken
            self._progress()
            if number not in self._pending:
                return
            first = next(iter(self._pending.values()))
            missing = first.missing()
            if any(place in self._mesh.gone for place in missing):
                raise self._lost(first.notice)
            if not self._mesh.listen(self._timeout_s):
                names = " and ".join(f"rank {self.ranks[place]}" for place in missing)
                self._broken = ClusterError(
                    f"rank {self.rank} waited {self._timeout_s:.1f} s for {names} in {first.notice}"
                )

    def _progress(self) -> None:
        while self._mesh.inbox:
            self._hear(*self._mesh.inbox.popleft())
        for op in list(self._pending.values()):
            while op.steps is not None and not op.missing():
                try:
                    op.missing = next(op.steps)
                except StopIteration:
                    op.steps, op.slot = None, NOTHING
                    op.heard.clear()
            if op.steps is not None and len(op.heard) < len(self._others):
                break  # Peers start in the same order, so none has started what comes after.
        while self._pending and self._pending[self._finished + 1].steps is None:
            self._finished += 1
            del self._pending[self._finished]

    def _tell(self, notices: Mapping[int, Notice], file: int | None = None) -> None:
        try:
            for place, notice in notices.items():
                self._mesh.tell(place, notice, file)
        except ClusterError as error:
            self._broken = error
            raise

    def _hear(self, place: int, notice: Notice, file: int | None) -> None:
        if notice.kind == Kind.arena:
            assert file is not None
            self._arenas[place] = mapped(file, notice.nbytes)
            os.close(file)
        elif notice.kind in (Kind.added, Kind.fetched):
            self._read_by[place] = notice.finished
            op = self._pending.get(notice.number)
            if op is not None:  # Else this rank needed nothing more of it.
                (op.added if notice.kind == Kind.added else op.fetched)[place] = notice.offset
        else:
            self._read_by[place] = notice.finished
            room = self._room(place, notice.nbytes, notice.extras) if notice.kind == Kind.all_reduce else notice.nbytes
            slot = self._arenas[place][notice.offset : notice.offset + room]
            if notice.number in self._pending:
                self._take(self._pending[notice.number], place, notice, slot)
            else:
                self._early.setdefault(notice.number, []).append((place, notice, slot))

    def _take(self, op: Collective[Any], place: int, notice: Notice, slot: Tensor) -> None:
        if not op.notice.agrees(notice):
            self._broken = ClusterError(
                f"rank {self.rank} began {op.notice}, but rank {self.ranks[place]} began {notice}: "
                "all ranks must begin the same collectives in the same order"
            )
            raise self._broken
        op.heard[place] = slot

    def _lost(self, doing: Notice) -> ClusterError:
        rank = self.ranks[self._mesh.gone[0]]
        self._broken = PeerLost(rank, str(doing))
        # Peers will now miss this rank too, but should name the one that went first.
        self._tell(dict.fromkeys(self._others, Notice(Kind.lost, rank=rank)))
        return self._broken

    def _room(self, place: int, nbytes: int, extras: int) -> int:
        """Bytes of a slot for a sum: of the values only the first rank's slot has any when they are relayed."""
        if nbytes >= RELAYED_FROM:
            nbytes = min(nbytes, self._windows * self._block(nbytes)) if place == 0 else 0
        return aligned(nbytes) + extras

    def _block(self, nbytes: int) -> int:
        """Bytes of a block: many ranks need many, lest most of them wait for the first and then for the last."""
        return min(BLOCK, aligned(-(-nbytes // len(self.ranks))))


def flat(x: Tensor, doing: str) -> Tensor:
    if x.device.type != "cpu" or not x.is_contiguous():
        raise ValueError(
            f"{doing} of a tensor on {x.device} with strides {x.stride()}: it must be contiguous and on the cpu"
        )
    return x.detach().view(-1)


def last(slot: Tensor, extras: Tensor) -> Tensor:
    return slot[slot.numel() - extras.nbytes :].view(extras.dtype)


def add(terms: Sequence[Tensor], total: Tensor) -> None:
    """Sum in the order given."""
    torch.add(terms[0], terms[1], out=total)
    for term in terms[2:]:
        total.add_(term)
