"""Everything that the laws test. Add one entry here for a new codec, rule, strategy or endpoint: all laws then apply to
it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from examples.scaffold import Scaffold
from paceline import (
    ASGD,
    EAMSGD,
    EASGD,
    AdaComm,
    AdaptiveAveraging,
    AllReduceSGD,
    AsyncDiLoCo,
    AsyncEASGD,
    AsyncMomentum,
    BlockMomentum,
    DecreasingAveraging,
    DelayCompensated,
    DiLoCo,
    Downpour,
    EAWild,
    Gossip,
    Hogwild,
    OneBitAdam,
    ParameterServer,
    PeriodicAveraging,
    Replicated,
    RoundRobinEASGD,
    Sandblaster,
    SlowMo,
    SoftSync,
    StaleSynchronous,
    Strom,
    Then,
)
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
from paceline.collectives import VOTE_NBYTES, packed_nbytes
from paceline.families.topology import Exponential, RandomPairs
from paceline.server import Rule
from paceline.server.rules import (
    Adagrad,
    Adam,
    Attract,
    Compensated,
    Every,
    Momentum,
    Quorum,
    Scaled,
    Sgd,
)
from paceline.strategy import Strategy
from paceline.stripes import stripe_of
from tests.laws.ranks import Ranks, on_gloo, on_gloo_in_comm_thread, on_shared_memory, on_simulator

CODECS: dict[str, Codec] = {
    "fp32": Fp32(),
    "fp16": Fp16(),
    "one-bit": OneBit(),
    "one-bit of 64": OneBit(bucket=64),
    "one-bit by zero": OneBit(threshold="zero"),
    "2 bits": NBit(bits=2),
    "4 bits": NBit(),
    "8 bits of 64": NBit(bits=8, bucket=64),
    "16 bits": NBit(bits=16),
    "bfloat16": BFloat16(),
    "fp8": Fp8(),
    "fp8 e5m2 of 64": Fp8(format="e5m2", bucket=64),
    "qsgd": QSGD(),
    "qsgd, 7 levels of the largest": QSGD(levels=7, bucket=64, norm="max"),
    "qsgd, 1000 levels": QSGD(levels=1000),
    "terngrad": TernGrad(),
    "terngrad, not clipped": TernGrad(clip=None),
    "threshold": Threshold(tau=5.0, limit=math.inf),
    "threshold, many hits": Threshold(tau=0.5, limit=math.inf),
    "threshold, entropy": Threshold(tau=5.0, entropy=True, limit=math.inf),
    "threshold, many hits, entropy": Threshold(tau=0.5, entropy=True, limit=math.inf),
    "adaptive threshold": AdaptiveThreshold(limit=math.inf),
    "top-k": TopK(ratio=0.05),
    "top-k, a quarter": TopK(ratio=0.25),
    "dgc": DGC(ratio=0.05),
    "dgc, warm-up": DGC(ratio=0.05, warmup=8),
    "entropy of qsgd": Entropy(),
    "entropy of one-bit": Entropy(OneBit()),
    "entropy of fp16": Entropy(Fp16()),
    "entropy of threshold": Entropy(Threshold(tau=0.5, limit=math.inf)),
    "power-sgd": PowerSGD(),
    "power-sgd of rank 1": PowerSGD(rank=1),
    "one-bit per tensor": PerTensor(OneBit()),
    "terngrad per tensor": PerTensor(raw_below=32),
    "terngrad per chunk": Chunked(chunk=100),
    "top-k per chunk": Chunked(TopK(ratio=0.1), chunk=512),
    "threshold per chunk": Chunked(Threshold(tau=5.0, limit=math.inf), chunk=512),
}

# The number of messages after which a codec's residual has reached its full size. The stream is stationary and has
# standard normal values.
SETTLES: dict[str, int | None] = {name: 40 for name in CODECS} | {
    "top-k": 120,
    "dgc": 120,
    "dgc, warm-up": 120,
    "power-sgd of rank 1": 60,
    # A threshold codec sends tau a message. An element that gains more than tau at every step waits longer and longer.
    "threshold, many hits": None,
    "threshold, many hits, entropy": None,
    "entropy of threshold": None,
    "adaptive threshold": None,
    # Random rounding to one of three values loses more than the residual holds. It is for senders without feedback.
    "terngrad": None,
    "terngrad, not clipped": None,
    "terngrad per tensor": None,
    "terngrad per chunk": None,
}

RULES: dict[str, Rule] = {
    "sgd": Sgd(lr=0.05),
    "attract": Attract(alpha=0.2),
    "momentum": Momentum(lr=0.05),
    "momentum of Nesterov, unit gain": Momentum(lr=0.05, nesterov=True, unit_gain=True),
    "momentum, decayed": Momentum(lr=0.05, weight_decay=0.1),
    "adagrad": Adagrad(lr=0.05),
    "adagrad, decayed": Adagrad(lr=0.05, weight_decay=0.1),
    "adam": Adam(lr=0.05),
    "adam, decayed": Adam(lr=0.05, weight_decay=0.1),
    "adam, decoupled": Adam(lr=0.05, weight_decay=0.1, decoupled=True),
    "scaled": Scaled(Adagrad(lr=0.05)),
    "every 3": Every(Momentum(lr=0.05), 3),
    "quorum": Quorum(Momentum(lr=0.7, nesterov=True), 2),
    "compensated": Compensated(Sgd(lr=0.05), lam=0.5),
    "compensated, adaptive": Compensated(Momentum(lr=0.05), lam=2.0, adaptive=True),
    "scaled and every 2": Scaled(Every(Compensated(Sgd(lr=0.05)), 2), by="1/(tau+1)"),
}


@dataclass(frozen=True)
class Case:
    """A strategy, and what the laws must know about it.

    `alone` says how closely one worker equals plain training with `plain`, which is the task's own optimizer by
    default. It is None for a method that differs from plain training even on one worker. Such methods are: an outer
    optimizer with its own momentum or rate (test_lattice has the reference, an outer loop); elastic averaging (the
    model is the centre, which a single worker pulls along); Sandblaster (test_sandblaster has the reference);
    OneBitAdam, which takes Adam's steps with any optimizer here (test_one_bit_adam has the reference).

    `nbytes(numel, workers, steps, rank)` is the number of bytes that a worker sends in a float32 run. It is None if
    that number depends on the values.
    """

    strategy: Strategy
    nbytes: Callable[[int, int, int, int], int] | None
    alone: Literal["bits", "rounding"] | None = "bits"
    plain: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    agrees: bool = True  # All ranks end with the same bits.
    least: int = 1  # The fewest steps that a run may have.
    group: int = 1  # The number of workers must be a multiple of this.
    whole: bool = False  # It works on whole epochs, and skips a last part of an epoch.
    doubles: bool = False  # Some work may be done twice. Then one result is dropped.


def ring(nbytes: int, workers: int) -> int:
    return 2 * (workers - 1) * nbytes // workers


def summed(period: int) -> Callable[[int, int, int, int], int]:
    """A ring all-reduce of all parameters and of a vote, every `period` steps and at the end."""
    return lambda numel, workers, steps, rank: -(-steps // period) * ring(4 * numel + VOTE_NBYTES, workers)


def summed_in_16_bits(numel: int, workers: int, steps: int, rank: int) -> int:
    """A ring all-reduce of 2 bytes a value at every step, with a vote, and what the ranks must know of their scales."""
    return steps * ring(2 * numel + VOTE_NBYTES + 32, workers)


def met(period: int) -> Callable[[int, int, int, int], int]:
    """The same as `summed` at steps 0, `period`, ... and at the first of these that is not before the last step."""
    return lambda numel, workers, steps, rank: (1 + -(-(steps - 1) // period)) * ring(4 * numel + VOTE_NBYTES, workers)


def two_means(period: int) -> Callable[[int, int, int, int], int]:
    """Two ring all-reduces of all parameters, each with a vote, every `period` steps and at the end."""
    return lambda numel, workers, steps, rank: 2 * summed(period)(numel, workers, steps, rank)


def averaged(period: int) -> Callable[[int, int, int, int], int]:
    """The same as `summed`, plus eight numbers that every worker sends to all others."""
    return lambda numel, workers, steps, rank: (
        summed(period)(numel, workers, steps, rank) + -(-steps // period) * 64 * (workers - 1)
    )


def striped(codec: Codec) -> Callable[[int, int, int, int], int]:
    """A stripe and a vote to each other rank, which owns that stripe. Then the own stripe to every other rank."""

    def nbytes(numel: int, workers: int, steps: int, rank: int) -> int:
        whole = codec.fitted([torch.Size([numel])])  # The model of this law is one vector.
        stripes = [stripe_of(j, numel, workers, unit=whole.unit) for j in range(workers)]
        sealed = [packed_nbytes(whole.part(s).nbytes(s.stop - s.start) or 0) for s in stripes]
        away = sum(sealed[j] for j in range(workers) if j != rank)
        return steps * (away + (workers - 1) * max(sealed))

    return nbytes


def warmed(codec: Codec, warmup: int) -> Callable[[int, int, int, int], int]:
    """Full gradients for `warmup` steps, then encoded vectors."""
    return lambda numel, workers, steps, rank: (
        summed(1)(numel, workers, min(steps, warmup), rank)
        + striped(codec)(numel, workers, max(steps - warmup, 0), rank)
    )


def gathered(codec: Codec) -> Callable[[int, int, int, int], int]:
    """The whole encoded vector to every other rank."""
    return lambda numel, workers, steps, rank: steps * (workers - 1) * packed_nbytes(codec.nbytes(numel) or 0)


def gathered_by_two(codec: Codec) -> Callable[[int, int, int, int], int]:
    """The whole encoded vector between two ranks, stripes of it among more."""
    return lambda numel, workers, steps, rank: (gathered if workers == 2 else striped)(codec)(
        numel, workers, steps, rank
    )


def served(numel: int, workers: int, steps: int, rank: int) -> int:
    """At every step, a push of all parameters and a request for a part of a minibatch. The first worker also sends the
    initial value."""
    return 4 * numel * (steps + (rank == 0)) + 24 * (steps + 1)


def flooded(numel: int, workers: int, steps: int, rank: int) -> int:
    """Every update to every other worker."""
    return 4 * numel * steps * (workers - 1)


STRATEGIES: dict[str, Case] = {
    "all-reduce-sgd": Case(AllReduceSGD(), summed(1)),
    "all-reduce-sgd by fp32": Case(AllReduceSGD(codec=Fp32()), striped(Fp32())),
    "all-reduce-sgd by fp16": Case(AllReduceSGD(codec=Fp16()), summed_in_16_bits),
    "all-reduce-sgd by bfloat16": Case(AllReduceSGD(codec=BFloat16()), summed_in_16_bits),
    "all-reduce-sgd by one-bit": Case(AllReduceSGD(codec=OneBit()), striped(OneBit())),
    "all-reduce-sgd by qsgd": Case(AllReduceSGD(codec=QSGD()), gathered_by_two(QSGD())),
    "all-reduce-sgd by qsgd, gathered": Case(
        AllReduceSGD(codec=QSGD(reduction="gather")), gathered(QSGD(reduction="gather"))
    ),
    "all-reduce-sgd by top-k": Case(AllReduceSGD(codec=TopK(ratio=0.1)), gathered(TopK(ratio=0.1))),
    "all-reduce-sgd by dgc": Case(AllReduceSGD(codec=DGC(ratio=0.1, momentum=0.0, warmup=6)), None),
    "all-reduce-sgd by adaptive thresholds": Case(
        AllReduceSGD(codec=Chunked(AdaptiveThreshold(limit=math.inf), chunk=64)), None
    ),
    "all-reduce-sgd by entropy": Case(AllReduceSGD(codec=Entropy(PerTensor(TernGrad(), raw_below=16))), None),
    "all-reduce-sgd by power-sgd": Case(AllReduceSGD(codec=PowerSGD(rank=2)), None),
    "all-reduce-sgd by groups": Case(AllReduceSGD(group=2), None),
    "all-reduce-sgd by groups and one-bit": Case(AllReduceSGD(group=2, codec=OneBit()), None),
    "all-reduce-sgd, clipped": Case(AllReduceSGD(clip=1e9), summed(1), alone="rounding"),
    "one-bit-adam": Case(OneBitAdam(warmup=3, betas=(0.9, 0.99)), warmed(OneBit(), 3), alone=None),
    "one-bit-adam by top-k": Case(OneBitAdam(TopK(ratio=0.2), betas=(0.9, 0.5)), None, alone=None),
    "periodic-averaging": Case(PeriodicAveraging(period=4), averaged(4)),
    "periodic-averaging by samples": Case(PeriodicAveraging(samples=7), None),
    "periodic-averaging, delayed": Case(PeriodicAveraging(period=4, delay=2), averaged(4)),
    "periodic-averaging, optimizer averaged": Case(PeriodicAveraging(period=4, optimizer_state="average"), None),
    "periodic-averaging, optimizer averaged, delayed": Case(
        PeriodicAveraging(period=4, optimizer_state="average", delay=3), None
    ),
    "periodic-averaging by one-bit": Case(PeriodicAveraging(period=4, codec=OneBit()), None),
    "periodic-averaging by qsgd, delayed": Case(PeriodicAveraging(period=4, codec=QSGD(), delay=1), None),
    "adaptive-averaging": Case(AdaptiveAveraging(period=2, warmup=2, sampling=6), None),
    "adaptive-averaging by one-bit, delayed": Case(
        AdaptiveAveraging(period=3, warmup=1, sampling=7, codec=OneBit(), delay=1), None
    ),
    "decreasing-averaging": Case(DecreasingAveraging(periods=(5, 2, 1)), None),
    "ada-comm": Case(AdaComm(period=4, steps=5), None),
    "block-momentum": Case(BlockMomentum(period=4), averaged(4), alone="rounding"),
    "block-momentum, kept": Case(BlockMomentum(period=4, optimizer_state="keep"), averaged(4), alone="rounding"),
    "block-momentum, classical": Case(
        BlockMomentum(period=3, momentum=0.5, rate=0.8, nesterov=False), averaged(3), alone=None
    ),
    "block-momentum of CNTK": Case(BlockMomentum(period=4, form="cntk", momentum=0.75), averaged(4), alone=None),
    "block-momentum by samples and time constant": Case(BlockMomentum(samples=9, time_constant=40.0), None, alone=None),
    "block-momentum by one-bit, delayed": Case(
        BlockMomentum(period=4, codec=OneBit(), delay=2), None, alone="rounding"
    ),
    "slow-mo": Case(SlowMo(period=4), averaged(4), alone=None),
    "diloco": Case(DiLoCo(period=4), averaged(4), alone=None),
    "diloco, streaming": Case(DiLoCo(period=4, fragments=2, delay=1), None, alone=None),
    "diloco, streaming by fp16": Case(DiLoCo(period=6, fragments=3, codec=Fp16()), None, alone=None),
    "scaffold": Case(Scaffold(period=4), two_means(4), alone="rounding"),  # examples/scaffold.py
    "replicated": Case(Replicated(), None, alone="bits"),
    "then": Case(Then(AllReduceSGD(), PeriodicAveraging(period=3), steps=3), None, least=3),
    "then, from averaging to one-bit": Case(
        Then(PeriodicAveraging(period=4), AllReduceSGD(codec=OneBit()), steps=5), None, least=5
    ),
    "then, delayed to delayed": Case(
        Then(DiLoCo(period=4, fragments=2, delay=1), BlockMomentum(period=3, delay=2), steps=5),
        None,
        alone=None,
        least=5,
    ),
    "parameter-server": Case(
        ParameterServer(rule=Sgd(lr=0.05)), served, plain=lambda params: torch.optim.SGD(params, lr=0.05), agrees=False
    ),
    "parameter-server by one-bit": Case(
        ParameterServer(rule=Sgd(lr=0.05), codec=OneBit(), pulls=OneBit()),
        None,
        plain=lambda params: torch.optim.SGD(params, lr=0.05),
        agrees=False,
    ),
    "parameter-server of 1": Case(
        ParameterServer(rule=Sgd(lr=0.05), servers=1),
        served,
        plain=lambda params: torch.optim.SGD(params, lr=0.05),
        agrees=False,
    ),
    "asgd": Case(ASGD(period=2), None, alone="rounding", agrees=False),
    "asgd, ramped as CNTK's code": Case(ASGD(period=2, ramp=2, ramp_of="delta"), None, agrees=False, alone=None),
    "asgd, pipelined": Case(ASGD(period=2, pipeline=True, ramp=3), None, agrees=False, alone=None),
    "downpour": Case(
        Downpour(local_lr=0.0),
        None,
        plain=lambda params: torch.optim.Adagrad(params, lr=0.01),
        agrees=False,
    ),
    "downpour, seldom": Case(Downpour(push=3, fetch=2), None, agrees=False, alone=None),
    "soft-sync": Case(SoftSync(lr=0.05), served, plain=lambda params: torch.optim.SGD(params, lr=0.05), agrees=False),
    "stale-synchronous": Case(
        StaleSynchronous(lr=0.05, bound=1), served, plain=lambda params: torch.optim.SGD(params, lr=0.05), agrees=False
    ),
    "delay-compensated": Case(
        DelayCompensated(lr=0.05), served, plain=lambda params: torch.optim.SGD(params, lr=0.05), agrees=False
    ),
    "async-momentum": Case(
        AsyncMomentum(lr=0.05),
        served,
        plain=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        agrees=False,
    ),
    "async-diloco": Case(AsyncDiLoCo(period=4, delay=1), None, agrees=False, alone=None),
    "easgd": Case(EASGD(period=3), met(3), alone=None),
    "easgd of a strong force": Case(EASGD(period=1, alpha=0.3), met(1), alone=None),
    "round-robin-easgd": Case(RoundRobinEASGD(period=2), None, agrees=False, alone=None),
    "async-easgd": Case(AsyncEASGD(period=2), None, agrees=False, alone=None),
    "eamsgd": Case(EAMSGD(period=2, momentum=0.3), None, agrees=False, alone=None),
    "ea-wild": Case(EAWild(), None, agrees=False, alone=None),
    "ea-wild on shards": Case(EAWild(period=2, servers=2), None, agrees=False, alone=None),
    "ea-wild by the learning rate, on a shard": Case(EAWild(rho=2.0, servers=1), None, agrees=False, alone=None),
    "ea-wild in groups": Case(EAWild(group=2), None, agrees=False, group=2, alone=None),
    "ea-wild in random groups, on a shard": Case(
        EAWild(group=2, groups="random", regroup=3, servers=1), None, agrees=False, group=2, alone=None
    ),
    "ea-wild in random groups of one": Case(EAWild(groups="random", regroup=3), None, agrees=False, alone=None),
    "hogwild": Case(Hogwild(), None),
    "sandblaster": Case(Sandblaster(), None, least=4, whole=True, doubles=True, alone=None),
    "sandblaster by wolfe, without backups": Case(
        Sandblaster(search="wolfe", backups=0, push=2), None, least=4, whole=True, alone=None
    ),
    "strom": Case(
        Strom(Threshold(tau=0.01, limit=math.inf), lr=0.05),
        None,
        plain=lambda params: torch.optim.SGD(params, lr=0.05),
        agrees=False,
    ),
    "strom, dense": Case(
        Strom(None, lr=0.05), flooded, plain=lambda params: torch.optim.SGD(params, lr=0.05), agrees=False
    ),
    "strom of local steps": Case(Strom(Threshold(tau=0.001, limit=math.inf)), None, agrees=False),
    "strom, few at first": Case(Strom(None, few=2, few_steps=3), None, agrees=False),
    "gossip": Case(Gossip(), None),
    "gossip in rounds": Case(Gossip(Exponential(), rounds=2, overlap=False), None),
    "gossip, seldom": Case(Gossip(RandomPairs(), period=2), None),
}
ALONE = {name: case for name, case in STRATEGIES.items() if case.alone is not None}
RESUMABLE = {name: case for name, case in STRATEGIES.items() if case.strategy.needs.resumable}
ORDERED = {name: case for name, case in STRATEGIES.items() if case.strategy.needs.ordered}

ENDPOINTS: dict[str, Ranks] = {
    "simulator": Ranks(on_simulator, is_ordered=True, is_real=False),
    "shared memory": Ranks(on_shared_memory, is_ordered=True),
    "gloo, ordered": Ranks(on_gloo, is_ordered=True),
    "gloo, native": Ranks(on_gloo, is_ordered=False),
    "gloo, in a thread": Ranks(on_gloo_in_comm_thread, is_ordered=False),
}
