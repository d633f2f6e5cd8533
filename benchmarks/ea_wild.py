"""The accuracy of EA-wild as workers are added at one global batch: Fashion-MNIST on 1 to 64 simulated workers.

AllReduceSGD is the reference. The shape is that of the EA-wild paper's table of GoogLeNet on ImageNet: 65.68 % with 8
workers, 59.26 with 16, 50.03 with 32 and 35.69 with 64, and 71.26 synchronously. Here too every run sees the data as
often, at the same rate and in minibatches of 1,024 samples, of which each worker has its part. Runs that are already in
the --json file do not run again.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

import paceline as pl
from benchmarks._async_accuracy_chart import chart
from benchmarks._frame import accuracy_of, arguments, as_code, markdown, show, table, worked
from benchmarks.accuracy import loss, perceptron, pixels
from paceline.data import fashion_mnist

WORKERS = (1, 8, 16, 32, 64)
BATCH, EPOCHS, RATE, MOMENTUM = 1024, 20, 0.05, 0.9
METHODS = ("AllReduceSGD()", "EAWild()", "EAWild(group=8)")
Job = tuple[str, int, int, Path | None]


def result_of(method: str, workers: int, seed: int, folder: Path | None) -> dict[str, Any]:
    data = fashion_mnist.load(folder)
    kept = len(data.labels) // BATCH * BATCH

    task = pl.Task(
        model=perceptron,
        loss=loss,
        data=(pixels(data.images)[:kept], data.labels.long()[:kept]),
        batch=BATCH,
        optimizer=partial(torch.optim.SGD, lr=RATE, momentum=MOMENTUM),
        epochs=EPOCHS,
        evaluate=accuracy_of(pixels(data.test_images), data.test_labels.long()),
        evaluate_every=10**9,  # Only at the end.
        seed=seed,
    )
    cluster = pl.Cluster(workers=workers, compute=pl.LogNormal("50ms", sigma=0.3), seed=seed)
    run = pl.simulate(task, eval(method, dict(vars(pl))), cluster, strict=False)
    return {
        "method": method,
        "workers": workers,
        "seed": seed,
        "accuracy": round(run.final["accuracy"], 2),
        "virtual_s": round(run.seconds, 2),
    }


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for method in METHODS:
        for workers in WORKERS:
            own = [run for run in runs if (run["method"], run["workers"]) == (method, workers)]
            if own:
                accuracies = [run["accuracy"] for run in own]
                rows.append(
                    {
                        "method": method,
                        "workers": workers,
                        "accuracy": mean(accuracies),
                        "spread": stdev(accuracies) if len(own) > 1 else 0.0,
                        "virtual_s": mean(run["virtual_s"] for run in own),
                    }
                )
    return rows


def lines(rows: list[dict[str, Any]]) -> list[list[str]]:
    found = {
        (r["method"], r["workers"]): f"{r['accuracy']:.2f} ± {r['spread']:.2f}, {r['virtual_s']:.0f} s" for r in rows
    }
    return [[method, *(found.get((method, workers), "") for workers in WORKERS)] for method in METHODS]


def main() -> None:
    args = arguments(__doc__, "ea-wild.json").parse_args()
    runs: list[dict[str, Any]] = json.loads(args.json.read_text()) if args.json.exists() and not args.fresh else []
    done = {(run["method"], run["workers"], run["seed"]) for run in runs}
    wanted = [(m, n, seed) for seed in range(args.seeds) for n in WORKERS for m in METHODS if n > 1 or "group" not in m]
    jobs: list[Job] = [(*job, args.data) for job in wanted if job not in done]
    if jobs and args.processes:
        fashion_mnist.load(args.data)  # If the data are missing, only one process says so.
        for run in worked(result_of, jobs, args.processes):
            runs.append(run)
            print(
                f"{run['accuracy']:.2f} %: seed {run['seed']}, {run['workers']} workers, {run['method']}",
                file=sys.stderr,
                flush=True,
            )
            args.json.write_text(
                json.dumps(sorted(runs, key=lambda r: (r["seed"], r["workers"], r["method"])), indent=1)
            )
    head, rows = ["method", *(f"{n} worker{'s' if n > 1 else ''}" for n in WORKERS)], summary(runs)
    made = table(head, lines(rows), title="test accuracy in %, and virtual seconds")
    show(markdown(head, as_code(lines(rows))) if args.markdown else made, width=150)
    if rows:
        args.json.with_suffix(".svg").write_text(chart(rows))


if __name__ == "__main__":
    main()
