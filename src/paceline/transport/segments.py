"""Parcels: tensors that travel between two processes of one host through memory that both have mapped.

A sender packs a tensor once and tells the receiver where it lies; the receiver works on it there and marks it as read when it lets go
of it, so nothing is copied twice.  The memory has no name on any disk and cannot shrink under a reader: who is killed leaves
nothing behind, and takes nothing away from those who had opened it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

LINE = (
    64  # Bytes of a cache line; parcels begin at one, and the marks of their readers, a byte each, have the one before.
)
LEAST = 1 << 22  # Bytes of the first warehouse.
NAME = "paceline-parcels"
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
READ, SENT, OPEN = 0, 1, 2  # What a mark says of its reader: it wants nothing, was told of the parcel, or works on it.


class Location(NamedTuple):
    """Where a parcel lies: in which of its sender's files, of what size, from which byte on; and where its reader's mark is."""

    file: int
    size: int
    start: int
    nbytes: int
    mark: int


class Unreadable(ValueError):
    """A parcel that is not where its sender says."""


@dataclass(slots=True)
class Parcel:
    """Bytes of a warehouse, from `start` on, that somebody may still read, or that their owner keeps."""

    start: int
    nbytes: int
    kept: weakref.ref[memoryview] | None = None  # by its owner, as long as there is this view of it
    told: dict[int, int] = field(
        default_factory=dict[int, int]
    )  # How much of it each reader was told of last, by its mark.


class Segment:
    """A file of memory, and the parcels in it, in the order in which they lie."""

    def __init__(self, size: int) -> None:
        self.file = os.memfd_create(NAME, os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.file, size)
            fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, SEALS)
            self.memory = mmap.mmap(self.file, size)
        except OSError:
            os.close(self.file)
            raise
        self.address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        self.parcels: list[Parcel] = []

    def is_lent(self, parcel: Parcel) -> bool:
        return any(self.memory[parcel.start - LINE : parcel.start])

    def tidy(self) -> None:
        """Forget what has been read by all, and is not kept."""
        self.parcels = [p for p in self.parcels if (p.kept is not None and p.kept() is not None) or self.is_lent(p)]

    def gap(self, need: int) -> int | None:
        """Where so many bytes fit between parcels, or behind them."""
        start = 0
        for parcel in self.parcels:
            if parcel.start - LINE - start >= need:
                return start
            start = parcel.start + aligned(parcel.nbytes)
        return start if len(self.memory) - start >= need else None

    def tear_down(self) -> None:
        """Nobody needs it any more: give its memory back at once, though readers may have it mapped for as long as they like."""
        with suppress(OSError):
            self.memory.madvise(mmap.MADV_REMOVE)
        os.close(self.file)


class Sender:
    """What one process sends, to up to 64 others."""

    def __init__(self) -> None:
        self._houses: list[Segment] = []  # The last one is in use, the others only until they are empty.
        self._slots: dict[int, int] = {}  # Which mark is whose.

    def pack(self, x: Tensor, reader: int) -> Location | None:
        """A copy of a tensor for a rank to read; none is made of what lies in `room`, or is a part of it.  None: there is no memory."""
        if (slot := self._slot(reader)) is None:
            return None
        found = self._find(x)
        # While the reader has not let go of it, one mark cannot stand for two readings.
        if found is None or found[0].memory[found[1].start - LINE + slot] != READ:
            try:
                house, parcel = self._store(x.nbytes)
            except OSError:  # There is no memory left for it.
                return None
            there = torch.frombuffer(house.memory, dtype=x.dtype, count=x.numel(), offset=parcel.start)
            there.view(x.shape).copy_(x.detach())
            start = parcel.start
        else:
            house, parcel = found
            start = x.data_ptr() - house.address
        mark = parcel.start - LINE + slot
        house.memory[mark], parcel.told[slot] = SENT, x.nbytes
        return Location(house.file, len(house.memory), start, x.nbytes, mark)

    def send_buffer(self, nbytes: int) -> Tensor:
        """Memory of which nothing needs to be copied when it is sent; kept until nobody has it, here or elsewhere."""
        house, parcel = self._store(nbytes)
        bytes_there = memoryview(house.memory)[parcel.start : parcel.start + nbytes]
        parcel.kept = weakref.ref(bytes_there)
        return torch.frombuffer(bytes_there, dtype=torch.uint8)

    def has(self, x: Tensor) -> bool:
        """Whether a tensor lies in `room`."""
        return self._find(x) is not None

    def is_lent(self, x: Tensor) -> bool:
        """Whether somebody may still read what lies in `room`."""
        found = self._find(x)
        return found is not None and found[0].is_lent(found[1])

    def unread(self, *readers: int) -> int:
        """Bytes that these readers, or all of them, were told of and have not opened."""
        slots = {slot for reader, slot in self._slots.items() if not readers or reader in readers}
        told = (
            (nbytes, house.memory[p.start - LINE + slot])
            for house in self._houses
            for p in house.parcels
            for slot, nbytes in p.told.items()
            if slot in slots
        )
        return sum(nbytes for nbytes, mark in told if mark == SENT)

    def release(self, reader: int) -> None:
        """A reader is gone: what it had is nobody's."""
        if (slot := self._slots.pop(reader, None)) is not None:
            for house in self._houses:
                for parcel in house.parcels:
                    house.memory[parcel.start - LINE + slot] = READ

    def close(self) -> None:
        """What readers have opened, and what is left of `room`, lives on in their mappings."""
        for house in self._houses:
            os.close(house.file)
        self._houses = []

    def _slot(self, reader: int) -> int | None:
        if reader not in self._slots:
            free = set(range(LINE)) - set(self._slots.values())
            if not free:
                return None
            self._slots[reader] = min(free)
        return self._slots[reader]

    def _find(self, x: Tensor) -> tuple[Segment, Parcel] | None:
        """Where a tensor lies, if that is in `room`."""
        if x.device.type != "cpu" or not x.is_contiguous():
            return None
        for house in self._houses:
            for parcel in house.parcels:
                begin = house.address + parcel.start
                if parcel.kept is not None and begin <= x.data_ptr() < x.data_ptr() + x.nbytes <= begin + parcel.nbytes:
                    return house, parcel
        return None

    def _store(self, nbytes: int) -> tuple[Segment, Parcel]:
        """Space for so many bytes, which nobody reads yet."""
        self._tidy()
        need = LINE + aligned(nbytes)
        start = self._houses[-1].gap(need) if self._houses else None
        if start is None:
            # Twice the size of the one before: so there are few, and no two of one size, by which readers tell them apart.
            self._houses.append(Segment(max(LEAST, 2 * need, 2 * len(self._houses[-1].memory) if self._houses else 0)))
            start = 0
        house, parcel = self._houses[-1], Parcel(start + LINE, nbytes)
        house.memory[start : parcel.start] = bytes(
            LINE
        )  # There may have been another parcel's bytes, which are no marks.
        house.parcels.append(parcel)
        house.parcels.sort(key=lambda p: p.start)
        return house, parcel

    def _tidy(self) -> None:
        for house in self._houses:
            house.tidy()
        for house in [h for h in self._houses[:-1] if not h.parcels]:
            self._houses.remove(house)
            house.tear_down()


