"""Means and sums over a group of ranks, for values that can be summed on the wire and for encoded ones that cannot.

All means are weighted by samples, work in place, and leave the same bits on every rank.  A `SyncVote` travels with each: the
weights are summed with the values, and the group learns in the same exchange who still has data and who found a NaN.
`mean_by_stripes` with Fp32 equals `mean`; with two ranks `mean_by_gather` sends as many bytes and encodes once less.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.codecs.codec import Codec, CodecState, Unencodable
from paceline.collectives.vote import SyncVote, packed_nbytes
from paceline.endpoint import Endpoint, check_summable
from paceline.errors import ClusterError
from paceline.protocol.messages import Message
from paceline.stripes import stripe_of
from paceline.worker.flat import is_finite

Groups = Sequence[Sequence[int]]


async def barrier(endpoint: Endpoint) -> None:
    """Wait until all others have come here too."""
    await endpoint.all_reduce(torch.zeros(1, dtype=torch.float64))


async def mean(
    endpoint: Endpoint, x: Tensor, vote: SyncVote, codec: Codec | None = None, groups: Groups | None = None
) -> SyncVote:
    """The weighted mean of `x`, by an all-reduce of sums; within `groups` first and then between them, if they are given.

    With a codec, which must be a linear one, its encoded values are what is summed: half the bytes, and half the precision.
    """
    if codec is not None:
        if codec.wire is None:
            raise ValueError(
                f"mean: what {codec} encodes cannot be summed; take mean_by_stripes or mean_by_gather, which decode first"
            )
        return await _mean_in(endpoint, x, vote, codec, codec.wire)
    if x.element_size() == 2:  # A sum weighted by thousands of samples overflows 16 bits, or drowns in them.
        wide = x.to(torch.float32)
        total = await mean(endpoint, wide, vote, groups=groups)
        x.copy_(wide)
        return total
    kept = x.clone() if vote.weight == 0 else None
    if vote.weight == 0:
        x.zero_()
    elif vote.weight != 1.0:
        x.mul_(vote.weight)
    extras = vote.tensor()
    if groups is None:
        await endpoint.all_reduce(x, extras)
    else:
        await sum_by_groups(endpoint, x, extras, groups)
    total = SyncVote(*extras.tolist())
    if total.weight == 0:  # Nobody has anything to say: everything stays as it was.
        assert kept is not None
        x.copy_(kept)
    elif total.weight != 1.0:
        x.div_(total.weight)
    return total


async def _mean_in(endpoint: Endpoint, x: Tensor, vote: SyncVote, codec: Codec, wire: torch.dtype) -> SyncVote:
    """By a sum of encoded values: the weights go ahead, since a sum over many samples would not fit into 16 bits."""
    if vote.weight and not vote.bad:
        try:
            codec.encode(x)  # If this can be said, so can any share of it.
        except Unencodable:
            vote.bad, vote.bad_rank = 1.0, vote.rank
    await endpoint.all_reduce(extras := vote.tensor())
    total = SyncVote(*extras.tolist())
    if total.bad:
        x.fill_(torch.nan)
    elif total.weight:
        share = x * (vote.weight / total.weight) if vote.weight else torch.zeros_like(x)
        x.copy_(await endpoint.all_reduce(codec.encode(share).view(wire)))
    return total


class RingChunk(Message):
    """A part of the vector, on its way round the ring."""

    values: Tensor


async def ring_sum(endpoint: Endpoint, x: Tensor) -> Tensor:
    """The sum of `x`, in place, by messages round a ring of the ranks: for groups that have no collective of their own.

    In N - 1 rounds each chunk collects its sum on the way round, in N - 1 more the sums go round; a rank sends 2 (N - 1) / N of `x`.
    """
    check_summable(x)
    ranks, me = len(endpoint.ranks), list(endpoint.ranks).index(endpoint.rank)
    chunks = [x[stripe_of(j, x.numel(), ranks)] for j in range(ranks)]
    right, left = endpoint.ranks[(me + 1) % ranks], endpoint.ranks[me - 1]
    for s in range(2 * (ranks - 1)):
        sent = endpoint.send(right, RingChunk(chunks[(me - s) % ranks]))
        received = await endpoint.recv(src=left)
        if not isinstance(received, RingChunk):
            raise ClusterError(f"rank {left} sent '{received.tag}' within a sum round a ring")
        chunk = chunks[(me - s - 1) % ranks]
        if s < ranks - 1:
            chunk.add_(received.values)
        else:
            chunk.copy_(received.values)
        await sent
    return x


async def sum_by_groups(endpoint: Endpoint, x: Tensor, extras: Tensor, groups: Groups) -> Tensor:
    """The sum of `x` and of `tail`, in place: to the first of each group, between these, and back.

    Sums travel, never means, so groups may differ in size.  Between groups of G the latency is that of N / G ranks.
    """
    mine = _group_of(endpoint, groups)
    first, inner = min(mine), endpoint.group(mine)
    if len(mine) > 1:
        await inner.reduce(x, first, extras)
    if endpoint.rank == first and len(groups) > 1:
        await endpoint.group([min(g) for g in groups]).all_reduce(x, extras)
    if len(mine) > 1:
        await inner.broadcast(x, first)
        await inner.broadcast(extras, first)
    return x


def _group_of(endpoint: Endpoint, groups: Groups) -> Sequence[int]:
    if sorted(r for g in groups for r in g) != list(endpoint.ranks):
        raise ValueError(
            f"groups {[list(g) for g in groups]}: each of the ranks {list(endpoint.ranks)} must be in exactly one"
        )
    return next(g for g in groups if endpoint.rank in g)


def groups_of(ranks: Sequence[int], size: int) -> list[list[int]]:
    """Ranks in groups of one size, the last one smaller if need be.

    >>> groups_of(range(7), 4)
    [[0, 1, 2, 3], [4, 5, 6]]
    """
    if size < 1:
        raise ValueError(f"groups of {size}: a group has at least 1 member")
    return [list(ranks[i : i + size]) for i in range(0, len(ranks), size)]


async def mean_encoded(endpoint: Endpoint, x: Tensor, vote: SyncVote, codec_state: CodecState) -> SyncVote:
    """The weighted mean of what all ranks' encoded `x` say, in the way that suits the codec and the place of the ranks."""
    if endpoint.hosts is not None:
        return await mean_by_groups(endpoint, x, vote, codec_state, endpoint.hosts)
    if codec_state.codec.reduction == "factors":
        from paceline.collectives.low_rank import mean_by_factors

        return await mean_by_factors(endpoint, x, vote, codec_state)
    return await {"stripes": mean_by_stripes, "gather": mean_by_gather}[codec_state.codec.reduction](
        endpoint, x, vote, codec_state
    )


