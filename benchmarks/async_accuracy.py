"""What staleness costs in accuracy, and what wins some of it back: Fashion-MNIST by asynchronous methods on 1 to 64 simulated workers.

Every gradient is that of 32 samples, whatever the workers, and all runs of a seed see the same minibatches for as many epochs; the rate
is constant, and the best for one worker.  Gradients take unequal times, and every fourth worker takes twice as long as the others.
Runs that --json already holds are not run again.

Delay compensation was tried with 16 workers for 5 epochs, on one seed and held-out images, where ASGD without it had 86.38 %.  With a
constant lam: 0.04: 85.83, 4: 86.18, 100: diverged.  Adaptive: 0.5: 86.30, 2: 86.95, 10: 86.44, 20: 87.53, 50 and 100: diverged.  The
best of these nine settings runs here, which flatters it: on a second seed it had 86.38, and ASGD 86.30.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import paceline as pl
from benchmarks._accuracy_cases import SWEEP_SEED, Case
from benchmarks._async_accuracy_chart import chart
from benchmarks.accuracy import loss, perceptron, pixels
from paceline.data import fashion_mnist

WORKERS = (1, 4, 16, 64)
EPOCHS, MINIBATCH = 10, 32  # Samples of one gradient.
RATES, RATE = (0.02, 0.05, 0.1, 0.2), 0.05  # The best of them for one worker, by `sweep`.
SHARD = ", servers=1"
PLAIN, MOMENTUM = f"ParameterServer(rule=Sgd(lr={RATE}){SHARD})", f"AsyncMomentum(lr={RATE}, unit_gain=True{SHARD})"
TOGETHER = "AllReduceSGD()"
METHODS = (  # With `workers` for their number.
    PLAIN,
    f"ParameterServer(rule=Sgd(lr={RATE} / workers){SHARD})",
    f"ParameterServer(rule=Scaled(Sgd(lr={RATE})){SHARD})",
    f"SoftSync(lr={RATE}{SHARD})",
    f"StaleSynchronous(lr={RATE}, bound=4{SHARD})",
    f"DelayCompensated(lr={RATE}, lam=20, adaptive=True{SHARD})",
    MOMENTUM,
    TOGETHER,
)
TITLES = {
    "accuracy": "test accuracy, %",
    "staleness": "mean staleness of an update, and the greatest",
    "updates": "new versions of the model",
    "virtual_s": "virtual seconds",
}
Runs = dict[tuple[str, int], dict[str, Any]]


def case_of(method: str, workers: int) -> Case:
    """A method with so many workers.  With one nothing is stale, and all that push gradients without momentum are the same."""
    method = PLAIN if workers == 1 and method not in (MOMENTUM, TOGETHER) else method
    return Case(method.replace("workers", str(workers)), rate=RATE, workers=workers)


def sweep() -> list[Case]:
    """The rates that were tried."""
    return [Case(f"ParameterServer(rule=Sgd(lr={rate}){SHARD})", rate=rate, workers=1, held_out=True) for rate in RATES]


def shown(method: str) -> str:
    return method.replace(SHARD, "")


def cluster_of(workers: int, seed: int) -> pl.Cluster:
    """One shard is not what limits them: 64 workers push about 1,000 gradients a second, and its network card takes 2,800."""
    slow = dict.fromkeys(range(3, workers, 4), 2.0)
    return pl.Cluster(workers=workers, compute=pl.Stragglers(usual=pl.LogNormal("50ms", sigma=0.3), slow=slow), seed=seed)


def task_of(case: Case, seed: int, data: fashion_mnist.FashionMnist) -> pl.Task:
    images, labels = pixels(data.images), data.labels.long()
    test_images, test_labels = pixels(data.test_images), data.test_labels.long()
    if case.held_out:
        (images, test_images), (labels, test_labels) = images.split(50_000), labels.split(50_000)
    whole = MINIBATCH * max(WORKERS)
    kept = len(labels) // whole * whole  # So that every minibatch is a full one with any number of workers.

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"accuracy": 100 * (model(test_images).argmax(1) == test_labels).float().mean().item()}

    return pl.Task(
        model=perceptron,
        loss=loss,
        data=(images[:kept], labels[:kept]),
        batch=MINIBATCH * case.workers,
        optimizer=partial(torch.optim.SGD, lr=case.rate),
        epochs=EPOCHS,
        evaluate=evaluate,
        evaluate_every=EPOCHS * kept,  # Only at the end.
        seed=seed,
    )


def result_of(case: Case, seed: int, folder: Path | None) -> dict[str, Any]:
    """One run."""
    began = time.perf_counter()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # What diverges says so.
    task = task_of(case, seed, fashion_mnist.load(folder))
    run = pl.simulate(task, case.strategy, cluster_of(case.workers, seed), strict=False)
    trace, losses = run.trace, [p.loss for p in run.trace.points if p.loss is not None][-case.workers * task.steps_per_epoch :]
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


def work(job: tuple[Case, int, Path | None]) -> dict[str, Any]:
    result = result_of(*job)
    gc.collect()  # Replicas and their memories refer to each other.
    return result


def summary(runs: Runs) -> list[dict[str, Any]]:
    """A row for each method and number of workers that has run: what its seeds have in common."""
    rows: list[dict[str, Any]] = []
    for method in METHODS:
        for workers in WORKERS:
            key = case_of(method, workers).key
            own = [run for (other, _), run in sorted(runs.items()) if other == key]
            if not own:
                continue
            accuracies, stale = [run["accuracy"] for run in own], [run["staleness"] for run in own if run["staleness"] is not None]
            rows.append(
                {
                    "method": shown(method),
                    "workers": workers,
                    "seeds": len(own),
                    "accuracy": mean(accuracies),
                    "spread": stdev(accuracies) if len(own) > 1 else 0.0,
                    "staleness": mean(stale) if stale else None,
                    "greatest_staleness": max(run["greatest_staleness"] for run in own) if stale else None,
                    "updates": mean(run["updates"] for run in own),
                    "virtual_s": mean(run["virtual_s"] for run in own),
                }
            )
    return rows


def cell(row: dict[str, Any], field: str) -> str:
    if field == "accuracy":
        return f"{row['accuracy']:.2f} " + (f"± {row['spread']:.2f}" if row["seeds"] > 2 else f"({row['seeds']} of 3 seeds)")
    if field == "staleness":
        return "" if row["staleness"] is None else f"{row['staleness']:.1f}, {row['greatest_staleness']}"
    return f"{row[field]:,.0f}"


def lines(rows: list[dict[str, Any]], field: str) -> list[list[str]]:
    """A table's: methods below each other, numbers of workers beside each other."""
    found = {(row["method"], row["workers"]): cell(row, field) for row in rows}
    return [[method, *(found.get((method, workers), "") for workers in WORKERS)] for method in dict.fromkeys(row["method"] for row in rows)]


