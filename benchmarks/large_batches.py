"""Large minibatches with momentum SGD, LARS and LAMB: Fashion-MNIST, the same number of epochs for every size.

A scaled rate is that of plain SGD with 256 samples, times the size by 256. The others are chosen for each method
and size out of seven, by the accuracy of one run on images that no run trains on. The table has the test accuracy of
other seeds. All rates fall linearly to zero. Runs that are already in the --json file do not run again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import paceline as pl
from benchmarks._frame import accuracy_of, arguments, markdown, read_runs, show, spread, table, worked, write_runs
from benchmarks.accuracy import loss, perceptron, pixels
from paceline.data import fashion_mnist
from paceline.optimizers import LAMB, LARS

BASE, SIZES = 256, (256, 1024, 4096, 8192, 16384)
TRAINED = 49_152  # Images, a multiple of every size. The other 10,848 choose the rates.
EPOCHS, WARMUP = 15, 2
TUNING_SEED = 100  # It evaluates on the images that are held out.
TRUST = 0.1
SGD_RATES = (0.03, 0.06, 0.1, 0.2, 0.3, 0.4, 0.8)
LARS_RATES = (0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
LAMB_RATES = (0.005, 0.01, 0.02, 0.03, 0.04, 0.08, 0.16)
SETTINGS = {"epochs": EPOCHS, "warmup": WARMUP, "images": TRAINED, "trust": TRUST}
Key = tuple[str, int, int, float, int]  # Method, samples of a step, workers, rate, seed.
Runs = dict[Key, dict[str, Any]]


@dataclass(frozen=True)
class Method:
    """`rates` are the ones to choose from; without them it has the rate of plain SGD with 256 samples, scaled."""

    optimizer: Callable[..., torch.optim.Optimizer]
    rates: tuple[float, ...] = ()
    warms_up: bool = False
    scaling: pl.Scaling | None = None


SGD = partial(torch.optim.SGD, momentum=0.9)
METHODS = {
    "SGD": Method(SGD, SGD_RATES),
    "SGD, warm-up": Method(SGD, SGD_RATES, warms_up=True),
    "SGD, scaled rate": Method(SGD, scaling=pl.Scaling(base=BASE, momentum="none")),
    "SGD, scaled rate, warm-up": Method(SGD, warms_up=True, scaling=pl.Scaling(base=BASE, momentum="none")),
    "SGD, scaled rate and momentum, warm-up": Method(SGD, warms_up=True, scaling=pl.Scaling(base=BASE)),
    "LARS, warm-up": Method(partial(LARS, trust=TRUST), LARS_RATES, warms_up=True),
    "LAMB, warm-up": Method(partial(LAMB, weight_decay=0.0), LAMB_RATES, warms_up=True),
}
PLAIN, TOGETHER, MANY = "SGD", ("LARS, warm-up", 8192), 8  # What also runs on so many workers.
# LARS with other trust coefficients, and the rate that makes the same step of a layer; biases step by the rate alone.
TRUSTS = {f"LARS(trust={trust:g})": trust for trust in (0.001, 0.01, 1.0)}
TRUSTED = {name: Method(partial(LARS, trust=trust), warms_up=True) for name, trust in TRUSTS.items()}


def task_of(method: Method, size: int, rate: float, seed: int, data: fashion_mnist.FashionMnist) -> pl.Task:
    images, labels = pixels(data.images), data.labels.long()
    held_out = (images[TRAINED:], labels[TRAINED:])
    seen = held_out if seed == TUNING_SEED else (pixels(data.test_images), data.test_labels.long())
    warmup = f"{WARMUP} epochs" if method.warms_up else None
    start = {} if warmup is None else {"warmup": warmup, "start": 0.1 if method.scaling is None else "base"}
    return pl.Task(
        model=perceptron,
        loss=loss,
        data=(images[:TRAINED], labels[:TRAINED]),
        batch=size,
        optimizer=partial(method.optimizer, lr=rate),
        epochs=EPOCHS,
        evaluate=accuracy_of(*seen),
        evaluate_every=EPOCHS * TRAINED,  # Only at the end.
        schedule=pl.Schedule(decay="polynomial", **start),
        scaling=method.scaling,
        seed=seed,
    )


def result_of(name: str, size: int, workers: int, rate: float, seed: int, folder: Path | None) -> dict[str, Any]:
    """One run."""
    began = time.process_time()
    task = task_of((METHODS | TRUSTED)[name], size, rate, seed, fashion_mnist.load(folder))
    run = pl.simulate(task, pl.AllReduceSGD(), pl.Cluster(workers=workers), strict=False, nonfinite="pass")
    losses = [p.loss for p in run.trace.points[-workers * (TRAINED // size) :] if p.loss is not None]
    return {
        "method": name,
        "size": size,
        "workers": workers,
        "rate": rate,
        "seed": seed,
        "accuracy": round(run.final["accuracy"], 2),
        "loss": round(mean(losses), 4) if all(map(isfinite, losses)) else None,  # Of the last epoch.
        "cpu_s": round(time.process_time() - began, 1),
    }


def key(run: dict[str, Any]) -> Key:
    return run["method"], run["size"], run["workers"], run["rate"], run["seed"]


def choices(name: str, size: int) -> list[Key]:
    """The runs that choose a rate."""
    return [(name, size, 1, rate, TUNING_SEED) for rate in METHODS[name].rates]


def rate_of(name: str, size: int, runs: Runs) -> float:
    """The rate that was chosen; a method that scales it has that of 256 samples."""
    method = METHODS[name]
    wanted = choices(name, size) if method.rates else choices(PLAIN, BASE)
    return max(wanted, key=lambda k: runs[k]["accuracy"])[3]


def finals(seeds: int, runs: Runs) -> list[Key]:
    """The runs of the table, at the rates that were chosen."""
    rows = [(name, size, 1) for size in SIZES for name, m in METHODS.items() if size > BASE or m.scaling is None]
    rated = [(*row, rate_of(*row[:2], runs)) for row in [*rows, (*TOGETHER, MANY)]]
    rated += [(name, TOGETHER[1], 1, trusted_rate(name, runs)) for name in TRUSTS]
    return [(*row, seed) for row in rated for seed in range(seeds)]


def trusted_rate(name: str, runs: Runs) -> float:
    return round(rate_of(*TOGETHER, runs) * TRUST / TRUSTS[name], 6)


def accuracies(name: str, size: int, workers: int, runs: Runs) -> list[float]:
    rate = trusted_rate(name, runs) if name in TRUSTS else rate_of(name, size, runs)
    return [run["accuracy"] for k, run in sorted(runs.items()) if k[:4] == (name, size, workers, rate) and k[4] < 100]


def lines(runs: Runs) -> list[list[str]]:
    """A line for each method: accuracies by size, and below them the difference from plain SGD with 256 samples."""
    plain = mean(accuracies(PLAIN, BASE, 1, runs))
    made: list[list[str]] = []
    for name, method in METHODS.items():
        cells: list[str] = []
        for size in SIZES:
            found = accuracies(name, size, 1, runs)
            rate = rate_of(name, size, runs) * (size / BASE if method.scaling is not None else 1)
            cells.append(f"{spread(found, '{:.2f}')} ({mean(found) - plain:+.2f}), {rate:.3g}" if found else "")
        made.append([name, *cells])
    return made


def choice_lines(runs: Runs) -> list[list[str]]:
    """The held-out accuracy of every rate that was tried."""
    made: list[list[str]] = []
    for name, method in METHODS.items():
        for size in SIZES if method.rates else ():
            best = rate_of(name, size, runs)
            cells = (f"{runs[k]['accuracy']:.2f}" for k in choices(name, size))
            marked = [
                f"{rate:g}: {cell}" + " *" * (rate == best) for rate, cell in zip(method.rates, cells, strict=True)
            ]
            made.append([name, str(size), *marked])
    return made


def variant_lines(runs: Runs) -> list[list[str]]:
    """One row of the first table on more workers, and with other trust coefficients."""
    name, size = TOGETHER
    rate = rate_of(name, size, runs)
    variants = [(f"LARS(trust={TRUST:g})", f"{rate:g}", n, accuracies(name, size, n, runs)) for n in (1, MANY)]
    variants += [(other, f"{trusted_rate(other, runs):g}", 1, accuracies(other, size, 1, runs)) for other in TRUSTS]
    return [[shown, rate, f"{n}", spread(found, "{:.2f}")] for shown, rate, n, found in variants]


def main() -> None:
    args = arguments(__doc__, "large-batches.json", runs_of="method and size").parse_args()
    runs: Runs = {} if args.fresh else {key(run): run for run in read_runs(args.json, **SETTINGS)}

    def complete(wanted: Sequence[Key]) -> None:
        for run in worked(result_of, [(*k, args.data) for k in wanted if k not in runs], args.processes):
            runs[key(run)] = run
            print(f"{run['accuracy']:.2f} %, {run['cpu_s']:.0f} s: {key(run)}", file=sys.stderr, flush=True)
            write_runs(args.json, (runs[k] for k in sorted(runs)), **SETTINGS)

    if args.processes:
        fashion_mnist.load(args.data)  # If the data are missing, only one process says so.
        complete([k for size in SIZES for name in METHODS for k in choices(name, size)])
        complete(finals(args.seeds, runs))
    tables = (
        (["method", *(f"{size:,}" for size in SIZES)], lines(runs)),
        (["method", "samples", *[""] * len(SGD_RATES)], choice_lines(runs)),
        ([f"{TOGETHER[1]:,} samples", "rate", "workers", "accuracy"], variant_lines(runs)),
    )
    for head, made in tables:
        show(markdown(head, made) if args.markdown else table(head, made, right=1), width=200)
        print()
    print(f"{sum(run['cpu_s'] for run in runs.values()) / 60:.0f} minutes of one core in all")


if __name__ == "__main__":
    main()
