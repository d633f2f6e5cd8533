"""Compressed gradients against references in numpy, which import nothing of paceline.

Each row trains by AllReduceSGD with a codec, in the simulator, and by its reference on the same minibatches.  Of codecs
that round at random, the mean and the variance of many messages are compared.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import paceline as pl
from paceline.codecs import (
    DGC,
    QSGD,
    AdaptiveThreshold,
    BFloat16,
    Chunked,
    Codec,
    Entropy,
    Fp8,
    Fp16,
    Fp32,
    NBit,
    OneBit,
    PerTensor,
    PowerSGD,
    TernGrad,
    Threshold,
    TopK,
)
from paceline.stripes import stripe_of
from tests.laws.tasks import numbers
from tests.reference import sync_codes as codes
from tests.reference import sync_gradients as gradients
from tests.reference.harness import Together, classes, linear, sgd
from tests.reference.sync_problem import Sgd
from tests.reference.table import Row, compared, rows_of

DRAWS = 40_000
SEIDE = "CNTK manual; Seide et al. 2014"
ON_THE_WIRE = "values travel in single precision; the reference rounds them too"


def by_buckets(code: Any, bucket: int = 64, **settings: Any) -> Any:
    return lambda u: codes.by_buckets(partial(code, **settings), u, bucket)


def wide(momentum: float = 0.9, steps: int = 12) -> Together:
    """200 values, in four buckets of 64."""
    return classes(sgd(lr=0.1, momentum=momentum), 3, steps=steps, numel=200)


@compared(
    pl.AllReduceSGD(codec=OneBit(bucket=64)),
    "1-bit SGD",
    "feedback, two levels, bucket 64, momentum 0.9",
    SEIDE,
    reason=ON_THE_WIRE,
)
def _(strategy: pl.Strategy) -> float:
    return wide(steps=30).compare(strategy, gradients.two_levels, Sgd(0.1, 0.9), by_buckets(codes.one_bit))


TWO_LEVELS: dict[str, tuple[Codec, Any, str]] = {
    "single precision": (Fp32(), codes.single, "IEEE 754"),
    "1 bit, threshold at zero": (
        OneBit(bucket=64, threshold="zero"),
        by_buckets(codes.one_bit, threshold=0.0),
        "CNTK manual",
    ),
    "1 bit, coded once more": (Entropy(OneBit(bucket=64)), by_buckets(codes.one_bit), "lossless: Duda 2009"),
    "4 bits of 64": (NBit(bits=4, bucket=64), by_buckets(codes.n_bit, bits=4), "CNTK manual"),
    "2 bits of 64": (NBit(bits=2, bucket=64), by_buckets(codes.n_bit, bits=2), "CNTK manual"),
    "fp8 e4m3 of 64": (Fp8(bucket=64), by_buckets(codes.fp8), "OCP FP8"),
    "fp8 e5m2 of 64": (
        Fp8(format="e5m2", bucket=64),
        by_buckets(codes.fp8, mantissa=2, least=-14, top=57344.0),
        "OCP FP8",
    ),
}
for setting, (codec, code, source) in TWO_LEVELS.items():

    @compared(
        pl.AllReduceSGD(codec=codec),
        "Quantised gradients",
        f"{setting}, feedback, two levels, momentum 0.9",
        source,
        reason=ON_THE_WIRE,
    )
    def _(strategy: pl.Strategy, code: Any = code) -> float:
        return wide().compare(strategy, gradients.two_levels, Sgd(0.1, 0.9), code)


@compared(
    pl.AllReduceSGD(codec=OneBit()),
    "1-bit SGD",
    "a unit for each output: rows of 130 and a bias, momentum 0.9",
    SEIDE,
    reason=ON_THE_WIRE,
)
def _(strategy: pl.Strategy) -> float:
    """An owner's stripe is whole words of 32 bits, and cuts a row into two units."""
    problem = linear(sgd(lr=0.002, momentum=0.9), 3, steps=12, inputs=130, outputs=6)
    numel = len(problem.start)
    cuts = {130 * i for i in range(1, 7)} | {stripe_of(i, numel, 3, unit=32).start for i in (1, 2)}
    code = partial(codes.by_cuts, codes.one_bit, cuts=sorted(cuts))
    return problem.compare(strategy, gradients.two_levels, Sgd(0.002, 0.9), code)


