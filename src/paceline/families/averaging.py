"""Averaging: what methods share whose workers train alone for a while and then average their parameters.

Such a method says when the workers sync and what it makes of the mean of their deltas.  `SyncRounds` does the rest:
codecs, weights, optimizer state, buffers, syncs that overlap with the next steps, fragments, and how far apart the
replicas were.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any, Literal

import torch
from torch import Tensor

from paceline import collectives
from paceline.codecs.codec import Codec, CodecState
from paceline.collectives import SyncVote, retried
from paceline.endpoint import Endpoint
from paceline.families.deltas import compute_delta, go_to, merge, squared_distance, wide
from paceline.families.optimizer_state import (
    add_optimizer_state,
    exchange_optimizer_state,
    set_optimizer_state,
    warn_of_copies,
)
from paceline.families.sync import PendingSync, SyncResult, SyncStats
from paceline.families.unsent import Outer, Unsent
from paceline.op import Op, Ready
from paceline.state import Slot, per_worker
from paceline.strategy import Strategy
from paceline.stripes import stripe_of
from paceline.worker.replica import Replica

OptimizerState = Literal["keep", "average", "reset"]


class NonFiniteReplica(RuntimeWarning):
    """A worker's parameters could not take part in an average."""


@dataclass(frozen=True, kw_only=True)
class Averaging(Strategy):
    """A method whose workers average their parameters now and then.

    `codec` compresses each worker's delta since the last sync.  `optimizer_state` says what becomes of each worker's
    optimizer state at a sync: it is kept, averaged or reset.  With `delay`, workers train on for that many steps
    while a sync is in flight; what they learn meanwhile stays on top of its result.
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
            raise ValueError(f"{self._name}(delay={self.delay}): delay counts the steps that a sync may take, from 0")

    @property
    def _name(self) -> str:
        return type(self).__name__

    def samples_of_rate(self, samples: float, workers: int) -> float:
        """The mean of the models moves by one worker's step, unless the method adds it up in the end."""
        return samples / self.outer_gain(samples, workers)

    def outer_gain(self, samples: float, workers: int) -> float:
        """By how many times their mean delta the models are moved in the end; `samples` are those of a minibatch."""
        return 1.0

    def check_period(self, period: int | None, samples: int | None = None) -> None:
        """A period is given in steps, or in samples of each worker; not in both."""
        if period is not None and samples is not None:
            raise ValueError(
                f"{self._name}(period={period}, samples={samples}): give the period in steps or in samples, not in both"
            )
        for name, value in (("period", period), ("samples", samples)):
            if value is not None and value < 1:
                what = "steps" if name == "period" else "a worker's samples"
                raise ValueError(f"{self._name}({name}={value}): it counts {what} between syncs and must be at least 1")
        if period is not None and self.delay >= period > 1:
            raise ValueError(
                f"{self._name}(period={period}, delay={self.delay}): a mean must be merged before the next one begins; "
                f"give a delay of at most {period - 1}"
            )


