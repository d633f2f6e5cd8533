"""Threshold on the CPU: one pass over a vector of which few values are sent.

The pass works on groups of 32 values.  It stores a mask of the values to send for each group; most masks are 0.  A
second loop over the masks writes the message.  So the time is that of reading the vector and writing its residual.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from paceline.codecs.kernels import Kernel, top_k
from paceline.codecs.kernels.cpu_parts import ZERO, as_array, compiled, share_out, wanted
from paceline.codecs.kernels.lanes import LANES, count, full, less, load, lowest, select, store
from paceline.codecs.layout import check_indexable, is_aligned, put
from paceline.codecs.threshold import (
    BITMAP,
    HEADER,
    WORDS,
    AdaptiveThreshold,
    Header,
    Threshold,
    bitmap_nbytes,
    chosen,
    rice_nbytes,
    rice_parameter,
)

if TYPE_CHECKING:
    from paceline.codecs.codec import Codec

INF = np.float32(np.inf)
ALL = np.uint32(0xFFFFFFFF)


@compiled
def threshold_mark(x: Any, residual: Any, tau: Any, hits: Any, minus: Any, first: int, last: int) -> Any:
    """Mark the values to send in groups first to last, and update the residual.

    Returns the group where it stopped, which has a value that is not finite, or `last`; how many values are marked; and
    their largest magnitude.
    """
    zero = full(ZERO)
    high = full(tau)
    low = full(-tau)
    most = full(ZERO)
    least = full(ZERO)
    endless = full(INF)
    below_all = full(-INF)
    sent = 0
    stop = last
    for i in range(first, last):
        at = LANES * i
        u = wanted(x, residual, at)
        beyond = np.uint32(~(less(u, high) & less(low, u)))
        negative = np.uint32(0)
        if beyond:  # Includes NaN.
            if np.uint32(less(u, endless) & less(below_all, u)) != ALL:
                stop = i
                break
            negative = np.uint32(beyond & less(u, zero))
            sent += np.int64(count(beyond))
            most = select(less(most, u), u, most)
            least = select(less(u, least), u, least)
            u = u - select(negative, low, select(beyond, high, zero))
        hits[i] = beyond
        minus[i] = negative
        if residual is not None:
            store(residual, at, u)
    ends = np.empty(2 * LANES, np.float32)
    store(ends, 0, most)
    store(ends, LANES, least)
    return stop, sent, np.abs(ends).max()


@compiled
def threshold_unmark(x: Any, residual: Any, tau: Any, hits: Any, minus: Any, first: int, last: int) -> None:
    """Restore the residual, up to rounding, from before `threshold_mark`."""
    zero = full(ZERO)
    high = full(tau)
    low = full(-tau)
    for i in range(first, last):
        at = LANES * i
        store(residual, at, load(residual, at) + select(minus[i], low, select(hits[i], high, zero)) - load(x, at))


@compiled
def words_of(hits: Any, minus: Any, words: Any) -> None:
    """The indices and signs of all marked values."""
    n = 0
    for i in range(len(hits)):
        mask = hits[i]
        while mask:
            bit = lowest(mask)
            words[n] = np.uint32((LANES * i + bit) << 1 | (minus[i] >> np.uint32(bit)) & 1)
            n += 1
            mask = np.uint32(mask & (mask - np.uint32(1)))


@compiled
def quotients_of(words: Any, k: int) -> Any:
    """The sum of all gaps' quotients by 2**k."""
    total = 0
    last = -1
    for word in words:
        index = np.int64(word >> np.uint32(1))
        total += (index - last - 1) >> k
        last = index
    return total


