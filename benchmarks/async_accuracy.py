"""The cost of staleness in accuracy: Fashion-MNIST by asynchronous methods on 1 to 64 simulated workers.

Every gradient is of 32 samples with any number of workers. All runs of a seed see the same minibatches for as many
epochs. Gradients take unequal times, and every fourth worker takes five times as long as the others. All methods run at
the rate that is best for one worker. With 16 and 64 workers they also run at their own best of a few rates, which are
first tried on held-out images. Runs that are already in the --json file do not run again.

Delay compensation was tried with 16 workers that are less unequal (every fourth is twice as slow) at a rate of 0.05 for
5 epochs, on one seed and held-out images. There ASGD without it had 86.38 %. With a constant lam: 0.04: 85.83, 4:
86.18, 100: diverged. Adaptive: 0.5: 86.30, 2: 86.95, 10: 86.44, 20: 87.53, 50 and 100: diverged. The best of these nine
settings runs here, which favours it: on a second seed it had 86.38, and ASGD 86.30.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from rich.table import Table

import paceline as pl
from benchmarks._accuracy_cases import SWEEP_SEED, Case
from benchmarks._async_accuracy_chart import chart
from benchmarks._frame import accuracy_of, arguments, as_code, markdown, read_runs, show, table, worked, write_runs
from benchmarks.accuracy import loss, perceptron, pixels
from paceline.data import fashion_mnist

WORKERS = (1, 4, 16, 64)
TUNED = (16, 64)  # With these numbers of workers every method also has its own rate.
EPOCHS, MINIBATCH = 10, 32  # Samples of one gradient.
RATE = 0.05  # The best of RATES for one worker, by `sweep`.
RATES, HIGH_RATES = (0.005, 0.01, 0.02, 0.05, 0.1), (0.05, 0.1, 0.2, 0.5, 1.0)
SHARD = ", servers=1"
PLAIN, MOMENTUM, TOGETHER = (
    "ParameterServer(rule=Sgd(lr=RATE))",
    "AsyncMomentum(lr=RATE, unit_gain=True)",
    "AllReduceSGD()",
)
METHODS = {  # Rates to try. Updates divided by their number or their staleness tolerate higher ones.
    PLAIN: RATES,
    "ParameterServer(rule=Scaled(Sgd(lr=RATE)))": HIGH_RATES,
    "SoftSync(lr=RATE)": HIGH_RATES,
    "StaleSynchronous(lr=RATE, bound=4)": RATES,
    "DelayCompensated(lr=RATE, lam=20, adaptive=True)": RATES,
    MOMENTUM: RATES,
    TOGETHER: HIGH_RATES,
}
TITLES = {
    "accuracy": "test accuracy, %",
    "own": "test accuracy, %, each method at its own best rate",
    "staleness": "mean staleness of an update, and the greatest",
    "updates": "new versions of the model",
    "virtual_s": "virtual seconds",
}
WIDTH = 170  # The width of tables without a terminal.
SETTINGS = {"epochs": EPOCHS, "minibatch": MINIBATCH}
Runs = dict[tuple[str, int], dict[str, Any]]


def case_of(method: str, workers: int, rate: float = RATE, *, held_out: bool = False) -> Case:
    """A method with a number of workers. With one worker nothing is stale, and all methods that push gradients without
    momentum are equal."""
    method = PLAIN if workers == 1 and method not in (MOMENTUM, TOGETHER) else method
    written = method if method == TOGETHER else f"{method.replace('RATE', f'{rate:g}')[:-1]}{SHARD})"
    return Case(written, rate=rate, workers=workers, held_out=held_out)


def sweep() -> list[Case]:
    """The rates that are tried: for one worker, and for every method with many."""
    one = [case_of(PLAIN, 1, rate, held_out=True) for rate in (*RATES, 0.2)]
    return one + [
        case_of(method, n, rate, held_out=True) for n in TUNED for method, rates in METHODS.items() for rate in rates
    ]


def own_rate(method: str, workers: int, runs: Runs) -> float | None:
    """The best of the rates that were tried; None if not all of them have run."""
    tried = {
        rate: runs.get((case_of(method, workers, rate, held_out=True).key, SWEEP_SEED)) for rate in METHODS[method]
    }
    found = {rate: run["accuracy"] for rate, run in tried.items() if run is not None}
    return max(found, key=found.__getitem__) if len(found) == len(tried) else None


def shown(method: str, own: bool) -> str:
    return method.replace("RATE", "..." if own else f"{RATE:g}")


def cluster_of(workers: int, seed: int) -> pl.Cluster:
    """One shard is not the bottleneck: 64 workers push about 1,000 gradients a second, and its network card takes
    2,800."""
    slow = dict.fromkeys(range(3, workers, 4), 5.0)
    return pl.Cluster(
        workers=workers, compute=pl.Stragglers(usual=pl.LogNormal("50ms", sigma=0.3), slow=slow), seed=seed
    )


def task_of(case: Case, seed: int, data: fashion_mnist.FashionMnist) -> pl.Task:
    images, labels = pixels(data.images), data.labels.long()
    test_images, test_labels = pixels(data.test_images), data.test_labels.long()
    if case.held_out:
        (images, test_images), (labels, test_labels) = images.split(50_000), labels.split(50_000)
    whole = MINIBATCH * max(WORKERS)
    kept = len(labels) // whole * whole  # Every minibatch is then full, with any number of workers.

    return pl.Task(
        model=perceptron,
        loss=loss,
        data=(images[:kept], labels[:kept]),
        batch=MINIBATCH * case.workers,
        optimizer=partial(torch.optim.SGD, lr=case.rate),
        epochs=EPOCHS,
        evaluate=accuracy_of(test_images, test_labels),
        evaluate_every=EPOCHS * kept,  # Only at the end.
        seed=seed,
    )


def result_of(case: Case, seed: int, folder: Path | None) -> dict[str, Any]:
    """One run."""
    began = time.perf_counter()
    task = task_of(case, seed, fashion_mnist.load(folder))
    run = pl.simulate(task, case.strategy, cluster_of(case.workers, seed), strict=False)
    trace, losses = (
        run.trace,
        [p.loss for p in run.trace.points if p.loss is not None][-case.workers * task.steps_per_epoch :],
    )
    versions = {p.step for p in trace.points if p.staleness is not None}
    return {
        "case": case.key,
        "seed": seed,
        "accuracy": round(run.final["accuracy"], 2),
        "loss": round(mean(losses), 4) if all(map(math.isfinite, losses)) else None,  # Of the last epoch.
        "staleness": trace.mean_staleness(),
        "greatest_staleness": max(trace.staleness_counts, default=None),
        "updates": len(versions) if case.strategy.servers else task.total_steps,
        "virtual_s": round(run.seconds, 3),
        "wall_s": round(time.perf_counter() - began, 1),
    }


def summary(runs: Runs, *, own: bool) -> list[dict[str, Any]]:
    """A row for each method and number of workers that has run, at the common rate or at its `own`: the mean over its
    seeds."""
    rows: list[dict[str, Any]] = []
    for method in METHODS:
        for workers in TUNED if own else WORKERS:
            rate = own_rate(method, workers, runs) if own else RATE
            key = "" if rate is None else case_of(method, workers, rate).key
            found = [run for (other, _), run in sorted(runs.items()) if other == key]
            if not found:
                continue
            accuracies, stale = (
                [run["accuracy"] for run in found],
                [run["staleness"] for run in found if run["staleness"] is not None],
            )
            rows.append(
                {
                    "method": shown(method, own),
                    "workers": workers,
                    "rate": rate,
                    "seeds": len(found),
                    "accuracy": mean(accuracies),
                    "spread": stdev(accuracies) if len(found) > 1 else 0.0,
                    "staleness": mean(stale) if stale else None,
                    "greatest_staleness": max(run["greatest_staleness"] for run in found) if stale else None,
                    "updates": mean(run["updates"] for run in found),
                    "virtual_s": mean(run["virtual_s"] for run in found),
                }
            )
    return rows


def drawn(runs: Runs) -> list[dict[str, Any]]:
    """The rows of the chart: many workers at their method's own rate, few workers at the common rate."""
    few = [row for row in summary(runs, own=False) if row["workers"] not in TUNED]
    names = {shown(method, False): shown(method, True) for method in METHODS}
    return [row | {"method": names[row["method"]]} for row in few] + summary(runs, own=True)


