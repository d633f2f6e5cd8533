"""The mean over a group of ranks by low-rank factors: PowerSGD (Vogels, Karimireddy, Jaggi 2019) among workers.

Instead of M's mean the ranks sum M Q and then M^T P, both thin, so that the bytes sent do not grow with the number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.codecs.codec import CodecState
from paceline.codecs.power_sgd import FactorState, first_guess, multiply, orthonormalise
from paceline.collectives.vote import SyncVote
from paceline.endpoint import Endpoint


async def mean_by_factors(endpoint: Endpoint, x: Tensor, vote: SyncVote, codec_state: CodecState) -> SyncVote:
    """The weighted mean of `x` and what each rank remembers, in place, as far as matrices of low rank can say it.

    With M = x + residual on each rank: P = orth(sum of w M Q), with the Q of the last mean; Q = sum of w M^T P; the result is
    P Q^T / W.  Each remembers what P leaves out of its own M, not what the result lacks of it: both add up with the result to
    the mean of all M, but the latter holds all that the ranks differ in, grows for ever and counts once weights change.  What
    is too small for factors travels with P and is averaged exactly.
    """
    if not isinstance(codec_state, FactorState):
        raise TypeError(
            f"mean_by_factors with a {type(codec_state).__name__} of {codec_state.codec}: only PowerSGD's link remembers factors"
        )
    if x.dtype != codec_state.residual.dtype:
        wide = x.to(codec_state.residual.dtype)
        total = await mean_by_factors(endpoint, wide, vote, codec_state)
        if total.weight or total.bad:
            x.copy_(wide)
            if vote.weight and not total.bad:  # What the result loses by being rounded is left out like the rest.
                codec_state.residual.add_(
                    wide.sub_(x).nan_to_num_(0.0, 0.0, 0.0)
                )  # Infinity is to be seen once, not remembered.
        return total
    plan, counts = codec_state.plan, bool(vote.weight and not vote.bad)

    def project() -> Tensor:
        nonlocal counts
        flat = x.new_zeros(plan.left_numel + plan.raw_numel)
        if counts:
            x.add_(codec_state.residual)
            for m, p, q in zip(plan.matrices, plan.left(flat), codec_state.factors, strict=True):
                torch.mm(q, m.of(x).T, out=p)
            plan.put_raw(x, flat[plan.left_numel :])
            if (
                not flat.isfinite().all()
            ):  # A NaN anywhere in a matrix is in its product too: before there is no need to look for it.
                flat.zero_()
                counts = False
                vote.refuse(codec_state.codec, x, "their products are beyond the range of their type")
            elif vote.weight != 1.0:
                flat.mul_(vote.weight)
        return flat

    left = await endpoint.compute(project, kind="encode", nbytes=x.nbytes)
    extras = vote.tensor()
    await endpoint.all_reduce(left, extras)
    total = SyncVote(*extras.tolist())
    if not total.weight and not total.bad:  # Nobody has anything to say: everything stays as it was.
        return total
    if not total.bad and not left.isfinite().all():
        total.bad = float(len(endpoint.ranks))  # Each rank's values were finite and their sum is not, as all see alike.
    if total.bad:
        x.fill_(torch.nan)
        return total
    ps = plan.left(left)
    own = x.new_zeros(plan.right_numel)

    def project_back() -> Tensor:
        orthonormalise(ps)
        if counts:
            for m, p, q in zip(plan.matrices, ps, plan.right(own), strict=True):
                torch.mm(p, m.of(x), out=q)
        return own * vote.weight

    right = own
    if plan.matrices:
        right = await endpoint.compute(project_back, kind="encode", nbytes=x.nbytes)
        await endpoint.all_reduce(right)
        if not right.isfinite().all():
            total.bad = float(len(endpoint.ranks))
            x.fill_(torch.nan)
            return total

    def conclude() -> None:
        right.div_(total.weight)
        for m, p, q, mine in zip(plan.matrices, ps, plan.right(right), plan.right(own), strict=True):
            if counts:
                torch.addmm(m.of(x), p.T, mine, alpha=-1, out=m.of(codec_state.residual))
            multiply(p, q, m.of(x))
        plan.take_raw(left[plan.left_numel :].div_(total.weight), x)
        if counts:
            for s in plan.raw:
                codec_state.residual[s] = 0.0
        # A row of Q that died, as all do if a gradient is zero, would stay dead: it begins anew.
        for q, new in zip(codec_state.factors, plan.right(right), strict=True):
            q.copy_(new)
        orthonormalise(codec_state.factors, [first_guess(plan.rank, m.cols, x.device) for m in plan.matrices])

    await endpoint.compute(conclude, kind="decode", nbytes=x.nbytes)
    return total
