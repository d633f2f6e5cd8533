"""Minibatches that grow during a run: AutoBatch, and a first stage of gradient descent before Adam. Fashion-MNIST.

AutoBatch begins with 256 samples a step, at the rate of plain SGD with 256 samples that benchmarks.large_batches has
chosen; rate and momentum follow the size. The optimizer of two stages is compared with Adam at 8,192 samples a step, on
workers in step and on workers of EA-wild. Rates of Adam are chosen for each row, out of as many, by the accuracy of one
run on images that no run trains on. The tables have the test accuracy of other seeds. Runs that are already in the
--json file do not run again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import paceline as pl
from benchmarks._frame import accuracy_of, arguments, markdown, read_runs, show, spread, table, worked, write_runs
from benchmarks.accuracy import loss, perceptron, pixels
from benchmarks.large_batches import TRAINED, TUNING_SEED
from paceline.data import fashion_mnist
from paceline.optimizers import TwoStage

WORKERS, EPOCHS = 8, 15
BASE, LARGE = 256, 8192
SGD_RATE = 0.06  # Of plain SGD with 256 samples, as benchmarks.large_batches has chosen it.
ADAM_RATES = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032)
DESCENT_RATES = (0.1, 0.3, 0.6, 1.0)
GROWING = pl.GrowingBatch(start=BASE, end=LARGE, epochs=4, multiple=64)
STAGE = GROWING.steps(TRAINED)  # The first stage.
SETTINGS = {"epochs": EPOCHS, "workers": WORKERS, "images": TRAINED, "rate": SGD_RATE}
Key = tuple[str, float, int]  # Row, rate, seed.
Runs = dict[Key, dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """`rates` are the ones to choose from. `optimizer` takes a rate, and that of the first of two stages."""

    batch: int | pl.GrowingBatch | pl.AutoBatch
    optimizer: Callable[[float, float], Callable[..., torch.optim.Optimizer]]
    rates: tuple[float, ...] = (SGD_RATE,)
    scaling: pl.Scaling | None = None
    warmup: str | None = None
    strategy: pl.Strategy = pl.AllReduceSGD()  # noqa: RUF009


def momentum(rate: float, first: float) -> Callable[..., torch.optim.Optimizer]:
    return partial(torch.optim.SGD, lr=rate, momentum=0.9)


def descent(rate: float, first: float) -> Callable[..., torch.optim.Optimizer]:
    return partial(torch.optim.SGD, lr=rate)


def adam(rate: float, first: float) -> Callable[..., torch.optim.Optimizer]:
    return partial(torch.optim.Adam, lr=rate)


def two_stage(rate: float, first: float) -> Callable[..., torch.optim.Optimizer]:
    return partial(TwoStage, first=descent(first, first), second=adam(rate, first), steps=STAGE)


FIXED = partial(Row, optimizer=momentum, scaling=pl.Scaling(base=BASE), warmup="2 epochs")
AUTO = partial(Row, optimizer=momentum, scaling=pl.Scaling(base=BASE))
DESCENT = "gradient descent, 256 samples"
REFERENCE = "256 samples"
GROUPS: dict[str, dict[str, Row]] = {
    "AutoBatch": {
        REFERENCE: Row(BASE, momentum),
        "512 samples, warm-up": FIXED(512),
        "1,024 samples, warm-up": FIXED(1024),
        "AutoBatch(256)": AUTO(pl.AutoBatch(BASE)),
        "AutoBatch(256, every=3)": AUTO(pl.AutoBatch(BASE, every=3)),
        "AutoBatch(256, every=3, trial=0.2, margin=0.03)": AUTO(pl.AutoBatch(BASE, every=3, trial=0.2, margin=0.03)),
        "AutoBatch(256, every=3, trial=0.2, margin=0.1)": AUTO(pl.AutoBatch(BASE, every=3, trial=0.2, margin=0.1)),
    },
    "in step": {
        "Adam, 256": Row(BASE, adam, ADAM_RATES),
        "Adam, 8,192": Row(LARGE, adam, ADAM_RATES),
        "Adam, 8,192, warm-up of the rate": Row(LARGE, adam, ADAM_RATES, warmup="4 epochs"),
        "Adam, 256 growing to 8,192": Row(GROWING, adam, ADAM_RATES),
        "TwoStage, 256 growing to 8,192": Row(GROWING, two_stage, ADAM_RATES),
    },
    "EA-wild": {
        "EAWild: Adam, 8,192": Row(LARGE, adam, ADAM_RATES, strategy=pl.EAWild()),
        "EAWild: Adam, 256 growing to 8,192": Row(GROWING, adam, ADAM_RATES, strategy=pl.EAWild()),
        "EAWild: TwoStage, 256 growing to 8,192": Row(GROWING, two_stage, ADAM_RATES, strategy=pl.EAWild()),
    },
}
ROWS = {DESCENT: Row(BASE, descent, DESCENT_RATES)} | {
    name: row for rows in GROUPS.values() for name, row in rows.items()
}
SHOWN = "AutoBatch(256)"  # The row whose decisions are shown.


def task_of(row: Row, rate: float, first: float, seed: int, data: fashion_mnist.FashionMnist) -> pl.Task:
    images, labels = pixels(data.images), data.labels.long()
    held_out = (images[TRAINED:], labels[TRAINED:])
    seen = held_out if seed == TUNING_SEED else (pixels(data.test_images), data.test_labels.long())
    start = {} if row.warmup is None else {"warmup": row.warmup, "start": 0.1 if row.scaling is None else "base"}
    return pl.Task(
        model=perceptron,
        loss=loss,
        data=(images[:TRAINED], labels[:TRAINED]),
        batch=row.batch,
        optimizer=row.optimizer(rate, first),
        epochs=EPOCHS,
        evaluate=accuracy_of(*seen),
        evaluate_every=EPOCHS * TRAINED,  # Only at the end.
        schedule=pl.Schedule(decay="polynomial", **start),
        scaling=row.scaling,
        seed=seed,
    )


def result_of(name: str, rate: float, seed: int, first: float, folder: Path | None) -> dict[str, Any]:
    """One run; `first` is the rate of the first of two stages."""
    began = time.process_time()
    row = ROWS[name]
    task = task_of(row, rate, first, seed, fashion_mnist.load(folder))
    cluster = pl.Cluster(workers=WORKERS, compute=pl.LogNormal("50ms", sigma=0.3), seed=seed)
    run = pl.simulate(task, row.strategy, cluster, strict=False, nonfinite="pass")
    decisions = [d.values for d in run.trace.decisions if d.kind == "batch"]
    steps = sum(p.rank == 0 and p.loss is not None for p in run.trace.points)
    tried = [size for d in decisions for size in d["sizes"][: len(d["losses"])]]
    trial = row.batch.trial * TRAINED if isinstance(row.batch, pl.AutoBatch) else 0.0
    return {
        "row": name,
        "rate": rate,
        "seed": seed,
        "accuracy": round(run.final["accuracy"], 2),
        "steps": steps,
        "trial_steps": sum(s.kind == "all_reduce" and s.rank == 0 for s in run.trace.spans) - steps if tried else 0,
        "trial_samples": round(sum(round(trial / size) * size for size in tried) / TRAINED / EPOCHS, 4),
        "decisions": decisions if name == SHOWN else [],
        "chosen": [d["chosen"] for d in decisions],
        "cpu_s": round(time.process_time() - began, 1),
    }


def key(run: dict[str, Any]) -> Key:
    return run["row"], run["rate"], run["seed"]


def choices(name: str) -> list[Key]:
    """The runs that choose a rate, if there is a choice."""
    rates = ROWS[name].rates
    return [(name, rate, TUNING_SEED) for rate in rates] if len(rates) > 1 else []


def rate_of(name: str, runs: Runs) -> float:
    wanted = choices(name)
    return max(wanted, key=lambda k: runs[k]["accuracy"])[1] if wanted else ROWS[name].rates[0]


def own(name: str, runs: Runs) -> list[dict[str, Any]]:
    """The runs of a row at its rate, by seed."""
    rate = rate_of(name, runs)
    return [run for k, run in sorted(runs.items()) if k[:2] == (name, rate) and k[2] != TUNING_SEED]


def auto_lines(runs: Runs) -> list[list[str]]:
    plain = mean(run["accuracy"] for run in own(REFERENCE, runs))
    made: list[list[str]] = []
    for name, row in GROUPS["AutoBatch"].items():
        found = own(name, runs)
        if not found:
            continue
        accuracies = [run["accuracy"] for run in found]
        last = ", ".join(f"{run['chosen'][-1]:,}" for run in found if run["chosen"])
        steps, trials = (mean(run[part] for run in found) for part in ("steps", "trial_steps"))
        made.append(
            [
                name,
                spread(accuracies, "{:.2f}"),
                f"{mean(accuracies) - plain:+.2f}",
                last or f"{row.batch:,}",
                f"{steps:,.0f}",
                f"{trials:,.0f}" if trials else "",
                f"{steps + trials:,.0f}",
                f"{mean(run['trial_samples'] for run in found):.0%}" if trials else "",
            ]
        )
    return made


def decision_lines(runs: Runs) -> list[list[str]]:
    """The decisions of the first run of a row, as its trace has them."""
    found = own(SHOWN, runs)
    return [
        [
            str(d["epoch"]),
            "" if d["before"] is None else f"{d['before']:,}",
            ", ".join(f"{size:,}: {loss:.4f}" for size, loss in zip(d["sizes"], d["losses"], strict=True)) or "none",
            f"{d['chosen']:,}",
        ]
        for d in (found[0]["decisions"] if found else [])
    ]


def stage_lines(group: str, runs: Runs) -> list[list[str]]:
    """The test accuracy at the rate that was chosen, and what one run had on the held-out images at each rate."""
    made: list[list[str]] = []
    for name, row in GROUPS[group].items():
        found = own(name, runs)
        tried = [f"{runs[k]['accuracy']:.2f}" for k in choices(name)]
        accuracy = spread([run["accuracy"] for run in found], "{:.2f}")
        made.append([name, f"{rate_of(name, runs):g}", accuracy, f"{found[0]['steps']:,}", *tried])
        assert len(tried) == len(row.rates)
    return made


def main() -> None:
    args = arguments(__doc__, "growing-batches.json", runs_of="row").parse_args()
    runs: Runs = {} if args.fresh else {key(run): run for run in read_runs(args.json, **SETTINGS)}

    def complete(wanted: Sequence[Key], first: float = 0.0) -> None:
        for run in worked(result_of, [(*k, first, args.data) for k in wanted if k not in runs], args.processes):
            runs[key(run)] = run
            print(f"{run['accuracy']:.2f} %, {run['cpu_s']:.0f} s: {key(run)}", file=sys.stderr, flush=True)
            write_runs(args.json, (runs[k] for k in sorted(runs)), **SETTINGS)

    if args.processes:
        fashion_mnist.load(args.data)  # If the data are missing, only one process says so.
        complete(choices(DESCENT))
        first = rate_of(DESCENT, runs)
        complete([k for name in ROWS for k in choices(name)], first)
        finals = [(name, rate_of(name, runs)) for name in ROWS if name != DESCENT]
        complete([(*row, seed) for row in finals for seed in range(args.seeds)], first)
    rates = [f"{rate:g}" for rate in ADAM_RATES]
    auto = [
        "size",
        "accuracy",
        "difference",
        "last size",
        "steps",
        "in trials",
        "synchronisations",
        "samples in trials",
    ]
    tables = [
        (auto, auto_lines(runs)),
        (["epoch", "size before", "trials: mean loss", "chosen"], decision_lines(runs)),
        *((["optimizer", "rate", "accuracy", "steps", *rates], stage_lines(g, runs)) for g in ("in step", "EA-wild")),
    ]
    for head, made in tables:
        show(markdown(head, made) if args.markdown else table(head, made, right=1), width=200)
        print()
    first_rates = ", ".join(f"{k[1]:g}: {runs[k]['accuracy']:.2f}" for k in choices(DESCENT))
    print(f"{DESCENT}, by its rate: {first_rates}; {STAGE} steps in the first stage")
    print(f"{sum(run['cpu_s'] for run in runs.values()) / 60:.0f} minutes of one core in all")


if __name__ == "__main__":
    main()
