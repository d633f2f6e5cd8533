"""What the CPU's kernels have in common: compiling, threads, and views of tensors."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numba
import numpy as np
import torch
from torch import Tensor

from paceline.codecs.kernels.lanes import load
from paceline.codecs.layout import is_straight

if TYPE_CHECKING:
    from paceline.codecs.codec import Codec

SHARED_FROM = 1 << 18  # Values below which a second thread is not worth waking.
ZERO = np.float32(0)
NAN = np.float32(np.nan)

# What functions of other files have in them.
SHARED = ("kernels/lanes.py", "kernels/cpu_parts.py", "kernels/quantisers.py", "noise.py", "entropy.py")
_VERSION = zlib.crc32(b"".join((Path(__file__).parents[1] / name).read_bytes() for name in SHARED))


def compiled(function: Callable[..., Any]) -> Any:
    """The function, compiled for the types that it is called with.

    numba keeps the result beside the sources, as Python does, or in the user's cache, so that only a machine's first run compiles;
    where neither can be written to, every run does.  It looks only at a function's own file to see whether the result is still
    right, not at those of the functions in it, so that the state of these has to be in the name.
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
os.register_at_fork(after_in_child=_pool.clear)  # Threads do not come along into a child.


def share_out(work: Callable[[int, int], bool], units: int, numel: int) -> bool:
    """`work(start, stop)` on all units, by as many threads as torch uses; whether all of it went well."""
    threads = min(torch.get_num_threads(), -(-numel // SHARED_FROM), units)
    if threads <= 1:
        return work(0, units)
    if not _pool:
        _pool.append(ThreadPoolExecutor(thread_name_prefix="paceline-codec"))
    edges = [units * i // threads for i in range(threads + 1)]
    others = [_pool[0].submit(work, start, stop) for start, stop in pairwise(edges[1:])]
    return all([work(0, edges[1]), *(o.result() for o in others)])


def as_array(x: Tensor) -> Any:
    """A tensor as `load` knows it."""
    return x.view({torch.float16: torch.uint16, torch.bfloat16: torch.int16}.get(x.dtype, x.dtype)).numpy()


def room(codec: Codec, numel: int, out: Tensor | None) -> Tensor:
    """Where the bytes go: `out` if it lies straight, otherwise memory of its own."""
    nbytes = codec.nbytes(numel)
    assert nbytes is not None
    if out is not None and out.shape != (nbytes,):
        raise ValueError(
            f"{codec} encodes {numel} values in {nbytes} bytes, but was given room of shape {tuple(out.shape)}"
        )
    return out if out is not None and is_straight(out) else torch.empty(nbytes, dtype=torch.uint8)


def put(data: Tensor, out: Tensor | None) -> Tensor:
    return data if out is None or out.data_ptr() == data.data_ptr() else out.copy_(data)


@compiled
def wanted(x: Any, residual: Any, at: int) -> Any:
    """32 values of `x + residual`; of `x` alone if there is none."""
    if residual is None:
        return load(x, at)
    return load(x, at) + load(residual, at)


Run = Callable[[Any, Any, Any, int, int, int, int], bool]


def in_buckets(
    bucket: int, bits: int, x: Tensor | None, out: Tensor | None, codes: Tensor, run: Run, *, packs: bool
) -> bool:
    """`run(x, out, codes, begin, real, first, last)` on all buckets; whether all of it went well.

    `x` is read, `out` is read and written; `codes`, of `bits` bits a value, are written if `run` packs them and otherwise read.  A
    last bucket that is not full is run by itself, filled up with zeros: then the arrays are its own, `begin` is its place in the
    vector, and `real` the number of its values.
    """
    like = x if x is not None else out
    assert like is not None
    start, real, is_good = like.numel() // bucket * bucket, like.numel() % bucket, True
    xs, outs, words = (None if t is None else as_array(t) for t in (x, out, codes))
    if start:
        is_good = share_out(lambda first, last: run(xs, outs, words, 0, bucket, first, last), start // bucket, start)
    if real:
        # By numpy, which takes a fraction of torch's time for so few values.
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
