"""Length: a part of a run, in steps, samples of all workers, or epochs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

UNITS = {
    "step": "steps",
    "steps": "steps",
    "sample": "samples",
    "samples": "samples",
    "epoch": "epochs",
    "epochs": "epochs",
}


class Position(NamedTuple):
    """How far a run has come, and how long it is; None where that is not known."""

    steps: float
    samples: float
    epochs: float | None
    all_steps: float | None = None
    all_epochs: float | None = None

    @property
    def share(self) -> float | None:
        """The share of the run that is done: of its epochs if they are known, since minibatches may grow."""
        if self.epochs is not None and self.all_epochs:
            return min(1.0, self.epochs / self.all_epochs)
        return min(1.0, self.steps / self.all_steps) if self.all_steps else None


@dataclass(frozen=True)
class Length:
    """A number of steps, samples or epochs.

    >>> Length.of("schedule.warmup", "5 epochs")
    Length(value=5.0, unit='epochs')
    """

    value: float
    unit: str

    @classmethod
    def of(cls, name: str, given: Any) -> Length:
        """Text such as "5 epochs"; `name` is the setting, for the error."""
        if isinstance(given, Length):
            return given
        found = re.fullmatch(r"\s*(\d[\d_]*\.?\d*(?:e\d+)?)\s*([a-z]+)\s*", given) if isinstance(given, str) else None
        if found is None or found[2] not in UNITS:
            raise ValueError(f"{name}={given!r}: write a number and a unit, steps, samples or epochs, as in '5 epochs'")
        value = float(found[1].replace("_", ""))
        if not 0 <= value < inf:
            raise ValueError(f"{name}={given!r}: it must be finite and at least 0")
        return cls(value, UNITS[found[2]])

    def count(self, at: Position) -> int:
        """How many times this length has passed.

        >>> Length(0.1, "epochs").count(Position(30, 300, 0.3))
        3
        """
        return int(getattr(at, self.unit) / self.value + 1e-9)

    def done(self, name: str, at: Position) -> float:
        """The share of this length that is done at a position; 1 after its end."""
        here = getattr(at, self.unit)
        if here is None:
            raise ValueError(f"{name}='{self}': the epochs of this run are not known; give it in steps or samples")
        return 1.0 if here >= self.value else here / self.value

    def __str__(self) -> str:
        return f"{self.value:g} {self.unit if self.value != 1 else self.unit.removesuffix('s')}"
