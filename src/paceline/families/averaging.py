"""Averaging: what methods have in common that let workers train alone for a while and then bring their parameters together.

Such a method says when the workers meet and what it makes of their mean displacement; everything else is a `SyncRounds`' business:
codecs, weights, optimizer state, buffers, exchanges that overlap with the next steps, fragments, and how far apart the
replicas were.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from paceline import collectives
from paceline.codecs import kernels
from paceline.codecs.codec import Codec, CodecState
from paceline.collectives import SyncVote
from paceline.endpoint import Endpoint
from paceline.op import Op, Ready
from paceline.strategy import Strategy
from paceline.stripes import stripe_of
from paceline.worker.flat import carry_over, is_finite
from paceline.worker.learner import optimizer_vectors, set_optimizer_vectors
from paceline.worker.replica import Replica

OptimizerState = Literal["keep", "average", "reset"]
TOLD = 7  # Numbers that every worker tells all others: see `SyncRounds._begin`.
Outer = Callable[[slice, Tensor, "SyncResult"], None]


class NonFiniteReplica(RuntimeWarning):
    """A worker's parameters could not take part in an average."""


@dataclass(frozen=True, kw_only=True)
class Averaging(Strategy):
    """A method whose workers meet now and then.

    `codec` encodes what they tell each other, the way that each has gone since they met.  `optimizer_state` says what becomes of
    each one's momentum then: it is kept, averaged too, or reset.  For `delay` steps they go on while the exchange is under way;
    what they learn meanwhile is kept on top of its result.
    """

    codec: Codec | None = None
    optimizer_state: OptimizerState = "keep"
    delay: int = 0

    def __post_init__(self) -> None:
        if self.optimizer_state not in ("keep", "average", "reset"):
            raise ValueError(
                f"{self._name}(optimizer_state={self.optimizer_state!r}): it is one of 'keep', 'average' and 'reset'"
            )
        if self.delay < 0:
            raise ValueError(
                f"{self._name}(delay={self.delay}): a mean cannot be merged before it was begun; delay counts steps, from 0"
            )

    @property
    def _name(self) -> str:
        return type(self).__name__

    def check_period(self, period: int | None, samples: int | None = None) -> None:
        """A period is given in steps, or in samples of each worker; not in both."""
        if period is not None and samples is not None:
            raise ValueError(
                f"{self._name}(period={period}, samples={samples}): a period is in steps or in samples, not in both"
            )
        for name, value in (("period", period), ("samples", samples)):
            if value is not None and value < 1:
                what = "steps" if name == "period" else "a worker's samples"
                raise ValueError(
                    f"{self._name}({name}={value}): it counts {what} between synchronisations and must be at least 1"
                )
        if period is not None and self.delay >= period > 1:
            raise ValueError(
                f"{self._name}(period={period}, delay={self.delay}): a mean must be merged before the next one begins"
            )


@dataclass(frozen=True, slots=True)
class SyncResult:
    """What all workers know alike after they met: after which step, and how many steps after they last did."""

    step: int
    steps: int
    samples: float  # of all workers, since the last time
    lr: float
    divergence: float  # the mean squared distance of the replicas from their mean
    loss: float | None  # the mean over workers and steps since the last time
    time: float  # on the first worker's clock


@dataclass
class PendingSync:
    """What a worker brings to a meeting and, once all have met, what it has heard there."""

    fragment: int
    step: int
    steps: int
    samples: float
    mean: Tensor  # The way that the worker has gone; in the end the mean of all ways.
    sent: Tensor | None = None  # With a delay: the parameters that it came with,
    buffers: Tensor | None = None  # and the buffers.
    state_names: Sequence[str] = ()  # The optimizer's vectors, if they are averaged too, one behind the other.
    state: Tensor | None = None
    state_mean: Tensor | None = None
    is_lost: bool = False  # The parameters were not finite and did not count.
    going_on: float = 0.0  # How many workers have more data.
    weight: float = 0.0  # The samples behind the mean, of all workers.
    bad: str = ""  # Whose values could not be told, if anybody's could not;
    complaint: str = ""  # why, if they were this worker's.
    told: Sequence[Tensor] = ()  # The numbers and buffers of each.

    def saved(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}

    @classmethod
    def restored(cls, saved: dict[str, Any], device: torch.device) -> PendingSync:
        meeting = cls(**saved)
        for name in ("mean", "sent", "state", "state_mean"):
            if (value := getattr(meeting, name)) is not None:
                setattr(meeting, name, value.to(device))
        return meeting


