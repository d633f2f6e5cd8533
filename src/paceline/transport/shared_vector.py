"""A vector in memory that all workers of a host share: the first worker makes it, and the others map it."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.collectives import barrier
from paceline.errors import ClusterError
from paceline.op import Op

if TYPE_CHECKING:
    from paceline.transport.endpoint import ProcessEndpoint


class ProcessSharedVector:
    """One rank's mapping of the vector."""

    def __init__(self, endpoint: ProcessEndpoint, values: Tensor) -> None:
        self.endpoint = endpoint
        self.values = values

    def read(self, into: Tensor) -> Op[Tensor]:
        return self.endpoint.compute(lambda: into.copy_(self.values), kind="read")

    def draw(self, towards: Tensor, share: float) -> Op[None]:
        def work() -> None:
            self.values.lerp_(towards, share)

        return self.endpoint.compute(work, kind="write")


async def shared_vector(endpoint: ProcessEndpoint, first: Tensor) -> ProcessSharedVector:
    """Map the vector, on every rank of the endpoint's group; it starts with the first rank's values."""
    if len(endpoint.ranks) == 1:
        return ProcessSharedVector(endpoint, first.clone())
    if first.device.type != "cpu":
        raise ValueError(
            f"parameters on {first.device}: processes share only the memory of their host; keep the model on the CPU"
        )
    if not endpoint.is_one_host:
        raise ClusterError(
            "the workers are on several hosts and share no memory; a centre could be on shards (servers=1)"
        )
    is_first = endpoint.rank == endpoint.ranks[0]
    file = os.memfd_create("paceline-shared-vector", os.MFD_CLOEXEC) if is_first else -1
    try:
        if is_first:
            os.ftruncate(file, max(1, first.nbytes))
        location = await endpoint.broadcast(torch.tensor([os.getpid(), file]), endpoint.ranks[0])
        if not is_first:
            file = os.open(Path("/proc", str(int(location[0])), "fd", str(int(location[1]))), os.O_RDWR | os.O_CLOEXEC)
        values = torch.frombuffer(mmap.mmap(file, max(1, first.nbytes)), dtype=first.dtype, count=first.numel())
        if is_first:
            values.copy_(first)
        # The first rank keeps the file open until all have mapped it, and no rank reads before the values are there.
        await barrier(endpoint)
    finally:
        if file >= 0:
            os.close(file)
    return ProcessSharedVector(endpoint, values.view(first.shape))
