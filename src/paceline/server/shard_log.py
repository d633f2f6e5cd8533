"""ShardLog: what a shard has received since its last snapshot, in memory that outlives its process.

A record is written before anything is done with what it holds, so a shard that is killed has answered nothing that its
log does not have.  After a snapshot the log starts again: two files of each kind take turns, so their number of pages
does not grow, and the older snapshot stays until the newer one is complete.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from paceline.checkpoint.plain import flattened, restored

HEAD = struct.Struct("<IIQQQ")  # Checksum of the rest, a mark, generation, bytes of the description, bytes of tensors.
MARK = 0x7061636C
FIRST_NBYTES = 1 << 20
LIMIT_NBYTES = 1 << 26  # The log starts again when it has so many bytes, or
SNAPSHOTS = 2  # so many times the bytes of a snapshot.

Tensors = Sequence[Tensor]
Form = tuple[str, tuple[int, ...]]


class LogFailed(OSError):
    """The log cannot be written any more, and where."""


class Area(Protocol):
    """Bytes under a name, that a killed process leaves as they are."""

    def room(self, nbytes: int) -> memoryview:
        """All bytes; at least so many."""
        ...

    def close(self) -> None: ...


class MemoryArea:
    """Bytes in this process, for simulated shards."""

    def __init__(self) -> None:
        self.data = bytearray()

    def room(self, nbytes: int) -> memoryview:
        if nbytes > len(self.data):
            self.data = self.data + bytes(max(nbytes, 2 * len(self.data)) - len(self.data))
        return memoryview(self.data)

    def close(self) -> None:
        pass


class FileArea:
    """A file that is mapped: what was stored in it is in the system's memory, whatever becomes of this process."""

    def __init__(self, name: str, file: int) -> None:
        """`file` is the descriptor of an open file."""
        self.name = name
        self._file = file
        self._map()

    def room(self, nbytes: int) -> memoryview:
        if nbytes > len(self._view):
            try:
                # Memory that was only mapped, and is not there when it is written to, would kill the process.
                os.posix_fallocate(self._file, 0, max(FIRST_NBYTES, 2 * len(self._view), nbytes))
            except OSError as error:
                raise LogFailed(error.errno, error.strerror, self.name) from None
            self._map()
        return self._view

    def _map(self) -> None:
        size = os.fstat(self._file).st_size
        self._view = memoryview(mmap.mmap(self._file, size)) if size else memoryview(b"")

    def close(self) -> None:
        self._view = memoryview(b"")
        os.close(self._file)


class ShardLog:
    """The log and the snapshots of one shard.

    >>> areas = {}
    >>> log = ShardLog(lambda name: areas.setdefault(name, MemoryArea()))
    >>> log.append({"src": 1}, [torch.ones(2)])
    >>> log.save({"version": 1})
    >>> log.append({"src": 2}, [])
    >>> again = ShardLog(areas.__getitem__)
    >>> again.snapshot, list(again.records())
    ({'version': 1}, [({'src': 2}, [])])
    """

    def __init__(self, area: Callable[[str], Area]) -> None:
        """`area` opens the bytes of a name."""
        self._snapshots = [area(f"snapshot-{i}") for i in range(2)]
        self._logs = [area(f"log-{i}") for i in range(2)]
        self.generation = 0
        self.snapshot: Any = None
        self.snapshot_nbytes = 0
        self.end = 0
        for snapshot in self._snapshots:
            found = _read(snapshot, 0)
            if found is not None and found[0] > self.generation:
                self.generation, description, tensors, self.snapshot_nbytes = found
                self.snapshot = restored(description["tree"], _named(description, tensors))

    @property
    def is_new(self) -> bool:
        """Whether nothing was ever written to it."""
        return not self.generation and _read(self._logs[0], 0) is None

    @property
    def is_long(self) -> bool:
        """Whether it is time for a snapshot."""
        return self.end > max(LIMIT_NBYTES, SNAPSHOTS * self.snapshot_nbytes)

    def records(self) -> Iterator[tuple[Any, list[Tensor]]]:
        """All records since the snapshot, in order.  What follows them is appended after the last one."""
        self.end = 0
        while (found := _read(self._logs[self.generation % 2], self.end)) is not None:
            generation, description, tensors, nbytes = found
            if generation != self.generation:
                return
            self.end += nbytes
            yield description, tensors

    def append(self, description: Any, tensors: Tensors) -> None:
        self.end += _write(self._logs[self.generation % 2], self.end, self.generation, description, tensors)

    def save(self, state: Any) -> None:
        """A snapshot takes the place of all that was logged before."""
        tree, named = flattened(state)
        description = {"tree": tree, "names": list(named)}
        slot = self._snapshots[(self.generation + 1) % 2]
        slot.room(HEAD.size)[: HEAD.size] = bytes(HEAD.size)  # From now on the older snapshot in it is none.
        self.snapshot_nbytes = _write(slot, 0, self.generation + 1, description, list(named.values()))
        self.generation += 1
        self.end = 0
        self.snapshot = None

    def close(self) -> None:
        for area in (*self._snapshots, *self._logs):
            area.close()


def _write(area: Area, at: int, generation: int, description: Any, tensors: Tensors) -> int:
    """Write a record, its head last: until then it is not there.  How many bytes it takes."""
    forms = [(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in tensors]
    text = msgspec.msgpack.encode((description, forms))
    nbytes = sum(_padded(t.nbytes) for t in tensors)
    start = at + HEAD.size + _padded(len(text))
    view = area.room(start + nbytes)
    view[at + HEAD.size : at + HEAD.size + len(text)] = text
    for tensor in tensors:
        if tensor.numel():
            there = torch.frombuffer(view, dtype=tensor.dtype, count=tensor.numel(), offset=start)
            there.view(tensor.shape).copy_(tensor.detach())
        start += _padded(tensor.nbytes)
    head = HEAD.pack(0, MARK, generation, len(text), nbytes)[4:]
    view[at : at + HEAD.size] = zlib.crc32(text, zlib.crc32(head)).to_bytes(4, "little") + head
    return start - at


def _read(area: Area, at: int) -> tuple[int, Any, list[Tensor], int] | None:
    """The record at a place: its generation, what it holds, and how many bytes it takes; None if there is none."""
    view = area.room(0)
    if at + HEAD.size > len(view):
        return None
    checksum, mark, generation, length, nbytes = HEAD.unpack_from(view, at)
    start = at + HEAD.size + _padded(length)
    if mark != MARK or start + nbytes > len(view):
        return None
    text = bytes(view[at + HEAD.size : at + HEAD.size + length])
    if zlib.crc32(text, zlib.crc32(view[at + 4 : at + HEAD.size])) != checksum:
        return None
    with suppress(msgspec.MsgspecError):
        description, forms = msgspec.msgpack.decode(text, type=tuple[Any, list[Form]])
        tensors: list[Tensor] = []
        for name, shape in forms:
            count = torch.Size(shape).numel()
            dtype: torch.dtype = getattr(torch, name)
            tensor = torch.frombuffer(view, dtype=dtype, count=count, offset=start) if count else torch.empty(0)
            tensors.append(tensor.to(dtype).view(shape).clone())
            start += _padded(tensors[-1].nbytes)
        return generation, description, tensors, start - at
    return None


def _padded(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def _named(description: Any, tensors: list[Tensor]) -> Callable[[str], Tensor]:
    return dict(zip(description["names"], tensors, strict=True)).__getitem__