class SyncRounds:
    """A worker's part in the syncs of an averaging method.

    `anchor` is the point from which all workers started together.  Every `period` steps, or `samples` of each worker,
    the mean of their deltas since then moves it: by `outer`, or by just that mean.  `memory` is what `outer` remembers
    at the beginning, vectors of the model's length.  With several fragments each sync is about the next fragment, and a
    period is that of each fragment.
    """

    def __init__(
        self,
        w: Replica,
        method: Averaging,
        *,
        period: int | None = None,
        samples: int | None = None,
        outer: Outer | None = None,
        memory: dict[str, Any] | None = None,
        fragments: int = 1,
    ) -> None:
        numel = w.params.numel()
        if fragments > numel:
            raise ValueError(
                f"{type(method).__name__}(fragments={fragments}): the model has only {numel} parameters; "
                "give at most that many"
            )
        self.w = w
        self.method = method
        self.period = period
        self.samples = samples
        self.fragments = [stripe_of(j, numel, fragments) for j in range(fragments)]
        self._outer = outer
        self.memory = w.state("outer", **memory) if memory else Slot()
        self._m = w.state("sync", anchor=wide(w.params), count=0, next=0, per_step=0.0, workers=w.workers)
        self._m.per_step *= self._m.workers / w.workers
        self._m.workers = w.workers
        self._own = w.state(
            "sync.own", rule=per_worker, version=2, before_save=self._drain, losses=[0.0, 0.0], pending={}
        )
        w.batch.track_syncs(fragments, noted=True)
        self._codec_state = w.codec_state(method.codec, "sync")
        self._unsent = Unsent(w, method.codec, outer, memory or {})
        self._pending: Op[PendingSync] | None = None
        self._has_stepped = False
        if self._own.pending:
            self._pending = Ready("mean", PendingSync.restored(self._own.pending, self.anchor.device))
        # The same memory for all syncs: fresh memory costs more than the arithmetic.
        self._delta = torch.empty_like(self.anchor[: max(s.stop - s.start for s in self.fragments)])
        self._snapshot = torch.empty_like(self._delta if method.delay else self.anchor[:0])

    @property
    def anchor(self) -> Tensor:
        """The point from which all workers started together."""
        return self._m.anchor

    async def train(self) -> None:
        """The whole run: local steps, and syncs between them."""
        for _ in self.w.steps():
            await self.w.local_step()
            await self.after_step()
        await self.finish()

    async def after_step(self) -> SyncResult | None:
        """To be awaited after every local step; the result of a sync, if one has just been merged."""
        w = self.w
        self._m.count += 1
        if not self._has_stepped and w.batch.samples:
            self._has_stepped = True
            if w.workers > 1 and self.method.optimizer_state == "keep":
                warn_of_copies(type(self.method).__name__, w.learner)
        if w.batch.samples and w.learner.loss is not None:
            self._own.losses = [self._own.losses[0] + w.learner.loss, self._own.losses[1] + 1]
        if self.samples is not None:
            await self._find_samples_per_step()
        result = None
        if self._pending is not None and (self._m.count >= self.method.delay or self._is_due()):
            result = await self._merge()
        if self._is_due() and not w.cursor.is_over:
            await self._begin()
            if not self.method.delay:
                result = await self._merge()
        return result

    async def finish(self) -> None:
        """Merge the sync in flight, and sync the other fragments."""
        if self._pending is not None:
            await self._merge()
        for _ in self.fragments[1:]:
            await self._begin()
            await self._merge()

    async def _drain(self) -> None:
        """Wait for the sync in flight, so that the state holds all of it."""
        if self._pending is not None:
            pending = await self._pending
            self._pending = Ready("mean", pending)
            self._own.pending = pending.saved()

    # When.

    def _is_due(self) -> bool:
        if self.samples is None:
            assert self.period is not None
            stride = self.period // len(self.fragments)
        else:
            stride = ceil(self.samples / len(self.fragments) / self._m.per_step) if self._m.per_step else 1
        return self._m.count >= max(1, stride)

    async def _find_samples_per_step(self) -> None:
        """A worker's samples in a step, on average: a period in samples must end at the same step for all workers."""
        w = self.w
        if not w.batch.is_counted:
            raise ValueError(
                f"{type(self.method).__name__}(samples={self.samples}): the samples are not counted; iterate over "
                "session.shard(loader), or call session.count(n) before each step"
            )
        if self._m.per_step:
            return
        mine = torch.tensor([w.batch.samples], dtype=torch.float64)
        everyones = [mine] if w.workers == 1 else await w.endpoint.all_gather(mine)
        self._m.per_step = sum(float(t) for t in everyones) / len(everyones)

    # Sending.

    async def _begin(self) -> None:
        """Start a sync of the next fragment."""
        w = self.w
        m = self._m
        fragment = m.next
        m.next = (m.next + 1) % len(self.fragments)
        where = self.fragments[fragment]
        delta = self._delta[: where.stop - where.start]
        snapshot = self._snapshot[: len(delta)] if self.method.delay else None
        is_sound = compute_delta(w.params[where], m.anchor[where], delta, snapshot)
        self._unsent.take_from(delta, where)
        weight = w.batch.mark_sync(fragment)
        pending = PendingSync(fragment, w.cursor.step, m.count, weight, delta, snapshot)
        if self.method.optimizer_state == "average":
            add_optimizer_state(pending, w.learner, where)
        vote = SyncVote(weight, float(w.cursor.has_data(w.cursor.step + 1)), rank=w.rank)
        is_lost = w.batch.nonfinite != "pass" and not is_sound and not delta.isfinite().all()
        if any(await w.learner.sum_over_stages([float(is_lost)])):
            leave_out(w, pending, vote)
        loss_sum, loss_steps = self._own.losses
        has_data = float(w.cursor.has_data(w.cursor.step))
        stats = SyncStats(vote.weight, loss_sum, loss_steps, w.endpoint.now(), 0.0, 0.0, w.lr, has_data)
        buffers = w.learner.flat.buffers()
        pending.buffers = buffers if self.method.delay else None
        self._own.losses = [0.0, 0.0]
        m.count = 0
        codec_state = self._codec_state and self._codec_state[where]
        self._pending = w.endpoint.run_collectives(
            lambda endpoint: self._exchange(endpoint, pending, vote, stats, buffers, codec_state),
            kind="mean",
            retry=retried(vote, pending.vector, lambda e: self._exchange(e, pending, vote, stats, buffers, None)),
        )

    async def _exchange(
        self,
        endpoint: Endpoint,
        pending: PendingSync,
        vote: SyncVote,
        stats: SyncStats,
        buffers: Tensor,
        codec_state: CodecState | None,
    ) -> PendingSync:
        """Everything that a sync sends."""
        is_alone = len(endpoint.ranks) == 1
        if is_alone:
            total = vote
        elif codec_state is None:
            total = await collectives.mean(endpoint, pending.vector, vote)
        else:
            total = await collectives.mean_encoded(endpoint, pending.vector, vote, codec_state)
        pending.going_on = total.going_on
        pending.weight = total.weight
        pending.bad = total.culprit() if total.bad else ""
        pending.complaint = "" if vote.complaint is None else str(vote.complaint)
        if total.bad or not total.weight:
            return pending
        where = self.fragments[pending.fragment]
        params = self.w.params[where] if pending.snapshot is None else pending.snapshot
        start = self._unsent.start(self._m.anchor[where], where)
        measure = partial(distance_in, params, start, pending.vector, where.start)
        distance = self.w.learner.flat.counted_once(measure, where)
        stats = stats._replace(squared_distance=distance, state_vectors=float(len(pending.state_names)))
        message = stats.packed(buffers)
        pending.replies = [message] if is_alone else await endpoint.all_gather(message)
        await exchange_optimizer_state(endpoint, pending, vote)
        return pending

    # Merging.

    async def _merge(self) -> SyncResult | None:
        """Wait for the sync in flight and apply its result; None if there was none."""
        assert self._pending is not None
        pending = await self._pending
        w = self.w
        self._own.pending = {}
        self._pending = None
        if not pending.going_on:
            w.cursor.finish()
        result = None if pending.bad or not pending.weight else pending.result()
        if result is not None and len(self.fragments) == 1:
            self._m.per_step = result.samples / result.workers / result.steps
        numbers = [0.0, 0.0] if result is None else [result.divergence, result.time]
        bad, divergence, time, stages = await w.learner.sum_over_stages([float(bool(pending.bad)), *numbers, 1.0])
        if bad:
            w.batch.undo_sync(pending.fragment, pending.samples)
            refuse(pending, w.batch.nonfinite)
        if bad or result is None:
            if not (bad or pending.going_on):  # The last sync is empty: no worker has moved since the one before.
                where = self.fragments[pending.fragment]
                if self._unsent.forget(where):
                    w.params[where] = self._m.anchor[where]
            return None
        pending.check_rates(w.endpoint.ranks)
        result = replace(result, divergence=divergence, time=time / stages)
        self._move(pending, result)
        w.endpoint.trace.sync(w.endpoint.now(), w.rank, result.step, result.steps, result.divergence)
        return result

    def _move(self, pending: PendingSync, result: SyncResult) -> None:
        """Move the anchor, the parameters, the optimizer's state and the buffers."""
        w = self.w
        where = self.fragments[pending.fragment]
        is_alone = len(pending.replies) == 1  # When the sync began: others may have left since, or joined.
        params = w.params[where]
        anchor = self._m.anchor[where]
        snapshot = None if pending.is_lost else pending.snapshot
        if self._outer is not None:
            self._outer(self.memory, anchor, pending.vector, where, result)
            go_to(anchor, params, snapshot)
        elif is_alone and w.workers == 1 and not self._unsent.is_held(where):
            # One worker's own mean changes nothing, not even by rounding.
            anchor.add_(pending.vector)
        else:  # What was learnt while the sync was in flight stays on top of it.
            merge(anchor, pending.vector, params, snapshot)
        if pending.going_on:
            self._unsent.put_into(params, where, self._codec_state, pending.share(w.workers), result)
        else:
            self._unsent.forget(where)
        if self.method.optimizer_state == "reset":
            w.learner.optimizer.state.clear()
        elif not is_alone:
            set_optimizer_state(pending, w.learner, where)
        if not is_alone:
            received = [SyncStats.unpacked(reply) for reply in pending.replies]
            since = None if pending.is_lost else pending.buffers
            w.learner.flat.set_buffers([b for _, b in received], [stats.weight for stats, _ in received], since=since)


