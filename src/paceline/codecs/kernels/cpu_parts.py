"""Shared parts of the CPU kernels: compilation, threads, and views of tensors."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numba
import numpy as np
import torch
from torch import Tensor

from paceline.codecs.kernels.lanes import load, load_some

SHARED_FROM = 1 << 18  # Below this many values a second thread does not pay.
ZERO = np.float32(0)
NAN = np.float32(np.nan)

# Files with functions that compiled functions of other files call.
SHARED = ("kernels/lanes.py", "kernels/cpu_parts.py", "kernels/quantisers.py", "noise.py", "entropy.py")
_VERSION = zlib.crc32(b"".join((Path(__file__).parents[1] / name).read_bytes() for name in SHARED))


def compiled(function: Callable[..., Any]) -> Any:
    """The function, compiled for the types that it is called with.

    numba caches the result beside the sources, as Python does, or in the user's cache, so that only a machine's first
    run compiles.  If neither is writable, every run does.  numba invalidates the cache when the function's own file
    changes, but not when a file with a function that it calls changes; so the version of these files is part of the
    name.
    """
    function.__qualname__ += f"_{_VERSION:08x}"
    compile_it: Callable[..., Any] = partial(numba.njit, nogil=True, error_model="numpy", boundscheck=False)
    try:
        return compile_it(cache=True)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        return compile_it()(function)


_pool: list[ThreadPoolExecutor] = []
os.register_at_fork(after_in_child=_pool.clear)  # A forked child has no threads.


def share_out(work: Callable[[int, int], bool], units: int, numel: int) -> bool:
    """Run `work(start, stop)` over all units, on as many threads as torch uses; whether all succeeded."""
    threads = min(torch.get_num_threads(), -(-numel // SHARED_FROM), units)
    if threads <= 1:
        return work(0, units)
    if not _pool:
        _pool.append(ThreadPoolExecutor(thread_name_prefix="paceline-codec"))
    edges = [units * i // threads for i in range(threads + 1)]
    others = [_pool[0].submit(work, start, stop) for start, stop in pairwise(edges[1:])]
    return all([work(0, edges[1]), *(o.result() for o in others)])


def as_array(x: Tensor) -> Any:
    """A tensor as an array that `load` can read."""
    return x.view({torch.float16: torch.uint16, torch.bfloat16: torch.int16}.get(x.dtype, x.dtype)).numpy()


@compiled
def wanted(x: Any, residual: Any, at: int) -> Any:
    """32 values of `x + residual`; of `x` if there is no residual."""
    if residual is None:
        return load(x, at)
    return load(x, at) + load(residual, at)


@compiled
def wanted_some(x: Any, residual: Any, at: int, mask: Any) -> Any:
    """As `wanted`, but only the lanes of the mask; the others are 0."""
    if residual is None:
        return load_some(x, at, mask)
    return load_some(x, at, mask) + load_some(residual, at, mask)


Run = Callable[[Any, Any, Any, int, int, int, int], bool]


def in_buckets(
    bucket: int, bits: int, x: Tensor | None, out: Tensor | None, codes: Tensor, run: Run, *, packs: bool
) -> bool:
    """Call `run(x, out, codes, begin, real, first, last)` for all buckets; whether all succeeded.

    `x` is read, `out` is read and written.  `codes`, with `bits` bits per value, are written if `packs`, otherwise
    read.  A last bucket that is not full is padded with zeros and run separately: then the arrays hold only this
    bucket, `begin` is its index in the vector, and `real` the number of its values.
    """
    like = x if x is not None else out
    assert like is not None
    start = like.numel() // bucket * bucket
    real = like.numel() % bucket
    is_good = True
    xs, outs, words = (None if t is None else as_array(t) for t in (x, out, codes))
    if start:
        is_good = share_out(lambda first, last: run(xs, outs, words, 0, bucket, first, last), start // bucket, start)
    if real:
        # For so few values numpy is much faster than torch.
        end_xs, end_outs = (None if t is None else _filled(t[start:], bucket) for t in (xs, outs))
        code = cast(Any, words)[start * bits // 8 :]
        end_code = _filled(code, bucket * bits // 8)
        is_good &= run(end_xs, end_outs, end_code, start, real, 0, 1)
        if outs is not None:
            outs[start:] = cast(Any, end_outs)[:real]
        if packs:
            code[:] = end_code[: len(code)]
    return is_good


def _filled(x: Any, numel: int) -> Any:
    more = np.zeros(numel, x.dtype)
    more[: len(x)] = x
    return more
