"""Six asynchronous solvers on one host: time to an accuracy on Fashion-MNIST, on 4 simulated GPUs and on 4 real processes.

The comparison of the EA-wild paper: EA-wild, Hogwild!, a parameter server, asynchronous momentum, EAMSGD, and EASGD in turns (with the
lock that the paper blames).  The simulated GPUs take 1 ms for a gradient of 32 images and reach their host's memory over one bus of
12 GB/s, as on a PCIe switch.  Real processes compute in earnest, four on however many cores there are.  Every solver runs at its own best
of three learning rates, tried in the simulator on held-out images.  Runs that --json already holds are not run again.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
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
from benchmarks.accuracy import loss, perceptron, pixels
from paceline.data import fashion_mnist

WORKERS, MINIBATCH, EPOCHS = 4, 32, 5
TARGET = 86.0  # Percent of the test images.
RATES = (0.02, 0.05, 0.1)
SWEEP_SEED = 100
SOLVERS = {  # With `lr` for the rate; where shards step, they have it, otherwise the workers' optimizer.
    "EA-wild": "EAWild()",
    "Hogwild!": "Hogwild()",
    "parameter server": "ParameterServer(rule=Sgd(lr=lr), servers=1)",
    "asynchronous momentum": "AsyncMomentum(lr=lr, unit_gain=True, servers=1)",
    "EAMSGD": "EAMSGD(period=1, momentum=0.5, servers=1)",
    "EASGD in turns": "RoundRobinEASGD(period=1, servers=1)",
}
CLUSTER = pl.Cluster(workers=WORKERS, compute=pl.LogNormal("1ms", sigma=0.2), latency="20us", bus="12GB/s", memory_bandwidth="20GB/s")
Runs = dict[str, dict[str, Any]]


def strategy_of(solver: str, rate: float) -> pl.Strategy:
    return eval(SOLVERS[solver], dict(vars(pl)) | {"lr": rate})


def task_of(rate: float, seed: int, data: fashion_mnist.FashionMnist, *, held_out: bool = False) -> pl.Task:
    images, labels = pixels(data.images), data.labels.long()
    test_images, test_labels = pixels(data.test_images), data.test_labels.long()
    if held_out:
        (images, test_images), (labels, test_labels) = images.split(50_000), labels.split(50_000)

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"accuracy": 100 * (model(test_images).argmax(1) == test_labels).float().mean().item()}

    batch = WORKERS * MINIBATCH
    return pl.Task(
        model=perceptron,
        loss=loss,
        data=(images, labels),
        batch=batch,
        optimizer=partial(torch.optim.SGD, lr=rate),
        epochs=EPOCHS,
        evaluate=evaluate,
        evaluate_every=len(labels) // batch // 5,
        seed=seed,
    )


def told(run: pl.Run, samples: int) -> dict[str, Any]:
    """What counts of a run: how fast it was, and when it first had the accuracy."""
    reached = [e for e in run.trace.evaluations if e.values["accuracy"] >= TARGET]
    return {
        "samples_per_s": samples / run.seconds,
        "seconds_to_target": reached[0].time if reached else None,
        "samples_to_target": reached[0].samples if reached else None,
        "accuracy": round(run.final["accuracy"], 2),
    }


def run_one(solver: str, rate: float, seed: int, kind: str, data: fashion_mnist.FashionMnist) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # What diverges says so.
    task, strategy = task_of(rate, seed, data, held_out=kind == "held out"), strategy_of(solver, rate)
    if kind == "real":
        run = pl.train(task, strategy, workers=WORKERS)
    else:
        torch.set_num_threads(1)
        run = pl.simulate(task, strategy, CLUSTER, strict=False)
    result = told(run, task.total_steps * task.batch)
    gc.collect()  # Replicas and their memories refer to each other.
    return result


def own_rate(solver: str, runs: Runs) -> float:
    """The one with the best accuracy on held-out images."""
    return max(RATES, key=lambda rate: runs[key(solver, rate, SWEEP_SEED, "held out")]["accuracy"])


def key(solver: str, rate: float, seed: int, kind: str) -> str:
    return f"{solver}, {kind}, rate {rate:g}, seed {seed}"


def rows(runs: Runs, seeds: int) -> list[list[str]]:
    found: list[list[str]] = []
    for solver in SOLVERS:
        rate, line = own_rate(solver, runs), [solver]
        line.append(f"{rate:g}")
        for kind in ("simulated", "real"):
            own = [runs[k] for seed in range(seeds) if (k := key(solver, rate, seed, kind)) in runs]
            if not own:
                line += [""] * 3
                continue
            times = [run["seconds_to_target"] for run in own if run["seconds_to_target"] is not None]
            reached = spread(times, "{:.2f}") if len(times) == len(own) else f"{len(times)} of {len(own)} runs"
            line += [
                spread([run["samples_per_s"] / 1e3 for run in own], "{:.1f}"),
                reached,
                spread([run["accuracy"] for run in own], "{:.2f}"),
            ]
        found.append(line)
    return found


def spread(values: list[float], form: str) -> str:
    return form.format(mean(values)) + (f" ± {form.format(stdev(values))}" if len(values) > 1 else "")


HEAD = ["solver", "rate"] + [
    f"{kind}: {what}" for kind in ("simulated", "real") for what in ("1000 samples/s", f"s to {TARGET:g} %", "final, %")
]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="the folder of Fashion-MNIST's four IDX files")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each solver")
    parser.add_argument("--fresh", action="store_true", help="forget the runs in the file")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", type=Path, default=Path("docs/results/solvers.json"), help="where to keep the runs")
    args = parser.parse_args()
    data = fashion_mnist.load(args.data)
    runs: Runs = json.loads(args.json.read_text()) if args.json.exists() and not args.fresh else {}

    def need(solver: str, rate: float, seed: int, kind: str) -> None:
        if (name := key(solver, rate, seed, kind)) not in runs:
            runs[name] = run_one(solver, rate, seed, kind, data)
            print(f"{runs[name]['accuracy']:.2f} %, {runs[name]['samples_per_s']:,.0f} samples/s: {name}", file=sys.stderr, flush=True)
            args.json.write_text(json.dumps(runs, indent=1))

    for solver in SOLVERS:
        for rate in RATES:
            need(solver, rate, SWEEP_SEED, "held out")
    for kind in ("real", "simulated"):
        for seed in range(args.seeds):  # The solvers take turns: what disturbs the machine for a while disturbs all of them.
            for solver in SOLVERS:
                need(solver, own_rate(solver, runs), seed, kind)
    lines = rows(runs, args.seeds)
    if args.markdown:
        print("\n".join(f"| {' | '.join(line)} |" for line in [HEAD, ["---"] * len(HEAD), *lines]))
    else:
        made = Table(*HEAD)
        for line in lines:
            made.add_row(*line)
        Console(width=None if sys.stdout.isatty() else 160).print(made)


if __name__ == "__main__":
    main()
