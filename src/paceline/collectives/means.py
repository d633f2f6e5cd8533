"""Means and sums over a group of ranks, for values that can be summed on the wire and for encoded ones that cannot.

All means are weighted by samples, work in place, and leave the same bits on every rank.  A `SyncVote` travels with
each.  So one exchange sums the weights with the values, and tells which ranks still have data and which found a NaN.
`mean_by_stripes` with Fp32 equals `mean`; with two ranks `mean_by_gather` sends as many bytes and encodes once less.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.codecs.codec import Codec, CodecState, ErrorFeedback, Unencodable
from paceline.codecs.layout import is_finite
from paceline.collectives.reductions import reduction, reduction_of
from paceline.collectives.summed import mean_by_sum
from paceline.collectives.vote import SyncVote, packed_nbytes
from paceline.endpoint import Endpoint, check_summable
from paceline.errors import ClusterError
from paceline.protocol.messages import Message
from paceline.stripes import stripe_of

Groups = Sequence[Sequence[int]]


async def barrier(endpoint: Endpoint) -> None:
    """Wait until all ranks of the group have called this."""
    await endpoint.all_reduce(torch.zeros(1, dtype=torch.float64))


async def mean(
    endpoint: Endpoint, x: Tensor, vote: SyncVote, codec: Codec | None = None, groups: Groups | None = None
) -> SyncVote:
    """The weighted mean of `x`, by an all-reduce of sums; first within `groups` and then between them, if given.

    With a codec, which must have a `wire` dtype, its encoded values are summed: half the bytes, and half the precision.
    """
    if codec is not None:
        if codec.wire is None:
            raise ValueError(
                f"mean: what {codec} encodes cannot be summed; use mean_by_stripes or mean_by_gather, which decode it"
            )
        return await mean_by_sum(endpoint, x, vote, ErrorFeedback(codec, None))
    if x.element_size() == 2:  # A sum weighted by thousands of samples overflows 16 bits, or loses its digits in them.
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
    if total.weight == 0:  # No rank has values: everything stays as it was.
        assert kept is not None
        x.copy_(kept)
    elif total.weight != 1.0:
        x.div_(total.weight)
    return total


class RingChunk(Message):
    """A part of the vector, on its way round the ring."""

    values: Tensor


async def ring_sum(endpoint: Endpoint, x: Tensor) -> Tensor:
    """The sum of `x`, in place, by messages in a ring of the ranks: for groups without a collective.

    In N - 1 rounds each chunk's sum is added up along the ring, in N - 1 more rounds the sums are passed on to all
    ranks.  A rank sends 2 (N - 1) / N of `x`.
    """
    check_summable(x)
    ranks = len(endpoint.ranks)
    me = list(endpoint.ranks).index(endpoint.rank)
    chunks = [x[stripe_of(j, x.numel(), ranks)] for j in range(ranks)]
    right = endpoint.ranks[(me + 1) % ranks]
    left = endpoint.ranks[me - 1]
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
    """The sum of `x` and of `extras`, in place: to the first rank of each group, between these, and back.

    Sums travel, not means, so groups may differ in size.  Between groups of G the latency is that of N / G ranks.
    """
    mine = _group_of(endpoint, groups)
    first = min(mine)
    inner = endpoint.group(mine)
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
    """Ranks in groups of one size; the last one may be smaller.

    >>> groups_of(range(7), 4)
    [[0, 1, 2, 3], [4, 5, 6]]
    """
    if size < 1:
        raise ValueError(f"groups of {size}: a group has at least 1 rank")
    return [list(ranks[i : i + size]) for i in range(0, len(ranks), size)]


async def mean_encoded(endpoint: Endpoint, x: Tensor, vote: SyncVote, codec_state: CodecState) -> SyncVote:
    """The weighted mean of all ranks' encoded `x`, by the codec's reduction; if hosts are known, first within each."""
    if endpoint.hosts is not None:
        return await mean_by_groups(endpoint, x, vote, codec_state, endpoint.hosts)
    return await reduction_of(codec_state.codec, len(endpoint.ranks))(endpoint, x, vote, codec_state)


def is_single(endpoint: Endpoint, codec_state: CodecState | None, groups: Groups | None) -> bool:
    """Whether such a mean over the group is one collective, nearly always."""
    is_summed = codec_state is None or codec_state.codec.reduction == "sum"
    return is_summed and groups is None and endpoint.hosts is None


async def mean_by_groups(
    endpoint: Endpoint, x: Tensor, vote: SyncVote, codec_state: CodecState, groups: Groups
) -> SyncVote:
    """The weighted mean, by plain sums within groups and encoded ones between the first ranks of the groups."""
    if x.element_size() == 2:
        wide = x.to(torch.float32)
        total = await mean_by_groups(endpoint, wide, vote, codec_state, groups)
        x.copy_(wide)
        return total
    mine = _group_of(endpoint, groups)
    first = min(mine)
    inner = endpoint.group(mine)
    if vote.weight and not vote.bad and not is_finite(x):  # The group's sum would not tell which rank has the NaN.
        vote.refuse(codec_state.codec, x, "")
    kept = x.clone() if vote.weight == 0 else None
    x.mul_(vote.weight) if vote.weight and not vote.bad else x.zero_()
    extras = vote.tensor()
    await inner.reduce(x, first, extras)
    if endpoint.rank == first:
        group_vote = SyncVote(*extras.tolist(), rank=endpoint.rank)
        if group_vote.weight:
            x.div_(group_vote.weight)
        total = await mean_encoded(endpoint.group([min(g) for g in groups]), x, group_vote, codec_state)
        extras.copy_(total.tensor())
    await inner.broadcast(x, first)
    await inner.broadcast(extras, first)
    total = SyncVote(*extras.tolist())
    if total.weight == 0:
        assert kept is not None
        x.copy_(kept)
    return total


@reduction("gather")
async def mean_by_gather(endpoint: Endpoint, x: Tensor, vote: SyncVote, codec_state: CodecState) -> SyncVote:
    """The weighted mean of all ranks' encoded `x`: each rank sends its bytes to all others."""
    whole = [slice(0, x.numel())]
    (message,) = await endpoint.compute(
        lambda: encode_stripes(x, whole, vote, codec_state), kind="encode", nbytes=x.nbytes
    )
    if codec_state.codec.nbytes(x.numel()) is None:
        messages = await endpoint.all_to_all([message] * len(endpoint.ranks))
    else:
        messages = await endpoint.all_gather(message)
    encoded, weights, total = SyncVote.unpack(messages)
    if _is_void(total):
        _undo(x, [message], whole, vote, total, codec_state)
        return total

    def decode() -> None:
        _settle(x, [message], whole, vote, total, codec_state)
        _weighted_mean(x, encoded, weights, codec_state)

    await endpoint.compute(decode, kind="decode", nbytes=x.nbytes * len(encoded))
    return total


