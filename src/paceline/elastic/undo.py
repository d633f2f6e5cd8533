"""Copies of what an exchange changes in place."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from paceline.state import Slot


class Copies:
    """The values of tensors and of slots of state, as they were when this was made."""

    def __init__(self, tensors: Sequence[Tensor], slots: Sequence[Slot]) -> None:
        self._tensors = [(t, t.clone()) for t in tensors]
        self._values = [(vars(slot), {name: _copied(value) for name, value in vars(slot).items()}) for slot in slots]

    def restore(self) -> None:
        """Give all of them these values again, in the memory that they have."""
        for tensor, values in self._tensors:
            tensor.copy_(values)
        for slot, values in self._values:
            for name, value in values.items():
                slot[name] = _put_back(slot[name], value)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _put_back(now: Any, before: Any) -> Any:
    """The value from before; in the same object where others may refer to it."""
    if isinstance(now, Tensor) and isinstance(before, Tensor) and now.shape == before.shape:
        return now.copy_(before)
    if isinstance(now, list) and isinstance(before, list):
        now[:] = copy.deepcopy(before)
        return now
    if isinstance(now, dict) and isinstance(before, dict):
        now.clear()
        now.update(copy.deepcopy(before))
        return now
    return _copied(before)
