"""The cost of encoding: time, bytes and error of every codec, compared with plain torch and a memory copy.

A round times each in turn, so that noise of the machine affects all of them. The table shows medians of the rounds and
their ratios. "encode" is the sender's work, with the feedback that the codec wants. "add" is the receiver's work:
decoding into a sum. Plain torch is the obvious code: written by hand for 1-bit, QSGD and thresholds, otherwise the
codec's definition.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from paceline import codecs
from paceline.codecs import Codec, kernels
from paceline.state import ResizeRule

MEGABYTES = 25
GIB = 1 << 30

CODECS: list[Codec] = [
    codecs.Fp32(),
    codecs.Fp16(),
    codecs.BFloat16(),
    codecs.Fp8(),
    codecs.OneBit(),
    codecs.OneBit(bucket=512),
    codecs.NBit(bits=2),
    codecs.NBit(bits=4),
    codecs.NBit(bits=8),
    codecs.QSGD(levels=7),
    codecs.QSGD(),
    codecs.TernGrad(),
    codecs.Threshold(tau=2.8),
    codecs.Threshold(tau=2.8, entropy=True),
    codecs.TopK(ratio=0.01),
    codecs.DGC(),
    codecs.PowerSGD(),
    codecs.Entropy(codec=codecs.QSGD()),
    codecs.Chunked(codec=codecs.TopK(ratio=0.01)),
    codecs.PerTensor(codec=codecs.TernGrad()),
]


def remember(name: str, /, *, rule: ResizeRule, version: int = 1, **initial: Any) -> SimpleNamespace:
    """A slot of codec state that lasts as long as the benchmark."""
    return SimpleNamespace(**{n: v.clone() if isinstance(v, Tensor) else v for n, v in initial.items()})


def eager_one_bit(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """1 bit in obvious torch code."""
    rows = (x + residual).view(-1, 512)
    positive = rows >= 0
    positives = positive.sum(1, keepdim=True)
    high = (rows * positive).sum(1, keepdim=True) / positives.clamp(min=1)
    low = (rows * ~positive).sum(1, keepdim=True) / (512 - positives).clamp(min=1)
    torch.sub(rows, torch.where(positive, high, low), out=residual.view(-1, 512))
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)
    return torch.cat([low, high], 1), (positive.view(-1, 8).to(torch.uint8) * weights).sum(1, dtype=torch.uint8)


def eager_add_one_bit(said: tuple[Tensor, Tensor], into: Tensor) -> None:
    means, bits = said
    positive = ((bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).bool().view(-1, 512)
    into.view(-1, 512).add_(torch.where(positive, means[:, 1:], means[:, :1]), alpha=0.5)


def eager_qsgd(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    rows = x.view(-1, 512)
    norms = rows.norm(dim=1, keepdim=True)
    scaled = rows.abs() * (levels / norms)
    level = scaled.floor()
    level += torch.rand_like(scaled) < scaled - level
    return norms, (level * rows.sign()).to(torch.int8)


def eager_add_qsgd(said: tuple[Tensor, Tensor], into: Tensor, levels: int) -> None:
    norms, level = said
    into.view(-1, 512).add_(level.to(torch.float32) * (norms / levels), alpha=0.5)


def eager_threshold(x: Tensor, residual: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    residual += x
    at = (residual.abs() >= tau).nonzero().view(-1)
    signs = residual[at].sign()
    residual[at] -= tau * signs
    return at.to(torch.int32), signs


def eager_add_threshold(said: tuple[Tensor, Tensor], into: Tensor, tau: float) -> None:
    at, signs = said
    into.index_add_(0, at, signs, alpha=0.5 * tau)


Work = Callable[[], Any]


def named(codec: Codec) -> str:
    """A codec with the settings that are not its defaults."""
    changed = [(f.name, v) for f in fields(codec) if f.init and (v := getattr(codec, f.name)) != f.default]  # pyright: ignore
    return f"{type(codec).__name__}({', '.join(f'{n}={named(v) if isinstance(v, Codec) else v}' for n, v in changed)})"


def by_hand(codec: Codec, x: Tensor, residual: Tensor, into: Tensor) -> tuple[Work, Callable[[Any], None]] | None:
    """Encode and add in eager torch, for the most used codecs."""
    if isinstance(codec, codecs.OneBit):
        return lambda: eager_one_bit(x, residual), lambda said: eager_add_one_bit(said, into)
    if isinstance(codec, codecs.QSGD) and codec.levels == 127:
        return lambda: eager_qsgd(x, codec.levels), lambda said: eager_add_qsgd(said, into, codec.levels)
    if isinstance(codec, codecs.Threshold) and not codec.entropy:
        return lambda: eager_threshold(x, residual, codec.tau), lambda said: eager_add_threshold(said, into, codec.tau)
    return None


def by_definition(codec: Codec, x: Tensor, residual: Tensor, into: Tensor) -> tuple[Work, Callable[[Any], None]]:
    def encode() -> Tensor:
        with kernels.plain():
            return kernels.encode(codec, x, residual if codec.feedback else None, torch.Generator().manual_seed(0))

    def add(data: Tensor) -> None:
        with kernels.plain():
            kernels.add(codec, data, into, 0.5)

    return encode, add


def timed(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(codec: Codec, numel: int, rounds: int) -> dict[str, Any]:
    """The row of one codec."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    copy, into = torch.empty_like(x), torch.zeros_like(x)
    fitted = codec
    if isinstance(codec, codecs.OneBit):  # Its units are rows, here of a length that is no multiple of 32.
        fitted = codec.fitted([torch.Size([numel // 784, 784]), torch.Size([numel % 784])])
    codec_state = fitted.codec_state(remember, x)
    encode, add = by_hand(codec, x, torch.zeros_like(x), into) or by_definition(codec, x, torch.zeros_like(x), into)
    data, said = codec_state.encode(x), encode()
    nbytes = data.numel()
    heard = torch.zeros_like(x)
    codec_state.add(data, heard)
    error = ((heard - x).norm() / x.norm()).item()
    taken: dict[str, list[float]] = {}
    for i in range(rounds + 1):
        x.neg_()  # Otherwise the residual would grow.
        held: list[Tensor] = []
        turns: dict[str, Work] = {
            "copy": lambda: copy.copy_(x),
            "encode": lambda held=held: held.append(codec_state.encode(x)),
            "add": lambda held=held: codec_state.add(held[0], into, 0.5),
        }
        if i % 4 == 0:  # It is slow, so not every time.
            turns |= {"plain encode": encode, "plain add": lambda: add(said)}
        for name, work in turns.items():
            seconds = timed(work)
            if i:  # The first round warms up.
                taken.setdefault(name, []).append(seconds)
    of = {name: median(times) for name, times in taken.items()}
    return {
        "codec": named(codec),
        "bytes_per_value": nbytes / numel,
        "error": error,
        "seconds": of,
        "gib_per_s": {name: 4 * numel / GIB / of[name] for name in ("copy", "encode", "add")},
        "encode_over_copy": of["encode"] / of["copy"],
        "add_over_copy": of["add"] / of["copy"],
        "plain_over_encode": of["plain encode"] / of["encode"],
        "plain_over_add": of["plain add"] / of["add"],
        "plain_by_hand": by_hand(codec, x, x, x) is not None,
    }


def table(rows: list[dict[str, Any]], megabytes: int, threads: int) -> Table:
    shown = Table(title=f"{megabytes} MB of float32, {threads} thread{'s' * (threads > 1)}; times in ms, medians")
    for name in (
        "codec",
        "B/value",
        "error",
        "copy",
        "encode",
        "GiB/s",
        "x copy",
        "plain/ours",
        "add",
        "GiB/s",
        "x copy",
        "plain/ours",
    ):
        shown.add_column(name, justify="left" if name == "codec" else "right", no_wrap=True)
    for r in rows:
        t = {n: f"{1e3 * s:.2f}" for n, s in r["seconds"].items()}
        hand = "" if r["plain_by_hand"] else "*"
        shown.add_row(
            r["codec"],
            f"{r['bytes_per_value']:.3f}",
            f"{r['error']:.3g}",
            t["copy"],
            t["encode"],
            f"{r['gib_per_s']['encode']:.1f}",
            f"{r['encode_over_copy']:.2f}",
            f"{r['plain_over_encode']:.1f}{hand}",
            t["add"],
            f"{r['gib_per_s']['add']:.1f}",
            f"{r['add_over_copy']:.2f}",
            f"{r['plain_over_add']:.1f}{hand}",
        )
    shown.caption = (
        "error: of one message, relative to the values' norm.  *: against the codec's definition in plain torch"
    )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=MEGABYTES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console(width=170)
    rows: list[dict[str, Any]] = []
    for codec in CODECS:
        rows.append(measure(codec, arguments.megabytes * (1 << 20) // 4, arguments.rounds))
    console.print(table(rows, arguments.megabytes, arguments.threads))
    if torch.cuda.is_available():
        from benchmarks import codecs_gpu

        console.print(codecs_gpu.table(codecs_gpu.rows()))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
