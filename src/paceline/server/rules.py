"""Rules: what an arriving update does to the value that a shard holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


class Rule(ABC):
    """A frozen dataclass of settings; what it remembers lies in the shard's memory."""

    @abstractmethod
    def apply(self, value: Tensor, update: Tensor, *, staleness: int) -> None:
        """Change `value` in place.  `staleness` counts the updates applied since the sender read it."""


@dataclass(frozen=True)
class Sgd(Rule):
    """value -= lr * gradient."""

    lr: float = 0.1

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"Sgd(lr={self.lr}): the learning rate must be positive")

    def apply(self, value: Tensor, update: Tensor, *, staleness: int) -> None:
        value.add_(update, alpha=-self.lr)


RULES: tuple[type[Rule], ...] = (Sgd,)
