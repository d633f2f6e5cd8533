"""Fused kernels: a codec and its error feedback in one pass over memory.

`encode` and `add` use the kernel for the codec, the device and the dtypes: numba's on a CPU, Triton's on a GPU, and
plain torch if there is no kernel.  All agree bit for bit on every device, except for the sign of zeros in decoded
sparse messages.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from paceline.codecs.codec import Codec

INPUTS = (torch.float32, torch.float16, torch.bfloat16)


class SlowCodec(RuntimeWarning):
    """Vectors are encoded in plain torch, because the compiler of the fast kernels is not installed."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A codec's encoder and decoder, each in one pass.

    `encode(codec, x, residual, seed, out)` returns the bytes for `x + residual`, in `out` if given, and whether all
    values could be encoded.  `residual` becomes what the bytes leave out.  A bucket that cannot be encoded gets NaN
    as its scale and keeps its residual.  `add(codec, data, into, weight, fresh)` adds `weight` times the decoded
    bytes to `into`, or overwrites it if `fresh`.  `encode_scaled(codec, x, factor)` is for codecs whose values are
    summed on the wire, see the function of the same name.
    """

    encode: Callable[[Codec, Tensor, Tensor | None, int, Tensor | None], tuple[Tensor, bool]]
    add: Callable[[Codec, Tensor, Tensor, float, bool], None]
    encode_scaled: Callable[[Codec, Tensor, float], tuple[Tensor, bool]] | None = None


# Kernels for every device: those of codecs around other codecs, which call the others' kernels.
EVERYWHERE: dict[type[Codec], Kernel] = {}
_is_plain = False


@contextmanager
def plain() -> Generator[None]:
    """Use no kernels: for tests and benchmarks."""
    global _is_plain
    before, _is_plain = _is_plain, True
    try:
        yield
    finally:
        _is_plain = before


def is_plain() -> bool:
    return _is_plain


def encode(
    codec: Codec,
    x: Tensor,
    residual: Tensor | None = None,
    rng: torch.Generator | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The bytes for `x + residual`, in `out` if given; `residual` becomes what they leave out."""
    x = x.detach().reshape(-1)
    kernel = find(codec, x.device)
    if kernel is not None and x.dtype in INPUTS and (residual is None or _fits(residual, x)):
        data, is_good = kernel.encode(codec, x.contiguous(), residual, draw(rng) if codec.is_random else 0, out)
        if not is_good:
            _undo(codec, kernel, x, residual, data)
        return data
    # The residual is added before encoding, not after: a value that was rounded up in the last message may flip now.
    wanted = x if residual is None else x + residual
    data = codec.encode(wanted, rng)
    if residual is not None:
        torch.sub(wanted, codec.decode(data, x.numel()), out=residual)
    return data if out is None else out.copy_(data)


def encode_scaled(codec: Codec, x: Tensor, factor: float) -> Tensor:
    """`x * factor` in the codec's wire dtype; Unencodable if `codec` cannot encode `x` itself.

    If only the product is beyond the range of the dtype, it becomes infinity.
    """
    x = x.detach().reshape(-1)
    kernel = find(codec, x.device)
    if kernel is not None and kernel.encode_scaled is not None and x.dtype in INPUTS:
        data, is_good = kernel.encode_scaled(codec, x.contiguous(), factor)
        if not is_good:
            _undo(codec, kernel, x, None, data)
        return data
    codec.encode(x)
    return (x.to(torch.promote_types(x.dtype, torch.float32)) * factor).to(codec.wire)


def _fits(residual: Tensor, x: Tensor) -> bool:
    """Whether a kernel may write to the residual: it does not check bounds."""
    return residual.dtype == torch.float32 and residual.is_contiguous() and residual.shape == x.shape


def _undo(codec: Codec, kernel: Kernel, x: Tensor, residual: Tensor | None, data: Tensor) -> None:
    """Restore the residual after a value could not be encoded, and raise Unencodable."""
    wanted = x.to(torch.float32) if residual is None else x + residual
    if residual is not None:
        decoded = torch.empty_like(residual)
        kernel.add(codec, data, decoded, 1.0, True)  # Unlike decode, it accepts NaN scales, which mark skipped buckets.
        residual.copy_(torch.where(decoded.isnan(), residual, residual + (decoded - x)))
        wanted = x + residual
    codec.refuse(wanted, "their sum is beyond float32")
    raise AssertionError("a kernel could not encode a value that its codec can encode")


def add(codec: Codec, data: Tensor, into: Tensor, weight: float = 1.0, fresh: bool = False) -> None:
    """Add the decoded bytes, times `weight`, to `into`; overwrite it if `fresh`."""
    kernel = find(codec, into.device)
    if kernel is not None and into.dtype == torch.float32 and into.dim() == 1 and into.is_contiguous():
        codec.check(data, into.numel())
        return kernel.add(codec, data, into, weight, fresh)
    decoded = codec.decode(data, into.numel()).to(torch.promote_types(into.dtype, torch.float32))
    if weight != 1.0:
        decoded = decoded * weight
    if fresh:
        into.copy_(decoded)
    else:
        into.add_(decoded)


def draw(rng: torch.Generator | None) -> int:
    """A seed for one message."""
    return int(torch.randint(2**63 - 1, (1,), generator=rng, dtype=torch.int64))


def find(codec: Codec, device: torch.device) -> Kernel | None:
    """The kernel of a codec on a device; None if it has none."""
    return None if _is_plain else kernels_of(device.type).get(type(codec)) or EVERYWHERE.get(type(codec))


@cache
def kernels_of(device: str) -> Mapping[type[Codec], Kernel]:
    """All kernels for a type of device; warns once if their compiler is missing."""
    module, needs = {"cpu": ("cpu", "numba"), "cuda": ("gpu", "triton")}.get(device, ("", ""))
    if not module:
        return {}
    try:
        return import_module(f"paceline.codecs.kernels.{module}").KERNELS
    except ImportError as error:
        if (error.name or "").partition(".")[0] != needs:
            raise
        text = (
            f"{needs} is not installed: vectors on {device} are encoded in plain torch, up to 100 times slower; "
            f"pip install {needs}"
        )
        warnings.warn(SlowCodec(text), stacklevel=2)
        return {}