@reduction("stripes")
async def mean_by_stripes(endpoint: Endpoint, x: Tensor, vote: SyncVote, codec_state: CodecState) -> SyncVote:
    """The two-level scheme of 1-bit SGD: each rank owns a stripe, which it decodes, averages, encodes and sends."""
    ranks = len(endpoint.ranks)
    me = list(endpoint.ranks).index(endpoint.rank)
    stripes = [stripe_of(j, x.numel(), ranks, unit=codec_state.codec.unit) for j in range(ranks)]
    own = stripes[me]
    parts = await endpoint.compute(
        lambda: encode_stripes(x, stripes, vote, codec_state), kind="encode", nbytes=x.nbytes
    )
    is_fixed = codec_state.codec.nbytes(x.numel()) is not None
    encoded, weights, total = SyncVote.unpack(
        await endpoint.all_to_all(parts, [parts[me].numel()] * ranks if is_fixed else None)
    )
    if _is_void(total):
        _undo(x, parts, stripes, vote, total, codec_state)
        return total

    def average_and_encode() -> Tensor:
        _settle(x, parts, stripes, vote, total, codec_state)
        average = _weighted_mean(x[own], encoded, weights, codec_state[own])
        # Stripes and their messages may differ in length; gathered messages may not.
        buffer = torch.empty_like(max(parts, key=Tensor.numel)) if is_fixed else None
        return _packed_mean(average, codec_state.owned(own), SyncVote(0.0, rank=vote.rank), buffer)

    data = await endpoint.compute(average_and_encode, kind="encode", nbytes=x[own].nbytes * (ranks + 1))
    means, _, verdict = SyncVote.unpack(
        await (endpoint.all_gather(data) if is_fixed else endpoint.all_to_all([data] * ranks))
    )
    if verdict.bad:
        x.fill_(torch.nan)
        total.bad = verdict.bad
        total.bad_rank = verdict.bad_rank
        return total

    def decode() -> None:
        for s, message in zip(stripes, means, strict=True):
            codec_state[s].add(message, x[s], fresh=True)

    await endpoint.compute(decode, kind="decode", nbytes=x.nbytes)
    return total


