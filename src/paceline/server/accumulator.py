"""Accumulator: the steps and samples of a worker since its last push."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Accumulator:
    """Counts the steps and the samples that a worker has not pushed yet.

    >>> unpushed = Accumulator()
    >>> unpushed.add(32)
    >>> unpushed.add(16)
    >>> unpushed.steps, unpushed.take(), unpushed.steps
    (2, 48.0, 0)
    """

    steps: int = 0
    samples: float = 0.0

    def add(self, samples: float) -> None:
        """Count one step, on so many samples."""
        self.steps += 1
        self.samples += samples

    def take(self) -> float:
        """Return the number of samples, and start again at zero."""
        samples = self.samples
        self.steps = 0
        self.samples = 0.0
        return samples