async def mean_by_groups(
    endpoint: Endpoint, x: Tensor, vote: SyncVote, codec_state: CodecState, groups: Groups
) -> SyncVote:
    """The weighted mean of plain sums within groups and encoded ones between them: each first member speaks for its group."""
    if x.element_size() == 2:
        wide = x.to(torch.float32)
        total = await mean_by_groups(endpoint, wide, vote, codec_state, groups)
        x.copy_(wide)
        return total
    mine = _group_of(endpoint, groups)
    first, inner = min(mine), endpoint.group(mine)
    if vote.weight and not vote.bad and not is_finite(x):  # In the group's sum nobody could tell whose it was.
        vote.refuse(codec_state.codec, x, "")
    kept = x.clone() if vote.weight == 0 else None
    x.mul_(vote.weight) if vote.weight and not vote.bad else x.zero_()
    extras = vote.tensor()
    await inner.reduce(x, first, extras)
    if endpoint.rank == first:
        theirs = SyncVote(*extras.tolist(), rank=endpoint.rank)
        if theirs.weight:
            x.div_(theirs.weight)
        total = await mean_encoded(endpoint.group([min(g) for g in groups]), x, theirs, codec_state)
        extras.copy_(total.tensor())
    await inner.broadcast(x, first)
    await inner.broadcast(extras, first)
    total = SyncVote(*extras.tolist())
    if total.weight == 0:
        assert kept is not None
        x.copy_(kept)
    return total


async def mean_by_gather(endpoint: Endpoint, x: Tensor, vote: SyncVote, codec_state: CodecState) -> SyncVote:
    """The weighted mean of what all ranks' encoded `x` say: everybody's bytes go to everybody."""
    whole = [slice(0, x.numel())]
    (message,) = await endpoint.compute(
        lambda: encode_stripes(x, whole, vote, codec_state), kind="encode", nbytes=x.nbytes
    )
    if codec_state.codec.nbytes(x.numel()) is None:
        messages = await endpoint.all_to_all([message] * len(endpoint.ranks))
    else:
        messages = await endpoint.all_gather(message)
    said, weights, total = SyncVote.unpack(messages)
    if _is_void(total):
        _undo(x, [message], whole, vote, total, codec_state)
        return total
    await endpoint.compute(
        lambda: _weighted_mean(x, said, weights, codec_state), kind="decode", nbytes=x.nbytes * len(said)
    )
    return total


