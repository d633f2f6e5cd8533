"""Means and sums over a group of ranks, for values that can be summed on the wire and for encoded ones that cannot.

All means are weighted by samples, work in place, and leave the same bits on every rank.  A `Ballot` travels with each: the
weights are summed with the values, and the group learns in the same exchange who still has data and who found a NaN.
`mean_by_stripes` with Fp32 equals `mean`; with two ranks `mean_by_gather` sends as many bytes and encodes once less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.codecs.codec import Codec, Link, Unencodable
from paceline.endpoint import Endpoint, Message, check_summable
from paceline.flat import is_finite

Groups = Sequence[Sequence[int]]
VOTE_NBYTES = 32  # A ballot on the wire: four float64 numbers.
SEAL_NBYTES = 40  # What follows an encoded message: the ballot, and the message's length without its padding.


@dataclass(slots=True)
class Ballot:
    """What every rank says beside its values, summed over the group: the weight, who goes on, who found a NaN."""

    weight: float
    going_on: float = 0.0
    bad: float = 0.0
    bad_rank: float = 0.0
    rank: float = 0.0  # Whose ballot it is, and what it had that cannot be encoded: these do not travel.
    complaint: Unencodable | None = None

    def tensor(self) -> Tensor:
        return torch.tensor([self.weight, self.going_on, self.bad, self.bad_rank], dtype=torch.float64)

    def seal(self, data: Tensor, message: Tensor | None) -> Tensor:
        """`data` with the ballot behind it, in `message` if given, where the data may already lie."""
        nbytes = data.numel()
        if message is None:
            message = torch.empty(sealed_nbytes(nbytes), dtype=torch.uint8, device=data.device)
        if message.data_ptr() != data.data_ptr():
            message[:nbytes] = data
        message[nbytes:-SEAL_NBYTES] = 0
        message[-SEAL_NBYTES:] = torch.cat([self.tensor(), torch.tensor([nbytes], dtype=torch.float64)]).view(torch.uint8).to(data.device)
        return message

    @staticmethod
    def opened(messages: Sequence[Tensor]) -> tuple[list[Tensor], list[float], Ballot]:
        """The bytes of sealed messages without their ballots, each one's weight, and the ballots' sum."""
        votes = torch.stack([m[-SEAL_NBYTES:] for m in messages]).cpu().view(torch.float64)
        said = [m[: int(nbytes)] for m, nbytes in zip(messages, votes[:, 4].tolist(), strict=True)]
        return said, votes[:, 0].tolist(), Ballot(*votes[:, :4].sum(0).tolist())

    def refuse(self, codec: Codec, x: Tensor, why: str) -> None:
        """Say that `x` is not finite, or cannot be encoded for `why`, and remember where the first such value is."""
        self.bad, self.bad_rank = 1.0, self.rank
        try:
            codec.refuse(x, why)
        except Unencodable as complaint:
            self.complaint = complaint

    def culprit(self) -> str:
        return f"rank {self.bad_rank:.0f}" if self.bad == 1 else f"{self.bad:.0f} ranks"


async def all_there(endpoint: Endpoint) -> None:
    """Wait until all others have come here too."""
    await endpoint.all_reduce(torch.zeros(1, dtype=torch.float64))


async def mean(endpoint: Endpoint, x: Tensor, ballot: Ballot, codec: Codec | None = None, groups: Groups | None = None) -> Ballot:
    """The weighted mean of `x`, by an all-reduce of sums; within `groups` first and then between them, if they are given.

    With a codec, which must be a linear one, its encoded values are what is summed: half the bytes, and half the precision.
    """
    if codec is not None:
        if codec.wire is None:
            raise ValueError(f"mean: what {codec} encodes cannot be summed; take mean_by_stripes or mean_by_gather, which decode first")
        return await _mean_in(endpoint, x, ballot, codec, codec.wire)
    if x.element_size() == 2:  # A sum weighted by thousands of samples overflows 16 bits, or drowns in them.
        wide = x.to(torch.float32)
        total = await mean(endpoint, wide, ballot, groups=groups)
        x.copy_(wide)
        return total
    kept = x.clone() if ballot.weight == 0 else None
    if ballot.weight == 0:
        x.zero_()
    elif ballot.weight != 1.0:
        x.mul_(ballot.weight)
    tail = ballot.tensor()
    if groups is None:
        await endpoint.all_reduce(x, tail)
    else:
        await sum_by_groups(endpoint, x, tail, groups)
    total = Ballot(*tail.tolist())
    if total.weight == 0:  # Nobody has anything to say: everything stays as it was.
        assert kept is not None
        x.copy_(kept)
    elif total.weight != 1.0:
        x.div_(total.weight)
    return total


async def _mean_in(endpoint: Endpoint, x: Tensor, ballot: Ballot, codec: Codec, wire: torch.dtype) -> Ballot:
    """By a sum of encoded values: the weights go ahead, since a sum over many samples would not fit into 16 bits."""
    if ballot.weight and not ballot.bad:
        try:
            codec.encode(x)  # If this can be said, so can any share of it.
        except Unencodable:
            ballot.bad, ballot.bad_rank = 1.0, ballot.rank
    await endpoint.all_reduce(tail := ballot.tensor())
    total = Ballot(*tail.tolist())
    if total.bad:
        x.fill_(torch.nan)
    elif total.weight:
        share = x * (ballot.weight / total.weight) if ballot.weight else torch.zeros_like(x)
        x.copy_(await endpoint.all_reduce(codec.encode(share).view(wire)))
    return total


async def ring_sum(endpoint: Endpoint, x: Tensor) -> Tensor:
    """The sum of `x`, in place, by messages round a ring of the ranks: for groups that have no collective of their own.

    In N - 1 rounds each chunk collects its sum on the way round, in N - 1 more the sums go round; a rank sends 2 (N - 1) / N of `x`.
    """
    check_summable(x)
    ranks, me = len(endpoint.ranks), list(endpoint.ranks).index(endpoint.rank)
    chunks = [x[stripe_of(j, x.numel(), ranks)] for j in range(ranks)]
    right, left = endpoint.ranks[(me + 1) % ranks], endpoint.ranks[me - 1]
    for s in range(2 * (ranks - 1)):
        sent = endpoint.send(right, Message("ring", (chunks[(me - s) % ranks],)))
        (received,) = (await endpoint.recv(src=left)).tensors
        chunk = chunks[(me - s - 1) % ranks]
        if s < ranks - 1:
            chunk.add_(received)
        else:
            chunk.copy_(received)
        await sent
    return x


async def sum_by_groups(endpoint: Endpoint, x: Tensor, tail: Tensor, groups: Groups) -> Tensor:
    """The sum of `x` and of `tail`, in place: to the first of each group, between these, and back.

    Sums travel, never means, so groups may differ in size.  Between groups of G the latency is that of N / G ranks.
    """
    mine = _group_of(endpoint, groups)
    first, inner = min(mine), endpoint.group(mine)
    if len(mine) > 1:
        await inner.reduce(x, first, tail)
    if endpoint.rank == first and len(groups) > 1:
        await endpoint.group([min(g) for g in groups]).all_reduce(x, tail)
    if len(mine) > 1:
        await inner.broadcast(x, first)
        await inner.broadcast(tail, first)
    return x


def _group_of(endpoint: Endpoint, groups: Groups) -> Sequence[int]:
    if sorted(r for g in groups for r in g) != list(endpoint.ranks):
        raise ValueError(f"groups {[list(g) for g in groups]}: each of the ranks {list(endpoint.ranks)} must be in exactly one")
    return next(g for g in groups if endpoint.rank in g)


def groups_of(ranks: Sequence[int], size: int) -> list[list[int]]:
    """Ranks in groups of one size, the last one smaller if need be.

    >>> groups_of(range(7), 4)
    [[0, 1, 2, 3], [4, 5, 6]]
    """
    if size < 1:
        raise ValueError(f"groups of {size}: a group has at least 1 member")
    return [list(ranks[i : i + size]) for i in range(0, len(ranks), size)]


async def mean_encoded(endpoint: Endpoint, x: Tensor, ballot: Ballot, link: Link) -> Ballot:
    """The weighted mean of what all ranks' encoded `x` say, in the way that suits the codec and the place of the ranks."""
    if endpoint.hosts is not None:
        return await mean_by_groups(endpoint, x, ballot, link, endpoint.hosts)
    if link.codec.way == "factors":
        from paceline.low_rank import mean_by_factors

        return await mean_by_factors(endpoint, x, ballot, link)
    return await {"stripes": mean_by_stripes, "gather": mean_by_gather}[link.codec.way](endpoint, x, ballot, link)


