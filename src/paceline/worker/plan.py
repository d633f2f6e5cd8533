"""Plan: what is known of a run before it begins."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """How long a run will be, and on how much data; None where nobody has said.

    >>> Plan(steps_per_epoch=5, samples=70, batch=16).steps_for(samples=86)
    6
    """

    steps: int | None = None
    steps_per_epoch: int | None = None
    samples: int | None = None  # different ones, in an epoch
    batch: int | None = None  # samples of a step, over all workers together
    epoch_samples: int | None = None  # seen in an epoch, if not all, or some more than once

    def require(self, name: str, by: str) -> int:
        """One of the above; a ValueError that says who wanted it and how to tell if nobody has."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(
                f"{by} must know the {name.replace('_', ' ')} beforehand: give attach(..., loader=loader, epochs=...), "
                "with a loader whose length, dataset and batch_size tell it"
            )
        return value

    def steps_for(self, *, samples: int, by: str = "this") -> int:
        """How many steps it takes to see so many samples, over all workers; an epoch's last minibatch may be smaller."""
        epochs, rest = divmod(samples, self.epoch_samples or self.require("samples", by))
        return epochs * self.require("steps_per_epoch", by) - (-rest // self.require("batch", by))
