"""The speed of encoding with feedback and adding on a GPU, compared with a copy of the same vector and eager torch.

`time` is that of the device alone: medians of CUDA events. The cache is flushed before each call, and the wait for the
flag that ends an encoding is not included. A rate counts the bytes that must move: those read of the vector and its
residual, the residual written, and the message. `call` is the time that the caller waits, from Python to the flag, with
a warm cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from paceline.codecs import QSGD, Codec, NBit, OneBit, TernGrad, Threshold, kernels

SIZES = {"25 MB": 6_553_600, "1 GB": 1 << 28, "4.3 GB": 1 << 30}


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
    positive = u >= 0
    count = positive.sum(1, keepdim=True)
    high = torch.where(positive, u, 0.0).sum(1, keepdim=True) / count.clamp(min=1)
    low = torch.where(positive, 0.0, u).sum(1, keepdim=True) / (bucket - count).clamp(min=1)
    torch.sub(u, torch.where(positive, high, low), out=residual.view(-1, bucket))
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=x.device)
    bits = (positive.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
    return torch.cat([torch.cat([low, high], 1).view(-1).view(torch.uint8), bits])


def eager_add(data: Tensor, into: Tensor, bucket: int = 512) -> None:
    """Adding a OneBit message in obvious torch code, for whole buckets."""
    means = data[: into.numel() // bucket * 8].view(torch.float32).view(-1, 2)
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    positive = (data[means.numel() * 4 :, None].bitwise_right_shift(shifts) & 1).view(-1, bucket).bool()
    into.view(-1, bucket).add_(torch.where(positive, means[:, 1:], means[:, :1]))


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
    codec: Codec, size: str, numel: int, dtype: torch.dtype = torch.float32, *, beside: bool = True
) -> list[Row]:
    """All figures of a codec at a size; with those of torch, eager and plain, if `beside`."""
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
    name, kind = type(codec).__name__, {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    is_whole = isinstance(codec, OneBit) and dtype == torch.float32 and numel % codec.bucket_size == 0
    if isinstance(codec, Threshold):  # As after many messages: every |x| / tau-th value is due.
        residual.uniform_(-codec.tau, codec.tau)
        data = kernels.encode(codec, x, residual)
        nbytes, out = data.numel(), None
    works: list[tuple[str, int, Callable[[], Any], Callable[[], Any] | None]] = []
    if codec.feedback:
        eager = (lambda: eager_encode(x, residual)) if is_whole else None
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
        eager = (lambda: eager_add(data, into)) if is_whole else None
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


def rows() -> list[Row]:
    """All figures; none without a GPU."""
    if not torch.cuda.is_available():
        return []
    every: list[Row] = []
    for size, numel in SIZES.items():
        every += of_codec(OneBit(), size, numel)
        every += of_codec(OneBit(), size, numel, torch.bfloat16, beside=False)
        if size == "1 GB":  # Large enough for all.
            for codec in (NBit(4), NBit(8), QSGD(), TernGrad(), Threshold(160.0)):
                every += of_codec(codec, size, numel)
        torch.cuda.empty_cache()
    return every


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


if __name__ == "__main__":
    if torch.cuda.is_available():
        from rich.console import Console

        Console(width=140).print(torch.cuda.get_device_name(), table(rows()))
    else:
        print("There is no GPU here, so nothing was measured.")