async def mean_by_groups(endpoint: Endpoint, x: Tensor, ballot: Ballot, link: Link, groups: Groups) -> Ballot:
    """The weighted mean of plain sums within groups and encoded ones between them: each first member speaks for its group."""
    if x.element_size() == 2:
        wide = x.to(torch.float32)
        total = await mean_by_groups(endpoint, wide, ballot, link, groups)
        x.copy_(wide)
        return total
    mine = _group_of(endpoint, groups)
    first, inner = min(mine), endpoint.group(mine)
    if ballot.weight and not ballot.bad and not is_finite(x):  # In the group's sum nobody could tell whose it was.
        ballot.refuse(link.codec, x, "")
    kept = x.clone() if ballot.weight == 0 else None
    x.mul_(ballot.weight) if ballot.weight and not ballot.bad else x.zero_()
    tail = ballot.tensor()
    await inner.reduce(x, first, tail)
    if endpoint.rank == first:
        theirs = Ballot(*tail.tolist(), rank=endpoint.rank)
        if theirs.weight:
            x.div_(theirs.weight)
        total = await mean_encoded(endpoint.group([min(g) for g in groups]), x, theirs, link)
        tail.copy_(total.tensor())
    await inner.broadcast(x, first)
    await inner.broadcast(tail, first)
    total = Ballot(*tail.tolist())
    if total.weight == 0:
        assert kept is not None
        x.copy_(kept)
    return total


