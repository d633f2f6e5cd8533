"""What error feedback loses when the last minibatch of every epoch is smaller: nothing now, and by the rule before.

Four workers exchange 1-bit means of vectors in epochs of three full minibatches and a last one in which they have
unequal shares.  `lost` is the norm of the sum of exact weighted means, minus what was delivered, minus what is still
remembered.  The rule before kept residuals in a worker's own units, so that each mean weighted them anew.  It is
replayed in numpy, and what it remembers counts for the shares of a full minibatch.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

import paceline as pl
from paceline.codecs import OneBit
from paceline.collectives import SyncVote, mean_encoded
from paceline.state import per_worker
from paceline.stripes import stripe_of

WORKERS = 4
NUMEL = 2048
EPOCH = [[32, 32, 32, 32]] * 3 + [[12, 12, 11, 1]]
Vector = NDArray[np.float64]


def vector(rank: int, step: int) -> Tensor:
    """A gradient of one worker: a slope that all have in common, and noise."""
    slope = torch.linspace(-0.3, 0.5, NUMEL)
    return slope + torch.randn(NUMEL, generator=torch.Generator().manual_seed(1000 * step + rank))


def exact(step: int) -> Vector:
    weights = EPOCH[step % len(EPOCH)]
    return sum(w * vector(rank, step).double().numpy() for rank, w in enumerate(weights)) / sum(weights)


@dataclass(frozen=True)
class Means(pl.Strategy):
    """The means of some epochs; the first worker's sum and what all remember are put into `found`."""

    epochs: int
    found: dict[str, Any] = field(default_factory=dict[str, Any])

    async def worker(self, w: pl.Replica) -> None:
        slot: Any = None

        def remember(name: str, /, *, rule: Any, version: int = 1, **initial: Any) -> Any:
            nonlocal slot
            slot = w.state(name, rule=per_worker, version=version, **initial)
            return slot

        state = OneBit().codec_state(remember, torch.zeros(NUMEL), key=w.rank)
        delivered = torch.zeros(NUMEL, dtype=torch.float64)
        for step in range(self.epochs * len(EPOCH)):
            x = vector(w.rank, step)
            await mean_encoded(w.endpoint, x, SyncVote(EPOCH[step % len(EPOCH)][w.rank]), state)
            delivered += x
        remembered = slot.owner_residual.double()
        for start, stop, unit in slot.shares:
            remembered[start:stop] += unit * slot.residual[start:stop]
        self.found[f"remembered {w.rank}"] = remembered.numpy()
        self.found["delivered"] = delivered.numpy()


def now(epochs: int) -> tuple[Vector, Vector]:
    """What the library delivers and remembers."""
    strategy = Means(epochs)
    task = pl.Task(
        lambda: torch.nn.Linear(1, 1), lambda m, b: m(b[0]).sum(), [torch.ones(8, 1)], 8, torch.optim.SGD, steps=1
    )
    pl.simulate(task, strategy, pl.Cluster(workers=WORKERS))
    return strategy.found["delivered"], sum(strategy.found[f"remembered {rank}"] for rank in range(WORKERS))


def one_bit(x: Vector) -> Vector:
    """The decoded values of OneBit, in buckets of 512."""
    decoded = np.empty_like(x)
    for start in range(0, len(x), 512):
        bucket = x[start : start + 512]
        high = bucket >= 0
        for side in (high, ~high):
            decoded[start : start + 512][side] = bucket[side].mean() if side.any() else 0.0
    return decoded


def before(epochs: int) -> tuple[Vector, Vector]:
    """What the rule before delivered and remembered."""
    stripes = [stripe_of(j, NUMEL, WORKERS, unit=512) for j in range(WORKERS)]
    residuals = np.zeros((WORKERS, NUMEL))
    owned = np.zeros(NUMEL)
    delivered = np.zeros(NUMEL)
    for step in range(epochs * len(EPOCH)):
        weights = np.array(EPOCH[step % len(EPOCH)], dtype=np.float64)
        mean = np.zeros(NUMEL)
        for rank in range(WORKERS):
            wanted = vector(rank, step).double().numpy() + residuals[rank]
            decoded = one_bit(wanted)
            residuals[rank] = wanted - decoded
            mean += weights[rank] / weights.sum() * decoded
        for stripe in stripes:
            wanted = mean[stripe] + owned[stripe]
            delivered[stripe] += one_bit(wanted)
            owned[stripe] = wanted - one_bit(wanted)
    return delivered, residuals.mean(0) + owned


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, nargs="+", default=[10, 100])
    arguments = parser.parse_args()
    table = Table("epochs", "rule", "sent", "lost", "lost of sent")
    for epochs in arguments.epochs:
        meant = sum(exact(step) for step in range(epochs * len(EPOCH)))
        for name, rule in (("before", before), ("now", now)):
            delivered, remembered = rule(epochs)
            sent = np.linalg.norm(delivered)
            lost = np.linalg.norm(meant - delivered - remembered)
            table.add_row(str(epochs), name, f"{sent:.1f}", f"{lost:.3g}", f"{lost / sent:.2g}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
