"""Cursor: a worker's position in its data: which step comes next, and which part of the minibatch it reads."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from paceline.op import Op, Ready
from paceline.worker.plan import Plan

if TYPE_CHECKING:
    from paceline.worker.batch import BatchRecord
    from paceline.worker.learner import Learner

MOST_EMPTY_STEPS = 1_000_000
MOST_WITHOUT_A_MEAN = 10_000  # Empty steps, if the strategy has asked for no mean before them, and plans no sync.


class Rest(Protocol):
    """The moments at which nothing is in flight between workers that do not wait for each other."""

    @property
    def is_asked(self) -> bool:
        """Whether another worker has begun to save the run."""
        ...

    @property
    def number(self) -> int:
        """How many such moments there were."""
        ...

    @property
    def member(self) -> int:
        """The data shard of this worker, which names its state."""
        ...

    @property
    def shards(self) -> int:
        """How many servers save a state of their own."""
        ...

    async def reach(self) -> None:
        """Return at the next one, at which this worker's state can be saved."""
        ...

    async def go_on(self) -> None:
        """This worker's state is saved, and it continues."""
        ...


class Cursor:
    """`step` is the step that the worker is at.

    `shard` is the part of each minibatch that it reads; None: that of its rank.
    """

    def __init__(self, learner: Learner, plan: Plan, shards: int) -> None:
        self.step = 0
        self.shard: int | None = None
        self.parts = 0  # If not 0, the current minibatch is cut into so many.
        self.shards = shards  # Each minibatch is cut into this many parts.
        self.is_over = False  # No worker has data left, and all workers know it.
        self.on_step: Callable[[int], None] = lambda step: None  # The driver's hook: called once for every step.
        self.on_end: Callable[[], None] = lambda: None  # The driver's hook: this worker computes no more gradients.
        self.on_rest: Callable[[], None] = lambda: None  # The driver's hook: others save the run after that.
        self.rest: Rest | None = None  # Of a method whose workers save the run at no common step.
        # The driver's: the part of the job's store where the checkpoint of that name is agreed; empty: there is none.
        self.place_of: Callable[[str], str] = lambda name: ""
        # The folder of the checkpoint from which this run continues; empty: it continues from states.
        self.restored: str | None = None
        self._learner = learner
        self._plan = plan
        self._end: float = inf  # The step before which the current phase ends.
        self._announced = -1  # The last step for which the hook was called.

    def has_data(self, step: int) -> bool:
        """Whether this worker has a minibatch for that step."""
        return step < self._end and self._learner.has_data(step)

    @property
    def is_in_phase(self) -> bool:
        return self.step < self._end

    @property
    def has_started(self) -> bool:
        """Whether the worker has reached its first step."""
        return self._announced >= 0

    @property
    def rate(self) -> float:
        """The factor that the schedule puts on the learning rates at this step; after the last step 1."""
        return self._learner.rate(self.step) if self.has_data(self.step) else 1.0

    @property
    def lr(self) -> float:
        """See `Replica.lr`."""
        if self.has_data(self.step):
            return self._learner.lr(self.step)
        return max(float(group["lr"]) for group in self._learner.optimizer.param_groups)

    def coming_lr(self) -> Op[float]:
        """The same, for a step whose gradient was not asked for yet; it waits until no scheduler can change it."""
        return self._learner.coming_lr(self.step) if self.has_data(self.step) else Ready("learning rate", self.lr)

    @property
    def last_step(self) -> int | None:
        """The step before which the run, or the current phase, ends; None if unknown."""
        known = [int(n) for n in (self._end, self._plan.steps) if n is not None and n < inf]
        return min(known, default=None)

    def steps(self, batch: BatchRecord) -> Iterator[int]:
        """Count steps until no worker has data left; see `Replica.steps`."""
        first = self.step
        empty = 0
        votes = batch.votes
        while not self.is_over:
            if self.is_in_phase:
                self._announce(self.step)
            yield self.step
            self.step += 1
            empty = 0 if batch.update_samples else empty + 1
            averages = batch.has_syncs or batch.votes != votes
            if empty > (MOST_EMPTY_STEPS if averages else MOST_WITHOUT_A_MEAN):
                raise RuntimeError(
                    f"this worker's data ended after step {self.step - empty - 1}, and {empty} empty steps followed "
                    f"without a mean, {self.step - first} steps in all: only a mean tells a worker that all data has "
                    "ended.  Count `steps_alone()` in a strategy that never averages, or shorten its period"
                )

    def steps_alone(self) -> Iterator[int]:
        """Count steps until this worker's own data ends."""
        while self.has_data(self.step):
            self._announce(self.step)
            yield self.step
            self.step += 1

    def advance(self) -> bool:
        """Go to this worker's own next step; False if it has no data for one."""
        following = self._announced + 1
        if not self.has_data(following):
            return False
        self.step = following
        self._announce(following)
        return True

    def seek(self, step: int, shard: int, parts: int = 0) -> None:
        """Go to any part of any minibatch, as a dispatcher assigned it.

        With `parts` it is cut into so many, and not into one for each worker.
        """
        for k in range(self._announced + 1, step + 1):  # The hook is called once for every step, however far this goes.
            self.step = k
            self._announce(k)
        self.step = step
        self.shard = shard
        self.parts = parts

    def resume_at(self, step: int) -> None:
        """Continue where another worker was, whose part of the data this one takes over."""
        self.step = step
        self._announced = step - 1

    def finish(self) -> None:
        """End the count of `steps`: no worker has data left."""
        self.is_over = True

    @contextmanager
    def until(self, step: int) -> Generator[None]:
        """Within this block the data of every worker ends before `step`."""
        outer = self._end
        self._end = min(step, outer)
        try:
            yield
        finally:
            self._end = outer
        self.step = min(self.step, step)
        self.is_over = False

    def end(self) -> None:
        """To be called by a method whose workers do not meet in means, before a worker waits for the others' end."""
        if self._end == inf:  # Otherwise another phase follows.
            self.on_end()

    @contextmanager
    def full_batches(self) -> Generator[None]:
        """Within this block every worker reads whole minibatches, not only its part of them."""
        self._learner.use_full_batches(whole=True)
        try:
            yield
        finally:
            self._learner.use_full_batches(whole=False)

    def _announce(self, step: int) -> None:
        self._announced = step
        self.on_step(step)

    def save(self) -> dict[str, Any]:
        return {"step": self.step}

    def load(self, values: dict[str, Any]) -> None:
        self.resume_at(values["step"])
        self.is_over = False
