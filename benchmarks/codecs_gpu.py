"""The speed of encoding with feedback and adding on a GPU, compared with a copy of the same vector and eager torch.

`time` is that of the device alone: medians of CUDA events. The cache is flushed before each call, and the wait for the
flag that ends an encoding is not included. A rate counts the bytes that must move: those read of the vector and its
residual, the residual written, and the message. `call` is the time that the caller waits, from Python to the flag, with
a warm cache. The units of OneBit are buckets of 512 values, or rows: of a matrix with 1024 columns, and of the tensors
of a ResNet-50.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from paceline.codecs import QSGD, Codec, NBit, OneBit, TernGrad, Threshold, kernels

SIZES = {"25 MB": 6_553_600, "1 GB": 1 << 28, "4.3 GB": 1 << 30}
CODECS: list[Codec] = [OneBit(), NBit(4), NBit(8), QSGD(), TernGrad(), Threshold(160.0)]
COLUMNS = 1024


def resnet50() -> list[torch.Size]:
    """The shapes of a ResNet-50's parameters."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    before = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            convolutions = [(width, before, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if not block:
                convolutions.append((4 * width, before, 1, 1))
            for shape in convolutions:
                shapes += [shape, shape[:1], shape[:1]]
            before = 4 * width
    return [torch.Size(shape) for shape in [*shapes, (1000, 2048), (1000,)]]


@dataclass(frozen=True)
class Row:
    """One figure: `nbytes` that must move, in `seconds`, compared with a copy at `copy` bytes a second."""

    codec: str
    what: str
    size: str
    nbytes: int
    seconds: float
    copy: float
    call: float
    eager: float | None
    plain: float | None

    @property
    def rate(self) -> float:
        return self.nbytes / self.seconds


def eager_encode(x: Tensor, residual: Tensor, bucket: int = 512) -> Tensor:
    """OneBit with feedback in obvious torch code, for whole buckets."""
    u = (x + residual).view(-1, bucket)
    upper = u >= u.mean(1, keepdim=True)
    count = upper.sum(1, keepdim=True)
    high = torch.where(upper, u, 0.0).sum(1, keepdim=True) / count.clamp(min=1)
    low = torch.where(upper, 0.0, u).sum(1, keepdim=True) / (bucket - count).clamp(min=1)
    torch.sub(u, torch.where(upper, high, low), out=residual.view(-1, bucket))
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=x.device)
    bits = (upper.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
    return torch.cat([torch.cat([low, high], 1).view(-1).view(torch.uint8), bits])


def eager_add(data: Tensor, into: Tensor, bucket: int = 512) -> None:
    """Adding a OneBit message in obvious torch code, for whole buckets."""
    means = data[: into.numel() // bucket * 8].view(torch.float32).view(-1, 2)
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    upper = (data[means.numel() * 4 :, None].bitwise_right_shift(shifts) & 1).view(-1, bucket).bool()
    into.view(-1, bucket).add_(torch.where(upper, means[:, 1:], means[:, :1]))


@contextmanager
def unwatched() -> Generator[None]:
    """Encode without waiting for the flag, so that the device does not wait for Python."""
    from paceline.codecs.kernels import gpu_parts

    with mock.patch.object(gpu_parts.Flags, "is_unset", lambda *_: True):
        yield


def seconds_of(work: Callable[[], Any], repeats: int = 20) -> float:
    """The median time of a call on the device, with a flushed cache."""
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    work()
    times: list[float] = []
    for _ in range(repeats):
        flush.zero_()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1000)
    return median(times)


def call_of(work: Callable[[], Any], repeats: int = 20) -> float:
    """The median time that a caller waits."""
    times: list[float] = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times)


def copy_rate(x: Tensor) -> float:
    """The bytes that a copy of `x` reads and writes a second."""
    other = torch.empty_like(x)
    return 2 * x.numel() * x.element_size() / seconds_of(lambda: other.copy_(x))


def if_it_fits(work: Callable[[], Any], repeats: int) -> float | None:
    try:
        return seconds_of(work, repeats)
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.cuda.empty_cache()