def table(rows: list[dict[str, Any]], field: str) -> Table:
    made = Table("method", *map(head, WORKERS), title=TITLES[field])
    for column in made.columns[1:]:
        column.justify = "right"
    for line in lines(rows, field):
        made.add_row(*line)
    return made


def markdown(rows: list[dict[str, Any]], field: str) -> str:
    """The same table for a page."""
    head_and_rule = [["method", *map(head, WORKERS)], ["---"] * (1 + len(WORKERS))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [*head_and_rule, *([f"`{name}`", *rest] for name, *rest in lines(rows, field))])


def head(workers: int) -> str:
    return f"{workers} worker{'s' if workers > 1 else ''}"


def sweep_table(runs: Runs) -> Table:
    made = Table("rate", "accuracy", title=f"rates of one worker: {EPOCHS} epochs, 10,000 images held out")
    for case in sweep():
        if own := [f"{run['accuracy']:.2f}" for (key, _), run in sorted(runs.items()) if key == case.key]:
            made.add_row(f"{case.rate:g}", f"{mean(map(float, own)):.2f} % ({', '.join(own)})")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="the folder of Fashion-MNIST's four IDX files")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each method")
    parser.add_argument("--sweep", action="store_true", help="run only the choice of the rate")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time; with 0, show what the file holds")
    parser.add_argument("--fresh", action="store_true", help="forget the runs in the file")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument(
        "--json", type=Path, default=Path("docs/results/async-accuracy.json"), help="where to keep the runs; the chart goes beside it"
    )
    args = parser.parse_args()
    runs = {} if args.fresh else read(args.json)
    jobs = [(case, SWEEP_SEED + seed) for case in sweep() for seed in range(args.seeds)]
    if not args.sweep:
        cases = dict.fromkeys(case_of(method, workers) for workers in WORKERS for method in METHODS)
        jobs += [(case, seed) for seed in range(args.seeds) for case in cases]
    jobs = [(case, seed, args.data) for case, seed in jobs if (case.key, seed) not in runs]
    if jobs and args.processes:
        fashion_mnist.load(args.data)  # If it is not there, one process says so.
        with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
            for run in pool.imap_unordered(work, jobs):
                runs[run["case"], run["seed"]] = run
                print(f"{run['accuracy']:.2f} %, {run['wall_s']:.0f} s: seed {run['seed']}, {run['case']}", file=sys.stderr, flush=True)
                write(args.json, runs)
    console, rows = Console(width=None if sys.stdout.isatty() else 150), summary(runs)
    console.print(sweep_table(runs))
    for field in TITLES if rows else ():
        if args.markdown:
            print(f"\n{TITLES[field]}\n\n{markdown(rows, field)}")
        else:
            console.print(table(rows, field))
    if rows:
        args.json.with_suffix(".svg").write_text(chart(rows))


def read(path: Path) -> Runs:
    """The runs that a file holds, if they were as long as those of today and with such minibatches."""
    kept = json.loads(path.read_text()) if path.exists() else {"runs": []}
    is_alike = (kept.get("epochs"), kept.get("minibatch")) == (EPOCHS, MINIBATCH)
    return {(run["case"], run["seed"]): run for run in kept["runs"]} if is_alike else {}


def write(path: Path, runs: Runs) -> None:
    told = ",\n".join(f"  {json.dumps(runs[key])}" for key in sorted(runs))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"epochs": {EPOCHS}, "minibatch": {MINIBATCH}, "runs": [\n{told}\n]}}\n')


if __name__ == "__main__":
    main()
