"""The mean of 16-bit floats by one all-reduce, which sums them on the wire.

A rank sends `x * weight / 2**k`, rounded to 16 bits, with an exponent k that is the same on all ranks.  The vote beside
it gives the sum of the weights W.  So the sum times `2**k / W` is the mean, whatever k was.  A power of two costs no
precision within the range of the format.  It is chosen before the weights are known: from the last exchange of the same
part of the vector, or, the first time, from this rank's own weight.  The vote shows whether all ranks chose the same.
If not, or if a sum overflowed, all ranks see it, and repeat the exchange with `k = ceil(log2(W))`.
"""

from __future__ import annotations

from math import floor, frexp, isfinite, ldexp, log2

import torch
from torch import Tensor

from paceline.codecs import kernels
from paceline.codecs.codec import CodecState, ErrorFeedback, SummedState, Unencodable
from paceline.collectives.reductions import REDUCTIONS, reduction
from paceline.collectives.vote import SyncVote
from paceline.endpoint import Endpoint

# Small values are sent larger, so that they are not lost below the smallest number of fp16: so much larger that no
# partial sum of the last exchange would be above this.  Values can then grow 256 times before a sum overflows.
TARGET = 256.0
MOST_GAIN = 64
ZERO_GAIN = 6  # If all values of a mean are zero, they may be too small: the gain grows by this much.
SLACK = 3  # An exponent may be this much above the best one, which loses as many bits of the smallest numbers.
SAFE = 2.0**14  # A quarter of the range of fp16: rounding makes the sum of 2,000 ranks at most 2.7 times as large.


@reduction("sum")
async def mean_by_sum(endpoint: Endpoint, x: Tensor, vote: SyncVote, codec_state: CodecState) -> SyncVote:
    """The weighted mean of all ranks' encoded `x`: the all-reduce itself sums what the codec encodes."""
    if codec_state.codec.wire is None:
        raise ValueError(
            f"{codec_state.codec} has the reduction 'sum', but no `wire`: the dtype in which its values are summed"
        )
    if isinstance(codec_state, ErrorFeedback) and codec_state.residual is not None:
        # A residual is in units of the values, not of the weighted values that are summed here.
        return await REDUCTIONS["stripes"](endpoint, x, vote, codec_state)
    exponent = _expected(codec_state) if vote.weight else 0
    if exponent is None:
        exponent = _exponent(vote.weight * len(endpoint.ranks))
    data, size = await endpoint.compute(
        lambda: _encoded(x, vote, codec_state, exponent), kind="encode", nbytes=x.nbytes
    )
    ballot = float(bool(vote.weight))
    own = [ballot, ballot * exponent, ballot * exponent**2, size]
    await endpoint.all_reduce(data, extras := torch.cat([vote.tensor(), torch.tensor(own, dtype=torch.float64)]))
    *counted, ballots, exponents, squares, size = extras.tolist()
    total = SyncVote(*counted)
    if total.bad:
        x.fill_(torch.nan)
    if total.bad or not total.weight:
        return total
    used = round(exponents / ballots)
    best = _exponent(total.weight)
    # The mean of the squares is the square of the mean only if all are equal.
    if ballots * squares != exponents**2 or used > best + SLACK or not _is_finite(data, ldexp(size, -used)):
        used = best
        data, size = await endpoint.compute(
            lambda: _encoded(x, vote, codec_state, best), kind="encode", nbytes=x.nbytes
        )
        await endpoint.all_reduce(data, extras := torch.tensor([size], dtype=torch.float64))
        [size] = extras.tolist()
        if not _is_finite(data, ldexp(size, -best)):  # No rank's own values were out of range, but their sum is.
            x.fill_(torch.nan)
            total.bad = float(len(endpoint.ranks))
            return total
    factor = ldexp(1.0, used) / total.weight
    await endpoint.compute(
        lambda: codec_state.add(data.view(torch.uint8), x, factor, fresh=True), kind="decode", nbytes=x.nbytes
    )
    if isinstance(codec_state, SummedState):
        codec_state.exponent = best - _gain(size / total.weight, data.dtype, before=best - used)
    return total


def _expected(codec_state: CodecState) -> int | None:
    return codec_state.exponent if isinstance(codec_state, SummedState) else None


def _exponent(weight: float) -> int:
    """The smallest k with `weight <= 2**k`: a sum of values times `weight / 2**k` is in the range of the values."""
    mantissa, exponent = frexp(weight)
    return exponent - (mantissa == 0.5)


def _gain(size: float, wire: torch.dtype, before: int) -> int:
    """By which power of two the next values can be multiplied; bfloat16 has the range of float32 and needs none."""
    if wire != torch.float16:
        return 0
    gain = floor(log2(TARGET / size)) if size else before + ZERO_GAIN
    return min(max(gain, 0), MOST_GAIN)


def _is_finite(data: Tensor, bound: float) -> bool:
    """Whether a sum has no infinity; `bound` is one on its partial sums, but for their rounding."""
    if data.dtype == torch.float16 and bound <= SAFE:
        return True
    return not data.numel() or all(map(isfinite, _extremes(data)))  # A NaN is both extremes.


def _extremes(data: Tensor) -> list[float]:
    """The smallest and the largest value: of 16-bit values these are found faster than their sum."""
    return torch.stack(data.aminmax()).tolist()


def _encoded(x: Tensor, vote: SyncVote, codec_state: CodecState, exponent: int) -> tuple[Tensor, float]:
    """This rank's term of the sum, zeros if its values do not count or cannot be encoded; and its largest magnitude.

    The magnitudes of all ranks together are a bound on every partial sum.  Only the gain of fp16 needs them.
    """
    codec = codec_state.codec
    if vote.weight and not vote.bad:
        try:
            data = kernels.encode_scaled(codec, x, vote.weight * 2.0**-exponent)
        except Unencodable as complaint:
            vote.bad = 1.0
            vote.bad_rank = vote.rank
            vote.complaint = complaint
        else:
            if data.dtype != torch.float16 or not data.numel():
                return data, 0.0
            low, high = _extremes(data)
            return data, ldexp(max(-low, high), exponent)
    return torch.zeros(x.numel(), dtype=codec.wire, device=x.device), 0.0