@compiled
def rice_write(words: Any, k: int, low: Any, unary: Any) -> None:
    """Write the Golomb-Rice code: a sign and k bits of each gap into `low`, the quotients into `unary`, which is 0."""
    held = np.uint64(0)
    bits = 0
    at = 0
    end = 0
    last = -1
    for word in words:
        index = np.int64(word >> np.uint32(1))
        gap = index - last - 1
        last = index
        field = (gap & ((1 << k) - 1)) << 1 | np.int64(word & np.uint32(1))
        held |= np.uint64(field) << np.uint64(bits)
        bits += k + 1
        while bits >= 8:
            low[at] = np.uint8(held & np.uint64(255))
            held >>= np.uint64(8)
            bits -= 8
            at += 1
        end += gap >> k
        unary[end >> 3] |= np.uint8(1 << (end & 7))
        end += 1
    if bits:
        low[at] = np.uint8(held & np.uint64(255))


@compiled
def rice_read(low: Any, unary: Any, k: int, numel: int, words: Any) -> bool:
    """Decode a Rice code into `words`; False if it does not hold that many indices below `numel`."""
    held = np.uint64(0)
    bits = 0
    at = 0
    end = -1
    n = 0
    index = -1
    for j in range(len(unary)):
        mask = np.uint32(unary[j])
        while mask:
            one = 8 * j + lowest(mask)
            mask = np.uint32(mask & (mask - np.uint32(1)))
            if n == len(words):
                return False
            while bits < k + 1:
                held |= np.uint64(low[at]) << np.uint64(bits)
                bits += 8
                at += 1
            field = np.int64(held & np.uint64((2 << k) - 1))
            held >>= np.uint64(k + 1)
            bits -= k + 1
            index += ((one - end - 1) << k | field >> 1) + 1
            end = one
            if index >= numel:
                return False
            words[n] = np.uint32(index << 1 | field & 1)
            n += 1
    return n == len(words) and held == 0 and (end >> 3) + 1 == len(unary)


@compiled
def is_bitmap(hits: Any, minus: Any, numel: int, sent: int) -> bool:
    """Whether two bitmaps hold `sent` values and their signs."""
    total = 0
    for i in range(len(hits)):
        total += np.int64(count(hits[i]))
        if np.uint32(minus[i] & np.uint32(~hits[i])):
            return False
    rest = numel % LANES
    return total == sent and not (rest and hits[-1] >> np.uint32(rest))


