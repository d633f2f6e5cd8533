"""Timetable: which samples every step reads, if the size of minibatches may change from epoch to epoch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """The samples of one step: of that epoch, from the one with number `first`, `size` of them or up to its end."""

    epoch: int
    first: int
    size: int


class Timetable:
    """A run over a data set of `samples`, for a number of `steps` or `epochs`.

    `size_of` gives the size of an epoch's minibatches, which is fixed once a step of that epoch was asked for.

    >>> growing = Timetable(100, lambda epoch: 10 * (epoch + 1), epochs=2)
    >>> growing.total_steps, growing.place(10), growing.place(14)
    (15, Place(epoch=1, first=0, size=20), Place(epoch=1, first=80, size=20))
    """

    def __init__(
        self, samples: int, size_of: Callable[[int], int], *, steps: int | None = None, epochs: float | None = None
    ) -> None:
        self.samples = samples
        self.sizes: list[int] = []  # Of the epochs so far.
        self._size_of = size_of
        self._steps = steps
        self._epochs = epochs
        self._starts = [0]  # The first step of each epoch so far, and of the next one.
        self._end: int | None = None  # A trial ends before this step.

    @property
    def total_steps(self) -> int:
        """The length of the run, as far as it is decided: later epochs may still get larger minibatches."""
        if self._end is not None:
            return self._end
        if self._steps is not None:
            return self._steps
        if not self._epochs:
            return 0
        whole = int(self._epochs)
        return max(1, self.start(whole) + round(self._epochs % 1 * self.steps_in(whole)))

    def start(self, epoch: int) -> int:
        """The first step of an epoch."""
        while len(self._starts) <= epoch:
            self._extend()
        return self._starts[epoch]

    def steps_in(self, epoch: int) -> int:
        return -(-self.samples // self.size(epoch))

    def size(self, epoch: int) -> int:
        """The samples of a step in that epoch."""
        return self.sizes[epoch] if epoch < len(self.sizes) else self._size_of(epoch)

    def place(self, step: int) -> Place:
        while self._starts[-1] <= step:
            self._extend()
        epoch = bisect_right(self._starts, step) - 1
        size = self.sizes[epoch]
        return Place(epoch, (step - self._starts[epoch]) * size, size)

    def is_start(self, step: int) -> bool:
        """Whether an epoch starts with that step."""
        return self.place(step).first == 0

    def samples_before(self, step: int) -> int:
        """How many samples all workers have read before that step."""
        epoch, first, _ = self.place(step)
        return epoch * self.samples + first

    def steps_for(self, samples: int) -> int:
        """The steps until so many samples have been read."""
        epoch, rest = divmod(samples, self.samples)
        return self.start(epoch) - (-rest // self.size(epoch))

    def samples_in(self, step: int) -> int:
        """How many samples all workers read in that step."""
        _, first, size = self.place(step)
        return min(size, self.samples - first)

    def epochs_before(self, step: int) -> float:
        return self.samples_before(step) / self.samples

    # Sizes that are chosen during the run.

    def forget_from(self, epoch: int) -> None:
        """The sizes of that epoch and later ones are not fixed any more."""
        del self.sizes[epoch:]
        del self._starts[epoch + 1 :]

    def set_sizes(self, sizes: Sequence[int]) -> None:
        """Fix the sizes of the first epochs, and no others."""
        self.sizes = list(sizes)
        self._starts = [0]
        for size in self.sizes:
            self._starts.append(self._starts[-1] - (-self.samples // size))

    def end_at(self, step: int | None) -> None:
        """Let the run end before that step; None: at its usual end."""
        self._end = step

    def _extend(self) -> None:
        size = self._size_of(len(self.sizes))
        self._starts.append(self._starts[-1] - (-self.samples // size))
        self.sizes.append(size)
