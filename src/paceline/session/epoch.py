"""Epoch: compares the minibatches that `shard` yields with the steps of the user's loop."""

from __future__ import annotations

from paceline.session.backward_watch import BackwardWatch
from paceline.session.minibatch import Minibatch


class Epoch:
    """Finds a forgotten `session.step()`, and an epoch that ends before its last minibatches make a step."""

    def __init__(self, batch: Minibatch, watch: BackwardWatch, accumulate: int) -> None:
        self.has_hooks = False  # Whether the strategy's own hooks see backward passes.
        self._batch = batch
        self._watch = watch
        self._accumulate = accumulate
        self._is_last = False  # Whether the current minibatch is the last of its epoch.
        self._batches_per_step: int | None = None  # Minibatches of `shard` in the last step.

    def on_minibatch(self, samples: int, *, number: int, is_last: bool) -> None:
        """`shard` yields a minibatch of its pass with that number, with so many samples of this worker."""
        self.check_step(least=self._accumulate)
        self._is_last = is_last
        self._batch.take(samples, number)

    def was_used(self, number: int) -> bool:
        """Whether a backward pass ran on the last minibatch of that pass, which was read in eval mode."""
        self._note_passes()
        return self._batch.end_eval_mode(number)

    def on_end(self) -> None:
        """`shard` has no more minibatches in this epoch."""
        self._note_passes()
        if 0 < self._batch.used < self._accumulate:
            raise RuntimeError(
                f"the epoch ended {self._batch.used} minibatches after the last session.step(), and "
                f"attach(accumulate={self._accumulate}) minibatches make a step: call session.step() after the last "
                "minibatch of an epoch too (the loader must have a length), or give the loader a multiple of "
                f"{self._accumulate} minibatches"
            )

    def on_step(self) -> None:
        """The user takes a step."""
        self._batches_per_step = self._batch.taken

    @property
    def has_open_gradient(self) -> bool:
        """Whether a backward pass has run on a minibatch since the last step, as far as hooks have seen it."""
        if not self._sees_passes:
            return False
        self._note_passes()
        return self._batch.used > 0

    def is_rest(self, passes: int) -> bool:
        """Whether this minibatch ends the epoch before `accumulate` minibatches make a step."""
        return self._is_last and self._batches_per_step == self._accumulate and passes == self._batch.taken

    def check_step(self, *, least: int) -> None:
        """Raise if a gradient was completed, no step was ever taken, and at least so many minibatches were used."""
        self._note_passes()
        used = self._batch.used
        if self._batches_per_step is None and self._watch.has_completed and used >= least:
            raise RuntimeError(
                f"backward() ran on {used} minibatches of session.shard, and session.step() was never called, so "
                "nothing is trained: call session.step() after backward(); to add up several minibatches in a step, "
                "give attach(accumulate=...) or run all passes but the last `with session.no_sync()`"
            )

    def _note_passes(self) -> None:
        """Find out whether a backward pass has used the minibatches so far; without a hook they count as used."""
        if not self._sees_passes or self._watch.take():
            self._batch.use()

    @property
    def _sees_passes(self) -> bool:
        return self.has_hooks or self._watch.is_active
