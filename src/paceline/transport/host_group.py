"""The ranks of one host that run collectives together: which collectives are in flight, and how each one progresses.

A collective starts by copying its input into a slot of this rank's arena and sending every peer a notice of where it
is.  It continues whenever the notices that it waits for have arrived, and only while the caller starts, polls or
waits: there is no thread.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.errors import ClusterError, DifferentCollectives, ExchangeFailed, PeerLost
from paceline.op import Op
from paceline.transport.arena import Arena
from paceline.transport.memory import NO_BYTES, mapped
from paceline.transport.mesh import CODES, WATCH_S, HostPeer, Kind, Mesh, Notice, Watch

T = TypeVar("T")

# The work of a collective.  Up to its first yield it copies its input into its slot.  It yields a function that
# returns the indices of the peers it still waits for; it continues when that is empty.
Missing = Callable[[], list[int]]
Steps = Generator[Missing, None, None]


class Collective(Op[T]):
    """One collective of one rank, in flight or finished."""

    __slots__ = ("added", "fetched", "finish", "missing", "notice", "result", "slot", "slots", "steps")

    def __init__(self, notice: Notice, slot: Tensor, result: T, finish: Callable[[int], None]) -> None:
        super().__init__(Kind(notice.kind).name)
        self.notice = notice
        self.slot = slot
        self.result = result
        self.finish = finish
        self.steps: Steps | None = None
        self.missing: Missing = list
        self.slots: dict[int, Tensor] = {}  # The peers' slots, by their index, once they have started too.
        # Of a relayed sum: how many blocks each rank has added its values to, and of how many it has fetched the total.
        self.added: defaultdict[int, int] = defaultdict(int)
        self.fetched: defaultdict[int, int] = defaultdict(int)

    def wait(self) -> T:
        self.finish(self.notice.number)
        return self.result


class HostGroup:
    """One rank's part in a group on one host.  `slot_nbytes(index, notice)` is the size of a peer's slot."""

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        peers: Sequence[HostPeer],
        *,
        slot_nbytes: Callable[[int, Notice], int],
        timeout_s: float,
        watch: Watch | None = None,
    ) -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self.index = self.ranks.index(rank)
        self.others = [index for index in range(len(ranks)) if index != self.index]
        self.finished = 0  # All collectives up to this number are finished.
        self._slot_nbytes = slot_nbytes
        self._timeout_s = timeout_s
        self._watch = watch
        self._mesh = Mesh(peers, timeout_s=timeout_s)
        self._number = 0
        self._pending: dict[int, Collective[Any]] = {}
        self._early: dict[int, list[tuple[int, Notice, Tensor]]] = {}  # Notices of what this rank has not started yet.
        self._arena = Arena(
            lambda file, nbytes: self.send(dict.fromkeys(self.others, Notice(Kind.arena, nbytes=nbytes)), file)
        )
        self._arenas = {index: NO_BYTES for index in self.others}
        self._read_by = {index: 0 for index in self.others}  # The last collective that each peer has finished.
        self._broken: ClusterError | None = None

    @property
    def lost(self) -> list[int]:
        """Indices of the peers that have left or died."""
        return self._mesh.lost

    def begin(
        self,
        kind: Kind,
        result: T,
        dtype: torch.dtype,
        *,
        nbytes: int,
        slot_nbytes: int,
        extras: int = 0,
        src: int = -1,
    ) -> Collective[T]:
        """A new collective with a slot of its own; no peer knows of it before `start`."""
        if self._broken is not None:
            raise self._broken
        self._number += 1
        offset, slot = self._arena.slot(self._number, slot_nbytes, read=min(self._read_by.values()))
        notice = Notice(kind, CODES[dtype], self._number, self.finished, src, nbytes, extras, offset)
        return Collective(notice, slot, result, self._finish)

    def start(self, op: Collective[T], steps: Steps, notices: Mapping[int, Notice] | None = None) -> Op[T]:
        """Run the first step and notify the peers, each by its own notice if `notices` are given."""
        number = op.notice.number
        op.steps = steps
        op.missing = next(steps)
        self._pending[number] = op
        # A notice orders memory as well: to send and to receive it takes one lock in the kernel.  A rank that has read
        # a notice therefore sees all that was written to the arena before the notice was sent.
        self.send(notices or dict.fromkeys(self.others, op.notice))
        for index, notice, slot in self._early.pop(number, ()):
            self._accept(op, index, notice, slot)
        self.poll()
        return op

    def send(self, notices: Mapping[int, Notice], file: int | None = None) -> None:
        """Send each peer its notice."""
        try:
            for index, notice in notices.items():
                self._mesh.send(index, notice, file)
        except ClusterError as error:
            self._broken = error
            raise

    def poll(self) -> None:
        """Continue what was started, as far as possible without waiting."""
        if self._broken is not None:
            raise self._broken
        self._mesh.receive(0.0)
        self._progress()

    def not_started(self, op: Collective[Any]) -> list[int]:
        """Indices of the peers that have not started a collective."""
        return [index for index in self.others if index not in op.slots]

    def slots_in_order(self, op: Collective[Any]) -> list[Tensor]:
        """The slots of all ranks, this one's included, in the order of the ranks."""
        return [op.slots.get(index, op.slot) for index in range(len(self.ranks))]

    def close(self) -> None:
        """Leave the group.  Peers can still read the slots that they have been notified of."""
        self._broken = self._broken or ClusterError(f"rank {self.rank} has closed its shared memory")
        self._arena.close()
        self._mesh.close()

    def _finish(self, number: int) -> None:
        """Continue until collective `number` and all before it are finished."""
        deadline = time.monotonic() + self._timeout_s
        while number in self._pending:
            if self._broken is not None:
                raise self._broken
            self._progress()
            if number not in self._pending:
                return
            first = next(iter(self._pending.values()))
            missing = first.missing()
            if any(index in self._mesh.lost for index in missing):
                raise self._peer_lost(first.notice)
            if self._receive(missing, first.notice):
                deadline = time.monotonic() + self._timeout_s
            elif time.monotonic() > deadline:
                names = " and ".join(f"rank {self.ranks[index]}" for index in missing)
                self._broken = ExchangeFailed(
                    f"rank {self.rank} waited {self._timeout_s:.1f} s for {names} in {first.notice}"
                )

    def _receive(self, missing: Sequence[int], notice: Notice) -> bool:
        """Wait for a notice; False if none has come.  It looks now and then whether a missing rank is dead."""
        if self._watch is None:
            return self._mesh.receive(self._timeout_s)
        if self._mesh.receive(min(WATCH_S, self._timeout_s)):
            return True
        for index in missing:
            if (why := self._watch([self.ranks[index]])) is not None:
                self._mesh.lost.append(index)
                raise self._peer_lost(notice, why)
        return False

    def _progress(self) -> None:
        while self._mesh.inbox:
            self._handle(*self._mesh.inbox.popleft())
        for op in list(self._pending.values()):
            while op.steps is not None and not op.missing():
                try:
                    op.missing = next(op.steps)
                except StopIteration:
                    op.steps = None
                    op.missing = list  # It refers to the op, and both to memory.
                    op.slot = NO_BYTES
                    op.slots.clear()
            if op.steps is not None and len(op.slots) < len(self.others):
                break  # Peers start collectives in the same order, so not all have started a later one.
        while self._pending and self._pending[self.finished + 1].steps is None:
            self.finished += 1
            del self._pending[self.finished]

    def _handle(self, index: int, notice: Notice, file: int | None) -> None:
        if notice.kind == Kind.arena:
            assert file is not None
            self._arenas[index] = mapped(file, notice.nbytes)
            os.close(file)
        elif notice.kind in (Kind.added, Kind.fetched):
            self._read_by[index] = notice.finished
            op = self._pending.get(notice.number)
            if op is not None:  # Otherwise this rank has finished it already.
                (op.added if notice.kind == Kind.added else op.fetched)[index] = notice.offset
        else:
            self._read_by[index] = notice.finished
            slot = self._arenas[index][notice.offset : notice.offset + self._slot_nbytes(index, notice)]
            if notice.number in self._pending:
                self._accept(self._pending[notice.number], index, notice, slot)
            else:
                self._early.setdefault(notice.number, []).append((index, notice, slot))

    def _accept(self, op: Collective[Any], index: int, notice: Notice, slot: Tensor) -> None:
        """A peer has started a collective that this rank has started too."""
        if not op.notice.agrees(notice):
            self._broken = DifferentCollectives(
                f"rank {self.rank} started {op.notice}, but rank {self.ranks[index]} started {notice}: "
                "all ranks must start the same collectives in the same order"
            )
            raise self._broken
        op.slots[index] = slot

    def _peer_lost(self, notice: Notice, why: str = "") -> ClusterError:
        rank = self.ranks[self._mesh.lost[0]]
        self._broken = PeerLost(rank, str(notice), why)
        # Peers will now miss this rank too, but should name the rank that was lost first.
        self.send(dict.fromkeys(self.others, Notice(Kind.lost, rank=rank)))
        return self._broken