class SyncRounds:
    """A worker's part in the meetings of an averaging method.

    `start` is where all workers began together.  Every `period` steps, or `samples` of each worker, the mean of their
    displacements since then goes to `outer(where, mean, met)`, which must move `start[where]`; by default by just that mean.  With
    several fragments each meeting is about the next one of them, and a period is that of each.
    """

    def __init__(
        self,
        w: Replica,
        method: Averaging,
        *,
        period: int | None = None,
        samples: int | None = None,
        outer: Outer | None = None,
        fragments: int = 1,
    ) -> None:
        self.w, self.method, self.period, self.samples = w, method, period, samples
        if fragments > w.params.numel():
            raise ValueError(
                f"{type(method).__name__}(fragments={fragments}): the model has only {w.params.numel()} parameters"
            )
        self.fragments = [stripe_of(j, w.params.numel(), fragments) for j in range(fragments)]
        self._outer = outer
        # In single precision at least: small displacements would drown in 16 bits.
        wide = w.params.to(torch.promote_types(w.params.dtype, torch.float32))
        self._m = w.memory(anchor=wide, count=0, next=0, per_step=0.0, workers=w.workers)
        self._m.per_step *= self._m.workers / w.workers
        self._m.workers = w.workers
        self._own = w.memory("own", seen=[w.samples] * fragments, losses=[0.0, 0.0], pending={})
        self._codec_state = w.codec_state(method.codec)
        self._pending: Op[PendingSync] | None = None
        if self._own.pending:
            self._pending = Ready("mean", PendingSync.restored(self._own.pending, wide.device))
        # The same memory for all meetings: fresh memory costs more than what is done with it.
        self._room = torch.empty_like(wide[: max(s.stop - s.start for s in self.fragments)])
        self._room_for_sent = torch.empty_like(self._room if method.delay else wide[:0])
        w.before_stop(self.drain)

    @property
    def anchor(self) -> Tensor:
        """Where all workers began together."""
        return self._m.anchor

    async def train(self) -> None:
        """All of the run: local steps, and meetings between them."""
        for _ in self.w.steps():
            await self.w.local_step()
            await self.after_step()
        await self.finish()

    async def after_step(self) -> SyncResult | None:
        """To be awaited after every local step; what was learned, if a mean has just been merged."""
        w, m = self.w, self._m
        m.count += 1
        if w.batch_samples and w.learner.loss is not None:
            self._own.losses = [self._own.losses[0] + w.learner.loss, self._own.losses[1] + 1]
        if self.samples is not None and not w.counts_samples:
            raise ValueError(
                f"{type(self.method).__name__}(samples={self.samples}): nobody counts the samples; iterate over session.shard(loader), "
                "or call session.count(n) before each step"
            )
        if self.samples is not None and not m.per_step:
            m.per_step = await self._samples_per_step()
        met = None
        if self._pending is not None and (m.count >= self.method.delay or self._is_due()):
            met = await self._merge()
        if self._is_due() and not w.is_over:
            await self._begin()
            if not self.method.delay:
                met = await self._merge()
        return met

    async def finish(self) -> None:
        """Merge what is under way, and meet about the fragments that were not the last."""
        if self._pending is not None:
            await self._merge()
        for _ in self.fragments[1:]:
            await self._begin()
            await self._merge()

    async def drain(self) -> None:
        """Wait for what is under way, so that all of it is in the memory."""
        if self._pending is not None:
            meeting = await self._pending
            self._pending, self._own.pending = Ready("mean", meeting), meeting.saved()

    def _is_due(self) -> bool:
        if self.samples is None:
            assert self.period is not None
            stride = self.period // len(self.fragments)
        else:
            stride = ceil(self.samples / len(self.fragments) / self._m.per_step) if self._m.per_step else 1
        return self._m.count >= max(1, stride)

    async def _samples_per_step(self) -> float:
        """A worker's samples in a step, on average: periods in samples must end at the same step for all workers."""
        mine = torch.tensor([self.w.batch_samples], dtype=torch.float64)
        everyones = [mine] if self.w.workers == 1 else await self.w.endpoint.all_gather(mine)
        return sum(float(t) for t in everyones) / len(everyones)

    async def _begin(self) -> None:
        w, m, own = self.w, self._m, self._own
        j, m.next = m.next, (m.next + 1) % len(self.fragments)
        where = self.fragments[j]
        weight, own.seen[j] = w.samples - own.seen[j], w.samples
        numel = where.stop - where.start
        delta, sent = self._room[:numel], self._room_for_sent[:numel] if self.method.delay else None
        is_sound = compute_delta(w.params[where], m.anchor[where], delta, sent)
        mine = PendingSync(j, w.step_index, m.count, weight, delta, sent)
        if self.method.optimizer_state == "average":
            vectors = optimizer_vectors(w.flat, w.learner.optimizer)
            mine.state_names = list(vectors)
            mine.state = torch.cat([v[where] for v in vectors.values()]) if vectors else torch.empty(0)
        vote = SyncVote(weight, float(w.has_data(w.step_index + 1)), rank=w.rank)
        is_lost = w.nonfinite != "pass" and not is_sound and not delta.isfinite().all()
        if any(await w.learner.sum_over_stages([float(is_lost)])):
            # It is overwritten by the others' mean, if they may go on without it.
            vote.weight, vote.bad, vote.bad_rank = (
                0.0,
                float(w.nonfinite == "stop"),
                w.rank * float(w.nonfinite == "stop"),
            )
            delta.zero_()
            mine.is_lost = True
            warnings.warn(
                NonFiniteReplica(
                    f"rank {w.rank} has NaN or infinity in its parameters after step {w.step_index}: they do not count"
                ),
                stacklevel=2,
            )
        numbers = [vote.weight, *own.losses, w.endpoint.now(), 0.0, 0.0, w.lr]
        told = torch.cat([torch.tensor(numbers, dtype=torch.float64), w.flat.buffers()])
        if self.method.delay:
            mine.buffers = told[TOLD:].clone()
        own.losses, m.count = [0.0, 0.0], 0
        codec_state = self._codec_state and self._codec_state[where]
        self._pending = w.endpoint.run_collectives(
            lambda endpoint: self._meet(endpoint, mine, vote, told, codec_state), kind="mean"
        )

    async def _meet(
        self, endpoint: Endpoint, mine: PendingSync, vote: SyncVote, told: Tensor, codec_state: CodecState | None
    ) -> PendingSync:
        """Everything that goes over the wire at a meeting."""
        if len(endpoint.ranks) == 1:
            total = vote
        elif codec_state is None:
            total = await collectives.mean(endpoint, mine.mean, vote)
        else:
            total = await collectives.mean_encoded(endpoint, mine.mean, vote, codec_state)
        mine.going_on, mine.weight, mine.bad = total.going_on, total.weight, total.culprit() if total.bad else ""
        mine.complaint = "" if vote.complaint is None else str(vote.complaint)
        if total.bad or not total.weight:
            return mine
        where = self.fragments[mine.fragment]
        told[4] = _squared_distance(
            self.w.params[where] if mine.sent is None else mine.sent, self._m.anchor[where], mine.mean
        )
        told[5] = len(mine.state_names)
        mine.told = [told] if len(endpoint.ranks) == 1 else await endpoint.all_gather(told)
        if names := int(max(float(t[5]) for t in mine.told)):
            # Who has not had a sample yet has no state either, and adds nothing.
            numel = names * mine.mean.numel()
            mine.state_mean = (
                mine.state.clone()
                if mine.state is not None and mine.state.numel() == numel
                else mine.mean.new_zeros(numel)
            )
            if len(endpoint.ranks) > 1:
                await collectives.mean(endpoint, mine.state_mean, SyncVote(vote.weight, rank=vote.rank))
        return mine

    async def _merge(self) -> SyncResult | None:
        assert self._pending is not None
        mine = await self._pending
        w, m, own = self.w, self._m, self._own
        own.pending, self._pending = {}, None
        if not mine.going_on:
            w.end()
        met = None if mine.bad or not mine.weight else self._heard(mine)
        numbers = [0.0, 0.0] if met is None else [met.divergence, met.time]
        bad, divergence, time, stages = await w.learner.sum_over_stages([float(bool(mine.bad)), *numbers, 1.0])
        if bad:
            own.seen[mine.fragment] -= mine.samples  # They count with the next ones.
            self._refuse(mine)
        if bad or met is None:
            return None
        met = replace(met, divergence=divergence, time=time / stages)
        where, is_alone = self.fragments[mine.fragment], w.workers == 1
        params, sent = w.params[where], None if mine.is_lost else mine.sent
        if self._outer is not None:
            self._outer(where, mine.mean, met)
            _take_over(m.anchor[where], params, sent)
        elif is_alone:  # One worker's own mean changes nothing, not even by rounding.
            m.anchor[where].add_(mine.mean)
        else:  # What was learnt while the mean was under way stays on top of it.
            _merge(m.anchor[where], mine.mean, params, sent)
        if not is_alone or self.method.optimizer_state == "reset":
            self._set_optimizer_state(where, mine)
        if not is_alone:
            w.flat.set_buffers(
                [t[TOLD:] for t in mine.told],
                [float(t[0]) for t in mine.told],
                since=None if mine.is_lost else mine.buffers,
            )
        w.endpoint.trace.sync(w.endpoint.now(), w.rank, met.step, met.steps, met.divergence)
        return met

    def _heard(self, mine: PendingSync) -> SyncResult:
        """What all have told, summed in the order of ranks in plain Python: the same bits on every machine."""
        told = [t[:TOLD].tolist() for t in mine.told]
        weight, losses, steps = (sum(t[i] for t in told) for i in range(3))
        if len(self.fragments) == 1:
            self._m.per_step = weight / len(told) / mine.steps
        divergence = sum(t[0] * t[4] for t in told) / weight
        lr = max(t[6] for t in told if t[0])  # Who has run out of data may no longer follow its schedule.
        return SyncResult(mine.step, mine.steps, weight, lr, divergence, losses / steps if steps else None, told[0][3])

    def _set_optimizer_state(self, where: slice, mine: PendingSync) -> None:
        flat, optimizer = self.w.flat, self.w.learner.optimizer
        if self.method.optimizer_state == "reset" or (mine.is_lost and mine.state_mean is None):
            self.w.reset_optimizer()
        elif mine.state_mean is not None and mine.state is not None and mine.state_names:
            vectors = optimizer_vectors(flat, optimizer)
            means, sents = (state.split(where.stop - where.start) for state in (mine.state_mean, mine.state))
            for name, mean, sent in zip(mine.state_names, means, sents, strict=True):
                now = vectors[name][where]
                now.copy_(mean if mine.sent is None or mine.is_lost else carry_over(mean, now, sent))
            set_optimizer_vectors(flat, optimizer, vectors)

    def _refuse(self, mine: PendingSync) -> None:
        """Somebody's parameters, or its way since the last time, could not be told to the others."""
        what = f"{mine.bad or 'another stage'} had parameters with NaN or infinity, or a displacement beyond its codec, after step {mine.step}"
        if self.w.nonfinite == "stop":
            raise FloatingPointError(f"{what}; they were not averaged (nonfinite='stop')")
        if mine.complaint:
            warnings.warn(NonFiniteReplica(f"{what}; there was no synchronisation: {mine.complaint}"), stacklevel=2)


