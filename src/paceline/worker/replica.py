"""Replica: a worker's model as one flat vector, with the verbs that papers use.

A strategy sees nothing else.  Where gradients come from and how a step is taken is the Learner's business.
"""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any, Literal

import torch
from torch import Tensor

from paceline import collectives
from paceline.codecs.codec import Codec, CodecState
from paceline.collectives import Groups, SyncVote
from paceline.endpoint import Endpoint
from paceline.op import Op, Ready
from paceline.state import Kind, Memory, copied, restored
from paceline.strategy import Ended, Stopped, Strategy
from paceline.worker.flat import Bucket
from paceline.worker.learner import Learner
from paceline.worker.plan import Plan

NonFinite = Literal["skip", "stop", "pass"]
MOST_EMPTY_STEPS = 10_000_000


class NonFiniteGradient(RuntimeWarning):
    """A gradient held NaN or infinity and was left out."""


class Replica:
    """One worker as its strategy sees it."""

    def __init__(
        self, endpoint: Endpoint, learner: Learner, *, nonfinite: NonFinite = "skip", plan: Plan | None = None
    ) -> None:
        if nonfinite not in ("skip", "stop", "pass"):
            raise ValueError(
                f"nonfinite={nonfinite!r}: what to do with a NaN gradient is one of 'skip', 'stop' and 'pass'"
            )
        self.endpoint = endpoint
        self.learner = learner
        self.flat = learner.flat
        self.nonfinite: NonFinite = nonfinite
        self.plan = plan or Plan()
        self.step_index = 0
        self.samples = 0.0  # seen by this worker in all
        self.counts_samples = True  # whether samples are counted, or every step as one
        self.skipped = 0  # steps left out because of a NaN
        self.on_step: Callable[[int], None] = lambda k: None  # what the driver does before each step
        self.data_shard: int | None = None  # whose part of the minibatch it works on; None: its own
        self.missed_end = False  # whether the run had ended without it
        self._announced = -1  # the last step of which the driver was told
        self.published: Tensor | None = None
        self._since_mean = 0.0
        self._since_buffers = 0.0
        self._mean_was_taken = False
        self._behind_update = 0.0  # samples behind the gradient at hand; after a mean, of all workers
        self._bad: str | None = None  # who and what was not finite in the gradient at hand
        self._is_culprit = self._over = False
        self._end: float = inf  # the step before which a part of the run ends
        self._memories: list[Memory] = []
        self._kinds: list[Kind] = []
        self._resumed: list[dict[str, Any]] = []
        self._unfinished: list[Callable[[], Awaitable[None]]] = []

    @property
    def params(self) -> Tensor:
        """The model as one vector; writing to it changes the model."""
        return self.flat.params

    @property
    def rank(self) -> int:
        return self.endpoint.rank

    @property
    def workers(self) -> int:
        return len(self.endpoint.ranks)

    @property
    def lr(self) -> float:
        """The largest learning rate of the optimizer's groups, as of the last step."""
        return max(float(group["lr"]) for group in self.learner.optimizer.param_groups)

    def has_data(self, step: int) -> bool:
        """Whether this worker has a minibatch for that step."""
        return step < self._end and self.learner.has_data(step)

    def steps(self) -> Iterator[int]:
        """Count steps until no worker has data left, as the last `mean` told all of them alike.

        A worker whose own data ended first goes on in empty steps (no samples, no time, no change), so that everybody
        meets at every mean; a run whose length is no multiple of the period thereby still ends with a mean.
        """
        empty = 0
        while not self._over:
            if self.step_index < self._end:
                self._announce(self.step_index)
            yield self.step_index
            self.step_index += 1
            empty = 0 if self._behind_update else empty + 1
            if empty > MOST_EMPTY_STEPS:
                raise RuntimeError(
                    f"{empty} steps without data and without a mean: the period is too long, or the strategy never averages and should "
                    "count `steps_alone()`"
                )

    def steps_alone(self) -> Iterator[int]:
        """Count steps until this worker's own data ends, whatever the others do."""
        while self.has_data(self.step_index):
            self._announce(self.step_index)
            yield self.step_index
            self.step_index += 1

    def advance(self) -> bool:
        """Go on to this worker's own next step; False if it has no data for one."""
        following = self._announced + 1
        if not self.has_data(following):
            return False
        self.step_index = following
        self._announce(following)
        return True

    def resume_at(self, step: int) -> None:
        """Go on where another worker was, whose part of the data this one takes over."""
        self.step_index, self._announced = step, step - 1

    def seek(self, step: int, data_shard: int) -> None:
        """Go on to a part of any minibatch, as it was handed out to this worker."""
        for k in range(
            self._announced + 1, step + 1
        ):  # The driver hears of every step once, however far this goes ahead.
            self._announce(k)
        self.step_index, self.data_shard = step, data_shard

    def _announce(self, k: int) -> None:
        self._announced = k
        self.on_step(k)

    @property
    def has_begun(self) -> bool:
        """Whether it has come to its first step."""
        return self._announced >= 0

    @property
    def last_step(self) -> int | None:
        """The step before which the run, or this part of it, ends; None if nobody knows."""
        return min((n for n in (self._end, self.plan.steps) if n is not None and n < inf), default=None)  # pyright: ignore

    @property
    def data_shards(self) -> int:
        """Into how many parts each minibatch is cut."""
        return self.endpoint.layout.workers

    def end(self) -> None:
        """Let `steps` count no further: no worker has data left, as all of them know alike."""
        self._over = True

    @property
    def is_over(self) -> bool:
        return self._over

    @contextmanager
    def until(self, step: int) -> Generator[None]:
        """Within this block the data of every worker ends before `step`, and so does what runs in it; then it goes on."""
        outer, self._end = self._end, min(step, self._end)
        try:
            yield
        except Ended:
            pass
        finally:
            self._end = outer
        self._take_published()
        self.step_index, self._over, self._mean_was_taken, self._since_buffers = (
            min(self.step_index, step),
            False,
            True,
            0.0,
        )

    @contextmanager
    def full_batches(self) -> Generator[None]:
        """Within this block every worker gets all of every minibatch, not its part of it."""
        self.learner.use_full_batches(whole=True)
        try:
            yield
        finally:
            self.learner.use_full_batches(whole=False)

    def gradient(self, each: Callable[[Bucket], None] | None = None) -> Op[Tensor]:
        """The mean gradient of the next minibatch at `params`; `each` sees every bucket as soon as backward filled it."""
        if self.step_index >= self._end:
            self.begin(0.0)
            self.flat.emit_zeros(each)
            return Ready("gradient", self.flat.grads)
        return self.learner.gradient(self, each)

    def step(self, g: Tensor) -> Op[None]:
        """The user's optimizer, with `g` as the gradient."""
        if self._bad is not None and self._refuses():
            return self.learner.skip(self)
        if not self._behind_update:
            return Ready("step", None)
        return self.learner.step(self, g)

    def local_step(self) -> Op[None]:
        """The next minibatch's gradient and the user's optimizer's step with it, as on one machine."""
        if self.step_index >= self._end:
            self.begin(0.0)
            return Ready("local step", None)
        return self.learner.local_step(self)

    async def train_alone(self) -> None:
        """Local steps to the end of this worker's own data."""
        for _ in self.steps_alone():
            await self.local_step()

    def reset_optimizer(self) -> None:
        """Let the optimizer forget its momentum and whatever else it has gathered."""
        self.learner.optimizer.state.clear()

    def codec_state(self, codec: Codec | None) -> CodecState | None:
        """A codec as this worker uses it for vectors like `params`; None for none, and for one worker alone."""
        if codec is None:
            return None
        codec_state = codec.fitted([p.shape for p in self.flat.parameters]).codec_state(
            partial(self.memory, "owed"), self.params, key=self.rank
        )
        return codec_state if self.workers > 1 else None  # It remembers all the same: others may join.

    def mean(self, x: Tensor, codec_state: CodecState | None = None) -> Op[Tensor]:
        """The mean of `x` over all workers, in place, weighted by the samples each has seen since the last mean.

        In a loop that ends without notice one mean comes too late, when nobody has new samples nor will have any: it ends
        the strategy where it stands.
        """
        return self._begin_mean(x, codec_state, ends_if_empty=True)

    def mean_of_bucket(
        self, bucket: Bucket, codec_state: CodecState | None = None, groups: Groups | None = None
    ) -> Op[Tensor]:
        """The mean over all workers of a stretch of the gradient, in place, weighted by samples; within `groups` of ranks first."""
        if codec_state is None:  # A codec sees every value anyway, and finds a NaN by itself.
            self.inspect(bucket.where)
        return self._begin_mean(
            bucket.grad,
            codec_state and codec_state[bucket.where],
            ends_if_empty=False,
            start=bucket.where.start,
            groups=groups,
        )

    def _begin_mean(
        self,
        x: Tensor,
        codec_state: CodecState | None,
        *,
        ends_if_empty: bool,
        start: int = 0,
        groups: Groups | None = None,
    ) -> Op[Tensor]:
        self._mean_was_taken = True
        bad = float(self._bad is not None)
        vote = SyncVote(self._since_mean, float(self.has_data(self.step_index + 1)), bad, bad * self.rank, self.rank)
        exchange = self.endpoint.run_collectives(
            lambda endpoint: self._exchange(endpoint, x, vote, codec_state, groups)
        )
        return self.endpoint.spawn(self._end_mean(x, exchange, vote, start, ends_if_empty), kind="mean")

    async def _end_mean(
        self, x: Tensor, exchange: Op[SyncVote], vote: SyncVote, start: int, ends_if_empty: bool
    ) -> Tensor:
        total = await exchange
        self._behind_update = total.weight
        if (complaint := vote.complaint) is not None:
            if (at := complaint.at) is not None:
                self._note_bad(lambda: self.flat.locate(start + at))
            elif self.nonfinite != "pass" and self._bad is None:
                self._bad, self._is_culprit = f"rank {self.rank} has a gradient beyond its codec: {complaint}", True
        if total.bad and self._bad is None:
            self._bad = f"{total.culprit()} had a gradient with NaN or infinity, or beyond its codec"
        self._over = not total.going_on
        if ends_if_empty and self._over and not total.weight:
            raise Ended
        return x

    async def _exchange(
        self, endpoint: Endpoint, x: Tensor, vote: SyncVote, codec_state: CodecState | None, groups: Groups | None
    ) -> SyncVote:
        if self.workers == 1:
            return vote
        if codec_state is None:
            return await collectives.mean(endpoint, x, vote, groups=groups)
        if groups is not None:
            return await collectives.mean_by_groups(endpoint, x, vote, codec_state, groups)
        return await collectives.mean_encoded(endpoint, x, vote, codec_state)

    async def mean_of_buffers(self) -> None:
        """Average floating-point buffers (BatchNorm statistics), weighted by samples; of integer ones take the largest."""
        mine = self.flat.buffers()
        if not mine.numel() or self.workers == 1:
            return
        weight = torch.tensor([self._since_buffers], dtype=torch.float64)
        self._since_buffers = 0.0
        everyones = await self.endpoint.all_gather(torch.cat([weight, mine]))
        self.flat.set_buffers([e[1:] for e in everyones], [float(e[0]) for e in everyones])

    def memory(self, kind: Kind = "shared", /, **initial: Any) -> Memory:
        """Whatever outlives an iteration; what is not in a memory is lost on resume.

        All workers have it alike, unless it is a worker's "own" or "owed" to the others: then see `resized` for what becomes of
        it when there are more or fewer workers.
        """
        saved = self._resumed[len(self._memories)] if len(self._memories) < len(self._resumed) else {}
        memory = Memory(**restored(initial, saved))
        self._memories.append(memory)
        self._kinds.append(kind)
        return memory

    def forget_after(self, memory: Memory) -> None:
        """Drop all memories that were asked for after this one: what they belong to is over."""
        keep = self._memories.index(memory) + 1
        del self._memories[keep:], self._kinds[keep:], self._resumed[keep:]
        self._unfinished.clear()

    def before_stop(self, finish: Callable[[], Awaitable[None]]) -> None:
        """What must be awaited before this replica's state is saved, or its run broken off, between two steps."""
        self._unfinished.append(finish)

    async def drain(self) -> None:
        """Let nothing be under way, so that all of the state is in its memories."""
        for finish in self._unfinished:
            await finish()

    # What learners tell the replica as a gradient comes to be.

    def begin(self, samples: float) -> None:
        """A minibatch of so many samples is being worked on (0: there was none)."""
        if self._mean_was_taken:
            self._since_mean, self._mean_was_taken = 0.0, False
        self._since_mean += samples
        self._since_buffers += samples
        self._behind_update = samples
        self.samples += samples
        self._bad, self._is_culprit = None, False

    def inspect(self, where: slice = slice(None)) -> None:
        """Note it if that stretch of the gradient holds NaN or infinity."""
        self._note_bad(lambda: self.flat.first_nonfinite(where))

    def _note_bad(self, first_nonfinite: Callable[[], str | None]) -> None:
        if self.nonfinite != "pass" and self._bad is None and (name := first_nonfinite()) is not None:
            self._bad = f"rank {self.rank} has NaN or infinity in the gradient of '{name}'"
            self._is_culprit = True

    def discard_batch(self) -> None:
        """Treat the minibatch at hand as if it had been empty."""
        self._since_mean -= self._behind_update
        self._since_buffers -= self._behind_update
        self.samples -= self._behind_update
        self._behind_update = 0.0

    def accept_gradient(self, first_nonfinite: Callable[[], str | None]) -> bool:
        """Whether a gradient that nobody else has a part in may be used; `first_nonfinite` names the parameter with a NaN in it."""
        self._note_bad(first_nonfinite)
        if self._bad is None or not self._refuses():
            return True
        self.discard_batch()
        self._bad = None
        return False

    def _refuses(self) -> bool:
        """What the policy says about the NaN in the gradient at hand."""
        self.skipped += self.nonfinite == "skip"
        if self.nonfinite == "stop":
            raise FloatingPointError(
                f"{self._bad} at step {self.step_index}; nothing was changed by it (nonfinite='stop')"
            )
        if self.nonfinite == "skip" and self._is_culprit:
            warnings.warn(
                NonFiniteGradient(f"{self._bad} at step {self.step_index}; the step was skipped"), stacklevel=3
            )
        return self.nonfinite == "skip"

    @property
    def batch_samples(self) -> float:
        """How many samples are behind the gradient at hand."""
        return self._behind_update

    def publish(self, vector: Tensor) -> None:
        """Name the vector to evaluate, and to end with, in place of `params`: a look-ahead point is not the model."""
        self.published = vector

    async def run(self, strategy: Strategy) -> bool:
        """A strategy's worker role; whether it came to its end, or was stopped before."""
        try:
            await strategy.worker(self)
        except Ended:
            pass
        except Stopped:
            await self.drain()
            return False
        self._take_published()
        return True

    def _take_published(self) -> None:
        if self.published is not None:
            self.params.copy_(self.published)
            self.published = None

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs beside the optimizer's own state: plain numbers and tensors."""
        return {
            "k": self.step_index,
            "samples": self.samples,
            "since_mean": 0.0 if self._mean_was_taken else self._since_mean,
            "since_buffers": self._since_buffers,
            "params": self.params.clone(),
            "buffers": [b.clone() for b in self.flat.model.buffers()],
            "memories": [{n: copied(v) for n, v in vars(m).items()} for m in self._memories],
            "kinds": list(self._kinds),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to where `state_dict` was taken; before the strategy starts."""
        if state["params"].numel() != self.params.numel():
            raise ValueError(
                f"the saved model has {state['params'].numel()} parameters, this one {self.params.numel()}"
            )
        self.step_index, self.samples, self._announced = state["k"], state["samples"], state["k"] - 1
        self._since_mean, self._since_buffers = state["since_mean"], state["since_buffers"]
        self.params.copy_(state["params"])
        for mine, saved in zip(self.flat.model.buffers(), state["buffers"], strict=True):
            mine.copy_(saved)
        self._resumed, self._memories, self._kinds, self._unfinished = list(state["memories"]), [], [], []
        self._over, self.published = False, None
