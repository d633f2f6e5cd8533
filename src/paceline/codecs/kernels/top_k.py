"""Top-k on the CPU: the exact choice of the k largest in two passes over the vector.

The first pass counts magnitudes by their upper bits, and so finds the bin of the k-th largest.  The second marks the
values in that bin or above, from which the k largest are chosen.  The result does not depend on the distribution of
the values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from paceline.codecs.dgc import DGC
from paceline.codecs.kernels import Kernel
from paceline.codecs.kernels.cpu_parts import ZERO, as_array, compiled, share_out, wanted
from paceline.codecs.kernels.lanes import LANES, full, less, load, lowest, store
from paceline.codecs.layout import aligned, check_indexable, is_aligned, put
from paceline.codecs.top_k import TopK

if TYPE_CHECKING:
    from paceline.codecs.codec import Codec

INF = np.float32(np.inf)
ALL = np.uint32(0xFFFFFFFF)
MAGNITUDE = np.uint32(0x7FFFFFFF)  # The bits of a float32 without the sign.
BINS = 2048  # By the exponent and three bits of the mantissa.
SHIFT = 20
LOOK = 512  # The lower bound is updated after this many groups.


@compiled
def bin_of(bits: Any) -> Any:
    return np.int64((bits & MAGNITUDE) >> np.uint32(SHIFT))


@compiled
def edge(b: int) -> Any:
    """The smallest magnitude in a bin."""
    return np.uint32(b << SHIFT).view(np.float32)


@compiled
def bin_with(counts: Any, k: int) -> tuple[int, int]:
    """The bin of the k-th largest, and how many are in the bins above; bin 0 if there are fewer than k."""
    above = 0
    b = len(counts) - 1
    while b > 0 and above + counts[b] < k:
        above += counts[b]
        b -= 1
    return b, above


@compiled
def top_k_count(x: Any, residual: Any, u: Any, counts: Any, k: int, first: int, last: int) -> int:
    """Store `x + residual` in `u`, which may be the residual, and count by bins what can be among the k largest.

    Once a bin and those above have k values, smaller values are not counted.  `u` is None if `x` alone is encoded.
    Returns the group where it stopped, which has a value that is not finite, or `last`.
    """
    high = full(ZERO)
    low = full(ZERO)
    endless = full(INF)
    below_all = full(-INF)
    bits = x.view(np.uint32) if u is None else u.view(np.uint32)
    for i in range(first, last):
        at = LANES * i
        v = wanted(x, residual, at)
        mask = np.uint32(~(less(v, high) & less(low, v)))
        if mask and np.uint32(less(v, endless) & less(below_all, v)) != ALL:
            return i
        if u is not None:
            store(u, at, v)
        while mask:
            counts[bin_of(bits[at + lowest(mask)])] += 1
            mask = np.uint32(mask & (mask - np.uint32(1)))
        if (i - first) % LOOK == LOOK - 1:
            bound = edge(bin_with(counts, k)[0])
            high, low = full(bound), full(-bound)
    return last


@compiled
def top_k_uncount(x: Any, residual: Any, first: int, last: int) -> None:
    """Restore the residual, up to rounding, from before `top_k_count`."""
    for i in range(first, last):
        store(residual, LANES * i, load(residual, LANES * i) - load(x, LANES * i))


@compiled
def top_k_mark(u: Any, least: Any, hits: Any, first: int, last: int) -> None:
    """Mark the values of magnitude `least` or more in groups first to last."""
    high, low = full(least), full(-least)
    for i in range(first, last):
        v = load(u, LANES * i)
        hits[i] = np.uint32(~(less(v, high) & less(low, v)))


@compiled
def top_k_pick(u: Any, hits: Any, counts: Any, k: int, indices: Any, values: Any) -> None:
    """The k largest of the marked values and of those after the last group; of equal magnitudes the first ones."""
    place, above = bin_with(counts, k)
    raw = u.view(np.uint32)
    some = np.empty(counts[place:].sum(), np.int32)
    n = 0
    for i in range(len(hits)):
        mask = hits[i]
        while mask:
            at = LANES * i + lowest(mask)
            if bin_of(raw[at]) >= place:  # More are marked if the processor treats denormals as zeros.
                some[n] = at
                n += 1
            mask = np.uint32(mask & (mask - np.uint32(1)))
    for i in range(LANES * len(hits), len(u)):
        if bin_of(raw[i]) >= place:
            some[n] = i
            n += 1
    # All but the lowest 20 bits of the k-th largest are known: count by the upper 10 of these, then by the lower 10.
    known = np.uint32(place)
    shift = SHIFT
    while shift > 0:
        shift -= 10
        finer = np.zeros(1024, np.int64)
        for i in some[:n]:
            bits = raw[i] & MAGNITUDE
            if np.uint32(bits >> np.uint32(shift + 10)) == known:
                finer[np.int64(bits >> np.uint32(shift)) & 1023] += 1
        place, more = bin_with(finer, k - above)
        above += more
        known = np.uint32(known << np.uint32(10) | np.uint32(place))
    ties = k - above
    m = 0
    for i in some[:n]:
        bits = np.uint32(raw[i] & MAGNITUDE)
        if bits == known and ties:
            ties -= 1
        elif bits <= known:
            continue
        indices[m] = i
        values[m] = u[i]
        m += 1


@compiled
def forget(values: Any, indices: Any) -> None:
    for i in indices:
        values[i] = ZERO


@compiled
def pairs_add(indices: Any, values: Any, weight: Any, into: Any, fresh: bool) -> int:
    """Add values at indices; does nothing and returns 1 for a wrong index, 2 for a value that is not finite."""
    last = -1
    for i in range(len(indices)):
        if indices[i] <= last or indices[i] >= len(into):
            return 1
        last = indices[i]
        if not np.isfinite(values[i]):
            return 2
    if fresh:
        into[:] = ZERO
    for i in range(len(indices)):
        into[indices[i]] += weight * values[i]
    return 0


def encode_top_k(
    codec: Codec, x: Tensor, residual: Tensor | None, seed: int, out: Tensor | None
) -> tuple[Tensor, bool]:
    codec = cast(TopK, codec)
    numel = x.numel()
    whole = numel // LANES
    check_indexable(codec, numel)
    k = codec.kept(numel)
    kept = torch.empty(numel) if residual is None and x.dtype != torch.float32 else residual
    values = as_array(x)
    rest = None if residual is None else residual.numpy()
    u = None if kept is None else kept.numpy()
    done: list[tuple[int, int, Any]] = []

    def work(first: int, last: int) -> bool:
        counts = np.zeros(BINS, np.int64)
        stop = top_k_count(values, rest, u, counts, k, first, last)
        done.append((first, stop, counts))
        return stop == last

    is_good = share_out(work, whole, numel) if whole else True
    extras = (
        x[LANES * whole :].to(torch.float32) if residual is None else x[LANES * whole :] + residual[LANES * whole :]
    )
    if not (is_good and extras.isfinite().all()):
        for first, stop, _ in done if rest is not None else ():
            top_k_uncount(values, rest, first, stop)
        codec.refuse(x if residual is None else x + residual, "they are among the largest")
    if kept is not None:
        kept[LANES * whole :] = extras
    counts: Any = np.bincount(bins(extras), minlength=BINS) + sum(d[2] for d in done)
    u = values if u is None else u
    hits = np.empty(whole, np.uint32)
    least = np.float32(edge(bin_with(counts, k)[0]))

    def mark(first: int, last: int) -> bool:
        top_k_mark(u, least, hits, first, last)
        return True

    if whole:
        share_out(mark, whole, numel)
    fits = out is not None and out.numel() == 8 * k and is_aligned(out)
    data = out if out is not None and fits else torch.empty(8 * k, dtype=torch.uint8)
    indices = data[: 4 * k].view(torch.int32).numpy()
    chosen_values = data[4 * k :].view(torch.float32).numpy()
    if k:
        top_k_pick(u, hits, counts, k, indices, chosen_values)
    if rest is not None:
        forget(rest, indices)
    return put(data, out), True


def bins(u: Tensor) -> Any:
    return (u.view(torch.int32).numpy() & 0x7FFFFFFF) >> SHIFT


def add_top_k(codec: Codec, data: Tensor, into: Tensor, weight: float, fresh: bool) -> None:
    codec = cast(TopK, codec)
    straight = aligned(data)
    k = data.numel() // 8
    indices = straight[: 4 * k].view(torch.int32).numpy()
    values = straight[4 * k :].view(torch.float32).numpy()
    if wrong := pairs_add(indices, values, np.float32(weight), into.numpy(), fresh):
        why = ("its indices do not ascend within the vector", "some of its values are not finite")[wrong - 1]
        codec.malformed(data, into.numel(), why)


KERNELS: dict[type[Codec], Kernel] = {
    TopK: Kernel(encode_top_k, add_top_k),
    DGC: Kernel(encode_top_k, add_top_k),
}
