"""From 1 to 8 workers with one flag: Fashion-MNIST by the settings file worker_counts.toml, without retuning.

The rate is the best of five for one worker, on images held out of the training set. Every other run has that file,
with flags for the method and the number of workers. The naive runs have the same file without its conventions: lr and
momentum are those of one worker's step, whatever the size of a step. Runs that are already in the --json file do not
run again.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any

from torch import Tensor

import paceline as pl
from benchmarks._frame import arguments, markdown, read_runs, show, spread, table, worked, write_runs
from paceline.data import fashion_mnist
from paceline.settings import Recipe, load
from paceline.settings.header import header
from paceline.settings.recipe import DATA
from paceline.training.scaling import PerSample

FILE = Path(__file__).with_suffix(".toml")
METHODS = {
    "AllReduceSGD": ["--strategy.name", "all-reduce-sgd"],
    "BlockMomentum": ["--strategy.name", "block-momentum", "--strategy.samples", "800"],
    "AdaptiveAveraging": ["--strategy.name", "adaptive-averaging"],
}
# What all runs in the --json file have in common; the rate is a part of each run.
SETTINGS = {"file": [line for line in FILE.read_text().splitlines() if "lr-per-sample" not in line], "methods": METHODS}
RATES = (0.0005, 0.001, 0.002, 0.004, 0.008)  # For each sample.
SWEEP_SEEDS = (100, 101)
HEAD = ["method", "1 worker", "8 workers", "difference", "8 workers, naive", "difference", "32 workers", "difference"]
Key = tuple[str, str, int, float, int]  # Kind of run, method, workers, rate for each sample, seed.
Runs = dict[Key, dict[str, Any]]
Group = dict[int, dict[str, Any]]  # Runs of a kind, by their seeds.


def file_rate() -> float:
    """The rate in the file."""
    rate = load(FILE).optimizer.lr_per_sample
    assert rate is not None
    return rate


def held_out(folder: str | None = None) -> tuple[Tensor, ...]:
    """50,000 images of the training set to train on, and its other 10,000 to test on."""
    x, y, *_ = DATA["fashion-mnist"](folder)
    return x[:50_000], y[:50_000], x[50_000:], y[50_000:]


def constant_flags() -> list[str]:
    """Flags for a momentum that does not follow the size of a step: that of one worker's."""
    momentum = repr(step_of_one_worker()["momentum"])
    return ["--optimizer.momentum-time-constant", "none", "--optimizer.momentum", momentum]


def naive_flags() -> list[str]:
    """Flags that leave out the conventions of the file: what they mean for one worker takes their place."""
    flags = ["--optimizer.lr-per-sample", "none", "--optimizer.lr", repr(step_of_one_worker()["lr"])]
    flags += ["--schedule.warmup", "none", "--schedule.start", "0.1"]  # 0.1 is the default.
    return [*constant_flags(), *flags]


def step_of_one_worker() -> dict[str, float]:
    """What the file means for the optimizer of one worker."""
    settings = load(FILE)
    assert settings.data.batch is not None and settings.optimizer.momentum_time_constant is not None
    return PerSample(file_rate(), settings.optimizer.momentum_time_constant).settings(settings.data.batch)


def flags_of(kind: str, method: str, workers: int, rate: float, seed: int, folder: Path | None) -> list[str]:
    flags = [*METHODS[method], "--workers", str(workers), "--seed", str(seed)]
    if folder is not None:
        flags += ["--data.folder", str(folder)]
    if kind == "sweep":
        flags += ["--optimizer.lr-per-sample", str(rate), "--data.name", "benchmarks.worker_counts:held_out"]
    if kind == "constant momentum":
        flags += [*constant_flags(), "--scaling.momentum", "none"]
    if kind in ("naive", "own momentum"):
        flags += naive_flags()
    if kind == "naive" and method == "BlockMomentum":
        flags += ["--strategy.momentum", "0.0"]  # That of one worker.
    return flags


def result_of(kind: str, method: str, workers: int, rate: float, seed: int, folder: Path | None) -> dict[str, Any]:
    """One run."""
    began = time.process_time()
    settings = load(FILE, flags_of(kind, method, workers, rate, seed, folder))
    recipe = Recipe(settings, settings.workers, Path.cwd())
    task = recipe.task()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run = pl.simulate(task, recipe.strategy, recipe.cluster(), strict=False)
    return {
        "kind": kind,
        "method": method,
        "workers": workers,
        "rate": rate,
        "seed": seed,
        "accuracy": round(100 * run.final["accuracy"], 2),
        "loss": round(run.final["loss"], 4) if math.isfinite(run.final["loss"]) else None,
        "optimizer": header(recipe, task)["optimizer"],
        "synchronisations": sum(s.rank == 0 for s in run.trace.syncs),
        "virtual_s": round(run.seconds, 1),
        "warnings": sorted({w.category.__name__ for w in warned}),
        "cpu_s": round(time.process_time() - began, 1),
    }