@compiled
def bitmap_add(hits: Any, minus: Any, tau: Any, into: Any, fresh: bool) -> bool:
    """Add the values of two bitmaps."""
    zero = full(ZERO)
    high = full(tau)
    low = full(-tau)
    for i in range(len(into) // LANES):
        at = LANES * i
        values = select(minus[i], low, select(hits[i], high, zero))
        store(into, at, values if fresh else load(into, at) + values)
    for i in range(len(into) // LANES * LANES, len(into)):
        bit = np.uint32(1 << (i % LANES))
        value = -tau if minus[-1] & bit else tau if hits[-1] & bit else ZERO
        into[i] = value if fresh else into[i] + value
    return True


@compiled
def words_add(words: Any, tau: Any, into: Any, fresh: bool) -> bool:
    """Add tau or -tau at each index; does nothing and returns False if the indices do not ascend within the vector."""
    last = -1
    for word in words:
        index = np.int64(word >> np.uint32(1))
        if index <= last or index >= len(into):
            return False
        last = index
    if fresh:
        into[:] = ZERO
    for word in words:
        index = np.int64(word >> np.uint32(1))
        into[index] += -tau if word & np.uint32(1) else tau
    return True


def encode_threshold(
    codec: Codec, x: Tensor, residual: Tensor | None, seed: int, out: Tensor | None
) -> tuple[Tensor, bool]:
    codec = cast(Threshold, codec)
    numel = x.numel()
    check_indexable(codec, numel)
    hits, minus = (np.empty(-(-numel // LANES), np.uint32) for _ in range(2))
    values = as_array(x)
    rest = None if residual is None else residual.numpy()
    tau = np.float32(codec.tau)
    done: list[tuple[int, int, int, float]] = []

    def work(first: int, last: int) -> bool:
        stop, sent, peak = threshold_mark(values, rest, tau, hits, minus, first, last)
        done.append((first, stop, sent, peak))
        return stop == last

    whole = numel // LANES
    is_good = share_out(work, whole, numel) if whole else True
    if is_good and numel % LANES:
        part, start = torch.zeros(LANES, dtype=x.dtype), LANES * whole
        part[: numel - start] = x[start:]
        kept = None if residual is None else torch.nn.functional.pad(residual[start:], (0, LANES - numel + start))
        stop, sent, peak = threshold_mark(
            as_array(part), kept if kept is None else kept.numpy(), tau, hits[whole:], minus[whole:], 0, 1
        )
        done.append((whole, whole, sent, peak))
        is_good = stop == 1
        if is_good and residual is not None and kept is not None:
            residual[start:] = kept[: numel - start]
    if not is_good:
        for first, stop, _, _ in done if rest is not None else ():
            threshold_unmark(values, rest, tau, hits, minus, first, stop)
        codec.refuse(x if residual is None else x + residual, "among the magnitudes beyond tau")
    sent = sum(d[2] for d in done)
    peak = max((d[3] for d in done), default=0.0)
    return put(threshold_message(codec, numel, hits, minus, sent, peak, out), out), True


def threshold_message(
    codec: Threshold, numel: int, hits: Any, minus: Any, sent: int, peak: float, out: Tensor | None
) -> Tensor:
    """The message for the marked values."""
    k = rice_parameter(numel, sent)
    rice = None
    words = np.empty(0, np.uint32)
    if codec.entropy and sent:
        words_of(hits, minus, words := np.empty(sent, np.uint32))
        rice = rice_nbytes(sent, k, quotients_of(words, k))
    form = chosen(numel, sent, rice)
    size = HEADER + (4 * sent if form == WORDS else bitmap_nbytes(numel) if form == BITMAP else cast(int, rice))
    fits = out is not None and out.numel() == size and is_aligned(out)
    data = out if out is not None and fits else torch.empty(size, dtype=torch.uint8)
    header = Header.made(sent, form, k, numel, codec.tau32, peak)
    data[:HEADER] = torch.frombuffer(bytearray(header.packed()), dtype=torch.uint8)
    body: Any = data[HEADER:].numpy()
    if form == WORDS:
        words_of(hits, minus, body.view(np.uint32))
    elif form == BITMAP:
        half = len(body) // 2
        body[:half] = hits.view(np.uint8)[:half]
        body[half:] = minus.view(np.uint8)[:half]
    else:
        split = -(-sent * (k + 1) // 8)
        body[split:] = 0
        rice_write(words, k, body[:split], body[split:])
    return data


def add_threshold(codec: Codec, data: Tensor, into: Tensor, weight: float, fresh: bool) -> None:
    codec = cast(Threshold, codec)
    numel = into.numel()
    header = codec.read(data, numel)
    body = cast(Any, data[HEADER:].contiguous().numpy())
    values = into.numpy()
    tau = np.float32(weight) * np.float32(header.tau)
    if header.format == BITMAP:
        planes = np.zeros((2, -(-numel // LANES)), np.uint32)
        half = len(body) // 2
        planes.view(np.uint8)[:, :half] = body.reshape(2, half)
        if not is_bitmap(planes[0], planes[1], numel, header.sent):
            codec.malformed(data, numel, f"its bitmaps do not hold {header.sent} values and their signs")
        bitmap_add(planes[0], planes[1], tau, values, fresh)
        return
    words = np.empty(header.sent, np.uint32)
    if header.format == WORDS:
        words.view(np.uint8)[:] = body
    else:
        split = -(-header.sent * (header.rice + 1) // 8)
        if len(body) < split or not rice_read(body[:split], body[split:], header.rice, numel, words):
            codec.malformed(data, numel, f"it is not a Rice code of {header.sent} values within the vector")
    if not words_add(words, tau, values, fresh):
        codec.malformed(data, numel, "its indices do not ascend within the vector")


KERNELS: dict[type[Codec], Kernel] = {
    Threshold: Kernel(encode_threshold, add_threshold),
    AdaptiveThreshold: Kernel(encode_threshold, add_threshold),
    **top_k.KERNELS,
}
