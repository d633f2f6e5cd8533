"""Plan: what is known about a run before it starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from paceline.training.timetable import Timetable


@dataclass(frozen=True)
class Plan:
    """The length of a run and the size of its data; None where it is not known.

    >>> Plan(steps_per_epoch=5, samples=70, batch=16).steps_for(samples=86)
    6
    """

    steps: int | None = None
    steps_per_epoch: int | None = None
    samples: int | None = None  # Different samples in an epoch.
    batch: int | None = None  # Samples of a step, over all workers.
    epoch_samples: int | None = None  # Samples seen in an epoch, if some are skipped or repeated.
    timetable: Timetable | None = field(default=None, repr=False, compare=False)  # If minibatches may grow.

    def require(self, name: str, by: str) -> int:
        """One of these numbers.  If it is not known, a ValueError says what needs it (`by`) and how to give it."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(
                f"{by} must know the {name.replace('_', ' ')} before the run: call attach(..., loader=loader, "
                "epochs=...) with a loader that has a length, a dataset and a batch_size; or give a Task data=[...] "
                "that its workers share out, and minibatches of one size"
            )
        return value

    def steps_for(self, *, samples: int, by: str = "this") -> int:
        """The steps until all workers together have seen `samples`; an epoch's last minibatch may be smaller."""
        if self.timetable is not None:
            return self.timetable.steps_for(samples)
        epochs, rest = divmod(samples, self.epoch_samples or self.require("samples", by))
        return epochs * self.require("steps_per_epoch", by) - (-rest // self.require("batch", by))

    def steps_for_epochs(self, epochs: float, by: str = "this") -> int:
        """The steps until so many epochs have passed."""
        if self.timetable is not None and self.steps_per_epoch is None:
            return self.timetable.steps_for(ceil(round(epochs * self.timetable.samples, 6)))
        return ceil(round(epochs * self.require("steps_per_epoch", by), 9))
