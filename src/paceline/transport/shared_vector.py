"""A vector in memory that all workers of a host share: the first worker makes it, and the others map it.

Workers with their models on GPUs share the same host memory.  It is registered with CUDA, so that copies between it and
a GPU are as fast as from pinned memory.
"""

from __future__ import annotations

import mmap
import os
import secrets
import time
import weakref
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from paceline.collectives import barrier
from paceline.endpoint import WriteCounts
from paceline.errors import ClusterError
from paceline.op import Op

if TYPE_CHECKING:
    from paceline.transport.endpoint import ProcessEndpoint

NAME = "paceline-shared-vector"
SEVERAL_HOSTS = "the workers are on several hosts and share no memory; a centre could be on shards (servers=1)"
COMING, WITHOUT = -1, -2  # In the place of a file: its worker is about to open it, or did not find it yet.
LOOK_S = 0.005  # Between two looks for a file.
LINE = 64  # The bytes of a cache line.  Each count has its own, so that a count does not slow down the others.


class ProcessSharedVector:
    """One rank's mapping of the vector."""

    def __init__(self, endpoint: ProcessEndpoint, values: Tensor, writes: WriteCounts, steps: memoryview) -> None:
        self.endpoint = endpoint
        self.values = values
        self.writes = writes
        self.steps = steps

    def read(self, into: Tensor) -> Op[Tensor]:
        return self.endpoint.compute(lambda: into.copy_(self.values), kind="read")

    def add(self, change: Tensor) -> Op[None]:
        def work() -> None:
            self.values.add_(self.on_host(change))

        return self.endpoint.compute(work, kind="write")

    def draw(self, towards: Tensor, share: float) -> Op[None]:
        def work() -> None:
            self.values.lerp_(self.on_host(towards), share)

        return self.endpoint.compute(work, kind="write")

    def on_host(self, x: Tensor) -> Tensor:
        """A vector of this rank where the shared memory is."""
        return x


class StagedSharedVector(ProcessSharedVector):
    """The mapping of a rank whose own vectors are on a device: they are written through a buffer on the host."""

    def __init__(
        self, endpoint: ProcessEndpoint, values: Tensor, writes: WriteCounts, steps: memoryview, buffer: Tensor
    ) -> None:
        super().__init__(endpoint, values, writes, steps)
        self._buffer = buffer

    def on_host(self, x: Tensor) -> Tensor:
        return self._buffer.copy_(x)  # Not asynchronous: the values are here when this returns.


