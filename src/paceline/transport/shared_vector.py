"""A vector in memory that all workers of a host share: the first worker makes it, and the others map it.

Workers with their models on GPUs share the same host memory.  It is registered with CUDA, so that copies between it and
a GPU are as fast as from pinned memory.
"""

from __future__ import annotations

import mmap
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.collectives import barrier
from paceline.endpoint import WriteCounts
from paceline.errors import ClusterError
from paceline.op import Op

if TYPE_CHECKING:
    from paceline.transport.endpoint import ProcessEndpoint

LINE = 64  # The bytes of a cache line.  Each count has its own, so that a count does not slow down the others.


class ProcessSharedVector:
    """One rank's mapping of the vector."""

    def __init__(self, endpoint: ProcessEndpoint, values: Tensor, writes: WriteCounts) -> None:
        self.endpoint = endpoint
        self.values = values
        self.writes = writes

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

    def __init__(self, endpoint: ProcessEndpoint, values: Tensor, writes: WriteCounts, buffer: Tensor) -> None:
        super().__init__(endpoint, values, writes)
        self._buffer = buffer

    def on_host(self, x: Tensor) -> Tensor:
        return self._buffer.copy_(x)  # Not asynchronous: the values are here when this returns.


async def shared_vector(endpoint: ProcessEndpoint, first: Tensor) -> ProcessSharedVector:
    """Map the vector, on every rank of the endpoint's group; it starts with the first rank's values."""
    if len(endpoint.ranks) == 1:
        return ProcessSharedVector(endpoint, first.clone(), WriteCounts(torch.zeros(1, dtype=torch.int64), 0))
    if not endpoint.is_one_host:
        raise ClusterError(
            "the workers are on several hosts and share no memory; a centre could be on shards (servers=1)"
        )
    is_first = endpoint.rank == endpoint.ranks[0]
    size = -(-first.nbytes // LINE) * LINE + LINE * len(endpoint.ranks)
    file = os.memfd_create("paceline-shared-vector", os.MFD_CLOEXEC) if is_first else -1
    try:
        if is_first:
            os.ftruncate(file, size)
        location = await endpoint.broadcast(torch.tensor([os.getpid(), file]), endpoint.ranks[0])
        if not is_first:
            file = os.open(Path("/proc", str(int(location[0])), "fd", str(int(location[1]))), os.O_RDWR | os.O_CLOEXEC)
        mapping = mmap.mmap(file, size)
        values = torch.frombuffer(mapping, dtype=first.dtype, count=first.numel())
        if first.device.type == "cuda":
            pin(mapping, values)
        if is_first:
            values.copy_(first)
        # The first rank keeps the file open until all have mapped it, and no rank reads before the values are there.
        await barrier(endpoint)
    finally:
        if file >= 0:
            os.close(file)
    words = torch.frombuffer(mapping, dtype=torch.int64)
    counts = words[words.numel() - LINE // 8 * len(endpoint.ranks) :: LINE // 8]
    return _of(endpoint, first, values.view(first.shape), counts)


def _of(endpoint: ProcessEndpoint, first: Tensor, values: Tensor, counts: Tensor) -> ProcessSharedVector:
    writes = WriteCounts(counts, endpoint.ranks.index(endpoint.rank))
    if first.device.type == "cpu":
        return ProcessSharedVector(endpoint, values, writes)
    buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=first.device.type == "cuda")
    return StagedSharedVector(endpoint, values, writes, buffer)


def pin(mapping: Any, values: Tensor) -> None:
    """Register mapped memory with CUDA, until the mapping is freed."""
    cudart: Any = torch.cuda.cudart()
    address = values.data_ptr()
    torch.cuda.check_error(int(cudart.cudaHostRegister(address, values.nbytes, 0)))
    weakref.finalize(mapping, cudart.cudaHostUnregister, address)
