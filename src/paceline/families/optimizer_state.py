"""The optimizer's state in a sync: how it is added to what a worker sends, averaged and put back."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from paceline import collectives
from paceline.collectives import SyncVote
from paceline.endpoint import Endpoint
from paceline.families.sync import PendingSync, SyncStats
from paceline.worker.buffers import carry_over
from paceline.worker.learner import Learner, optimizer_vectors, set_optimizer_vectors
from paceline.worker.tensors import local

ROUNDING = 2**-7  # A copy in float32 of parameters in bfloat16.


class CopiedParameters(RuntimeWarning):
    """An optimizer seems to keep the parameters in its state, where an average of the parameters does not reach."""


def warn_of_copies(method: str, learner: Learner) -> None:
    """Warn if a part of the optimizer's state has the parameters' values, as in schedule-free optimizers.

    The next step of such an optimizer starts from its own copy, so that it undoes an average.  Call this after the
    first local step, when no other state has these values.
    """
    optimizer = learner.optimizer
    if isinstance(optimizer, torch.optim.ASGD):  # It never reads its average.
        return
    near: dict[str, float] = {}
    numel = 0.0
    for p in learner.flat.parameters:
        values = local(p.detach())
        numel += float(values.count_nonzero())
        for name, state in optimizer.state.get(p, {}).items():
            if isinstance(state, Tensor) and state.shape == p.shape and state.is_floating_point():
                is_near = ((local(state) - values).abs() <= ROUNDING * values.abs()) & (values != 0)
                near[name] = near.get(name, 0.0) + float(is_near.sum())
    copies = [name for name, count in sorted(near.items()) if count > 0.99 * numel]
    if copies:
        warnings.warn(
            CopiedParameters(
                f"{method} with {type(optimizer).__name__}: {copies} in the optimizer's state has the values of the "
                "parameters; if the optimizer steps from there, averages of the parameters have no effect: give "
                f"{method}(optimizer_state='average'), which averages the state too, or use AllReduceSGD"
            ),
            stacklevel=2,
        )


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