async def shared_vector(endpoint: ProcessEndpoint, first: Tensor, member: int | None = None) -> ProcessSharedVector:
    """Map the vector by collectives, on every rank of the endpoint's group; it starts with the first rank's values."""
    size = len(endpoint.ranks)
    mine = endpoint.ranks.index(endpoint.rank) if member is None else member
    if size == 1:
        values, words = first.clone(), torch.zeros(LINE // 8, dtype=torch.int64)
        return ProcessSharedVector(endpoint, values, WriteCounts(words[:1], 0), words[1:2].numpy().data)
    if not endpoint.is_one_host:
        raise ClusterError(SEVERAL_HOSTS)
    is_first = endpoint.rank == endpoint.ranks[0]
    file = os.memfd_create(NAME, os.MFD_CLOEXEC) if is_first else -1
    try:
        if is_first:
            fill(file, first, size)
        location = await endpoint.broadcast(torch.tensor([os.getpid(), file]), endpoint.ranks[0])
        if not is_first:
            file = os.open(Path("/proc", str(int(location[0])), "fd", str(int(location[1]))), os.O_RDWR | os.O_CLOEXEC)
        mapped = mapping_of(endpoint, file, first, size, mine)
        # The first rank keeps the file open until all have mapped it.
        await barrier(endpoint)
    finally:
        if file >= 0:
            os.close(file)
    return mapped


class HostVectors:
    """The vectors of workers that may die, found through the job's `store`.

    The first worker that has one ready publishes where it is.  Each worker that has mapped it keeps its file open, so
    that a later one can open it although the first is dead.  If the first dies before another has opened its file, the
    next worker makes the vector anew: it had no other reader.
    """

    def __init__(self, store: Store, workers: int) -> None:
        self._store = store
        self._workers = workers
        self._files: list[int] = []

    def open(self, endpoint: ProcessEndpoint, first: Tensor, member: int) -> ProcessSharedVector:
        number = len(self._files)
        for attempt in count():
            file = self._file(f"vectors/{number}/{attempt}", first)
            if file is not None:
                self._files.append(file)
                return mapping_of(endpoint, file, first, self._workers, member)
        raise AssertionError("attempts have no end")

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files.clear()

    def _file(self, key: str, first: Tensor) -> int | None:
        """The open file of the vector of this key; None if it is lost."""
        own = self._offered(key, first)
        if own is not None:
            return own
        name, *maker = self._store.get(key).decode().split()
        holders = f"{key}/holders"
        mine = self._store.add(holders, 1)
        self._note(holders, mine, COMING)
        sources = [tuple(map(int, maker))]
        while True:
            for pid, held in sources:
                if held >= 0 and (file := _opened(pid, held, name)) is not None:
                    self._note(holders, mine, file)
                    return file
            self._note(holders, mine, WITHOUT)
            found = [self._holder(holders, i) for i in range(1, self._store.add(holders, 0) + 1) if i != mine]
            alive = [(pid, held) for pid, held in found if is_alive(pid)]
            sources = [(pid, held) for pid, held in alive if held >= 0]
            if not sources and all(held == WITHOUT for _, held in alive):
                return None
            time.sleep(LOOK_S)

    def _offered(self, key: str, first: Tensor) -> int | None:
        """The file of a new vector, if no other worker has published one before."""
        if self._store.check([key]):
            return None
        name = f"{NAME}-{secrets.token_hex(8)}"
        file = os.memfd_create(name, os.MFD_CLOEXEC)
        fill(file, first, self._workers)
        offer = f"{name} {os.getpid()} {file}"
        if self._store.compare_set(key, "", offer).decode() == offer:
            return file
        os.close(file)
        return None

    def _note(self, holders: str, number: int, held: int) -> None:
        self._store.set(f"{holders}/{number}", f"{os.getpid()} {held}")

    def _holder(self, holders: str, number: int) -> tuple[int, int]:
        """A worker that asks or has asked for the file: its process, and the file."""
        key = f"{holders}/{number}"
        if not self._store.check([key]):  # It is about to note that it comes, or has died before.
            return 0, WITHOUT
        pid, held = self._store.get(key).decode().split()
        return int(pid), int(held)


def _opened(pid: int, held: int, name: str) -> int | None:
    """The file that a process holds open; None if it is dead, or another one has its number."""
    path = Path("/proc", str(pid), "fd", str(held))
    try:
        if name not in os.readlink(path):
            return None
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None


def fill(file: int, first: Tensor, members: int) -> None:
    """Write the values, and room for what the members count."""
    os.ftruncate(file, _size(first, members))
    with mmap.mmap(file, _size(first, members)) as mapping:
        raw = first.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        mapping[: first.nbytes] = raw.tobytes()


def mapping_of(endpoint: ProcessEndpoint, file: int, first: Tensor, members: int, member: int) -> ProcessSharedVector:
    """The vector in an open file."""
    mapping = mmap.mmap(file, _size(first, members))
    values = torch.frombuffer(mapping, dtype=first.dtype, count=first.numel()).view(first.shape)
    if first.device.type == "cuda":
        pin(mapping, values)
    words = torch.frombuffer(mapping, dtype=torch.int64)
    own = words[words.numel() - LINE // 8 * members :].view(members, LINE // 8)
    writes, steps = WriteCounts(own[:, 0], member), own[:, 1].numpy().data
    if first.device.type == "cpu":
        return ProcessSharedVector(endpoint, values, writes, steps)
    buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=first.device.type == "cuda")
    return StagedSharedVector(endpoint, values, writes, steps, buffer)


def _size(first: Tensor, members: int) -> int:
    return -(-first.nbytes // LINE) * LINE + LINE * members


def pin(mapping: Any, values: Tensor) -> None:
    """Register mapped memory with CUDA, until the mapping is freed."""
    cudart: Any = torch.cuda.cudart()
    address = values.data_ptr()
    torch.cuda.check_error(int(cudart.cudaHostRegister(address, values.nbytes, 0)))
    weakref.finalize(mapping, cudart.cudaHostUnregister, address)


def is_alive(pid: int) -> bool:
    """Whether a process of this host runs, or is stopped; one that has ended may not have been waited for yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
