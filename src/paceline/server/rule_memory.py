"""A rule's memory on a shard: as plain values to save, loaded again, and cut to some elements of the value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.slot_values import copied
from paceline.state import Slot, Values


def plain_memory(m: Slot) -> Values:
    """A copy of a memory as plain dicts, lists, numbers and tensors."""
    return {name: plain_memory(value) if isinstance(value, Slot) else copied(value) for name, value in vars(m).items()}


def loaded_memory(slot: str, initial: Slot, saved: Any) -> Slot:
    """The saved values in the form of `initial`, on its device and in its dtype; refused if they do not fit."""
    if not isinstance(saved, dict) or saved.keys() != vars(initial).keys():
        holds = sorted(saved) if isinstance(saved, dict) else type(saved).__name__
        raise ValueError(f"the saved slot '{slot}' holds {holds}, and the rule remembers {sorted(vars(initial))}")
    return Slot(**{name: _loaded(f"{slot}.{name}", value, saved[name]) for name, value in vars(initial).items()})


def _loaded(name: str, initial: Any, saved: Any) -> Any:
    if isinstance(initial, Slot):
        return loaded_memory(name, initial, saved)
    if isinstance(initial, Tensor):
        if not isinstance(saved, Tensor) or saved.shape != initial.shape:
            found = tuple(saved.shape) if isinstance(saved, Tensor) else type(saved).__name__
            raise ValueError(f"the saved '{name}' has the shape {found}, and this shard needs {tuple(initial.shape)}")
        return saved.to(initial, copy=True)
    return copied(saved)


def memory_at(m: Slot, where: Tensor, shape: torch.Size) -> Slot:
    """The memory of some elements of the value.  What does not belong to single elements stays as it is."""
    parts = {}
    for name, value in vars(m).items():
        if isinstance(value, Slot):
            parts[name] = memory_at(value, where, shape)
        else:
            parts[name] = value[where] if isinstance(value, Tensor) and value.shape == shape else value
    return Slot(**parts)


def write_back(m: Slot, part: Slot, where: Tensor, shape: torch.Size) -> None:
    """Write what `memory_at` gave, and a rule has changed, to the whole memory."""
    for name, value in vars(m).items():
        if isinstance(value, Slot):
            write_back(value, getattr(part, name), where, shape)
        elif isinstance(value, Tensor) and value.shape == shape:
            value[where] = getattr(part, name)
        else:
            setattr(m, name, getattr(part, name))
