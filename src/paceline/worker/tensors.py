"""The tensors that a model starts from, and the local parts of tensors that several ranks hold together (DTensor)."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


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


def refuse_without_values(name: str, p: Tensor) -> None:
    """Raise ValueError for a parameter that has no values yet."""
    if is_lazy(p):
        raise ValueError(f"parameter '{name}' has no shape yet: run a minibatch through the model first")
    if p.is_meta:
        raise ValueError(
            f"parameter '{name}' is on the device 'meta', so it has no values: load or initialise the model first "
            "(model.to_empty(device=...) and the values)"
        )


def refuse_shared_memory(model: nn.Module) -> None:
    """Raise ValueError if two parameters, or a parameter and a buffer, have values in common.

    Each parameter gets memory of its own in the model's vector, so they would train apart.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    spans: list[tuple[int, int, str, Tensor, bool]] = []
    for name, t in named:
        part = local(t)
        if part.layout is torch.strided and part.numel():
            start = part.data_ptr()
            reach = sum((n - 1) * stride for n, stride in zip(part.shape, part.stride(), strict=True)) + 1
            spans.append((start, start + reach * part.element_size(), name, part, id(t) in trained))
    spans.sort(key=lambda span: span[:2])
    for i, (_, stop, name, t, is_trained) in enumerate(spans):
        for start, _, other, u, is_other_trained in spans[i + 1 :]:
            if start >= stop:
                break
            if (is_trained or is_other_trained) and _overlap(t, u):
                raise ValueError(
                    f"'{name}' and '{other}' have memory in common, and are two tensors of the model: they would train "
                    "apart.  Make them one parameter (b.weight = a.weight), or give one a copy (clone)"
                )


def _overlap(t: Tensor, u: Tensor) -> bool:
    """Whether two tensors with overlapping ranges of memory have a value in common, and not only interleaved ones."""
    if t.is_contiguous() and u.is_contiguous():
        return True
    first = min(t.data_ptr(), u.data_ptr())
    return bool(torch.isin(_addresses(t, first), _addresses(u, first)).any())


def _addresses(t: Tensor, first: int) -> Tensor:
    """Where in memory the values of a tensor are, in bytes from `first`."""
    found = torch.tensor(t.data_ptr() - first)
    for n, stride in zip(t.shape, t.stride(), strict=True):
        found = found.unsqueeze(-1) + torch.arange(n) * (stride * t.element_size())
    return found.reshape(-1)