@compared(
    pl.AllReduceSGD(codec=OneBit(bucket=64), group=2),
    "1-bit SGD by groups",
    "sums in groups of 2, 1 bit between 2 groups",
    f"{SEIDE}; Wongpanich et al.",
    reason=ON_THE_WIRE,
)
def _(strategy: pl.Strategy) -> float:
    problem = classes(sgd(lr=0.1), 4, steps=12, numel=200)
    groups = [
        [tuple(np.concatenate(c) for c in zip(*p[i : i + 2], strict=True)) for i in (0, 2)] for p in problem.batches
    ]
    expected = gradients.two_levels(problem.start, groups, problem.gradient, Sgd(0.1), by_buckets(codes.one_bit))
    return problem.difference(problem.run(strategy), expected)


@compared(
    pl.AllReduceSGD(codec=PerTensor(OneBit(bucket=64), raw_below=32)),
    "1-bit SGD by tensors",
    "a matrix of 120 values in buckets of 64, a bias of 10 in single precision",
    SEIDE,
    reason=ON_THE_WIRE,
)
def _(strategy: pl.Strategy) -> float:
    def code(u: Any) -> Any:
        return np.concatenate([codes.by_buckets(codes.one_bit, u[:120], 64), codes.single(u[120:])])

    return linear(sgd(lr=0.02), 3, steps=12).compare(strategy, gradients.two_levels, Sgd(0.02), code)


GATHERED: dict[str, tuple[Codec, Any, str]] = {
    "top 5 %": (TopK(ratio=0.05), partial(codes.top_k, ratio=0.05), "Aji & Heafield 2017"),
    "top 10 % of every 50": (
        Chunked(TopK(ratio=0.1), chunk=50),
        by_buckets(codes.top_k, bucket=50, ratio=0.1),
        "Aji & Heafield 2017",
    ),
    **{
        setting: (Threshold(tau=tau, entropy=entropy, limit=math.inf), partial(codes.threshold, tau=tau), "Strom 2015")
        for setting, tau, entropy in (
            ("values of 0.02 and more", 0.02, False),
            ("values of 0.05 and more, gaps in Golomb's code", 0.05, True),
        )
    },
}
for setting, (codec, code, source) in GATHERED.items():

    @compared(
        pl.AllReduceSGD(codec=codec),
        "Sparse gradients",
        f"{setting}, feedback, momentum 0.9",
        source,
        reason=ON_THE_WIRE,
    )
    def _(strategy: pl.Strategy, code: Any = code) -> float:
        return wide().compare(strategy, gradients.gathered, Sgd(0.1, 0.9), code)


@compared(
    pl.AllReduceSGD(codec=AdaptiveThreshold(tau=0.05, low=0.05, high=0.2, decay=0.9, limit=math.inf)),
    "Sparse gradients",
    "a threshold for 5 to 20 % of the values, momentum 0.9",
    "Strom 2015; DL4J",
    reason=ON_THE_WIRE,
)
def _(strategy: pl.Strategy) -> float:
    settings = {"tau": 0.05, "low": 0.05, "high": 0.2, "decay": 0.9}
    return wide().compare(strategy, gradients.strom_adaptive, Sgd(0.1, 0.9), **settings)


for codec, half in ((Fp16(), codes.fp16), (BFloat16(), codes.bfloat16)):

    @compared(
        pl.AllReduceSGD(codec=codec),
        "16-bit sums",
        f"{codec}, unequal shares, momentum 0.9",
        "torch's fp16_compress_hook",
        reason="sums are rounded to 16 bits in the order of ranks, in the reference too",
    )
    def _(strategy: pl.Strategy, half: Any = half) -> float:
        lr = 0.1 / 1024  # No gradient is so small that fp16 has fewer bits for it.
        problem = classes(sgd(lr=lr, momentum=0.9), 3, steps=20, batch=10, samples=34, numel=200, scale=1024.0)
        return problem.compare(strategy, gradients.summed, Sgd(lr, 0.9), half)


for setting, more in (
    ("5 %, momentum 0.9", {}),
    ("5 %, not masked", {"masking": False}),
    ("5 %, Nesterov, clipped", {"nesterov": True, "clip": 0.5}),
    ("5 %, warm-up of 8 messages", {"warmup": 8}),
):
    for_clip = {"workers": 3} if "clip" in more else {}

    @compared(
        pl.AllReduceSGD(codec=DGC(ratio=0.05, momentum=0.9, **more, **for_clip)),
        "DGC",
        setting,
        "Lin et al. 2018",
        reason=ON_THE_WIRE,
    )
    def _(strategy: pl.Strategy, more: dict[str, Any] = more) -> float:
        ratios = [0.25, 0.25, 0.0625, 0.0625] + [0.05] * 4 if "warmup" in more else []
        settings = {"lr": 0.1, "ratio": 0.05, "momentum": 0.9, "ratios": ratios} | more
        settings.pop("warmup", None)
        return wide(0.0, steps=20).compare(strategy, gradients.dgc, **settings)