def leave_out(w: Replica, pending: PendingSync, vote: SyncVote) -> None:
    """This worker's parameters are not finite: the mean of the others replaces them, unless the run must stop."""
    stops = float(w.batch.nonfinite == "stop")
    vote.weight = 0.0
    vote.bad = stops
    vote.bad_rank = w.rank * stops
    pending.vector.zero_()
    pending.is_lost = True
    text = f"rank {w.rank} has NaN or infinity in its parameters after step {w.cursor.step}: they do not count"
    warnings.warn(NonFiniteReplica(text), stacklevel=3)


def distance_in(params: Tensor, anchor: Tensor, delta: Tensor, start: int, part: slice) -> float:
    """The squared distance to the mean, in a part of the model; the vectors begin at its parameter `start`."""
    inner = slice(part.start - start, part.stop - start)
    return squared_distance(params[inner], anchor[inner], delta[inner])


def refuse(pending: PendingSync, nonfinite: str) -> None:
    """A worker's parameters, or its delta, could not be sent: stop the run, or warn the worker that had them."""
    what = (
        f"{pending.bad or 'another stage'} had parameters with NaN or infinity, or a delta beyond its codec, "
        f"after step {pending.step}"
    )
    if nonfinite == "stop":
        raise FloatingPointError(f"{what}; they were not averaged (nonfinite='stop')")
    if pending.complaint:
        warnings.warn(NonFiniteReplica(f"{what}; there was no sync: {pending.complaint}"), stacklevel=4)
