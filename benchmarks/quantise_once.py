"""One rounding or two: the error of a mean by QSGD and TernGrad, and the bytes that a worker sends for it.

By "gather" each worker's vector is rounded once, as in the papers.  By "stripes" the mean is rounded again, for fewer
bytes.  The error is the root mean square of mean minus exact mean, relative to that of the exact mean.  Workers have
either independent vectors, as with small minibatches, or the same vector, as with large ones.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import paceline as pl
from paceline.codecs import QSGD, Codec, TernGrad
from paceline.collectives import SyncVote, mean_encoded

NUMEL = 1 << 17
CODECS: dict[str, Codec] = {
    "QSGD(), gather": QSGD(reduction="gather"),
    "QSGD(), stripes": QSGD(reduction="stripes"),
    "QSGD(levels=32767), stripes": QSGD(levels=32767, reduction="stripes"),
    "TernGrad(), gather": TernGrad(reduction="gather"),
    "TernGrad(), stripes": TernGrad(reduction="stripes"),
}


def vector(rank: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))


@dataclass(frozen=True)
class Once(pl.Strategy):
    """One mean of the workers' vectors; its error is put into `errors`."""

    codec: Codec
    is_common: bool
    errors: list[float] = field(default_factory=list[float])

    async def worker(self, w: pl.Replica) -> None:
        vectors = [vector(0 if self.is_common else rank) for rank in range(w.workers)]
        exact = torch.stack(vectors).double().mean(0)
        x = vectors[w.rank]
        slots = w.state("slots", count=torch.zeros(1, dtype=torch.int64))
        state = self.codec.codec_state(lambda *_, **__: slots, x, key=w.rank)
        await mean_encoded(w.endpoint, x, SyncVote(1.0), state)
        if w.rank == 0:
            self.errors.append(float((x.double() - exact).norm() / exact.norm()))


def measured(codec: Codec, workers: int, *, is_common: bool) -> tuple[float, float]:
    """The error, and the bytes a worker sends for each value."""
    strategy = Once(codec, is_common)
    task = pl.Task(
        lambda: torch.nn.Linear(1, 1), lambda m, b: m(b[0]).sum(), [torch.ones(64, 1)], 64, torch.optim.SGD, steps=1
    )
    run = pl.simulate(task, strategy, pl.Cluster(workers=workers))
    return strategy.errors[0], run.trace.bytes_sent(rank=workers - 1) / NUMEL


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8, 16])
    arguments = parser.parse_args()
    table = Table("workers", "codec", "bytes per value", "error, independent", "error, the same vector")
    for workers in arguments.workers:
        for name, codec in CODECS.items():
            apart, nbytes = measured(codec, workers, is_common=False)
            same, _ = measured(codec, workers, is_common=True)
            table.add_row(str(workers), name, f"{nbytes:.2f}", f"{apart:.4g}", f"{same:.4g}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