async def mean_by_stripes(endpoint: Endpoint, x: Tensor, vote: SyncVote, codec_state: CodecState) -> SyncVote:
    """The two-level scheme of 1-bit SGD: each rank decodes, sums and encodes again the stripe it owns."""
    ranks, me = len(endpoint.ranks), list(endpoint.ranks).index(endpoint.rank)
    stripes = [stripe_of(j, x.numel(), ranks, unit=codec_state.codec.unit) for j in range(ranks)]
    own = stripes[me]
    parts = await endpoint.compute(
        lambda: encode_stripes(x, stripes, vote, codec_state), kind="encode", nbytes=x.nbytes
    )
    is_fixed = codec_state.codec.nbytes(x.numel()) is not None
    said, weights, total = SyncVote.unpack(
        await endpoint.all_to_all(parts, [parts[me].numel()] * ranks if is_fixed else None)
    )
    if _is_void(total):
        _undo(x, parts, stripes, vote, total, codec_state)
        return total

    def sum_and_encode() -> Tensor:
        mine = _weighted_mean(x[own], said, weights, codec_state[own])
        # Stripes may differ in length, and their messages by their place too; gathered messages may not.
        room = torch.empty_like(max(parts, key=Tensor.numel)) if is_fixed else None
        return _packed_sum(mine, codec_state.owned(own), SyncVote(0.0, rank=vote.rank), room)

    data = await endpoint.compute(sum_and_encode, kind="encode", nbytes=x[own].nbytes * (ranks + 1))
    said, _, verdict = SyncVote.unpack(
        await (endpoint.all_gather(data) if is_fixed else endpoint.all_to_all([data] * ranks))
    )
    if verdict.bad:
        x.fill_(torch.nan)
        total.bad, total.bad_rank = verdict.bad, verdict.bad_rank
        return total

    def decode() -> None:
        for s, message in zip(stripes, said, strict=True):
            codec_state[s].add(message, x[s], fresh=True)

    await endpoint.compute(decode, kind="decode", nbytes=x.nbytes)
    return total


def encode_stripes(x: Tensor, stripes: Sequence[slice], vote: SyncVote, codec_state: CodecState) -> list[Tensor]:
    """What a rank sends for the stripes of `x`; silence where it has nothing that counts, or that its codec can say.

    Messages of a known size are encoded where they lie, one behind the other, as they will be sent.
    """
    states, rooms = [codec_state[s] for s in stripes], _rooms(x, stripes, codec_state)
    said: list[Tensor] = []
    if vote.weight and not vote.bad:
        try:
            for part, s, room in zip(states, stripes, rooms, strict=True):
                said.append(part.encode(x[s], None if room is None else room[: part.codec.nbytes(s.stop - s.start)]))
        except Unencodable as error:
            for part, s, data in zip(states, stripes, said, strict=False):
                part.undo(x[s], data)
            if error.at is not None:
                error.at += stripes[len(said)].start
            vote.bad, vote.bad_rank, vote.complaint = 1.0, vote.rank, error
            said = []
    said = said or [part.encode_zero(s.stop - s.start, x.device) for part, s in zip(states, stripes, strict=True)]
    return [vote.pack(data, room) for data, room in zip(said, rooms, strict=True)]


def _rooms(x: Tensor, stripes: Sequence[slice], codec_state: CodecState) -> Sequence[Tensor | None]:
    """A place for each stripe's message, one behind the other; None where their sizes are not known beforehand."""
    sizes = [codec_state[s].codec.nbytes(s.stop - s.start) for s in stripes]
    known = [packed_nbytes(n) for n in sizes if n is not None]
    if len(known) < len(sizes):
        return [None] * len(sizes)
    return torch.empty(sum(known), dtype=torch.uint8, device=x.device).split(known)


def _packed_sum(mine: Tensor, owned: CodecState, vote: SyncVote, room: Tensor | None) -> Tensor:
    nbytes = owned.codec.nbytes(mine.numel())
    try:
        data = owned.encode(mine, None if room is None else room[:nbytes])
    except Unencodable:  # The mean is beyond the format, though nobody's own values were: all must be told.
        vote.bad, vote.bad_rank = 1.0, vote.rank
        data = owned.encode_zero(mine.numel(), mine.device)
    return vote.pack(data, room)


def _is_void(total: SyncVote) -> bool:
    """Nobody had anything to say, or somebody's NaN spoils it: there is no mean, and all ranks know it alike."""
    return bool(total.bad) or not total.weight


def _undo(
    x: Tensor,
    messages: Sequence[Tensor],
    stripes: Sequence[slice],
    vote: SyncVote,
    total: SyncVote,
    codec_state: CodecState,
) -> None:
    """Undo the encoding of what was not heard.  A NaN in a later bucket comes too late for that: what the buckets before it
    said in a step that is then skipped is lost with the step."""
    if vote.weight and not vote.bad:
        for s, data in zip(stripes, SyncVote.unpack(messages)[0], strict=True):
            codec_state[s].undo(x[s], data)
    if total.bad:
        x.fill_(torch.nan)  # As a plain sum would have it, so that whoever looks at the mean sees that it is none.


def _weighted_mean(x: Tensor, said: Sequence[Tensor], weights: Sequence[float], codec_state: CodecState) -> Tensor:
    """Into `x`; what is returned has not been rounded to 16 bits."""
    mean = x if x.element_size() > 2 else torch.empty_like(x, dtype=torch.float32)
    total, fresh = sum(weights), True
    for data, weight in zip(said, weights, strict=True):
        if weight:
            codec_state.add(data, mean, weight / total, fresh=fresh)
            fresh = False
    if mean is not x:
        x.copy_(mean)
    return mean
