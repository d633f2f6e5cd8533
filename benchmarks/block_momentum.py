"""Block momentum with workers that have momentum themselves, and on 8 to 64 workers: Fashion-MNIST, simulated.

CNTK's manual has a caveat: workers' momentum that is kept at a sync often diverges; one that is reset loses accuracy at
0.99, and not at 0.9, 0.5 and 0. It also says that 64 workers converge as SGD does. All runs have the same learning rate
for each sample: with more momentum a single step is smaller. Runs that are already in the --json file do not run again.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import paceline as pl
from benchmarks._frame import accuracy_of, arguments, markdown, read_runs, show, spread, table, worked, write_runs
from benchmarks.accuracy import loss, perceptron, pixels
from paceline.data import fashion_mnist
from paceline.training.scaling import time_constant_of

EPOCHS, BATCH = 10, 16  # BATCH is that of a worker.
RATE, LOWER_RATE = 0.001, 0.0005  # For each sample.
MOMENTA = (0.0, 0.5, 0.9, 0.99)  # Of steps of BATCH samples.
PERIODS = (16, 48)  # Steps of a block, with each momentum.
MOMENTUM = 0.0  # With each number of workers.
BY_WORKERS = [(n, RATE, period) for n in (8, 16, 32, 64) for period in (4, 16)] + [(64, LOWER_RATE, 4)]
SETTINGS = {"epochs": EPOCHS, "batch": BATCH}
MOMENTUM_HEAD = ["momentum", "SGD", "period", "a reset leaves", "reset", "kept"]
WORKERS_HEAD = [
    "workers",
    "rate",
    "SGD",
    "speed-up",
    "period",
    "block momentum",
    "speed-up",
    "blocks",
    "samples needed",
]
Key = tuple[str, int, float, float, int, int]  # Method, workers, rate, momentum, period, seed.
Runs = dict[Key, dict[str, Any]]


def strategy_of(method: str, period: int) -> pl.Strategy:
    if method == "sgd":
        return pl.AllReduceSGD()
    blocks = pl.BlockMomentum(period=period, optimizer_state="reset" if method == "reset" else "keep")
    return pl.Then(pl.AllReduceSGD(), blocks, epochs=1)  # The manual advises to start from a model that is trained.


def task_of(workers: int, rate: float, momentum: float, seed: int, data: fashion_mnist.FashionMnist) -> pl.Task:
    return pl.Task(
        model=perceptron,
        loss=loss,
        data=(pixels(data.images), data.labels.long()),
        batch=BATCH * workers,
        optimizer=partial(torch.optim.SGD, lr=rate * BATCH * (1 - momentum), momentum=momentum),
        epochs=EPOCHS,
        evaluate=accuracy_of(pixels(data.test_images), data.test_labels.long()),
        evaluate_every=EPOCHS * len(data.labels),  # Only at the end.
        schedule=pl.Schedule(warmup="1 epoch", start="base", decay="cosine"),
        scaling=pl.Scaling(base=BATCH),
        seed=seed,
    )


def result_of(
    method: str, workers: int, rate: float, momentum: float, period: int, seed: int, folder: Path | None
) -> dict[str, Any]:
    """One run."""
    began = time.process_time()
    task, strategy = task_of(workers, rate, momentum, seed, fashion_mnist.load(folder)), strategy_of(method, period)
    cluster = pl.Cluster(workers=workers, compute="10ms", bandwidth="1Gbit/s", latency="200us")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run = pl.simulate(task, strategy, cluster, strict=False)
    losses = [p.loss for p in run.trace.points[-workers * task.steps_per_epoch :] if p.loss is not None]
    return {
        "method": method,
        "workers": workers,
        "rate": rate,
        "momentum": momentum,
        "period": period,
        "seed": seed,
        "accuracy": round(run.final["accuracy"], 2),
        "loss": round(mean(losses), 4) if losses and all(map(math.isfinite, losses)) else None,  # Of the last epoch.
        "blocks": sum(s.rank == 0 for s in run.trace.syncs),
        "virtual_s": round(run.seconds, 2),
        "warnings": sorted({w.category.__name__ for w in warned}),
        "cpu_s": round(time.process_time() - began, 1),
    }


def key(run: dict[str, Any]) -> Key:
    return run["method"], run["workers"], run["rate"], run["momentum"], run["period"], run["seed"]


def of(
    runs: Runs, method: str, workers: int, momentum: float, period: int = 0, rate: float = RATE
) -> list[dict[str, Any]]:
    """The runs of a case, by their seeds."""
    return [run for k, run in sorted(runs.items()) if k[:5] == (method, workers, rate, momentum, period)]


def accuracy(runs: list[dict[str, Any]]) -> str:
    return spread([run["accuracy"] for run in runs], "{:.2f}") if runs else ""


def surviving(momentum: float, period: int) -> float:
    """The share of the workers' steps that a reset after so many steps leaves, under a constant gradient.

    >>> round(surviving(0.9, 16), 2), surviving(0.0, 16)
    (0.54, 1.0)
    """
    return 1 - momentum * (1 - momentum**period) / (period * (1 - momentum))


def momentum_lines(runs: Runs) -> list[list[str]]:
    return [
        [
            f"{m:g}",
            accuracy(of(runs, "sgd", 8, m)),
            str(period),
            f"{surviving(m, period):.0%}",
            accuracy(of(runs, "reset", 8, m, period)),
            accuracy(of(runs, "keep", 8, m, period)),
        ]
        for period in PERIODS
        for m in MOMENTA
    ]


def workers_line(workers: int, rate: float, period: int, runs: Runs) -> list[str]:
    sgd, block = of(runs, "sgd", workers, MOMENTUM, rate=rate), of(runs, "reset", workers, MOMENTUM, period, rate)
    blocks = f"{mean(run['blocks'] for run in block):,.0f}" if block else ""
    needed = time_constant_of(1 - 1 / workers, period * BATCH) * workers
    return [
        str(workers),
        f"{rate:g}",
        *(accuracy(sgd), speed_up(sgd, runs)),
        str(period),
        *(accuracy(block), speed_up(block, runs)),
        blocks,
        f"{needed:,.0f}",
    ]


def speed_up(own: list[dict[str, Any]], runs: Runs) -> str:
    """In virtual time, over one worker."""
    one = of(runs, "sgd", 1, MOMENTUM)
    if not (own and one):
        return ""
    return f"{mean(run['virtual_s'] for run in one) / mean(run['virtual_s'] for run in own):.1f}"


def cases() -> list[tuple[str, int, float, float, int]]:
    """Every method, with its workers, rate, momentum and period."""
    found = [("sgd", 1, rate, MOMENTUM, 0) for rate in (RATE, LOWER_RATE)]
    for m in MOMENTA:
        found += [("sgd", 8, RATE, m, 0), *((method, 8, RATE, m, p) for p in PERIODS for method in ("reset", "keep"))]
    for n, rate, period in BY_WORKERS:
        found += [("sgd", n, rate, MOMENTUM, 0), ("reset", n, rate, MOMENTUM, period)]
    # Without momentum there is nothing to reset or keep.
    return list(dict.fromkeys(case for case in found if case[0] != "keep" or case[3]))


def main() -> None:
    args = arguments(__doc__, "block-momentum.json", runs_of="case").parse_args()
    runs: Runs = {} if args.fresh else {key(run): run for run in read_runs(args.json, **SETTINGS)}

    def keep(found: Iterable[dict[str, Any]]) -> None:
        for run in found:
            runs[key(run)] = run
            print(f"{run['accuracy']:.2f} %, {run['cpu_s']:.0f} s: {key(run)}", file=sys.stderr, flush=True)
            write_runs(args.json, (runs[k] for k in sorted(runs)), **SETTINGS)

    if args.processes:
        fashion_mnist.load(args.data)  # If the data are missing, only one process says so.
        wanted: list[Key] = [(*case, seed) for seed in range(args.seeds) for case in cases()]
        keep(worked(result_of, [(*k, args.data) for k in wanted if k not in runs], args.processes))
    for rate in (RATE, LOWER_RATE):
        print(f"SGD on 1 worker at {rate:g}: {accuracy(of(runs, 'sgd', 1, MOMENTUM, rate=rate))}\n")
    for head, lines in (
        (MOMENTUM_HEAD, momentum_lines(runs)),
        (WORKERS_HEAD, [workers_line(*case, runs) for case in BY_WORKERS]),
    ):
        show(markdown(head, lines) if args.markdown else table(head, lines, right=0), width=160)
        print()
    print(f"{sum(run['cpu_s'] for run in runs.values()) / 60:.0f} minutes of one core in all")


if __name__ == "__main__":
    main()
