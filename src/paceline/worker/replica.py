"""Replica: one worker as its strategy sees it: the model as one flat vector, with the verbs that papers use.

Where gradients come from and how a step is taken is the Learner's business.  How a worker's role starts, stops, is
saved and ends is `WorkerRun`'s (`worker/run.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch
from torch import Tensor

from paceline import collectives
from paceline.codecs.codec import Codec, CodecState
from paceline.collectives import Groups, SyncVote
from paceline.endpoint import Endpoint
from paceline.op import Op, Ready
from paceline.state import ResizeRule, Slot, StateStore, same
from paceline.strategy import Ended, Strategy
from paceline.worker.batch import BatchRecord, NonFinite
from paceline.worker.cursor import Cursor
from paceline.worker.flat import Bucket
from paceline.worker.learner import Learner
from paceline.worker.plan import Plan


class Replica:
    """One worker.

    `cursor` is its position in the data, `batch` the record of its current minibatch.  `published` is the vector to
    evaluate and to end with in place of `params`; None: `params` itself.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        learner: Learner,
        states: StateStore,
        *,
        nonfinite: NonFinite = "skip",
        plan: Plan | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.learner = learner
        self.plan = plan or Plan()
        self.cursor = Cursor(learner, self.plan, endpoint.layout.workers)
        self.batch = BatchRecord(endpoint.rank, self.cursor, nonfinite)
        self.published: Tensor | None = None
        self._states = states

    @property
    def params(self) -> Tensor:
        """The model as one vector; writing to it changes the model.

        A parameter of a narrower dtype than the vector takes its value, rounded, when the model runs next.
        """
        return self.learner.flat.params

    @property
    def rank(self) -> int:
        return self.endpoint.rank

    @property
    def workers(self) -> int:
        return len(self.endpoint.ranks)

    @property
    def lr(self) -> float:
        """The largest learning rate of the optimizer's groups at this step; after the last step, that of the last.

        In the user's own loop a scheduler may still change it before the step is taken: see `cursor.coming_lr`.
        """
        return self.cursor.lr

    # Steps.

    def steps(self) -> Iterator[int]:
        """Count steps until no worker has data left; the last `mean` told all workers.

        A worker whose own data ends first continues in empty steps (no samples, no time, no change), so that all
        workers take part in every mean.  A run whose length is no multiple of the period therefore still ends with a
        mean.
        """
        return self.cursor.steps(self.batch)

    def steps_alone(self) -> Iterator[int]:
        """Count steps until this worker's own data ends.  For methods without means."""
        return self.cursor.steps_alone()

    def gradient(self, each: Callable[[Bucket], None] | None = None) -> Op[Tensor]:
        """The mean gradient of the next minibatch at `params`.

        `each` is called with every bucket as soon as backward has filled it.
        """
        if not self.cursor.is_in_phase:
            self.batch.begin(0.0)
            self.learner.flat.emit_zeros(each)
            return Ready("gradient", self.learner.flat.grads)
        return self.learner.gradient(self, each)

    def step(self, g: Tensor, by: Callable[[Tensor], None] | None = None) -> Op[None]:
        """A step of the user's optimizer, with `g` as the gradient; or by the function `by`, in place of it."""
        if (self.batch.fault is not None and self.batch.refuses()) or not self.batch.update_samples:
            return self.learner.skip(self)
        return self.learner.step(self, g, by)

    def local_step(self) -> Op[None]:
        """The gradient of the next minibatch and a step of the user's optimizer, as on one machine."""
        if not self.cursor.is_in_phase:
            self.batch.begin(0.0)
            return Ready("local step", None)
        return self.learner.local_step(self)

    @contextmanager
    def phase(self, name: str, method: Strategy, *, until: int | None = None) -> Generator[None]:
        """Within this block another strategy, `method`, runs, up to the step `until` or to the end of the run.

        The slots that it declares are saved under `name`.  They are dropped when another strategy follows.
        """
        self.learner.follow(method)
        if until is None:
            with self._states.scope(name, keep=True):
                yield
            return
        with self._states.scope(name), self.cursor.until(until), suppress(Ended):
            yield
        take_published(self)
        self.batch.begin_phase()

    # State.

    def state(
        self,
        name: str,
        /,
        *,
        rule: ResizeRule = same,
        version: int = 1,
        before_save: Callable[[], Awaitable[None]] | None = None,
        **initial: object,
    ) -> Slot:
        """Declare a slot of state and get its values: what is in no slot is lost on resume (see `paceline.state`)."""
        return self._states.slot(name, rule=rule, version=version, before_save=before_save, **initial)

    def codec_state(
        self, codec: Codec | None, name: str = "codec", *, knows_tensors: bool = True, is_stepped_here: bool = True
    ) -> CodecState | None:
        """A codec as this worker uses it for vectors like `params`, with its residuals in slots under `name`.

        None without a codec, and for one worker alone; its slots are declared all the same, since others may join.
        `knows_tensors` is False if the receiver does not know the shapes of the model's tensors: the codec then does
        not use them either.  `is_stepped_here` is False if a server's rule takes the steps, not this worker's
        optimizer.
        """
        if codec is None:
            return None
        if is_stepped_here:
            codec.check_optimizer(self.learner.optimizer.param_groups)
        if knows_tensors:
            codec = codec.fitted(self.learner.flat.shapes)
        state = codec.codec_state(partial(self._declare, name), self.params, key=self.rank)
        return state if self.workers > 1 else None

    def _declare(self, prefix: str, name: str, /, **settings: object) -> Slot:
        return self._states.slot(f"{prefix}.{name}", **settings)  # pyright: ignore[reportArgumentType]

    # Means.

    def mean(
        self,
        x: Tensor | Bucket,
        codec_state: CodecState | None = None,
        *,
        groups: Groups | None = None,
        within: Endpoint | None = None,
    ) -> Op[Tensor]:
        """The mean of a vector, or of a bucket of the gradient, over all workers, in place, weighted by samples.

        A worker's weight is the number of its samples since the last mean.  `groups` sums within groups of ranks
        first; `within` averages among the ranks of another endpoint.  If all data ended with the step before, the
        last mean of a vector is empty and raises Ended.
        """
        endpoint = within or self.endpoint
        flat = self.learner.flat
        if isinstance(x, Tensor):
            whole = range(len(flat.parameters)) if x.data_ptr() == flat.grads.data_ptr() else ()
            return self._begin_mean(endpoint, x, self._vote(whole), codec_state, groups, whole, ends_if_empty=True)
        if codec_state is None:  # A codec looks at every value anyway, and finds a NaN by itself.
            self.batch.note_fault(lambda: flat.first_nonfinite(x.where))
        part = codec_state and codec_state[x.where]
        vote = self._vote(x.parameters)
        return self._begin_mean(endpoint, x.grad, vote, part, groups, x.parameters, start=x.where.start)

    def _vote(self, parameters: Sequence[int]) -> SyncVote:
        bad = float(self.batch.fault is not None)
        goes_on = float(self.cursor.has_data(self.cursor.step + 1))
        weight = self.batch.take_weight()
        reached = [float(weight > 0 and self.learner.flat.reached[i]) for i in parameters]
        complete = float(weight > 0 and all(reached))
        return SyncVote(weight, goes_on, bad, bad * self.rank, self.rank, reached=reached, complete=complete)

    def _begin_mean(
        self,
        endpoint: Endpoint,
        x: Tensor,
        vote: SyncVote,
        codec_state: CodecState | None,
        groups: Groups | None,
        parameters: Sequence[int],
        *,
        start: int = 0,
        ends_if_empty: bool = False,
    ) -> Op[Tensor]:
        async def exchange(endpoint: Endpoint) -> SyncVote:
            if len(endpoint.ranks) == 1:
                return vote
            if codec_state is None:
                total = await collectives.mean(endpoint, x, vote, groups=groups)
            elif groups is not None:
                total = await collectives.mean_by_groups(endpoint, x, vote, codec_state, groups)
            else:
                total = await collectives.mean_encoded(endpoint, x, vote, codec_state)
            if parameters and total.weight and not total.complete:
                total.reached = (await endpoint.all_reduce(torch.tensor(vote.reached, dtype=torch.float64))).tolist()
            return total

        in_flight = endpoint.run_collectives(exchange, is_single=collectives.is_single(endpoint, codec_state, groups))
        ended = self._end_mean(x, in_flight, vote, parameters, start, ends_if_empty=ends_if_empty)
        return endpoint.spawn(ended, kind="mean")

    async def _end_mean(
        self,
        x: Tensor,
        in_flight: Op[SyncVote],
        vote: SyncVote,
        parameters: Sequence[int],
        start: int,
        *,
        ends_if_empty: bool,
    ) -> Tensor:
        total = await in_flight
        self._take_result(vote, total, start)
        # If the pass of one worker reached all these parameters, it sent no list of them.
        for i, count in zip(parameters, total.reached or [1.0] * len(parameters), strict=True):
            self.learner.flat.reached[i] = count > 0
        if (total.reached or self.learner.flat.late) and total.weight and not total.bad:
            self.learner.flat.keep_late(parameters)
        if ends_if_empty and self.cursor.is_over and not total.weight:
            raise Ended
        return x

    def _take_result(self, vote: SyncVote, total: SyncVote, start: int) -> None:
        """What the group's votes say: the samples behind the mean, faults, and whether any worker has more data."""
        batch = self.batch
        batch.update_samples = total.weight
        if (complaint := vote.complaint) is not None:
            if (at := complaint.at) is not None:
                batch.note_fault(lambda: self.learner.flat.locate(start + at))
            else:
                batch.note_own_fault(f"rank {self.rank} has a gradient beyond its codec: {complaint}")
        if total.bad and batch.fault is None:
            batch.fault = f"{total.culprit()} had a gradient with NaN or infinity, or beyond its codec"
        self.cursor.is_over = not total.going_on

    async def mean_of_buffers(self) -> None:
        """Average floating-point buffers (BatchNorm statistics) by samples; of integer buffers take the largest."""
        flat = self.learner.flat
        mine = flat.buffers()
        if not mine.numel() or self.workers == 1:
            return
        weight = torch.tensor([self.batch.take_buffers_weight()], dtype=torch.float64)
        everyones = await self.endpoint.all_gather(torch.cat([weight, mine]))
        flat.set_buffers([e[1:] for e in everyones], [float(e[0]) for e in everyones])


async def train_alone(w: Replica) -> None:
    """Local steps to the end of this worker's own data."""
    for _ in w.steps_alone():
        await w.local_step()


def take_published(w: Replica) -> None:
    """Copy the published vector into the model."""
    if w.published is not None:
        w.params.copy_(w.published)
        w.published = None