def encode_stripes(x: Tensor, stripes: Sequence[slice], vote: SyncVote, codec_state: CodecState) -> list[Tensor]:
    """A rank's messages for the stripes of `x`; zero messages if its values do not count or cannot be encoded.

    Messages of a known size are encoded into one buffer, one after the other, as they will be sent.
    """
    states = [codec_state[s] for s in stripes]
    buffers = _buffers(x, stripes, codec_state)
    encoded: list[Tensor] = []
    if vote.weight and not vote.bad:
        try:
            for state, s, buffer in zip(states, stripes, buffers, strict=True):
                out = None if buffer is None else buffer[: state.codec.nbytes(s.stop - s.start)]
                encoded.append(state.encode(x[s], out))
        except Unencodable as error:
            for state, s, data in zip(states, stripes, encoded, strict=False):
                state.undo(x[s], data)
            if error.at is not None:
                error.at += stripes[len(encoded)].start
            vote.bad = 1.0
            vote.bad_rank = vote.rank
            vote.complaint = error
            encoded = []
    if not encoded:
        encoded = [state.encode_zero(s.stop - s.start, x.device) for state, s in zip(states, stripes, strict=True)]
    return [vote.pack(data, buffer) for data, buffer in zip(encoded, buffers, strict=True)]


def _buffers(x: Tensor, stripes: Sequence[slice], codec_state: CodecState) -> Sequence[Tensor | None]:
    """A buffer for each stripe's message, one after the other; None if their sizes depend on the values."""
    sizes = [codec_state[s].codec.nbytes(s.stop - s.start) for s in stripes]
    known = [packed_nbytes(n) for n in sizes if n is not None]
    if len(known) < len(sizes):
        return [None] * len(sizes)
    return torch.empty(sum(known), dtype=torch.uint8, device=x.device).split(known)


def _packed_mean(average: Tensor, owned: CodecState, vote: SyncVote, buffer: Tensor | None) -> Tensor:
    nbytes = owned.codec.nbytes(average.numel())
    try:
        data = owned.encode(average, None if buffer is None else buffer[:nbytes])
    except Unencodable:  # No rank's own values were out of range, but the mean is: the vote tells all ranks.
        vote.bad = 1.0
        vote.bad_rank = vote.rank
        data = owned.encode_zero(average.numel(), average.device)
    return vote.pack(data, buffer)


def _is_void(total: SyncVote) -> bool:
    """Whether there is no mean, because no rank has values or one has a NaN; all ranks see the same."""
    return bool(total.bad) or not total.weight


def _undo(
    x: Tensor,
    messages: Sequence[Tensor],
    stripes: Sequence[slice],
    vote: SyncVote,
    total: SyncVote,
    codec_state: CodecState,
) -> None:
    """Undo the encoding of messages that were not used.

    This works for one bucket.  If a later bucket of a step has a NaN, the step is skipped, and what its earlier
    buckets sent is lost with it.
    """
    if vote.weight and not vote.bad:
        for s, data in zip(stripes, SyncVote.unpack(messages)[0], strict=True):
            codec_state[s].undo(x[s], data)
    if total.bad:
        x.fill_(torch.nan)  # As a plain sum would give, so that a caller that looks at the mean sees it.


def _settle(
    x: Tensor,
    messages: Sequence[Tensor],
    stripes: Sequence[slice],
    vote: SyncVote,
    total: SyncVote,
    codec_state: CodecState,
) -> None:
    """Tell the sender which share of the mean its messages have; `x` is still what they encode."""
    share = vote.weight / total.weight
    if codec_state.is_settled(share):
        return
    for s, data in zip(stripes, SyncVote.unpack(messages)[0], strict=True):
        codec_state[s].settle(x[s], data, share)


def _weighted_mean(x: Tensor, encoded: Sequence[Tensor], weights: Sequence[float], codec_state: CodecState) -> Tensor:
    """Into `x`; the result is not rounded to 16 bits."""
    mean = x if x.element_size() > 2 else torch.empty_like(x, dtype=torch.float32)
    total = sum(weights)
    fresh = True
    for data, weight in zip(encoded, weights, strict=True):
        if weight:
            codec_state.add(data, mean, weight / total, fresh=fresh)
            fresh = False
    if mean is not x:
        x.copy_(mean)
    return mean
