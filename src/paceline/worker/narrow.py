"""Narrow: the parameters of a narrower dtype than their model's vector, such as bfloat16 beside float32.

They keep memory of their own.  While the model or its optimizer runs, the parameters count; while a strategy runs, the
vector counts.  `publish` and `refresh` copy from one to the other where the two meet.  A parameter takes the vector's
value rounded; the vector takes the parameter's exactly.  A model of one dtype has no such parameters, and copies
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from paceline.worker.tensors import distributed_like, is_distributed, local, local_grad


def common_dtype(named: Sequence[tuple[str, nn.Parameter]]) -> torch.dtype:
    """The narrowest dtype that holds every value of these parameters."""
    first_name, first = named[0]
    found = first.dtype
    for name, p in named[1:]:
        try:
            found = torch.promote_types(found, p.dtype)
        except RuntimeError:  # Of the 8-bit dtypes.
            raise ValueError(
                f"parameter '{name}' is {p.dtype}, but '{first_name}' is {first.dtype}: torch has no dtype that holds "
                "both.  Cast one of them to bfloat16 or float32, or freeze it"
            ) from None
    return found


class Narrow:
    """These parameters by their index in the model, and their parts of its vector."""

    def __init__(self, parameters: Mapping[int, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        self._parts: list[Tensor] = []

    def __contains__(self, index: int) -> bool:
        return index in self.parameters

    def __bool__(self) -> bool:
        return bool(self.parameters)

    def bind(self, parts: Sequence[Tensor]) -> None:
        """Use these parts of the vector, one for each parameter of the model."""
        self._parts = [parts[i] for i in self.parameters]

    # Writing to `.data`, as to a view of the vector, is no change that autograd knows of.

    def publish(self) -> None:
        """Give the parameters the vector's values, rounded."""
        if self.parameters:
            own = [local(p).data for p in self.parameters.values()]
            torch._foreach_copy_(own, self._parts)  # pyright: ignore[reportPrivateUsage]

    def refresh(self) -> None:
        """Give the vector the parameters' values."""
        if self.parameters:
            own = [local(p).data for p in self.parameters.values()]
            torch._foreach_copy_(self._parts, own)  # pyright: ignore[reportPrivateUsage]

    def round(self, parts: Sequence[Tensor]) -> None:
        """Round the parts of a vector to what these parameters can hold, in place."""
        for i, p in self.parameters.items():
            parts[i].copy_(parts[i].to(p.dtype))

    # Gradients.

    def gradient(self, index: int, part: Tensor) -> Tensor:
        """A part of the gradient in the parameter's own dtype, if possible in the memory of its last `.grad`."""
        p = self.parameters[index]
        grad = p.grad
        if grad is None or grad.layout != torch.strided or is_distributed(p) or grad.requires_grad:
            return distributed_like(local(part).to(p.dtype), p)
        return grad.copy_(part)

    def take_changed(self, parts: Sequence[Tensor]) -> None:
        """Take over what the user's code has changed in `.grad` since it was a rounded copy of these parts."""
        for i, p in self.parameters.items():
            if (grad := local_grad(p)) is not None:
                part = local(parts[i])
                part.copy_(torch.where(part.to(grad.dtype) == grad, part, grad.to(part.dtype)))