def cell(row: dict[str, Any], field: str) -> str:
    if field == "accuracy":
        return f"{row['accuracy']:.2f} " + (
            f"± {row['spread']:.2f}" if row["seeds"] > 2 else f"({row['seeds']} of 3 seeds)"
        )
    if field == "own":
        return f"{cell(row, 'accuracy')} at {row['rate']:g}"
    if field == "staleness":
        return "" if row["staleness"] is None else f"{row['staleness']:.1f}, {row['greatest_staleness']}"
    return f"{row[field]:,.0f}"


def lines(rows: list[dict[str, Any]], field: str) -> list[list[str]]:
    """The rows of a table: one method a row, one number of workers a column."""
    found = {(row["method"], row["workers"]): cell(row, field) for row in rows}
    methods = dict.fromkeys(row["method"] for row in rows)
    return [[method, *(found.get((method, workers), "") for workers in counts(field))] for method in methods]


def counts(field: str) -> tuple[int, ...]:
    return TUNED if field == "own" else WORKERS


def head(workers: int) -> str:
    return f"{workers} worker{'s' if workers > 1 else ''}"


def sweep_table(runs: Runs) -> Table:
    rates = sorted({*RATES, *HIGH_RATES})
    made = Table(
        "", *(f"{rate:g}" for rate in rates), title=f"rates that were tried: {EPOCHS} epochs, 10,000 images held out"
    )
    for method, workers in [(PLAIN, 1), *((method, workers) for workers in TUNED for method in METHODS)]:
        found = [runs.get((case_of(method, workers, rate, held_out=True).key, SWEEP_SEED)) for rate in rates]
        if any(found):
            made.add_row(
                f"{head(workers)}, {shown(method, True)}",
                *("" if run is None else f"{run['accuracy']:.2f}" for run in found),
            )
    return made