async def mean_by_gather(endpoint: Endpoint, x: Tensor, ballot: Ballot, link: Link) -> Ballot:
    """The weighted mean of what all ranks' encoded `x` say: everybody's bytes go to everybody."""
    whole = [slice(0, x.numel())]
    (message,) = await endpoint.compute(lambda: _spoken(x, whole, ballot, link), kind="encode", nbytes=x.nbytes)
    if link.codec.nbytes(x.numel()) is None:
        messages = await endpoint.all_to_all([message] * len(endpoint.ranks))
    else:
        messages = await endpoint.all_gather(message)
    said, weights, total = Ballot.opened(messages)
    if _is_void(total):
        _take_back(x, [message], whole, ballot, total, link)
        return total
    await endpoint.compute(lambda: _weighted_mean(x, said, weights, link), kind="decode", nbytes=x.nbytes * len(said))
    return total


async def mean_by_stripes(endpoint: Endpoint, x: Tensor, ballot: Ballot, link: Link) -> Ballot:
    """The two-level scheme of 1-bit SGD: each rank decodes, sums and encodes again the stripe it owns."""
    ranks, me = len(endpoint.ranks), list(endpoint.ranks).index(endpoint.rank)
    stripes = [stripe_of(j, x.numel(), ranks, unit=link.codec.unit) for j in range(ranks)]
    own = stripes[me]
    parts = await endpoint.compute(lambda: _spoken(x, stripes, ballot, link), kind="encode", nbytes=x.nbytes)
    is_fixed = link.codec.nbytes(x.numel()) is not None
    said, weights, total = Ballot.opened(await endpoint.all_to_all(parts, [parts[me].numel()] * ranks if is_fixed else None))
    if _is_void(total):
        _take_back(x, parts, stripes, ballot, total, link)
        return total

    def sum_and_encode() -> Tensor:
        mine = _weighted_mean(x[own], said, weights, link[own])
        # Stripes may differ in length, and their messages by their place too; gathered messages may not.
        room = torch.empty_like(max(parts, key=Tensor.numel)) if is_fixed else None
        return _sealed_sum(mine, link.owned(own), Ballot(0.0, rank=ballot.rank), room)

    data = await endpoint.compute(sum_and_encode, kind="encode", nbytes=x[own].nbytes * (ranks + 1))
    said, _, verdict = Ballot.opened(await (endpoint.all_gather(data) if is_fixed else endpoint.all_to_all([data] * ranks)))
    if verdict.bad:
        x.fill_(torch.nan)
        total.bad, total.bad_rank = verdict.bad, verdict.bad_rank
        return total

    def decode() -> None:
        for s, message in zip(stripes, said, strict=True):
            link[s].add(message, x[s], fresh=True)

    await endpoint.compute(decode, kind="decode", nbytes=x.nbytes)
    return total