def compute_delta(params: Tensor, start: Tensor, delta: Tensor, sent: Tensor | None) -> bool:
    """way = params - start, and sent = params, if given; False if there may be NaN or infinity in the way."""
    if (fused := _fused(params, start)) is not None:
        return fused.compute_delta(params, start, delta, sent)
    torch.sub(params, start, out=delta)
    if sent is not None:
        sent.copy_(params)
    return is_finite(delta)


def _merge(start: Tensor, mean: Tensor, params: Tensor, sent: Tensor | None) -> None:
    """start += mean, and params = start; or start + (params - sent), if something was `sent`."""
    if (fused := _fused(params, start)) is not None:
        return fused.merge(start, mean, params, sent)
    _take_over(start.add_(mean), params, sent)


def _take_over(start: Tensor, params: Tensor, sent: Tensor | None) -> None:
    """params = start; or start + (params - sent), if something was `sent`, which is used up."""
    if sent is None:
        params.copy_(start)
    else:
        torch.add(start, torch.sub(params, sent, out=sent), out=params)


def _squared_distance(params: Tensor, start: Tensor, mean: Tensor) -> float:
    """Of the way from `start` to `params` from the mean of all workers' ways."""
    if (fused := _fused(params, start)) is not None:
        return fused.squared_distance(params, start, mean)
    # By pieces that stay in the processor's cache.
    pieces = zip(*(t.split(1 << 16) for t in (params, start, mean)), strict=True)
    return float(sum(torch.linalg.vector_norm((p - s).sub_(m)).double().square() for p, s, m in pieces))


def _fused(params: Tensor, start: Tensor) -> ModuleType | None:
    """What does all this in one pass each; None if there is nothing for these vectors."""
    if (
        params.device.type != "cpu"
        or start.dtype != torch.float32
        or kernels.is_plain()
        or not kernels.kernels_of("cpu")
    ):
        return None
    from paceline.codecs.kernels import vectors  # It takes numba, which may not be there.

    return vectors
