"""All that is under law.  A new codec, rule, strategy or endpoint joins by one entry here, and then obeys or is caught."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from paceline import AllReduceSGD, BlockMomentum, Fp16, Fp32, OneBit, ParameterServer, PeriodicAveraging, Sgd
from paceline.codecs import Codec
from paceline.collectives import VOTE_NBYTES, stripe_of
from paceline.server import Rule
from paceline.strategy import Strategy
from tests.laws.ranks import Ranks, on_gloo, on_shared_memory, on_simulator

CODECS: dict[str, Codec] = {
    "fp32": Fp32(),
    "fp16": Fp16(),
    "one-bit": OneBit(),
    "one-bit of 64": OneBit(bucket=64),
}

RULES: dict[str, Rule] = {
    "sgd": Sgd(lr=0.05),
}


@dataclass(frozen=True)
class Case:
    """A strategy, and what the laws must know of it.

    `alone` says how closely one worker equals plain training with `plain`, by default the task's own optimizer.
    `nbytes(numel, workers, steps, rank)` is what a worker sends in a run of float32.
    """

    strategy: Strategy
    nbytes: Callable[[int, int, int, int], int]
    alone: Literal["bits", "rounding"] = "bits"
    plain: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    agrees: bool = True  # All ranks end with the same bits.


def ring(nbytes: int, workers: int) -> int:
    return 2 * (workers - 1) * nbytes // workers


def summed(period: int) -> Callable[[int, int, int, int], int]:
    """A ring all-reduce of all parameters and of a ballot, every `period` steps and at the end."""
    return lambda numel, workers, steps, rank: -(-steps // period) * ring(4 * numel + VOTE_NBYTES, workers)


def striped(codec: Codec) -> Callable[[int, int, int, int], int]:
    """Every other rank's stripe with a ballot, then the owned stripe to every other rank."""

    def nbytes(numel: int, workers: int, steps: int, rank: int) -> int:
        sizes = [s.stop - s.start for s in (stripe_of(j, numel, workers, unit=512) for j in range(workers))]
        encoded: list[Any] = [codec.nbytes(size) for size in sizes]
        away = sum(encoded[j] + VOTE_NBYTES for j in range(workers) if j != rank)
        return steps * (away + (workers - 1) * encoded[0])

    return nbytes


def served(numel: int, workers: int, steps: int, rank: int) -> int:
    """A push of all parameters at every step; the first worker brings the first value too."""
    return 4 * numel * (steps + (rank == 0))


STRATEGIES: dict[str, Case] = {
    "all-reduce-sgd": Case(AllReduceSGD(), summed(1)),
    "all-reduce-sgd by fp32": Case(AllReduceSGD(codec=Fp32()), striped(Fp32())),
    "all-reduce-sgd by fp16": Case(AllReduceSGD(codec=Fp16()), striped(Fp16())),
    "all-reduce-sgd by one-bit": Case(AllReduceSGD(codec=OneBit()), striped(OneBit())),
    "periodic-averaging": Case(PeriodicAveraging(period=4), summed(4)),
    "block-momentum": Case(BlockMomentum(period=4), summed(4), alone="rounding"),
    "block-momentum, kept": Case(BlockMomentum(period=4, reset=False), summed(4), alone="rounding"),
    "block-momentum, classical": Case(BlockMomentum(period=3, momentum=0.5, rate=0.8, nesterov=False), summed(3), alone="rounding"),
    "parameter-server": Case(
        ParameterServer(rule=Sgd(lr=0.05)), served, plain=lambda params: torch.optim.SGD(params, lr=0.05), agrees=False
    ),
    "parameter-server of 1": Case(
        ParameterServer(rule=Sgd(lr=0.05), servers=1), served, plain=lambda params: torch.optim.SGD(params, lr=0.05), agrees=False
    ),
}
# Block momentum that resets the optimizer, or with eta and rate of its own, is another method on one worker too: its reference
# is the outer loop in test_lattice.
ALONE = {name: case for name, case in STRATEGIES.items() if name not in ("block-momentum", "block-momentum, classical")}
ORDERED = {name: case for name, case in STRATEGIES.items() if case.strategy.is_ordered}

ENDPOINTS: dict[str, Ranks] = {
    "simulator": Ranks(on_simulator, is_ordered=True, is_real=False),
    "shared memory": Ranks(on_shared_memory, is_ordered=True),
    "gloo, ordered": Ranks(on_gloo, is_ordered=True),
    "gloo, native": Ranks(on_gloo, is_ordered=False),
}