def key(run: dict[str, Any]) -> Key:
    return run["kind"], run["method"], run["workers"], run["rate"], run["seed"]


def of(kind: str, method: str, workers: int, runs: Runs) -> Group:
    """The runs of a kind at the rate of the file, by their seeds."""
    return {run["seed"]: run for k, run in sorted(runs.items()) if k[:4] == (kind, method, workers, file_rate())}


def line(method: str, runs: Runs) -> list[str]:
    one = of("conventions", "AllReduceSGD", 1, runs)
    cells = [method, _accuracy(one)]
    for kind, workers in (("conventions", 8), ("naive", 8), ("conventions", 32)):
        cells += compared(of(kind, method, workers, runs), one)
    return cells


def compared(own: Group, one: Group) -> list[str]:
    """The accuracy of these runs, and how far it is from that of one worker, seed by seed."""
    differences = [run["accuracy"] - one[seed]["accuracy"] for seed, run in own.items() if seed in one]
    return [_accuracy(own), spread(differences, "{:+.2f}").replace("± +", "± ") if differences else ""]


def other(kind: str, method: str, one: Group, runs: Runs) -> list[str]:
    return [cell for workers in (8, 32) for cell in compared(of(kind, method, workers, runs), one)]


def _accuracy(runs: Group) -> str:
    return spread([run["accuracy"] for run in runs.values()], "{:.2f}") if runs else ""


def effective_line(method: str, workers: int, runs: Runs) -> list[str]:
    """What a step was, and how often workers exchanged, in the runs with the conventions."""
    own = list(of("conventions", method, workers, runs).values())
    if not own:
        return [method, str(workers), "", ""]
    syncs = mean(run["synchronisations"] for run in own)
    warned = ", ".join(sorted({name for run in own for name in run["warnings"]}))
    return [method, str(workers), own[0]["optimizer"], f"{syncs:,.0f}" if syncs else "every step", warned]


def swept_line(rate: float, runs: Runs) -> list[str]:
    found = [run["accuracy"] for k, run in sorted(runs.items()) if k[0] == "sweep" and k[3] == rate]
    return [f"{rate:g}", *(f"{value:.2f}" for value in found), f"{mean(found):.2f}" if found else ""]


def main() -> None:
    args = arguments(__doc__, "worker-counts.json").parse_args()
    runs: Runs = {} if args.fresh else {key(run): run for run in read_runs(args.json, **SETTINGS)}

    def keep(found: Iterable[dict[str, Any]]) -> None:
        for run in found:
            runs[key(run)] = run
            print(f"{run['accuracy']:.2f} %, {run['cpu_s']:.0f} s: {key(run)}", file=sys.stderr, flush=True)
            write_runs(args.json, (runs[k] for k in sorted(runs)), **SETTINGS)

    rate = file_rate()
    if args.processes:
        fashion_mnist.load(args.data)  # If the data are missing, only one process says so.
        wanted: list[Key] = [("sweep", "AllReduceSGD", 1, swept, s) for s in SWEEP_SEEDS for swept in RATES]
        for seed in range(args.seeds):
            # One worker trains by any method as without one: a single seed of the others shows it.
            wanted += [("conventions", m, 1, rate, seed) for m in METHODS if m == "AllReduceSGD" or not seed]
            wanted += [(kind, m, 8, rate, seed) for m in METHODS for kind in ("conventions", "naive")]
            wanted += [("conventions", m, 32, rate, seed) for m in METHODS]
            wanted += [("own momentum", "BlockMomentum", 8, rate, seed)]
            wanted += [("constant momentum", "AllReduceSGD", n, rate, seed) for n in (8, 32)]
        keep(worked(result_of, [(*k, args.data) for k in wanted if k not in runs], args.processes))
    one = of("conventions", "AllReduceSGD", 1, runs)
    tables = {
        ("rate", *map("seed {}".format, SWEEP_SEEDS), "mean"): [swept_line(rate, runs) for rate in RATES],
        tuple(HEAD): [line(method, runs) for method in METHODS],
        ("other rules", "8 workers", "difference", "32 workers", "difference"): [
            ["AllReduceSGD, momentum the same at any size", *other("constant momentum", "AllReduceSGD", one, runs)],
            ["BlockMomentum, naive but with its own momentum", *other("own momentum", "BlockMomentum", one, runs)],
        ],
        ("method", "workers", "optimizer of a worker", "synchronisations", "warnings"): [
            effective_line(method, workers, runs) for method in METHODS for workers in (8, 32)
        ],
    }
    for head, lines in tables.items():
        show(markdown(head, lines) if args.markdown else table(head, lines, right=1), width=180)
        print()
    same = {method: of("conventions", method, 1, runs)[0]["accuracy"] for method in METHODS if runs}
    print(f"one worker, seed 0: {same}")
    print(f"{sum(run['cpu_s'] for run in runs.values()) / 60:.0f} minutes of one core in all")


if __name__ == "__main__":
    main()
