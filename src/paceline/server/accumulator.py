"""Accumulator: the steps, the samples and the learning rates of a worker since its last push."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Accumulator:
    """Counts the steps and the samples that a worker has not pushed yet.

    `rate` is the mean of the factors that its schedule has put on the learning rate in these steps.

    >>> unpushed = Accumulator()
    >>> unpushed.add(32)
    >>> unpushed.add(16, rate=0.5)
    >>> unpushed.steps, unpushed.rate, unpushed.take(), unpushed.steps
    (2, 0.75, 48.0, 0)
    """

    steps: int = 0
    samples: float = 0.0
    rate: float = 1.0

    def add(self, samples: float, rate: float = 1.0) -> None:
        """Count one step, on so many samples."""
        self.steps += 1
        self.samples += samples
        self.rate = rate if self.steps == 1 else self.rate + (rate - self.rate) / self.steps

    def take(self) -> float:
        """Return the number of samples, and start again at zero."""
        samples = self.samples
        self.steps = 0
        self.samples = 0.0
        self.rate = 1.0
        return samples