for rank in (1, 3):

    @compared(
        pl.AllReduceSGD(codec=PowerSGD(rank=rank)),
        "PowerSGD",
        f"rank {rank}, a matrix of 10 x 12 and a bias, momentum 0.9",
        "Vogels et al. 2019",
    )
    def _(strategy: pl.Strategy, rank: int = rank) -> float:
        guess = 2 * torch.rand(rank, 12, generator=torch.Generator().manual_seed(1234)).double().numpy().T - 1
        problem = linear(sgd(lr=0.02, momentum=0.9), 3, steps=20)
        return problem.compare(strategy, gradients.power_sgd, Sgd(0.02, 0.9), (10, 12), guess)


def halved(step: int) -> float:
    return 1.0 if step < 15 else 0.5


@compared(
    pl.OneBitAdam(OneBit(bucket=64), warmup=10),
    "1-bit Adam",
    "10 steps of AdamW, then 1 bit, a drop of the rate",
    "Tang et al. 2021",
    reason=ON_THE_WIRE,
)
def _(strategy: pl.Strategy) -> float:
    settings = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6}
    problem = classes(partial(torch.optim.AdamW, weight_decay=0.1, **settings), 3, steps=25, numel=200, schedule=halved)
    more = {"decay": 0.1, "warmup": 10, "code": by_buckets(codes.one_bit), "factor_at": halved}
    return problem.compare(strategy, gradients.one_bit_adam, **settings, **more)


# At random.


def standard_errors(codec: Codec, v: torch.Tensor, mean: np.ndarray, variance: np.ndarray) -> float:
    """How far the mean of many draws is from the right one, at most, in standard errors; likewise for the variance.

    One message holds all draws: each copy of `v` is a bucket of its own, or has the same scale.
    """
    message = codec.encode(v.repeat(DRAWS), torch.Generator().manual_seed(0))
    drawn = codec.decode(message, DRAWS * v.numel()).view(DRAWS, -1).double().numpy()
    spread = np.sqrt(variance)
    is_random = spread > 1e-3 * np.abs(mean).max()
    assert np.allclose(drawn[:, ~is_random], mean[~is_random], rtol=1e-6)
    of_mean = np.abs(drawn.mean(0) - mean)[is_random] / (spread[is_random] / np.sqrt(DRAWS))
    squares = (drawn - mean)[:, is_random] ** 2
    # Near a probability of one half all squares are equal, so that only rounding is left.
    error = np.maximum(squares.std(0) / np.sqrt(DRAWS), 1e-4 * variance[is_random])
    of_variance = np.abs(squares.mean(0) - variance[is_random]) / error
    return float(max(of_mean.max(), of_variance.max()))


RANDOM = "random: the largest of 128 deviations of a mean or a variance, in standard errors of 40 000 draws"

for norm in ("l2", "max"):

    @compared(
        QSGD(levels=7, bucket=64, norm=norm),
        "QSGD",
        f"7 levels, norm {norm}: mean and variance",
        "Alistarh et al. 2017",
        limit=4.0,
        reason=RANDOM,
    )
    def _(codec: Codec, norm: str = norm) -> float:
        v = numbers(64, seed=5, dtype=torch.float32)
        return standard_errors(codec, v, *codes.qsgd_moments(v.double().numpy(), 7, norm))


for clip in (None, 1.5):

    @compared(
        TernGrad(clip=clip),
        "TernGrad",
        f"clip {clip}: mean and variance",
        "Wen et al. 2017",
        limit=4.0,
        reason=RANDOM,
    )
    def _(codec: Codec, clip: float | None = clip) -> float:
        v = numbers(64, seed=5, dtype=torch.float32)
        return standard_errors(codec, v, *codes.terngrad_moments(v.double().numpy(), clip))


@pytest.mark.parametrize("row", rows_of(__name__), ids=str)
def test_codec_equals_its_reference(row: Row):
    assert row.difference() <= row.limit