class Tracker(Protocol):
    """What tells whether a socket has done with some memory."""

    @property
    def done(self) -> bool: ...


class OnTheWay:
    """What was given out of `room` to sockets, which may not have sent it yet."""

    def __init__(self) -> None:
        self._sent: list[tuple[Tracker, int, int, int]] = []  # With its receiver, where it begins and where it ends.

    def add(self, tracker: Tracker, receiver: int, x: Tensor) -> None:
        self._sent.append((tracker, receiver, x.data_ptr(), x.data_ptr() + x.nbytes))

    def nbytes(self, receiver: int) -> int:
        """How much of it is for one rank."""
        self._tidy()
        return sum(end - begin for _, to, begin, end in self._sent if to == receiver)

    def holds(self, x: Tensor) -> bool:
        """Whether any of it lies in a tensor."""
        self._tidy()
        return any(begin < x.data_ptr() + x.nbytes and x.data_ptr() < end for _, _, begin, end in self._sent)

    def _tidy(self) -> None:
        self._sent = [sent for sent in self._sent if not sent[0].done]


class Receiver:
    """What one process reads of another's."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._files: dict[tuple[int, int], mmap.mmap] = {}  # By their number and size.

    def open(self, place: Location) -> Tensor:
        """The bytes that a sender tells of; they are marked as read when nobody refers to them any more."""
        if place.nbytes < 1 or place.start < LINE or place.start + place.nbytes > place.size:
            raise Unreadable(f"{place.nbytes} bytes from byte {place.start} on are no parcel in a file of {place.size}")
        if not 0 <= place.mark < place.start:
            raise Unreadable(f"byte {place.mark} is no mark of a parcel at byte {place.start}")
        memory = self._memory(place)
        bytes_there = memoryview(memory)[place.start : place.start + place.nbytes]
        memory[place.mark] = OPEN
        # A tensor's storage keeps what it was made from.
        weakref.finalize(bytes_there, _let_go, memory, place.mark, os.getpid()).atexit = False
        return torch.frombuffer(bytes_there, dtype=torch.uint8)

    def _memory(self, place: Location) -> mmap.mmap:
        known = place.file, place.size
        if known not in self._files:
            self._files[known] = self._mapped(*known)
        return self._files[known]

    def _mapped(self, file: int, size: int) -> mmap.mmap:
        path = f"/proc/{self.pid}/fd/{file}"
        try:
            # By its name first: to open anything else, a device say, could have effects of its own.
            if os.readlink(path).startswith(f"/memfd:{NAME} "):
                with open(path, "r+b", buffering=0) as opened:
                    # Were it to shrink, reading it would kill this process.
                    is_sealed = fcntl.fcntl(opened, fcntl.F_GET_SEALS) & SEALS == SEALS
                    if is_sealed and os.fstat(opened.fileno()).st_size == size:
                        return mmap.mmap(opened.fileno(), size)
        except OSError as error:
            raise Unreadable(f"file {file} of process {self.pid} cannot be mapped: {error}") from error
        raise Unreadable(f"file {file} of process {self.pid} is none of {size} bytes that parcels come in")


def here() -> str:
    """What two processes have in common exactly if each may map the other's memory; empty if no other may map this one's."""
    try:
        spaces = [os.stat(f"/proc/self/ns/{space}").st_ino for space in ("net", "pid", "user")]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        rights = [
            line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapPrm")
        ]
        # The files of a process with something to hide, one that has changed its user for instance, are root's.
        is_hidden = os.stat("/proc/self/fd").st_uid != os.geteuid()
    except OSError:
        return ""
    return (
        ""
        if is_hidden or not hasattr(os, "memfd_create")
        else "-".join(map(str, [boot, *spaces, os.geteuid(), os.getegid(), *rights]))
    )


def aligned(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE


def _let_go(memory: mmap.mmap, mark: int, pid: int) -> None:
    if os.getpid() == pid:  # A child that was forked has a copy of the tensor, but the mark is its parent's.
        memory[mark] = READ
