"""Layerwise: what LARS and LAMB share, which scale the step of every layer by the norm of its weights.

A layer is a parameter tensor.  One of at most one dimension (a bias, the scale or shift of a norm) takes the step of
the optimizer that is behind: there the ratio of two norms says little.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import Any, get_type_hints

import torch
from torch import Tensor

from paceline.checked import checked

LIST_NUMEL = 1 << 18  # On the CPU. An operation on a longer list leaves nothing of it in the cache for the next one.


class Layerwise(torch.optim.Optimizer, ABC):
    """An optimizer whose groups have the setting `adapt`: whether steps are scaled; None leaves it to the dimension."""

    @abstractmethod
    def check_group(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError for settings of a parameter group that make no sense; their types are right."""

    @abstractmethod
    def update(self, group: Mapping[str, Any], params: list[Tensor], *, is_adapted: bool) -> None:
        """Step parameters of one device and dtype."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
        except ValueError:
            del self.param_groups[-1]
            raise

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for is_adapted, params in self._lists(group):
                    self.update(group, params, is_adapted=is_adapted)
        return loss

    def _lists(self, group: Mapping[str, Any]) -> Iterator[tuple[bool, list[Tensor]]]:
        """The parameters that have a gradient, in lists for torch's operations on lists; and whether to adapt them."""
        by_kind: dict[tuple[bool, torch.device, torch.dtype, type], list[Tensor]] = {}
        adapt = group["adapt"]
        for p in group["params"]:
            if p.grad is None:
                continue
            if p.grad.layout != torch.strided:
                raise ValueError(
                    f"{self._name}: a parameter of shape {list(p.shape)} has a sparse gradient, and the steps of "
                    f"{self._name} change whole layers: let the layer make dense gradients (nn.Embedding(sparse=False))"
                )
            by_kind.setdefault((p.dim() > 1 if adapt is None else adapt, p.device, p.dtype, type(p)), []).append(p)
        for (is_adapted, device, *_), params in by_kind.items():
            for part in cut(params, LIST_NUMEL) if device.type == "cpu" else [params]:
                yield is_adapted, part

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _check(self, group: Mapping[str, Any]) -> None:
        for name, kind in get_type_hints(type(self).__init__).items():
            if name in self.defaults:
                checked(self._name, name, group[name], kind)
        for name, what in (("lr", "the learning rate"), ("weight_decay", "the weight decay"), ("eps", "eps")):
            if not 0 <= group[name] < inf:
                raise ValueError(f"{self._name}({name}={group[name]}): {what} must be finite and at least 0")
        for p in group["params"]:
            if not p.dtype.is_floating_point:
                raise ValueError(
                    f"{self._name}: a parameter of shape {list(p.shape)} is {p.dtype}; it steps only real "
                    "floating-point parameters"
                )
        self.check_group(group)


def cut(tensors: list[Tensor], numel: int) -> Iterator[list[Tensor]]:
    """The same tensors in lists of at most `numel` values together; a larger tensor is alone.

    >>> [len(part) for part in cut([torch.zeros(n) for n in (3, 4, 1, 9, 1)], 8)]
    [3, 1, 1]
    """
    part: list[Tensor] = []
    room = numel
    for t in tensors:
        if part and t.numel() > room:
            yield part
            part = []
            room = numel
        part.append(t)
        room -= t.numel()
    yield part


def norms(tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """The norm of each tensor, in one vector, at least in float32.  The tensors have one device and dtype."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=wide))  # pyright: ignore[reportPrivateUsage]
