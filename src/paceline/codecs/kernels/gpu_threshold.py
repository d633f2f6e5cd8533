"""Threshold on a GPU: one pass over the vector marks the values to send, another over the marks writes the message.

The marks are two bits per value, which are the message if many values are sent.  Otherwise a running sum of the
groups' counts gives the position of each group's words, so that the indices ascend.
"""

# Triton's language has Python's syntax but not its types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false
# pyright: reportMissingTypeStubs=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.codecs.kernels.gpu_parts import LAUNCH, is_finite, on
from paceline.codecs.layout import LANES, aligned, check_indexable, put
from paceline.codecs.threshold import (
    BITMAP,
    HEADER,
    RICE,
    WORDS,
    Header,
    Threshold,
    bits_of,
    chosen,
    gaps,
    rice_encode,
    rice_nbytes,
    rice_parameter,
)

if TYPE_CHECKING:
    from paceline.codecs.codec import Codec

AT_ONCE = 32  # Words of 32 values per program.


@triton.jit
def mark_words(x, residual, hits, minus, count, peak, tau, left, W: tl.constexpr, TAIL: tl.constexpr):
    """`W` words of 32 values, with at most `left` values."""
    w, lane = tl.arange(0, W)[:, None], tl.arange(0, 32)[None, :]
    at = 32 * w + lane
    mask = (at < left) if TAIL else (32 * w < left)
    u = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        before = tl.load(residual + at, mask=mask, other=0.0)
        u += before
    beyond = (tl.abs(u) < tau) == 0  # Includes NaN.
    negative = beyond & (u < 0)
    tl.store(hits + w, tl.sum(beyond.to(tl.int32) << lane, axis=1, keep_dims=True), mask=32 * w < left)
    tl.store(minus + w, tl.sum(negative.to(tl.int32) << lane, axis=1, keep_dims=True), mask=32 * w < left)
    tl.store(count, tl.sum(tl.sum(beyond.to(tl.int32), axis=1), axis=0))
    # As an integer NaN is larger than infinity and all numbers.
    sizes = tl.where(beyond, u.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    tl.store(peak, tl.max(tl.max(sizes, axis=1), axis=0))
    if residual is not None:
        after = u - tl.where(beyond, tl.where(negative, -tau, tau), 0.0)
        tl.store(residual + at, tl.where(is_finite(u), after, before), mask=mask)


@triton.jit(do_not_specialize=["numel"])
def mark(x, residual, hits, minus, counts, peaks, tau, numel, W: tl.constexpr, TAIL: tl.constexpr):
    """Mark the values to send and those of them that are negative, and update the residual."""
    program = tl.program_id(0)
    first = program.to(tl.int64) * W
    left = tl.minimum(numel - 32 * first, 32 * W).to(tl.int32)
    x += 32 * first
    if residual is not None:
        residual += 32 * first
    if TAIL:
        # Only the last program needs masks that can end anywhere, with which it cannot read whole words.
        if program == tl.num_programs(0) - 1:
            mark_words(x, residual, hits + first, minus + first, counts + program, peaks + program, tau, left, W, True)
        else:
            mark_words(x, residual, hits + first, minus + first, counts + program, peaks + program, tau, left, W, False)
    else:
        mark_words(x, residual, hits + first, minus + first, counts + program, peaks + program, tau, left, W, False)


@triton.jit(do_not_specialize=["numel"])
def write_words(hits, minus, ends, body, numel, W: tl.constexpr):
    """An index and a sign for each marked value, from the lowest bit of each word on."""
    program = tl.program_id(0)
    first = program.to(tl.int64) * W
    w = tl.arange(0, W)
    there = 32 * (first + w) < numel
    word = tl.load(hits + first + w, mask=there, other=0)
    signs = tl.load(minus + first + w, mask=there, other=0)
    pairs = word - ((word >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F
    sent = (eights + (eights >> 8) + (eights >> 16) + (eights >> 24)) & 63
    begin = tl.load(ends + program) - tl.sum(sent, axis=0)
    place = body + begin + (tl.cumsum(sent, axis=0) - sent)
    while tl.max((word != 0).to(tl.int32), axis=0) > 0:
        low = word & -word
        lane = (low.to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        index = ((first + w) * 32).to(tl.int32) + lane
        tl.store(place, (index << 1) | ((signs & low) != 0).to(tl.int32), mask=word != 0)
        place += 1
        word = word & (word - 1)


def encode(codec: Codec, x: Tensor, residual: Tensor | None, seed: int, out: Tensor | None) -> tuple[Tensor, bool]:
    codec = cast(Threshold, codec)
    numel = x.numel()
    check_indexable(codec, numel)
    if not numel:
        return put(codec.encode(x), out), True
    groups, tau = -(-numel // LANES), codec.tau32
    programs, extras = triton.cdiv(groups, AT_ONCE), numel % LANES != 0
    planes = torch.empty(2, groups, dtype=torch.int32, device=x.device)
    counts, peaks = torch.empty(2, programs, dtype=torch.int32, device=x.device)
    with on(x):
        mark[programs,](
            x, residual, planes[0], planes[1], counts, peaks, tau, numel, AT_ONCE, extras, num_warps=1, **LAUNCH
        )
        ends = counts.cumsum(0)
        sent, peak = torch.stack([ends[-1], peaks.max()]).tolist()
        if peak >= 0x7F800000:
            undo(codec, x, residual, planes)
            codec.refuse(x if residual is None else x + residual, "among the magnitudes beyond tau")
        words = torch.empty(sent, dtype=torch.int32, device=x.device)
        k, rice = rice_parameter(numel, sent), None
        if is_written := bool(sent) and (codec.entropy or chosen(numel, sent, None) == WORDS):
            write_words[programs,](planes[0], planes[1], ends, words, numel, AT_ONCE, num_warps=1, **LAUNCH)
        indices = (words.to(torch.int64) & 0xFFFFFFFF) >> 1 if codec.entropy else words
        if codec.entropy and sent:
            rice = rice_nbytes(sent, k, int((gaps(indices) >> k).sum()))
    form = chosen(numel, sent, rice)
    if form == BITMAP:
        body = planes.view(torch.uint8)[:, : -(-numel // 8)].reshape(-1)
    elif form == RICE:
        body = rice_encode(indices, words.to(torch.int64) & 1, k)
    else:
        assert is_written or not sent
        body = words.view(torch.uint8)
    largest = struct.unpack("<f", struct.pack("<i", peak))[0]
    header = Header.made(sent, form, k, numel, tau, largest)
    data = torch.cat([torch.tensor(list(header.packed()), dtype=torch.uint8, device=x.device), body])
    return put(data, out), True


def undo(codec: Threshold, x: Tensor, residual: Tensor | None, planes: Tensor) -> None:
    """Restore the residual, up to rounding; it was not changed where a value is not finite."""
    if residual is None:
        return
    hit, negative = (bits_of(plane.view(torch.uint8))[: x.numel()].to(torch.float32) for plane in planes)
    before = residual + (hit - 2 * negative) * codec.tau32 - x
    residual.copy_(torch.where((x + residual).isfinite(), before, residual))


def add(codec: Codec, data: Tensor, into: Tensor, weight: float, fresh: bool) -> None:
    codec = cast(Threshold, codec)
    numel = into.numel()
    header = codec.read(data, numel)
    if header.format != WORDS:
        decoded = codec.decode(data, numel)
        decoded = decoded * weight if weight != 1.0 else decoded
        into.copy_(decoded) if fresh else into.add_(decoded)
        return
    words = aligned(data[HEADER:]).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    indices = words >> 1
    if header.sent and bool((indices[-1] >= numel) | (indices.diff() <= 0).any()):
        codec.malformed(data, numel, "its indices do not ascend within the vector")
    tau = torch.tensor(header.tau, device=into.device) * weight
    values = torch.where(words & 1 == 1, -tau, tau)
    if fresh:
        into.zero_()
        into[indices] = values
    else:
        into[indices] += values