def plainly(work: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with kernels.plain():
            return work()

    return run


def of_codec(
    codec: Codec,
    size: str,
    numel: int,
    dtype: torch.dtype = torch.float32,
    *,
    beside: bool = True,
    units: str = "",
    bucket: int | None = 512,
) -> list[Row]:
    """All figures of a codec at a size; with those of torch, eager and plain, if `beside`.

    `units` names those of OneBit; all have `bucket` values, or None if they differ.
    """
    x, residual, into = (
        torch.randn(numel, device="cuda").to(dtype),
        torch.zeros(numel, device="cuda"),
        torch.zeros(numel, device="cuda"),
    )
    copy = copy_rate(into)
    rng = torch.Generator().manual_seed(1)
    data = kernels.encode(codec, x, None, rng)
    out: Tensor | None = torch.empty_like(data)
    nbytes, width = data.numel(), x.element_size()
    name = type(codec).__name__ + units
    kind = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    has_eager = isinstance(codec, OneBit) and dtype == torch.float32
    whole = bucket if has_eager and bucket is not None and numel % bucket == 0 else None
    if isinstance(codec, Threshold):  # As after many messages: every |x| / tau-th value is due.
        residual.uniform_(-codec.tau, codec.tau)
        data = kernels.encode(codec, x, residual)
        nbytes, out = data.numel(), None
    works: list[tuple[str, int, Callable[[], Any], Callable[[], Any] | None]] = []
    if codec.feedback:
        eager = None if whole is None else partial(eager_encode, x, residual, whole)
        works.append(
            (
                f"encode {kind}, feedback",
                (width + 8) * numel + nbytes,
                lambda: kernels.encode(codec, x, residual, rng, out),
                eager,
            )
        )
    if not isinstance(codec, Threshold):  # Without it there is nothing to send.
        works.append((f"encode {kind}", width * numel + nbytes, lambda: kernels.encode(codec, x, None, rng, out), None))
    if dtype == torch.float32:  # Sums are float32 for every message.
        eager = None if whole is None else partial(eager_add, data, into, whole)
        moved = 3 * nbytes if isinstance(codec, Threshold) else 8 * numel + nbytes
        works.append(("add", moved, lambda: kernels.add(codec, data, into, 0.5), eager))
        works.append(("add, fresh", 4 * numel + nbytes, lambda: kernels.add(codec, data, into, 0.5, True), None))
    rows: list[Row] = []
    for what, moved, work, eager in works:
        slow = beside and numel <= 1 << 28
        with unwatched():
            alone = seconds_of(work)
        rows.append(
            Row(
                *(name, what, size, moved, alone, copy, call_of(work)),
                if_it_fits(eager, 5) if eager is not None and slow else None,
                if_it_fits(plainly(work), 3) if slow else None,
            )
        )
    return rows


def of_rows() -> list[Row]:
    """OneBit with rows as units, as it is fitted to a model."""
    every: list[Row] = []
    for dtype in (torch.float32, torch.bfloat16):
        for size, shapes in {"1 GB": [torch.Size([SIZES["1 GB"] // COLUMNS, COLUMNS])], "102 MB": resnet50()}.items():
            numel = sum(shape.numel() for shape in shapes)
            bucket, units = (COLUMNS, f", rows of {COLUMNS}") if len(shapes) == 1 else (None, ", ResNet-50")
            codec, beside = OneBit().fitted(shapes), dtype == torch.float32
            every += of_codec(codec, size, numel, dtype, beside=beside, units=units, bucket=bucket)
            torch.cuda.empty_cache()
    return every


def rows(names: set[str] | None = None) -> list[Row]:
    """All figures of the codecs with these names, or of all; none without a GPU."""
    if not torch.cuda.is_available():
        return []
    every: list[Row] = []
    codecs = [codec for codec in CODECS if names is None or type(codec).__name__ in names]
    for size, numel in SIZES.items():
        for codec in codecs:
            if isinstance(codec, OneBit):
                every += of_codec(codec, size, numel)
                every += of_codec(codec, size, numel, torch.bfloat16, beside=False)
            elif size == "1 GB":  # Large enough for all.
                every += of_codec(codec, size, numel)
        torch.cuda.empty_cache()
    return every + (of_rows() if names is None or "OneBit" in names else [])


def table(of: list[Row]) -> Any:
    from rich.table import Table

    shown = Table(
        "codec", "what", "size", "time", "GB/s", "% of copy", "call", "eager torch", "plain torch", title="On the GPU"
    )
    for r in of:
        others = (f"{t / r.seconds:.0f}x" if t is not None else "" for t in (r.eager, r.plain))
        figures = (
            f"{1e6 * r.seconds:,.0f} us",
            f"{r.rate / 1e9:,.0f}",
            f"{100 * r.rate / r.copy:.0f}",
            f"{1e6 * r.call:,.0f} us",
        )
        shown.add_row(r.codec, r.what, r.size, *figures, *others)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = sorted({type(codec).__name__ for codec in CODECS})
    parser.add_argument("--codec", nargs="+", choices=names, help="only these, instead of all")
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        from rich.console import Console

        Console(width=150).print(torch.cuda.get_device_name(), table(rows(arguments.codec and set(arguments.codec))))
    else:
        print("There is no GPU here, so nothing was measured.")


if __name__ == "__main__":
    main()
