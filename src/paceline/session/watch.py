"""ModelWatch: finds changes to a model that would separate it from its session, and names them.

A session holds the trainable parameters as views of one vector.  A parameter may be frozen while the session is open,
and unfrozen again.  But it must stay in its place, and no parameter can join later.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.worker.flat import FlatModel
from paceline.worker.tensors import local

WRAPPED = (
    "both would exchange the gradients.  Train by one of the two: leave DistributedDataParallel out, or give "
    "paceline.ddp_hook to it instead of attach"
)


class ModelWatch:
    """What a session knows about its model's parameters, compared with the model at every step."""

    def __init__(self, flat: FlatModel, optimizer: torch.optim.Optimizer) -> None:
        self._flat = flat
        self._optimizer = optimizer
        self._frozen = [(name, p) for name, p in flat.model.named_parameters() if not p.requires_grad]
        # A parameter without values has no place in memory, and a narrower one has a place of its own.
        filled = [i for i, p in enumerate(flat.parameters) if local(p).numel()]
        self._filled = [i for i in filled if i not in flat.narrow]
        self._offsets = [flat.offsets[i] * flat.params.element_size() for i in self._filled]
        self._parameters = [flat.parameters[i] for i in self._filled]
        self._places = {i: local(flat.parameters[i]).data_ptr() for i in filled if i in flat.narrow}
        self._held = self._count_held()
        self._checks = 0
        self._forward_hook = flat.model.register_forward_pre_hook(self._refuse_wrapped)

    def check(self) -> None:
        """Raise RuntimeError if a parameter has moved, or has become trainable since `attach`."""
        base = self._flat.params.data_ptr()
        if [local(p).data_ptr() - base for p in self._parameters] != self._offsets:
            self._refuse_moved(base)
        for i, place in self._places.items():
            if local(self._flat.parameters[i]).data_ptr() != place:
                raise RuntimeError(self._moved(i))
        for name, p in self._frozen:
            if p.requires_grad:
                raise RuntimeError(
                    f"parameter '{name}' was frozen at attach and is trainable now: the session would not share its "
                    "gradients.  Attach the model with all parameters trainable and freeze them afterwards; a "
                    "parameter that was trainable at attach may be frozen and unfrozen at any time"
                )
        if self._count_held() != self._held:
            raise RuntimeError(
                f"the optimizer held {self._held} parameters at attach and holds {self._count_held()} now: a session's "
                "parameters are fixed; add them to the model and the optimizer before attach"
            )
        if self._checks & (self._checks - 1) == 0:  # At the first step, and ever more rarely: this takes longer.
            self.check_members()
        self._forward_hook.remove()  # The forward passes of the first step are enough.
        self._checks += 1

    def check_members(self) -> None:
        """Raise RuntimeError if the model has other trainable parameters than at `attach`."""
        own = {id(p) for p in self._flat.parameters} | {id(p) for _, p in self._frozen}
        found: set[int] = set()
        for name, p in self._flat.model.named_parameters():
            found.add(id(p))
            if id(p) not in own:
                raise RuntimeError(
                    f"parameter '{name}' was not in the model at attach: a session's parameters are fixed; change the "
                    "model before attach"
                )
        for name, p in zip(self._flat.names, self._flat.parameters, strict=True):
            if id(p) not in found:
                raise RuntimeError(
                    f"parameter '{name}' has left the model since attach: a session's parameters are fixed; change the "
                    "model before attach"
                )

    def _count_held(self) -> int:
        return sum(len(group["params"]) for group in self._optimizer.param_groups)

    def _refuse_moved(self, base: int) -> None:
        for i, p, offset in zip(self._filled, self._parameters, self._offsets, strict=True):
            if local(p).data_ptr() - base != offset:
                raise RuntimeError(self._moved(i))

    def _moved(self, index: int) -> str:
        return (
            f"parameter '{self._flat.names[index]}' has other memory than at attach, so the session would no longer "
            "train it: something replaced its data (`p.data = ...`, or `.to()`, `.half()`, `.cuda()` of the model).  "
            "Move the model before attach, and change values in place: `with torch.no_grad(): p.copy_(...)`"
        )

    def _refuse_wrapped(self, *_: object) -> None:
        """Before a forward pass: raise RuntimeError if DistributedDataParallel runs it."""
        if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
            raise RuntimeError(
                f"the attached {type(self._flat.model).__name__} is wrapped in DistributedDataParallel: {WRAPPED}"
            )

    def close(self) -> None:
        self._forward_hook.remove()


def refuse_wrapped(model: nn.Module) -> None:
    """Raise ValueError if a model to attach is wrapped in DistributedDataParallel, or has such a part."""
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            where = f"its part '{name}'" if name else "the model"
            raise ValueError(f"attach({type(model).__name__}): {where} is a DistributedDataParallel: {WRAPPED}")
