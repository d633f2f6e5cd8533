"""The accuracy of every synchronous and periodic method: Fashion-MNIST on 8 simulated workers.

All runs of a seed start with the same values and see the same minibatches in the same order. The rate drops tenfold
after a half and after three quarters of the run. Runs that are already in the --json file do not run again. The data
are those of Debian's package dataset-fashion-mnist, or of the folder given by --data.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import re
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
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from benchmarks._accuracy_cases import EPOCHS, GROUPS, PLAIN_RATE, SWEEP_EPOCHS, SWEEP_SEED, TITLES, Case, sweep
from benchmarks._accuracy_chart import chart
from paceline.data import fashion_mnist

BATCH = 128  # Of one worker.
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, weight_decay=0.01),
}
COLUMNS = (
    "method",
    "optimizer, rate",
    "test accuracy",
    "difference",
    "MB a worker",
    "synchronisations",
    "mean period",
    "virtual s",
)
REFERENCE = Case("AllReduceSGD()", rate=PLAIN_RATE)


def perceptron() -> nn.Module:
    """109,386 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def pixels(images: Tensor) -> Tensor:
    return images.float().div_(255).sub_(0.286).div_(0.353)  # The mean and deviation of the training set.


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def task_of(case: Case, seed: int, data: fashion_mnist.FashionMnist) -> pl.Task:
    images, labels = pixels(data.images), data.labels.long()
    test_images, test_labels = pixels(data.test_images), data.test_labels.long()
    if case.held_out:
        (images, test_images), (labels, test_labels) = images.split(50_000), labels.split(50_000)
    batch, epochs = BATCH * case.workers, SWEEP_EPOCHS if case.held_out else EPOCHS
    steps = epochs * -(-len(labels) // batch)

    def drop(step: int) -> float:
        return 1.0 if step < steps // 2 else 0.1 if step < steps * 3 // 4 else 0.01

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"accuracy": 100 * (model(test_images).argmax(1) == test_labels).float().mean().item()}

    return pl.Task(
        model=perceptron,
        loss=loss,
        data=(images, labels),
        batch=batch,
        optimizer=partial(OPTIMIZERS[case.optimizer], lr=case.rate),
        epochs=epochs,
        evaluate=evaluate,
        schedule=drop,
        seed=seed,
    )


def result_of(case: Case, seed: int, folder: Path | None) -> dict[str, Any]:
    """One run."""
    began = time.perf_counter()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    task = task_of(case, seed, fashion_mnist.load(folder))
    cluster = pl.Cluster(workers=case.workers, compute="10ms", bandwidth="1Gbit/s", latency="200us")
    run = pl.simulate(task, case.strategy, cluster, strict=False)
    trace, losses = (
        run.trace,
        [p.loss for p in run.trace.points[-case.workers * task.steps_per_epoch :] if p.loss is not None],
    )
    return {
        "case": case.key,
        "seed": seed,
        "accuracy": round(run.final["accuracy"], 2),
        "loss": round(mean(losses), 4) if all(map(math.isfinite, losses)) else None,  # Of the last epoch.
        "bytes": trace.bytes_sent(0),
        "synchronisations": sum(s.rank == 0 for s in trace.syncs),
        "mean_period": trace.mean_period(),
        "virtual_s": round(run.seconds, 3),
        "wall_s": round(time.perf_counter() - began, 1),
    }


def work(job: tuple[Case, int, Path | None]) -> dict[str, Any]:
    result = result_of(*job)
    gc.collect()  # Replicas and their state refer to each other.
    return result


