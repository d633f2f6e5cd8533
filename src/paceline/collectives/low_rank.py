"""The mean over a group of ranks by low-rank factors: PowerSGD (Vogels, Karimireddy, Jaggi 2019) among workers.

The ranks do not sum the matrix M itself.  They sum M Q and then M^T P.  Both are thin, so the bytes that a rank sends
do not grow with the number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.codecs.codec import CodecState
from paceline.codecs.power_sgd import FactorState, first_guess, multiply, orthonormalise
from paceline.collectives.reductions import reduction
from paceline.collectives.vote import SyncVote
from paceline.endpoint import Endpoint


@reduction("factors")
async def mean_by_factors(endpoint: Endpoint, x: Tensor, vote: SyncVote, codec_state: CodecState) -> SyncVote:
    """The weighted mean of `x + residual`, in place, approximated by matrices of low rank.

    With M = x + residual on each rank: P = orth(sum of w M Q), with the Q of the last mean; Q = sum of w M^T P; the
    result is P Q^T / W.  Each rank's new residual is what P leaves out of its own M, not what the result leaves out
    of it.  Both add up with the result to the mean of all M.  But the latter holds all differences between the ranks,
    grows without bound, and counts once weights change.  Tensors too small for factors travel with P and are averaged
    exactly.
    """
    if not isinstance(codec_state, FactorState):
        raise TypeError(
            f"mean_by_factors with a {type(codec_state).__name__} of {codec_state.codec}: "
            "only PowerSGD's state has factors"
        )
    if x.dtype != codec_state.residual.dtype:
        return await _mean_in_wider_dtype(endpoint, x, vote, codec_state)
    plan = codec_state.plan
    own = _OwnFactors(x, vote, codec_state)
    left = await endpoint.compute(own.project, kind="encode", nbytes=x.nbytes)
    extras = vote.tensor()
    await endpoint.all_reduce(left, extras)
    total = SyncVote(*extras.tolist())
    if not total.weight and not total.bad:  # No rank has values: everything stays as it was.
        return total
    if not total.bad and not left.isfinite().all():
        total.bad = float(
            len(endpoint.ranks)
        )  # Each rank's values were finite, their sum is not; every rank sees that.
    if total.bad:
        x.fill_(torch.nan)
        return total
    ps = plan.left(left)
    right = own.right
    if plan.matrices:
        right = await endpoint.compute(lambda: own.project_back(ps), kind="encode", nbytes=x.nbytes)
        await endpoint.all_reduce(right)
        if not right.isfinite().all():
            total.bad = float(len(endpoint.ranks))
            x.fill_(torch.nan)
            return total
    await endpoint.compute(lambda: own.conclude(left, right, total.weight), kind="decode", nbytes=x.nbytes)
    return total


async def _mean_in_wider_dtype(endpoint: Endpoint, x: Tensor, vote: SyncVote, codec_state: FactorState) -> SyncVote:
    """The mean in the dtype of the residual."""
    wide = x.to(codec_state.residual.dtype)
    total = await mean_by_factors(endpoint, wide, vote, codec_state)
    if total.weight or total.bad:
        x.copy_(wide)
        if vote.weight and not total.bad:
            # The residual takes the rounding error of the result too, but not infinity, which would stay there.
            codec_state.add_rounding(wide.sub_(x).nan_to_num_(0.0, 0.0, 0.0), vote.weight / total.weight)
    return total


class _OwnFactors:
    """One rank's part in one mean: its products with the factors, and then its residual and its copy of the result."""

    def __init__(self, x: Tensor, vote: SyncVote, codec_state: FactorState) -> None:
        self.x = x
        self.vote = vote
        self.state = codec_state
        self.plan = codec_state.plan
        self.counts = bool(vote.weight and not vote.bad)
        self.right = x.new_zeros(self.plan.right_numel)  # This rank's M^T P, without its weight.

    def project(self) -> Tensor:
        """w M Q of every matrix, and w times the values that are not in a matrix; zeros if they do not count."""
        plan = self.plan
        x = self.x
        flat = x.new_zeros(plan.left_numel + plan.raw_numel)
        if self.counts:
            x.add_(self.state.residual)
            for m, p, q in zip(plan.matrices, plan.left(flat), self.state.factors, strict=True):
                torch.mm(q, m.of(x).T, out=p)
            plan.put_raw(x, flat[plan.left_numel :])
            if (
                not flat.isfinite().all()
            ):  # A NaN in a matrix is in its product too, so checking the products is enough.
                flat.zero_()
                self.counts = False
                self.vote.refuse(self.state.codec, x, "their products are beyond the range of their type")
            elif self.vote.weight != 1.0:
                flat.mul_(self.vote.weight)
        return flat

    def project_back(self, ps: list[Tensor]) -> Tensor:
        """Make P orthonormal, in place; then w M^T P of every matrix."""
        orthonormalise(ps)
        if self.counts:
            for m, p, q in zip(self.plan.matrices, ps, self.plan.right(self.right), strict=True):
                torch.mm(p, m.of(self.x), out=q)
        return self.right * self.vote.weight

    def share(self, weight: float) -> float:
        """This rank's share of a mean of this total weight."""
        return self.vote.weight / weight if self.counts else 0.0

    def conclude(self, left: Tensor, right: Tensor, weight: float) -> None:
        """Put the result into `x`, what it leaves out into the residual, and keep Q for the next mean."""
        plan = self.plan
        x = self.x
        residual = self.state.residual
        before = None if self.state.is_settled(self.share(weight)) else residual.clone()
        right.div_(weight)
        factors = zip(plan.matrices, plan.left(left), plan.right(right), plan.right(self.right), strict=True)
        for m, p, q, own in factors:
            if self.counts:
                torch.addmm(m.of(x), p.T, own, alpha=-1, out=m.of(residual))
            multiply(p, q, m.of(x))
        plan.take_raw(left[plan.left_numel :].div_(weight), x)
        if self.counts:
            for s in plan.raw:
                residual[s] = 0.0
        if before is not None:
            self.state.settle_from([(residual, before)], self.share(weight))
        for q, new in zip(self.state.factors, plan.right(right), strict=True):
            q.copy_(new)
        # A row of Q that has become zero, as with a zero gradient, would stay zero: it starts from the first guess
        # again.
        orthonormalise(self.state.factors, [first_guess(plan.rank, m.cols, x.device) for m in plan.matrices])
