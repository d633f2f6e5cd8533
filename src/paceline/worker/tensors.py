"""The tensors that a model starts from, and the local parts of tensors that several ranks hold together (DTensor)."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """All parameters, frozen ones too, and all buffers, by name; of a DTensor its local part."""
    return [(n, local(t.detach())) for n, t in (*model.named_parameters(), *model.named_buffers())]


def is_distributed(t: Tensor) -> bool:
    """Whether this is torch's DTensor.  Its module takes a second to import, and is there if there is one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def local(t: Any) -> Any:
    """The part of a DTensor that this rank holds; any other tensor itself."""
    return t._local_tensor if is_distributed(t) else t


def local_grad(p: Tensor) -> Tensor | None:
    """This rank's part of a parameter's gradient."""
    grad: Any = p.grad
    if grad is None or not is_distributed(grad):
        return grad
    placements: Any = p.placements  # pyright: ignore[reportAttributeAccessIssue]
    if grad.placements != placements:  # A part of a sum, for example.
        with torch.no_grad():
            grad = grad.redistribute(placements=placements)
    return local(grad)


def distributed_like(part: Tensor, p: Any) -> Tensor:
    """A tensor with this local part, distributed as `p` is; the part itself if `p` is no DTensor."""
    if not is_distributed(p):
        return part
    return type(p.data).from_local(part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
