"""The optimizer's state in a sync: how it is added to what a worker sends, averaged and put back."""

from __future__ import annotations

import torch

from paceline import collectives
from paceline.collectives import SyncVote
from paceline.endpoint import Endpoint
from paceline.families.sync import PendingSync, SyncStats
from paceline.worker.buffers import carry_over
from paceline.worker.learner import Learner, optimizer_vectors, set_optimizer_vectors


def add_optimizer_state(pending: PendingSync, learner: Learner, where: slice) -> None:
    """Add the slice `where` of every vector of the optimizer's state (momenta) to a sync."""
    vectors = optimizer_vectors(learner.flat, learner.optimizer)
    pending.state_names = list(vectors)
    pending.state = torch.cat([v[where] for v in vectors.values()]) if vectors else torch.empty(0)


async def exchange_optimizer_state(endpoint: Endpoint, pending: PendingSync, vote: SyncVote) -> None:
    """Average the vectors of all workers.  A worker that has had no sample yet has no state, and adds nothing."""
    vectors = int(max(SyncStats.unpacked(reply)[0].state_vectors for reply in pending.replies))
    if not vectors:
        return
    numel = vectors * pending.vector.numel()
    if pending.state is not None and pending.state.numel() == numel:
        pending.state_mean = pending.state.clone()
    else:
        pending.state_mean = pending.vector.new_zeros(numel)
    if len(endpoint.ranks) > 1:
        await collectives.mean(endpoint, pending.state_mean, SyncVote(vote.weight, rank=vote.rank))


def set_optimizer_state(pending: PendingSync, learner: Learner, where: slice) -> None:
    """Put the mean into the optimizer; what changed while the sync was in flight stays on top of it."""
    if pending.is_lost and pending.state_mean is None:
        learner.optimizer.state.clear()
    elif pending.state_mean is not None and pending.state is not None and pending.state_names:
        vectors = optimizer_vectors(learner.flat, learner.optimizer)
        numel = where.stop - where.start
        is_at_once = pending.snapshot is None or pending.is_lost
        means = pending.state_mean.split(numel)
        sent = pending.state.split(numel)
        for name, mean, before in zip(pending.state_names, means, sent, strict=True):
            now = vectors[name][where]
            now.copy_(mean if is_at_once else carry_over(mean, now, before))
        set_optimizer_vectors(learner.flat, learner.optimizer, vectors)