def _spoken(x: Tensor, stripes: Sequence[slice], ballot: Ballot, link: Link) -> list[Tensor]:
    """What a rank sends for the stripes of `x`; silence where it has nothing that counts, or that its codec can say.

    Messages of a known size are encoded where they lie, one behind the other, as they will be sent.
    """
    links, rooms = [link[s] for s in stripes], _rooms(x, stripes, link)
    said: list[Tensor] = []
    if ballot.weight and not ballot.bad:
        try:
            for part, s, room in zip(links, stripes, rooms, strict=True):
                said.append(part.encode(x[s], None if room is None else room[: part.codec.nbytes(s.stop - s.start)]))
        except Unencodable as error:
            for part, s, data in zip(links, stripes, said, strict=False):
                part.take_back(x[s], data)
            if error.at is not None:
                error.at += stripes[len(said)].start
            ballot.bad, ballot.bad_rank, ballot.complaint = 1.0, ballot.rank, error
            said = []
    said = said or [part.silence(s.stop - s.start, x.device) for part, s in zip(links, stripes, strict=True)]
    return [ballot.seal(data, room) for data, room in zip(said, rooms, strict=True)]


def _rooms(x: Tensor, stripes: Sequence[slice], link: Link) -> Sequence[Tensor | None]:
    """A place for each stripe's message, one behind the other; None where their sizes are not known beforehand."""
    sizes = [link[s].codec.nbytes(s.stop - s.start) for s in stripes]
    known = [sealed_nbytes(n) for n in sizes if n is not None]
    if len(known) < len(sizes):
        return [None] * len(sizes)
    return torch.empty(sum(known), dtype=torch.uint8, device=x.device).split(known)


def _sealed_sum(mine: Tensor, owned: Link, ballot: Ballot, room: Tensor | None) -> Tensor:
    nbytes = owned.codec.nbytes(mine.numel())
    try:
        data = owned.encode(mine, None if room is None else room[:nbytes])
    except Unencodable:  # The mean is beyond the format, though nobody's own values were: all must be told.
        ballot.bad, ballot.bad_rank = 1.0, ballot.rank
        data = owned.silence(mine.numel(), mine.device)
    return ballot.seal(data, room)


def sealed_nbytes(nbytes: int) -> int:
    """The size of a message of so many encoded bytes: filled up to a multiple of 8, and sealed."""
    return -(-nbytes // 8) * 8 + SEAL_NBYTES


def _is_void(total: Ballot) -> bool:
    """Nobody had anything to say, or somebody's NaN spoils it: there is no mean, and all ranks know it alike."""
    return bool(total.bad) or not total.weight


def _take_back(x: Tensor, messages: Sequence[Tensor], stripes: Sequence[slice], ballot: Ballot, total: Ballot, link: Link) -> None:
    """Undo the encoding of what was not heard.  A NaN in a later bucket comes too late for that: what the buckets before it
    said in a step that is then skipped is lost with the step."""
    if ballot.weight and not ballot.bad:
        for s, data in zip(stripes, Ballot.opened(messages)[0], strict=True):
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


def _weighted_mean(x: Tensor, said: Sequence[Tensor], weights: Sequence[float], link: Link) -> Tensor:
    """Into `x`; what is returned has not been rounded to 16 bits."""
    mean = x if x.element_size() > 2 else torch.empty_like(x, dtype=torch.float32)
    total, fresh = sum(weights), True
    for data, weight in zip(said, weights, strict=True):
        if weight:
            link.add(data, mean, weight / total, fresh=fresh)
            fresh = False
    if mean is not x:
        x.copy_(mean)
    return mean