def summary(runs: dict[tuple[str, int], dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """A row for each method that has run, by group: the mean over its seeds, and the comparison with AllReduceSGD."""
    plain = {seed: run["accuracy"] for (key, seed), run in runs.items() if key == REFERENCE.key}
    groups: dict[str, list[dict[str, Any]]] = {}
    for group, cases in GROUPS.items():
        for case in cases:
            own = [run for (key, _), run in sorted(runs.items()) if key == case.key]
            if not own:
                continue
            accuracies, periods = (
                [run["accuracy"] for run in own],
                [run["mean_period"] for run in own if run["mean_period"]],
            )
            groups.setdefault(group, []).append(
                {
                    "method": case.method,
                    "optimizer": f"{case.optimizer} {case.rate:g}",
                    "seeds": len(own),
                    "accuracy": mean(accuracies),
                    "spread": stdev(accuracies) if len(own) > 1 else 0.0,
                    "difference": mean(run["accuracy"] - plain.get(run["seed"], math.nan) for run in own),
                    "bytes": mean(run["bytes"] for run in own),
                    "synchronisations": mean(run["synchronisations"] for run in own),
                    "mean_period": mean(periods) if periods else None,
                    "virtual_s": mean(run["virtual_s"] for run in own),
                }
            )
    return groups


def table(group: str, rows: list[dict[str, Any]]) -> Table:
    made = Table(*COLUMNS, title=f"{group}: {TITLES[group]}")
    for column in made.columns[2:]:
        column.justify = "right"
    for row in rows:
        made.add_row(*cells(row))
    return made


def cells(row: dict[str, Any]) -> list[str]:
    spread = f"± {row['spread']:.2f}" if row["seeds"] > 2 else f"({row['seeds']} of 3 seeds)"
    return [
        row["method"],
        row["optimizer"],
        f"{row['accuracy']:.2f} % {spread}",
        f"{row['difference']:+.2f}",
        f"{row['bytes'] / 1e6:,.1f}",
        f"{row['synchronisations']:,.0f}" if row["mean_period"] else "",
        f"{row['mean_period']:.1f}" if row["mean_period"] else "",
        f"{row['virtual_s']:.1f}",
    ]


def markdown(rows: list[dict[str, Any]]) -> str:
    """The same table as Markdown."""
    lines = [list(COLUMNS), ["---"] * len(COLUMNS), *([f"`{name}`", *rest] for name, *rest in map(cells, rows))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def sweep_table(runs: dict[tuple[str, int], dict[str, Any]]) -> Table:
    made = Table(
        "method",
        "workers",
        "optimizer",
        "rate",
        "accuracy",
        title=f"rates: {SWEEP_EPOCHS} epochs, 10,000 images held out",
    )
    for case in sweep():
        if run := runs.get((case.key, SWEEP_SEED)):
            made.add_row(case.method, str(case.workers), case.optimizer, f"{case.rate:g}", f"{run['accuracy']:.2f} %")
    return made


def drawn(groups: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of the chart: every method with momentum SGD that has all its seeds, once, at the better of its
    rates."""
    best: dict[str, dict[str, Any]] = {}
    for row in (row for name, rows in groups.items() if name != "policies" for row in rows):
        if (
            row["optimizer"].startswith("SGD")
            and row["seeds"] > 2
            and row["accuracy"] > best.get(row["method"], {"accuracy": 0})["accuracy"]
        ):
            best[row["method"]] = row
    codecs = ("OneBit", "QSGD", "PowerSGD", "TopK", "Fp16")
    found = [
        row
        | {
            "family": method.partition("(")[0].replace("Then", "with a warm start"),
            "codec": next((codec for codec in codecs if codec in method), "none"),
            "label": ", ".join(re.findall(r"(?:period|delay|warmup|fragments|nesterov|form|bucket)=[^,)]+", method)),
        }
        for method, row in best.items()
    ]
    return sorted(found, key=lambda row: row["family"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="the folder of Fashion-MNIST's four IDX files")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each method")
    parser.add_argument(
        "--group", choices=GROUPS, action="append", help="run only this group of methods; can be repeated"
    )
    parser.add_argument("--sweep", action="store_true", help="run only the choice of rates")
    parser.add_argument(
        "--processes", type=int, default=2, help="runs at a time; with 0, only show the runs in the file"
    )
    parser.add_argument("--fresh", action="store_true", help="ignore the runs in the file")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("docs/results/accuracy.json"),
        help="where to keep the runs; the chart is written next to it",
    )
    args = parser.parse_args()
    runs = {} if args.fresh else read(args.json)
    jobs = [(case, SWEEP_SEED) for case in sweep()] if args.sweep or not args.group else []
    if not args.sweep:
        cases = dict.fromkeys(case for name in args.group or GROUPS for case in GROUPS[name])
        jobs += [(case, seed) for case in cases for seed in range(args.seeds)]
    jobs = [(case, seed, args.data) for case, seed in jobs if (case.key, seed) not in runs]
    if jobs and args.processes:
        fashion_mnist.load(args.data)  # If the data are missing, only one process says so.
        with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
            for run in pool.imap_unordered(work, jobs):
                runs[run["case"], run["seed"]] = run
                print(
                    f"{run['accuracy']:.2f} %, {run['wall_s']:.0f} s: seed {run['seed']}, {run['case']}",
                    file=sys.stderr,
                    flush=True,
                )
                write(args.json, runs)
    console, groups = Console(width=None if sys.stdout.isatty() else 180), summary(runs)
    console.print(sweep_table(runs))
    for group, rows in groups.items():
        if args.markdown:
            print(f"\n{TITLES[group]}\n\n{markdown(rows)}")
        else:
            console.print(table(group, rows))
    if rows := drawn(groups):
        args.json.with_suffix(".svg").write_text(chart(rows))


def read(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The runs in a file, if they are as long as the current ones."""
    kept = json.loads(path.read_text()) if path.exists() else {"epochs": EPOCHS, "runs": []}
    return {(run["case"], run["seed"]): run for run in kept["runs"]} if kept["epochs"] == EPOCHS else {}


def write(path: Path, runs: dict[tuple[str, int], dict[str, Any]]) -> None:
    lines = ",\n".join(f"  {json.dumps(runs[key])}" for key in sorted(runs))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"epochs": {EPOCHS}, "runs": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
