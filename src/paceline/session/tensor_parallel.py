"""TensorParallel: the ranks that hold the tensors of one replica together, each a part (torch's DTensor).

A model is parallelised over one dimension of a device mesh, by `torch.distributed.tensor.parallel`.  Strategies run
along the other dimension: each rank exchanges its parts with the ranks that hold the same parts of the other replicas.
The ranks of one replica decide together which steps they take.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.op import Op
from paceline.transport.torch_collectives import Work
from paceline.worker.flat import FlatModel
from paceline.worker.tensors import is_distributed


class TensorParallel:
    """`replicas` are the ranks with the same parts as this one; the process group `group` holds one whole replica."""

    def __init__(self, replicas: Sequence[int], group: dist.ProcessGroup) -> None:
        self.replicas = tuple(replicas)
        self._group = group
        self._size = dist.get_world_size(group)

    def all_gather(self, numbers: Sequence[float]) -> Op[list[list[float]]]:
        """The numbers of every rank of this replica."""
        mine = torch.tensor(numbers, dtype=torch.float64)
        gathered = [torch.empty_like(mine) for _ in range(self._size)]
        work = dist.all_gather(gathered, mine, group=self._group, async_op=True)
        return Work("parts", [work], lambda: [t.tolist() for t in gathered])

    def first_fault(self, flat: FlatModel, name: str | None) -> str | None:
        """The first of the parameters in which the ranks of this replica found a NaN; None if there is none."""
        none = len(flat.names)
        found = self.all_gather([none if name is None else flat.names.index(name)]).wait()
        first = int(min(index for [index] in found))
        return None if first == none else flat.names[first]

    def mark_repeated(self, flat: FlatModel) -> None:
        """Of values that all ranks of a replica hold, only the first rank counts those in norms."""
        if dist.get_rank(self._group):
            flat.repeated = [flat.where(i) for i, p in enumerate(flat.parameters) if _is_repeated(p)]


def _is_repeated(p: Any) -> bool:
    return not is_distributed(p) or all(placement.is_replicate() for placement in p.placements)


def tensor_parallel(model: nn.Module, mesh: Any) -> TensorParallel | None:
    """How a model is distributed, if `mesh`, the mesh of the replicas, is given; ValueError if they do not fit."""
    if mesh is None:
        return None
    named = [(n, p) for n, p in model.named_parameters() if is_distributed(p)]
    if not isinstance(mesh, dist.DeviceMesh) or mesh.ndim != 1:
        what = f"a mesh of {mesh.ndim} dimensions" if isinstance(mesh, dist.DeviceMesh) else type(mesh).__name__
        raise ValueError(f"attach(mesh=...): it is {what}; give the dimension of the replicas, such as mesh['replica']")
    if not named:
        raise ValueError(
            "attach(mesh=...): the model has no DTensor parameter; parallelise it first, or leave out mesh"
        )
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for m in model.modules()):
        raise ValueError("attach(mesh=...): fully_shard moves the parameters in every step; use parallelize_module")
    first_name, first = named[0]
    parts: Any = first.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    replicas = mesh.mesh.tolist()
    for name, p in named:
        own: Any = p.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
        if own != parts or own.ndim != 1 or set(own.mesh.tolist()) & set(replicas) != {dist.get_rank()}:
            raise ValueError(
                f"attach(mesh=...): '{name}' is distributed over the ranks {own.mesh.tolist()}, '{first_name}' over "
                f"{parts.mesh.tolist()}, and replicas over {replicas}: all tensors must be distributed over the same "
                "ranks, and replicas over another dimension of the mesh"
            )
    return TensorParallel(replicas, parts.get_group())
