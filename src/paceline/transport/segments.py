"""Tensors that travel between two processes of one host through segments of memory that both have mapped.

The sender copies a tensor into a segment once and sends its location.  The receiver uses the tensor there, and marks
it as read when it drops the last reference, so nothing is copied twice.  A segment has no name on any disk and cannot
shrink while a reader has it mapped: a killed process leaves nothing behind, and readers keep what they have opened.
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

from paceline.transport.memory import CACHE_LINE, aligned

FIRST_NBYTES = 1 << 22  # Bytes of the first segment.
NAME = "paceline-segment"
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
# The states of a reader, in its status byte: it has no use of the allocation, was sent its location, or has it open.
READ = 0
SENT = 1
OPEN = 2
# An allocation has a status byte for each reader, in the cache line before it.
MAX_READERS = CACHE_LINE


class Location(NamedTuple):
    """Where a tensor is: in which file of its sender, of what size, from which byte on; and its status byte."""

    file: int
    size: int
    start: int
    nbytes: int
    status: int


class Unreadable(ValueError):
    """There is no tensor at the location that a sender gave."""


@dataclass(slots=True)
class Allocation:
    """Bytes of a segment, from `start` on, that a reader may still read or that their owner still uses."""

    start: int
    nbytes: int
    owner: weakref.ref[memoryview] | None = None  # A send buffer is allocated for as long as this view of it exists.
    sent: dict[int, int] = field(default_factory=dict[int, int])  # Bytes last sent to each reader, by its slot.

    def status(self, slot: int) -> int:
        """Where the status byte of a reader is."""
        return self.start - CACHE_LINE + slot


class Segment:
    """A file in memory, and its allocations in the order of their addresses."""

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
        self.allocations: list[Allocation] = []

    def is_unread(self, allocation: Allocation) -> bool:
        """Whether any reader may still read it."""
        return any(self.memory[allocation.start - CACHE_LINE : allocation.start])

    def free_unused(self) -> None:
        """Free what all readers have read, unless its owner still has it."""
        self.allocations = [
            a for a in self.allocations if (a.owner is not None and a.owner() is not None) or self.is_unread(a)
        ]

    def gap(self, need: int) -> int | None:
        """Where `need` bytes are free between allocations, or behind them."""
        start = 0
        for allocation in self.allocations:
            if allocation.start - CACHE_LINE - start >= need:
                return start
            start = allocation.start + aligned(allocation.nbytes)
        return start if len(self.memory) - start >= need else None

    def allocate(self, start: int, nbytes: int) -> Allocation:
        """Take a gap into use."""
        allocation = Allocation(start + CACHE_LINE, nbytes)
        self.memory[start : allocation.start] = bytes(CACHE_LINE)  # These may be bytes of an earlier allocation.
        self.allocations.append(allocation)
        self.allocations.sort(key=lambda a: a.start)
        return allocation

    def close(self) -> None:
        """Return the memory of an unused segment to the system at once, although readers may keep it mapped."""
        with suppress(OSError):
            self.memory.madvise(mmap.MADV_REMOVE)
        os.close(self.file)


class SegmentWriter:
    """The segments that one process sends from, to at most `MAX_READERS` readers."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []  # The last one is in use, the others only until they are empty.
        self._slots: dict[int, int] = {}  # The number of each reader's status byte.

    def write(self, x: Tensor, reader: int) -> Location | None:
        """A location where `reader` finds the tensor; None if there is no memory for it.

        A tensor in a send buffer is not copied.
        """
        if (slot := self._slot(reader)) is None:
            return None
        found = self._find(x)
        # While the reader has not released it, one status byte cannot stand for two sends.
        if found is None or found[0].memory[found[1].status(slot)] != READ:
            try:
                segment, allocation = self._allocate(x.nbytes)
            except OSError:  # There is no memory left for it.
                return None
            there = torch.frombuffer(segment.memory, dtype=x.dtype, count=x.numel(), offset=allocation.start)
            there.view(x.shape).copy_(x.detach())
            start = allocation.start
        else:
            segment, allocation = found
            start = x.data_ptr() - segment.address
        status = allocation.status(slot)
        segment.memory[status] = SENT
        allocation.sent[slot] = x.nbytes
        return Location(segment.file, len(segment.memory), start, x.nbytes, status)

    def send_buffer(self, nbytes: int) -> Tensor:
        """Memory that can be sent without a copy; allocated until no process refers to it."""
        segment, allocation = self._allocate(nbytes)
        view = memoryview(segment.memory)[allocation.start : allocation.start + nbytes]
        allocation.owner = weakref.ref(view)
        return torch.frombuffer(view, dtype=torch.uint8)

    def has(self, x: Tensor) -> bool:
        """Whether a tensor is in a send buffer."""
        return self._find(x) is not None

    def is_unread(self, x: Tensor) -> bool:
        """Whether any reader may still read the send buffer of a tensor."""
        found = self._find(x)
        return found is not None and found[0].is_unread(found[1])

    def unread_nbytes(self, *readers: int) -> int:
        """Bytes that were sent to these readers, or to any, and that they have not opened."""
        slots = {slot for reader, slot in self._slots.items() if not readers or reader in readers}
        sent = (
            (nbytes, segment.memory[a.status(slot)])
            for segment in self._segments
            for a in segment.allocations
            for slot, nbytes in a.sent.items()
            if slot in slots
        )
        return sum(nbytes for nbytes, status in sent if status == SENT)

    def release(self, reader: int) -> None:
        """A reader is dead: free what it had open or was sent."""
        if (slot := self._slots.pop(reader, None)) is not None:
            for segment in self._segments:
                for allocation in segment.allocations:
                    segment.memory[allocation.status(slot)] = READ

    def close(self) -> None:
        """What readers have opened, and send buffers still in use, stay valid in their mappings."""
        for segment in self._segments:
            os.close(segment.file)
        self._segments = []

    def _slot(self, reader: int) -> int | None:
        if reader not in self._slots:
            free = set(range(MAX_READERS)) - set(self._slots.values())
            if not free:
                return None
            self._slots[reader] = min(free)
        return self._slots[reader]

    def _find(self, x: Tensor) -> tuple[Segment, Allocation] | None:
        """The send buffer that a tensor is in."""
        if x.device.type != "cpu" or not x.is_contiguous():
            return None
        for segment in self._segments:
            for allocation in segment.allocations:
                begin = segment.address + allocation.start
                end = begin + allocation.nbytes
                if allocation.owner is not None and begin <= x.data_ptr() < x.data_ptr() + x.nbytes <= end:
                    return segment, allocation
        return None

    def _allocate(self, nbytes: int) -> tuple[Segment, Allocation]:
        """Memory for `nbytes` bytes, in a new segment if the newest is full."""
        self._free_unused()
        need = CACHE_LINE + aligned(nbytes)
        start = self._segments[-1].gap(need) if self._segments else None
        if start is None:
            # At least twice the size of the last one: so there are few, and readers tell them apart by their sizes.
            last = len(self._segments[-1].memory) if self._segments else 0
            self._segments.append(Segment(max(FIRST_NBYTES, 2 * need, 2 * last)))
            start = 0
        segment = self._segments[-1]
        return segment, segment.allocate(start, nbytes)

    def _free_unused(self) -> None:
        for segment in self._segments:
            segment.free_unused()
        for segment in [s for s in self._segments[:-1] if not s.allocations]:
            self._segments.remove(segment)
            segment.close()


