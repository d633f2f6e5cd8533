"""BatchRecord: the samples behind a worker's gradient, and whether that gradient may be used.

Means are weighted by samples, so a worker counts them: of the current minibatch, since the last mean, since the last
sync of its parameters, and in all.  The policy for NaN and infinity is here too: a refused minibatch counts as an
empty one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from paceline.worker.cursor import Cursor

NonFinite = Literal["skip", "stop", "pass"]


class NonFiniteGradient(RuntimeWarning):
    """A gradient held NaN or infinity and was not used."""


class BatchRecord:
    """What is known about the minibatch that a worker works on."""

    def __init__(self, rank: int, cursor: Cursor, nonfinite: NonFinite = "skip") -> None:
        if nonfinite not in ("skip", "stop", "pass"):
            raise ValueError(
                f"nonfinite={nonfinite!r}: the policy for a NaN gradient is one of 'skip', 'stop' and 'pass'"
            )
        self.nonfinite: NonFinite = nonfinite
        self.samples = 0.0  # Of this worker's part of the current minibatch.
        self.update_samples = 0.0  # Behind the next step: this worker's, or after a mean of gradients all workers'.
        self.total = 0.0  # Seen by this worker in all.
        self.is_counted = True  # Whether samples are counted; otherwise every step counts as one.
        self.skipped = 0  # Steps that were skipped because of a NaN.
        self.votes = 0  # Means and syncs that this worker has asked for.
        self.fault: str | None = None  # Which rank has which parameter with a NaN in the current gradient.
        self.rank = rank
        self._cursor = cursor
        self._is_own_fault = False
        self._since_mean = 0.0
        self._since_buffers = 0.0
        self._was_averaged = False
        self.notes_syncs = False  # Whether each sync of the parameters is in the trace.
        self._marks: list[float] = []  # For each fragment of the parameters: `total` at its last sync.

    def begin(self, samples: float) -> None:
        """Start a minibatch with that many samples (0: there was none)."""
        if self._was_averaged:
            self._since_mean = 0.0
            self._was_averaged = False
        self._since_mean += samples
        self._since_buffers += samples
        self.samples = self.update_samples = samples
        self.total += samples
        self.fault = None
        self._is_own_fault = False

    def discard(self) -> None:
        """Treat the current minibatch as if it had been empty."""
        self._since_mean -= self.samples
        self._since_buffers -= self.samples
        self.total -= self.samples
        self.samples = self.update_samples = 0.0

    # Weights.

    def take_weight(self) -> float:
        """This worker's weight in a mean that starts now: its samples since the last mean."""
        self._was_averaged = True
        self.votes += 1
        return self._since_mean

    def take_buffers_weight(self) -> float:
        """The same for the model's buffers."""
        weight = self._since_buffers
        self._since_buffers = 0.0
        return weight

    def begin_phase(self) -> None:
        """All workers have equal parameters and buffers: a method starts anew."""
        self._was_averaged = True
        self._since_buffers = 0.0
        self._marks = []
        self.notes_syncs = False

    def track_syncs(self, fragments: int = 1, *, noted: bool = False) -> None:
        """From now on count the samples since each fragment of the parameters was last averaged.

        With `noted` the strategy adds each sync to the trace.
        """
        self.notes_syncs = noted
        if len(self._marks) != fragments:
            self._marks = [self.total] * fragments

    def since_sync(self, fragment: int = 0) -> float:
        """This worker's samples since the last sync of that fragment."""
        return self.total - self._marks[fragment]

    def mark_sync(self, fragment: int = 0) -> float:
        """That fragment is averaged now; how many samples count in that average."""
        self.votes += 1
        weight = self.since_sync(fragment)
        self._marks[fragment] = self.total
        return weight

    def undo_sync(self, fragment: int, samples: float) -> None:
        """A sync failed: its samples count in the next one."""
        self._marks[fragment] -= samples

    @property
    def has_syncs(self) -> bool:
        """Whether the strategy averages parameters now and then, however long it waits before the next time."""
        return bool(self._marks)

    @property
    def unsynced(self) -> float:
        """How many samples this worker's parameters stand for, beyond those that all workers have."""
        if self._marks:
            return self.total - sum(self._marks) / len(self._marks)
        return 0.0 if self._was_averaged else self._since_mean

    # NaN and infinity.

    def note_fault(self, first_nonfinite: Callable[[], str | None]) -> None:
        """Note a NaN in this worker's own gradient; `first_nonfinite` names the parameter, or returns None."""
        if self.nonfinite != "pass" and self.fault is None and (name := first_nonfinite()) is not None:
            self.note_own_fault(f"rank {self.rank} has NaN or infinity in the gradient of '{name}'")

    def note_own_fault(self, fault: str) -> None:
        if self.nonfinite != "pass" and self.fault is None:
            self.fault = fault
            self._is_own_fault = True

    def accept(self, first_nonfinite: Callable[[], str | None]) -> bool:
        """Whether a gradient of this worker alone may be used; otherwise its minibatch is discarded."""
        self.note_fault(first_nonfinite)
        if self.fault is None or not self.refuses():
            return True
        self.discard()
        self.fault = None
        return False

    def refuses(self) -> bool:
        """Apply the policy to the fault in the current gradient; whether the step is skipped."""
        step = self._cursor.step
        self.skipped += self.nonfinite == "skip"
        if self.nonfinite == "stop":
            raise FloatingPointError(f"{self.fault} at step {step}; the step was not taken (nonfinite='stop')")
        if self.nonfinite == "skip" and self._is_own_fault:
            warnings.warn(NonFiniteGradient(f"{self.fault} at step {step}; the step was skipped"), stacklevel=4)
        return self.nonfinite == "skip"

    # State.

    def save(self) -> dict[str, Any]:
        return {
            "total": self.total,
            "since_mean": 0.0 if self._was_averaged else self._since_mean,
            "since_buffers": self._since_buffers,
            "marks": list(self._marks),
        }

    def load(self, values: dict[str, Any]) -> None:
        self.total = values["total"]
        self._since_mean = values["since_mean"]
        self._was_averaged = False
        self._since_buffers = values["since_buffers"]
        self._marks = list(values["marks"])