def main() -> None:
    parser = arguments(__doc__, "async-accuracy.json")
    parser.add_argument("--sweep", action="store_true", help="run only the choice of the rate")
    args = parser.parse_args()
    runs: Runs = {} if args.fresh else {(run["case"], run["seed"]): run for run in read_runs(args.json, **SETTINGS)}
    if args.processes:
        fashion_mnist.load(args.data)  # If the data are missing, only one process says so.
        run_all([(case, SWEEP_SEED) for case in sweep()], runs, args)
        if not args.sweep:
            cases = [case_of(method, workers) for workers in WORKERS for method in METHODS]
            own = [(method, workers, own_rate(method, workers, runs)) for workers in TUNED for method in METHODS]
            cases += [case_of(method, workers, rate) for method, workers, rate in own if rate is not None]
            run_all([(case, seed) for seed in range(args.seeds) for case in dict.fromkeys(cases)], runs, args)
    show(sweep_table(runs), width=WIDTH)
    for field, title in TITLES.items():
        if not (rows := summary(runs, own=field == "own")):
            continue
        columns, told = ["method", *map(head, counts(field))], lines(rows, field)
        page = f"\n{title}\n\n{markdown(columns, as_code(told))}"
        show(page if args.markdown else table(columns, told, title=title, right=1), width=WIDTH)
    if rows := drawn(runs):
        args.json.with_suffix(".svg").write_text(chart(rows))


def run_all(jobs: list[tuple[Case, int]], runs: Runs, args: argparse.Namespace) -> None:
    """Add the missing runs to `runs`, and to the file."""
    missing = [(case, seed, args.data) for case, seed in jobs if (case.key, seed) not in runs]
    for run in worked(result_of, missing, args.processes):
        runs[run["case"], run["seed"]] = run
        print(
            f"{run['accuracy']:.2f} %, {run['wall_s']:.0f} s: seed {run['seed']}, {run['case']}",
            file=sys.stderr,
            flush=True,
        )
        write_runs(args.json, (runs[key] for key in sorted(runs)), **SETTINGS)


if __name__ == "__main__":
    main()