class Tracker(Protocol):
    """Reports whether a socket has finished with some memory."""

    @property
    def done(self) -> bool: ...


class InFlight:
    """Send buffers that were given to sockets, which may not have sent them yet."""

    def __init__(self) -> None:
        self._sent: list[tuple[Tracker, int, int, int]] = []  # With the receiver, the first address and the end.

    def add(self, tracker: Tracker, receiver: int, x: Tensor) -> None:
        self._sent.append((tracker, receiver, x.data_ptr(), x.data_ptr() + x.nbytes))

    def nbytes(self, receiver: int) -> int:
        """Bytes in flight to one rank."""
        self._forget_done()
        return sum(end - begin for _, to, begin, end in self._sent if to == receiver)

    def overlaps(self, x: Tensor) -> bool:
        """Whether any byte of a tensor is in flight."""
        self._forget_done()
        return any(begin < x.data_ptr() + x.nbytes and x.data_ptr() < end for _, _, begin, end in self._sent)

    def _forget_done(self) -> None:
        self._sent = [sent for sent in self._sent if not sent[0].done]


class SegmentReader:
    """What one process reads from the segments of another."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._files: dict[tuple[int, int], mmap.mmap] = {}  # By file number and size.

    def open(self, location: Location) -> Tensor:
        """The bytes at a location; they are marked as read when the last reference to them is dropped."""
        start = location.start
        nbytes = location.nbytes
        size = location.size
        if nbytes < 1 or start < CACHE_LINE or start + nbytes > size:
            raise Unreadable(f"{nbytes} bytes from byte {start} on are not within a segment of {size} bytes")
        if not 0 <= location.status < start:
            raise Unreadable(f"byte {location.status} cannot be a status byte of data at byte {start}")
        memory = self._memory(location)
        view = memoryview(memory)[start : start + nbytes]
        memory[location.status] = OPEN
        # The tensor's storage keeps the view alive.
        weakref.finalize(view, _mark_read, memory, location.status, os.getpid()).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)

    def _memory(self, location: Location) -> mmap.mmap:
        key = location.file, location.size
        if key not in self._files:
            self._files[key] = self._mapped(*key)
        return self._files[key]

    def _mapped(self, file: int, size: int) -> mmap.mmap:
        path = f"/proc/{self.pid}/fd/{file}"
        try:
            # Check its name first: to open anything else, such as a device, could have side effects.
            if os.readlink(path).startswith(f"/memfd:{NAME} "):
                with open(path, "r+b", buffering=0) as opened:
                    # If the file could shrink, reading it could kill this process.
                    is_sealed = fcntl.fcntl(opened, fcntl.F_GET_SEALS) & SEALS == SEALS
                    if is_sealed and os.fstat(opened.fileno()).st_size == size:
                        return mmap.mmap(opened.fileno(), size)
        except OSError as error:
            raise Unreadable(f"file {file} of process {self.pid} cannot be mapped: {error}") from error
        raise Unreadable(f"file {file} of process {self.pid} is not a sealed segment of {size} bytes")


def memory_domain() -> str:
    """A text that two processes have in common exactly if each may map the other's memory.

    Empty if no other process may map this one's.
    """
    try:
        spaces = [os.stat(f"/proc/self/ns/{space}").st_ino for space in ("net", "pid", "user")]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        rights = [
            line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapPrm")
        ]
        # The files of a process that is not dumpable, such as one that has changed its user, belong to root.
        is_hidden = os.stat("/proc/self/fd").st_uid != os.geteuid()
    except OSError:
        return ""
    if is_hidden or not hasattr(os, "memfd_create"):
        return ""
    return "-".join(map(str, [boot, *spaces, os.geteuid(), os.getegid(), *rights]))


def _mark_read(memory: mmap.mmap, status: int, pid: int) -> None:
    if os.getpid() == pid:  # A forked child has a copy of the tensor, but the status byte is its parent's.
        memory[status] = READ
