"""Slots: what a codec keeps between messages, by name, as in a checkpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from paceline.state import RESIZE_RULES, ResizeRule


class Slots:
    """A `Remember` for tests.  Given another one's slots, it resumes from copies of them."""

    def __init__(self, saved: dict[str, SimpleNamespace] | None = None) -> None:
        self.saved = saved
        self.slots: dict[str, SimpleNamespace] = {}
        self.rules: dict[str, ResizeRule] = {}

    def __call__(self, name: str, /, *, rule: ResizeRule, version: int = 1, **initial: Any) -> SimpleNamespace:
        assert name not in self.slots, f"two slots of one codec are named '{name}'"
        assert rule in RESIZE_RULES.values(), f"the resize rule of '{name}' is not registered"
        values = initial if self.saved is None else vars(self.saved[name])
        assert values.keys() == initial.keys()
        self.slots[name] = SimpleNamespace(**{n: v.clone() if isinstance(v, Tensor) else v for n, v in values.items()})
        self.rules[name] = rule
        return self.slots[name]

    def vector(self) -> Tensor:
        """All floating-point values, one after the other, in double precision."""
        values = [v for slot in self.slots.values() for v in vars(slot).values()]
        vectors = [v.reshape(-1).double() for v in values if isinstance(v, Tensor) and v.is_floating_point()]
        return torch.cat(vectors) if vectors else torch.zeros(0)


def in_units(slot: dict[str, Any], name: str = "residual") -> Tensor:
    """Each value of a vector in the slot times its unit."""
    total = torch.zeros_like(slot[name], dtype=torch.float64)
    for start, stop, unit in slot["shares"]:
        total[start:stop] = unit * slot[name][start:stop].double()
    return total


def remembered(slot: dict[str, Any]) -> Tensor:
    """What one sender's residuals add to the coming means: each value times its unit, and its residual as an owner."""
    total = in_units(slot)
    return total + slot["owner_residual"].double() if "owner_residual" in slot else total


def owed(states: list[Any]) -> Tensor:
    """What the next means would still deliver.  A resized state has no units: each worker then has all of it."""
    slots = [next(v["values"] for n, v in s["slots"].items() if n.endswith(".residuals")) for s in states]
    if not any(slot["shares"] for slot in slots):
        assert all(torch.equal(slot["residual"], slots[0]["residual"]) for slot in slots)
        return slots[0]["residual"].double()
    return torch.stack([remembered(slot) for slot in slots]).sum(0)
