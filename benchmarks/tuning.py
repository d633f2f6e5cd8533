"""A short search for the learning rate beside a full sweep: Fashion-MNIST on 4 simulated workers.

The sweep trains with each of seven rates to the end, and has the accuracy on the test images for each. `tune` tries the
same rates in short trials, of which it sees only the training loss, with seeds that the sweep does not have. Runs that
are already in the --json file do not run again.
"""

from __future__ import annotations

import sys
import time
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

WORKERS, BATCH, EPOCHS = 4, 512, 15
OWN = 0.1  # The rate of the task that is given to the search.
RATES = pl.RateRange(0.01, 1.0, number=7)
METHODS: dict[str, pl.Strategy] = {
    "AllReduceSGD": pl.AllReduceSGD(),
    "PeriodicAveraging": pl.PeriodicAveraging(period=8),
}
BUDGETS = ("0.1 epochs", "0.25 epochs")  # Of the first trials.
SEARCH_SEED = 100  # Far from the seeds of the sweep; each search begins with another one.
SETTINGS = {"epochs": EPOCHS, "batch": BATCH, "workers": WORKERS}
SWEEP_HEAD = ["method", *(f"{rate:g}" for rate in RATES.rates)]
HEAD = ["method", "first trials", "rates chosen", "with the lowest loss", "accuracy", "best of the sweep", "cost"]
Key = tuple[str, str, float, int]  # Method, the sweep or the budget of a search, rate, seed.
Runs = dict[Key, dict[str, Any]]


def task_of(rate: float, seed: int, data: fashion_mnist.FashionMnist) -> pl.Task:
    return pl.Task(
        model=perceptron,
        loss=loss,
        data=(pixels(data.images), data.labels.long()),
        batch=BATCH,
        optimizer=partial(torch.optim.SGD, lr=rate, momentum=0.9),
        epochs=EPOCHS,
        evaluate=accuracy_of(pixels(data.test_images), data.test_labels.long()),
        evaluate_every=EPOCHS * len(data.labels),  # Only at the end.
        schedule=pl.Schedule(decay="cosine"),
        seed=seed,
    )


def result_of(method: str, kind: str, rate: float, seed: int, folder: Path | None) -> dict[str, Any]:
    """A training of the sweep, or a search."""
    began = time.process_time()
    task, cluster = task_of(rate, seed, fashion_mnist.load(folder)), pl.Cluster(workers=WORKERS)
    result: dict[str, Any] = {"method": method, "kind": kind, "rate": rate, "seed": seed}
    if kind == "sweep":
        run = pl.simulate(task, METHODS[method], cluster, strict=False)
        result["accuracy"] = round(run.final["accuracy"], 2)
    else:
        tuned = pl.tune(task, METHODS[method], cluster, rates=RATES, budget=kind)
        lowest = tuned.rungs[-1].ranked(1.0)[0].rate
        result |= {"chosen": tuned.rate, "lowest_loss": lowest, "share": round(tuned.share, 4)}
    return result | {"cpu_s": round(time.process_time() - began, 1)}


def key(run: dict[str, Any]) -> Key:
    return run["method"], run["kind"], run["rate"], run["seed"]


def accuracies(method: str, rate: float, runs: Runs) -> list[float]:
    """Of the trainings with that rate, by their seeds."""
    return [run["accuracy"] for k, run in sorted(runs.items()) if k[:3] == (method, "sweep", rate)]


def sweep_line(method: str, runs: Runs) -> list[str]:
    found = [accuracies(method, rate, runs) for rate in RATES.rates]
    return [method, *(spread(values, "{:.2f}") if values else "" for values in found)]


def line(method: str, budget: str, runs: Runs) -> list[str]:
    """What the searches of a budget have chosen, and what the sweep has at these rates."""
    searches = [run for k, run in sorted(runs.items()) if k[:2] == (method, budget)]
    swept = {rate: mean(values) for rate in RATES.rates if (values := accuracies(method, rate, runs))}
    if not searches or len(swept) < len(RATES.rates):
        return [method, budget, *[""] * 5]
    best = max(swept, key=swept.__getitem__)
    return [
        method,
        budget,
        ", ".join(f"{run['chosen']:g}" for run in searches),
        ", ".join(f"{run['lowest_loss']:g}" for run in searches),
        f"{mean(swept[run['chosen']] for run in searches):.2f} %",
        f"{swept[best]:.2f} % at {best:g}",
        f"{mean(run['share'] for run in searches):.2f} trainings",
    ]


def main() -> None:
    args = arguments(__doc__, "tuning.json", runs_of="rate, and searches").parse_args()
    runs: Runs = {} if args.fresh else {key(run): run for run in read_runs(args.json, **SETTINGS)}

    def keep(found: Iterable[dict[str, Any]]) -> None:
        for run in found:
            runs[key(run)] = run
            told = f"{run['accuracy']:.2f} %" if "accuracy" in run else f"chose {run['chosen']:g}"
            print(f"{told}, {run['cpu_s']:.0f} s: {key(run)}", file=sys.stderr, flush=True)
            write_runs(args.json, (runs[k] for k in sorted(runs)), **SETTINGS)

    if args.processes:
        fashion_mnist.load(args.data)  # If the data are missing, only one process says so.
        wanted = [(m, kind, OWN, SEARCH_SEED * (i + 1)) for i in range(args.seeds) for kind in BUDGETS for m in METHODS]
        wanted += [(m, "sweep", rate, seed) for seed in range(args.seeds) for rate in RATES.rates for m in METHODS]
        keep(worked(result_of, [(*k, args.data) for k in wanted if k not in runs], args.processes))
    swept = [sweep_line(method, runs) for method in METHODS]
    searched = [line(method, budget, runs) for method in METHODS for budget in BUDGETS]
    for head, lines in ((SWEEP_HEAD, swept), (HEAD, searched)):
        show(markdown(head, lines) if args.markdown else table(head, lines, right=1), width=160)
        print()
    print(f"{sum(run['cpu_s'] for run in runs.values()) / 60:.0f} minutes of one core in all")


if __name__ == "__main__":
    main()
