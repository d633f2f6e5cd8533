"""What one bit a value costs on handwritten digits: the length of its units, and methods that average models.

"units" exchanges gradients at every step with units of rows that are joined up to a length, with buckets, and without a
codec.  "averaging" exchanges models every 8 steps, without a codec and with `OneBit()`.  Gradients are those of 128
samples in all.  The rate drops tenfold after a half and after three quarters of the run.  Each figure is the mean over
the seeds: the test accuracy, and the loss on the training set.  "quadratic" averages every 4 of 160 steps on a
quadratic with curvatures from 0.01 to 1, and says how far above the minimum a run ends.
"""

from __future__ import annotations

import argparse
import warnings
from functools import partial
from statistics import mean

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from paceline.codecs import OneBit, rows
from paceline.data import digits

EPOCHS = 20
BATCH = 128  # Of all workers.
PARTS = ["units", "averaging", "quadratic"]
RATES = (0.1, 0.3, 0.6)
AVERAGING_RATES = (0.1, 0.3)


def join_rows(shortest: int) -> None:
    """From now on join rows until a unit has as many values."""
    rows.SHORTEST = shortest
    rows.units_of.cache_clear()


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


MODELS = {"perceptron": perceptron, "convolutions": convolutions}
UNITS: dict[str, OneBit | None] = {
    "no codec": None,
    "rows, at least 64": OneBit(),
    "rows, at least 128": OneBit(),
    "rows, at least 256": OneBit(),
    "buckets of 64": OneBit(bucket=64),
    "buckets of 512": OneBit(bucket=512),
}
AVERAGING: dict[str, pl.Averaging] = {
    "PeriodicAveraging(period=8)": pl.PeriodicAveraging(period=8),
    "AdaptiveAveraging(period=8)": pl.AdaptiveAveraging(period=8),
    "SlowMo(period=8)": pl.SlowMo(period=8),
    "BlockMomentum(period=8)": pl.BlockMomentum(period=8),
    "DiLoCo(period=8)": pl.DiLoCo(period=8),
}


def run_of(strategy: pl.Strategy, model: str, workers: int, rate: float, seed: int) -> tuple[float, float, float]:
    """The test accuracy in percent, the loss on the training set, and the bytes that a worker has sent."""
    x, y, test_x, test_y = digits()
    steps = EPOCHS * -(-len(y) // BATCH)

    def drop(step: int) -> float:
        return 1.0 if step < steps // 2 else 0.1 if step < steps * 3 // 4 else 0.01

    def evaluate(model: nn.Module) -> dict[str, float]:
        right = (model(test_x).argmax(1) == test_y).float().mean().item()
        return {"accuracy": 100 * right, "loss": F.cross_entropy(model(x), y).item()}

    task = pl.Task(
        model=MODELS[model],
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        data=(x, y),
        batch=BATCH,
        optimizer=partial(torch.optim.SGD, lr=rate, momentum=0.5),
        epochs=EPOCHS,
        evaluate=evaluate,
        evaluate_every=steps,
        schedule=drop,
        seed=seed,
    )
    run = pl.simulate(task, strategy, pl.Cluster(workers=workers), strict=False)
    return run.final["accuracy"], run.final["loss"], run.trace.bytes_sent(0)


def figures(strategy: pl.Strategy, model: str, workers: int, rate: float, seeds: int) -> tuple[str, str, float]:
    accuracies, losses, sent = zip(
        *(run_of(strategy, model, workers, rate, seed) for seed in range(seeds)), strict=True
    )
    return f"{mean(accuracies):.2f}", f"{mean(losses):.4f}", sent[0]


def units(models: list[str], seeds: int, workers: int) -> Table:
    table = Table("model", "units", "kB a worker", *(f"{what}, rate {r:g}" for r in RATES for what in ("%", "loss")))
    usual = rows.SHORTEST
    for model in models:
        for name, codec in UNITS.items():
            if name.startswith("rows"):
                join_rows(int(name.rpartition(" ")[2]))
            found = [figures(pl.AllReduceSGD(codec=codec), model, workers, rate, seeds) for rate in RATES]
            cells = [cell for accuracy, loss, _ in found for cell in (accuracy, loss)]
            table.add_row(model, name, f"{found[0][2] / 1e3:,.0f}", *cells)
            print(model, name, found[0][2], *cells, flush=True)
    join_rows(usual)
    return table


def averaging(seeds: int, every: list[int]) -> Table:
    heads = [
        f"{what}, rate {r:g}" for r in AVERAGING_RATES for what in ("%, no codec", "1-bit", "loss, no codec", "1-bit")
    ]
    table = Table("method", "workers", *heads)
    for name, strategy in AVERAGING.items():
        for workers in every:
            cells: list[str] = []
            for rate in AVERAGING_RATES:
                pair = [
                    figures(type(strategy)(period=8, codec=codec), "perceptron", workers, rate, seeds)
                    for codec in (None, OneBit())
                ]
                cells += [pair[0][0], pair[1][0], pair[0][1], pair[1][1]]
            table.add_row(name, str(workers), *cells)
            print(name, workers, *cells, flush=True)
    return table


def quadratic(every: list[int]) -> Table:
    numel = 600
    points = torch.randn(64, numel, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    curvature = torch.logspace(0, -2, numel, dtype=torch.float64)

    def point() -> nn.Module:
        model = nn.Module()
        model.w = nn.Parameter(torch.linspace(-1, 1, numel, dtype=torch.float64))
        return model

    def above(w: Tensor) -> float:
        return ((w - points.mean(0)).square() * curvature).sum().item()

    task = pl.Task(
        model=point,
        loss=lambda model, batch: 0.5 * ((model.w - batch[0]).square() * curvature).sum(1).mean(),
        data=[points],
        batch=8,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        steps=160,
    )
    table = Table("method", "workers", "no codec", "1-bit", title=f"from {above(point().w.detach()):.0f}")
    for strategy in AVERAGING.values():
        for workers in every:
            settings = {"period": 4} | ({"warmup": 8} if isinstance(strategy, pl.AdaptiveAveraging) else {})
            ends = [
                pl.simulate(task, type(strategy)(**settings, codec=codec), pl.Cluster(workers=workers)).params
                for codec in (None, OneBit(bucket=512))
            ]
            table.add_row(type(strategy).__name__, str(workers), *(f"{above(end):.2f}" for end in ends))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    console = Console(width=200)
    if "units" in arguments.what:
        console.print(units(arguments.models, arguments.seeds, workers=8))
    if "averaging" in arguments.what:
        console.print(averaging(arguments.seeds, [2, 4, 8]))
    if "quadratic" in arguments.what:
        console.print(quadratic([2, 4, 8]))


if __name__ == "__main__":
    main()
