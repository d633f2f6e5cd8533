"""Rule: what an arriving update does to the value that a shard holds; the interface of all rules."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.checked import Checked
from paceline.server.rule_memory import plain_memory
from paceline.state import Slot, Values

PIECE = 1 << 16  # Values: so many of each vector stay in the processor's cache.


@dataclass(frozen=True, slots=True)
class Push:
    """A description of an update: its sender, its samples, and its staleness, which is the number of versions since
    the sender read the value.

    `rate` is the factor on the learning rate that the sender's schedule gives for the minibatches behind the update.
    """

    src: int = 0
    samples: float = 1.0
    staleness: int = 0
    workers: int = 1  # That are active.
    time: float = 0.0
    rate: float = 1.0


class Rule(Checked):
    """How an update changes a shard's value.  `Adagrad` is an example with memory, `Scaled` one that wraps a rule."""

    KIND: ClassVar = "rule"

    def memory(self, value: Tensor) -> dict[str, Any]:
        """The memory at the beginning."""
        return {}

    @abstractmethod
    def apply(self, value: Tensor, update: Tensor, m: Slot, push: Push) -> bool:
        """Change `value` in place, or hold the update back; whether `value` changed.  `update` may be overwritten."""

    def flush(self, value: Tensor, m: Slot) -> bool:
        """Apply the updates that are held back, at the end; whether there were any."""
        return False

    def due(self, m: Slot) -> float | None:
        """The time at which `tick` must be called, if no update arrives before."""
        return None

    def tick(self, value: Tensor, m: Slot, now: float, workers: int) -> bool:
        """Apply the updates that are held back, if they are due or all active workers have sent one; whether it did."""
        return False

    def pulled(self, value: Tensor, m: Slot, src: int) -> None:
        """A worker is being sent the value."""

    def forget(self, m: Slot, src: int) -> None:
        """A worker has left or died."""

    def saved(self, m: Slot) -> Values:
        """The memory as plain values, to be loaded in another run."""
        return plain_memory(m)

    @property
    def weighs_samples(self) -> bool:
        """Whether an update counts for as much as it has samples: then what codecs leave out is weighed so too."""
        return False

    def updates_in_step(self, workers: int) -> int:
        """The mean of how many updates makes a step of the value."""
        return 1

    def _check(self, is_right: bool, **given: Any) -> None:
        if not is_right:
            settings = ", ".join(f"{name}={value!r}" for name, value in given.items())
            raise ValueError(f"{type(self).__name__}({settings}): {self.NEEDS}")

    NEEDS: ClassVar[str] = "the learning rate must be positive"
    holds_answers: ClassVar[bool] = False  # Whether a sender gets its reply only after its update was applied.

    @property
    def is_elementwise(self) -> bool:
        """Whether an update can be applied to some values and to the memory of them only."""
        return True


def in_pieces(work: Callable[..., None], *vectors: Tensor) -> None:
    """Call `work` on one piece of the vectors after the other, so that its operations find them in the cache.

    Each value gets the same operations as in one piece, and so the same bits.  Several threads of torch share out the
    whole vectors instead.
    """
    if vectors[0].device.type != "cpu" or vectors[0].numel() <= PIECE or torch.get_num_threads() > 1:
        return work(*vectors)
    for pieces in zip(*(vector.split(PIECE) for vector in vectors), strict=True):
        work(*pieces)
