"""Minibatch: what the user's loop reports about its current minibatch, and what the replica hears about it."""

from __future__ import annotations

from collections.abc import Callable

from paceline.session.learner import LoopLearner
from paceline.worker.replica import Replica


class Minibatch:
    """The minibatch that the user's loop works on: its samples, and whether its gradient may be used.

    All calls that report a minibatch to the replica are made here.
    """

    def __init__(self, replica: Replica, learner: LoopLearner) -> None:
        self._replica = replica
        self._learner = learner
        self.samples: float | None = None  # Read since the last step; None if they are not counted.

    def count(self, samples: int) -> None:
        """Add samples that were read for the next step."""
        self.samples = (self.samples or 0) + samples

    def forget_samples(self) -> None:
        self.samples = None

    def begin(self) -> None:
        """Its gradient is computed now.  A minibatch whose samples are not counted weighs 1."""
        self._replica.batch.is_counted = self.samples is not None
        self._replica.batch.begin(1.0 if self.samples is None else self.samples)

    def begin_empty(self) -> None:
        """This worker has no minibatch for the step."""
        self._replica.batch.begin(0.0)

    def is_empty(self) -> bool:
        """Whether it has no samples for this worker."""
        return not self._replica.batch.samples

    def accepts_gradient(self, first_nonfinite: Callable[[], str | None], *, overflow: bool) -> bool:
        """Whether its gradient may be used; if not, the minibatch counts as empty.

        `first_nonfinite` names the first parameter whose gradient has a NaN or infinity.  `overflow` says that the
        user's gradient scaler has already found one.
        """
        if overflow:
            self._replica.batch.discard()
            return False
        return self._replica.batch.accept(first_nonfinite)

    def record(self) -> None:
        """Add it to the trace."""
        endpoint = self._replica.endpoint
        endpoint.trace.point(
            endpoint.now(),
            self._replica.rank,
            self._replica.cursor.step,
            int(self._replica.batch.samples),
            self._learner.loss,
        )

    def finish(self) -> None:
        """Its step is taken: the next samples and the next loss are those of another minibatch."""
        self.samples = None
        self._learner.loss = None
