"""Means over a group of ranks, for values that can be summed on the wire and for encoded ones that cannot.

All three are weighted by samples, work in place, and leave the same bits on every rank.  A `Ballot` travels with each: the
weights are summed with the values, and the group learns in the same exchange who still has data and who found a NaN.
`mean_by_stripes` with Fp32 equals `mean`; with two ranks `mean_by_gather` sends as many bytes and encodes once less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.codecs.codec import ErrorFeedback, Unencodable
from paceline.endpoint import Endpoint

VOTE_NBYTES = 32  # A ballot on the wire: four float64 numbers.


@dataclass(slots=True)
class Ballot:
    """What every rank says beside its values, summed over the group: the weight, who goes on, who found a NaN."""

    weight: float
    going_on: float = 0.0
    bad: float = 0.0
    bad_rank: float = 0.0
    rank: float = 0.0  # whose ballot it is; does not travel

    def tensor(self) -> Tensor:
        return torch.tensor([self.weight, self.going_on, self.bad, self.bad_rank], dtype=torch.float64)

    def sealed(self, data: Tensor) -> Tensor:
        """Encoded bytes with the ballot behind them."""
        return torch.cat([data, self.tensor().view(torch.uint8).to(data.device)])

    @staticmethod
    def opened(messages: Sequence[Tensor]) -> tuple[list[Tensor], list[float], Ballot]:
        """The bytes of sealed messages without their ballots, each one's weight, and the ballots' sum."""
        votes = torch.stack([m[-VOTE_NBYTES:] for m in messages]).cpu().view(torch.float64)
        return [m[:-VOTE_NBYTES] for m in messages], votes[:, 0].tolist(), Ballot(*votes.sum(0).tolist())

    def culprit(self) -> str:
        return f"rank {self.bad_rank:.0f}" if self.bad == 1 else f"{self.bad:.0f} ranks"


async def mean(endpoint: Endpoint, x: Tensor, ballot: Ballot) -> Ballot:
    """The weighted mean of `x`, by an all-reduce of sums."""
    if x.element_size() == 2:  # A sum weighted by thousands of samples overflows 16 bits, or drowns in them.
        wide = x.to(torch.float32)
        total = await mean(endpoint, wide, ballot)
        x.copy_(wide)
        return total
    kept = x.clone() if ballot.weight == 0 else None
    if ballot.weight == 0:
        x.zero_()
    elif ballot.weight != 1.0:
        x.mul_(ballot.weight)
    tail = ballot.tensor()
    await endpoint.all_reduce(x, tail)
    total = Ballot(*tail.tolist())
    if total.weight == 0:  # Nobody has anything to say: everything stays as it was.
        assert kept is not None
        x.copy_(kept)
    elif total.weight != 1.0:
        x.div_(total.weight)
    return total


async def mean_by_gather(endpoint: Endpoint, x: Tensor, ballot: Ballot, link: ErrorFeedback) -> Ballot:
    """The weighted mean of what all ranks' encoded `x` say: everybody's bytes go to everybody."""
    whole = [slice(0, x.numel())]
    (data,) = await endpoint.compute(lambda: _spoken(x, whole, ballot, link), kind="encode", nbytes=_nbytes(x))
    said, weights, total = Ballot.opened(await endpoint.all_gather(ballot.sealed(data)))
    if _is_void(total):
        _take_back(x, [data], whole, ballot, total, link)
        return total
    await endpoint.compute(lambda: _weighted_mean(x, link, said, weights), kind="decode", nbytes=_nbytes(x) * len(said))
    return total


async def mean_by_stripes(endpoint: Endpoint, x: Tensor, ballot: Ballot, link: ErrorFeedback) -> Ballot:
    """The two-level scheme of 1-bit SGD: each rank decodes, sums and encodes again the stripe it owns."""
    ranks, me = len(endpoint.ranks), list(endpoint.ranks).index(endpoint.rank)
    stripes = [stripe_of(j, x.numel(), ranks, unit=512) for j in range(ranks)]
    parts = await endpoint.compute(lambda: _spoken(x, stripes, ballot, link), kind="encode", nbytes=_nbytes(x))
    said, weights, total = Ballot.opened(await endpoint.all_to_all([ballot.sealed(p) for p in parts]))
    if _is_void(total):
        _take_back(x, parts, stripes, ballot, total, link)
        return total
    mine = x[stripes[me]]

    def sum_and_encode() -> Tensor:
        _weighted_mean(mine, link, said, weights)
        return link.owned(stripes[me]).encode(mine)

    data = await endpoint.compute(sum_and_encode, kind="encode", nbytes=_nbytes(mine) * (ranks + 1))
    # Stripes may differ in length; gathered messages may not.  The first stripe is a longest one.
    widest = link.codec.nbytes(stripes[0].stop - stripes[0].start)
    assert widest is not None
    sums = await endpoint.all_gather(torch.nn.functional.pad(data, (0, widest - data.numel())))

    def decode() -> None:
        for s, message in zip(stripes, sums, strict=True):
            numel = s.stop - s.start
            x[s] = link.codec.decode(message[: link.codec.nbytes(numel)], numel).to(x.dtype)

    await endpoint.compute(decode, kind="decode", nbytes=_nbytes(x))
    return total


def _spoken(x: Tensor, stripes: Sequence[slice], ballot: Ballot, link: ErrorFeedback) -> list[Tensor]:
    """What a rank sends for the stripes of `x`; silence where it has nothing that counts, or that its codec can say."""
    parts: list[Tensor] = []
    if ballot.weight and not ballot.bad:
        try:
            for s in stripes:
                parts.append(link[s].encode(x[s]))
            return parts
        except Unencodable:
            for s, data in zip(stripes, parts, strict=False):
                link[s].take_back(x[s], data)
            ballot.bad, ballot.bad_rank = 1.0, ballot.rank
    return [link.silence(s.stop - s.start) for s in stripes]


def _is_void(total: Ballot) -> bool:
    """Nobody had anything to say, or somebody's NaN spoils it: there is no mean, and all ranks know it alike."""
    return bool(total.bad) or not total.weight


def _take_back(x: Tensor, parts: Sequence[Tensor], stripes: Sequence[slice], ballot: Ballot, total: Ballot, link: ErrorFeedback) -> None:
    """Undo the encoding of what was not heard.  A NaN in a later bucket comes too late for that: what the buckets before it
    said in a step that is then skipped is lost with the step."""
    if ballot.weight and not ballot.bad:
        for s, data in zip(stripes, parts, strict=True):
            link[s].take_back(x[s], data)
    if total.bad:
        x.fill_(torch.nan)  # As a plain sum would have it, so that whoever looks at the mean sees that it is none.


def stripe_of(index: int, numel: int, stripes: int, unit: int = 1) -> slice:
    """The part of a vector that the index-th of so many owners holds: whole units, the first owners one more.

    >>> [stripe_of(i, 10, 4) for i in range(4)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 8, None), slice(8, 10, None)]
    """
    units = -(-numel // unit)
    each, more = divmod(units, stripes)
    start = index * each + min(index, more)
    stop = start + each + (index < more)
    return slice(min(start * unit, numel), min(stop * unit, numel))


def _weighted_mean(x: Tensor, link: ErrorFeedback, messages: Sequence[Tensor], weights: Sequence[float]) -> None:
    total = sum(weights)
    x.zero_()
    for data, weight in zip(messages, weights, strict=True):
        if weight:
            x.add_(link.codec.decode(data, x.numel()).to(x.dtype).mul_(weight))
    if total != 1.0:
        x.div_(total)


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
