"""Minibatch: what the user's loop reports about its current minibatch, and what the replica hears about it.

Tally: whether any of its steps were of use.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from paceline.session.learner import LoopLearner
from paceline.worker.batch import NonFiniteGradient
from paceline.worker.replica import Replica


class UnsharedLoader(RuntimeWarning):
    """Several workers train, and nothing says that they read different data."""


class Minibatch:
    """The minibatch that the user's loop works on: its samples, and whether its gradient may be used.

    All calls that report a minibatch to the replica are made here.
    """

    def __init__(self, replica: Replica, learner: LoopLearner) -> None:
        self._replica = replica
        self._learner = learner
        self.samples: float | None = None  # Read since the last step; None if they are not counted.
        self.refused_unshared: str | None = None  # The error if no `shard` has yielded a minibatch for a step.
        self.taken = 0  # Minibatches that `shard` has yielded since the last step,
        self._has_taken = False  # some of them in training mode.
        self._unused: dict[int, int] = {}  # Samples of those since the last backward pass, by pass over a loader.
        self._in_eval_mode: dict[int, int] = {}  # The same, read in eval mode: they count if a backward pass uses them.
        self._has_begun = False

    def count(self, samples: int) -> None:
        """Add samples that were read for the next step."""
        self.samples = (self.samples or 0) + samples

    def take(self, samples: int, epoch: int) -> None:
        """`shard` yields a minibatch of its pass number `epoch`, with that many samples.

        If the user's loop did nothing with the minibatch before, that one does not count.
        """
        skipped = self._unused.pop(epoch, None)
        if skipped is not None and self.samples is not None:
            self.samples -= skipped
            self.taken -= 1
        self.count(samples)
        self.taken += 1
        self._has_taken = True
        self._unused[epoch] = samples

    def take_in_eval_mode(self, samples: int, epoch: int) -> None:
        """`shard` yields a minibatch of its pass number `epoch` to a model in eval mode, perhaps to train it."""
        self._in_eval_mode[epoch] = samples

    def end_eval_mode(self, epoch: int) -> bool:
        """That minibatch is over; whether it was used by a backward pass."""
        return self._in_eval_mode.pop(epoch, None) is None

    def use(self) -> None:
        """A backward pass has run on the minibatches that were taken."""
        self._use_in_eval_mode()
        self._unused = {}

    def _use_in_eval_mode(self) -> None:
        """Count minibatches read in eval mode, unless the step has others: then they only evaluate the model."""
        if self._has_taken:
            return
        for samples in self._in_eval_mode.values():
            self.count(samples)
            self.taken += 1
        self._in_eval_mode = {}

    @property
    def used(self) -> int:
        """Minibatches of `shard` since the last step on which a backward pass has run."""
        return self.taken - len(self._unused)

    def forget_samples(self) -> None:
        self.samples = None
        self.taken = 0
        self._has_taken = False
        self._unused = {}
        self._in_eval_mode = {}

    def begin(self) -> None:
        """Its gradient is computed now.  A minibatch whose samples are not counted weighs 1."""
        self._use_in_eval_mode()
        if self.refused_unshared is not None and not self.taken:
            raise ValueError(self.refused_unshared)
        if not self._has_begun and self.samples is None and self._replica.workers > 1 and not self._replica.rank:
            warnings.warn(
                UnsharedLoader(
                    f"{self._replica.workers} workers train, and neither session.shard nor session.count was called "
                    "in training mode before the first gradient: if all workers read the same data, give the loader to "
                    "session.shard(loader); if each worker reads its own data, call session.count(samples) before "
                    "each backward pass"
                ),
                stacklevel=5,
            )
        self._has_begun = True
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

    def tell(self, loss: float) -> None:
        """Give its loss; if its gradient was exchanged already, add the loss to what the trace has of it."""
        self._learner.loss = loss
        points = self._replica.endpoint.trace.points
        if points and points[-1].step == self._replica.cursor.step and points[-1].loss is None:
            points[-1] = points[-1]._replace(loss=loss)

    def finish(self) -> None:
        """Its step is taken: the next samples and the next loss are those of another minibatch."""
        self.forget_samples()
        self._learner.loss = None


class NothingTrained(RuntimeWarning):
    """The steps of a session have changed no parameter."""


class Tally:
    """Counts the steps of this worker by what became of them."""

    def __init__(self, replica: Replica) -> None:
        self._batch = replica.batch
        self._replica = replica
        self._start = float(replica.params.sum(dtype=torch.float64))
        self._rank = replica.rank
        self._skipped = 0  # By the replica's count, at the last step.
        self.used = 0
        self.refused = 0
        self.overflowed = 0

    def add(self, *, overflow: bool) -> None:
        """A step was taken; on `overflow` the user's gradient scaler skips it."""
        was_skipped = self._batch.skipped > self._skipped
        self._skipped = self._batch.skipped
        if overflow:
            self.overflowed += 1
        elif was_skipped:
            self.refused += 1
        elif self._batch.samples:
            self.used += 1

    def check(self) -> None:
        """At the end of the run: raise FloatingPointError if NaN or infinity prevented every step.

        Warn if no parameter has changed, although the learning rate was above 0.
        """
        is_same = float(self._replica.params.sum(dtype=torch.float64)) == self._start
        if self.used and is_same and any(group["lr"] for group in self._replica.learner.optimizer.param_groups):
            warnings.warn(
                NothingTrained(
                    f"no parameter has changed in {self.used} steps: the gradients may be 0, the steps too small for "
                    f"{self._replica.params.dtype}, or the optimizer may hold the memory that the parameters had "
                    "before attach"
                ),
                stacklevel=3,
            )
        if self.used or not (self.refused or self.overflowed):
            return
        lost = self.refused + self.overflowed
        message = (
            f"rank {self._rank} has trained nothing: its gradient had NaN or infinity in all of its {lost} steps, so "
            "all were skipped; lower the learning rate, or look for the NaN with torch.autograd.set_detect_anomaly"
        )
        if self.refused:
            raise FloatingPointError(message)
        # The first steps of a gradient scaler always overflow, and a short run may have no others.
        warnings.warn(NonFiniteGradient(f"{message}; or lower init_scale of the GradScaler"), stacklevel=3)
