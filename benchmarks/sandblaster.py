"""Sandblaster L-BFGS and SGD at the same number of passes over the data, and passes with one slow worker.

The slow worker is ten times slower. All runs are in the simulator, so the figures are the same every time. Losses are
of all of the training data. SGD has the best of several learning rates at each budget. Every step of a line search
counts as a pass.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import paceline as pl
from paceline.data import digits

BUDGETS = (10, 20, 40)
RATES = [0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0]
WORKERS, SLOW, FACTOR = 8, 3, 10.0
PASS_S, PASSES = 0.5, 4  # The time of a pass on all workers together, and the number of timed passes.


def logistic(spread: float) -> pl.Task:
    """Two classes, and features whose scales are between 1 and 1 / spread."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 30, generator=generator, dtype=torch.float64) * torch.logspace(
        0, -math.log10(spread), 30, dtype=torch.float64
    )
    clean = x @ (torch.randn(30, generator=generator, dtype=torch.float64) / x.std(0))
    y = (clean + 3 * torch.randn(1000, generator=generator, dtype=torch.float64) > 0).double()

    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        penalty = sum(p.square().sum() for p in model.parameters())
        return F.binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1]) + 0.5e-4 * penalty

    return _task(lambda: nn.Linear(30, 1).double(), loss, (x, y), batch=50)


def network() -> pl.Task:
    x, y, _, _ = digits()
    model = lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))  # noqa: E731
    return _task(model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), (x, y), batch=64)


def _task(model: Any, loss: Any, data: tuple[torch.Tensor, ...], *, batch: int) -> pl.Task:
    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"loss": loss(model, data).item()}

    return pl.Task(model, loss, data, batch, _sgd(0.1, 0.0), epochs=max(BUDGETS), evaluate=evaluate)


def _sgd(lr: float, momentum: float) -> Any:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum)


def _with(task: pl.Task, epochs: int, optimizer: Any = None) -> pl.Task:
    return pl.Task(
        task.model, task.loss, task.data, task.batch, optimizer or task.optimizer, epochs=epochs, evaluate=task.evaluate
    )


TASKS = {
    "logistic regression, scales 1 to 1/100": lambda: logistic(100.0),
    "logistic regression, equal scales": lambda: logistic(1.0),
    "digits, a network of 4,810 weights": network,
}


def losses(quick: bool) -> list[dict[str, Any]]:
    """The loss of each method at each budget."""
    rows: list[dict[str, Any]] = []
    rates = RATES[1::2] if quick else RATES
    for name, make in TASKS.items():
        task = make()
        for momentum in (0.0, 0.9):
            runs = {
                lr: pl.simulate(_with(task, max(BUDGETS), _sgd(lr, momentum)), pl.AllReduceSGD(), pl.Cluster(workers=1))
                for lr in rates
            }
            for budget in BUDGETS:
                at = {lr: run.trace.evaluations[budget - 1].values["loss"] for lr, run in runs.items()}
                rate = min(at, key=lambda lr: at[lr] if math.isfinite(at[lr]) else math.inf)
                method = f"SGD, momentum {momentum:g}, best rate"
                rows.append({"task": name, "method": method, "epochs": budget, "loss": at[rate], "rate": rate})
        for search in ("armijo", "wolfe"):
            for budget in BUDGETS:
                run = pl.simulate(_with(task, budget), pl.Sandblaster(search=search), pl.Cluster(workers=1))
                method = f"Sandblaster(search='{search}')"
                rows.append({"task": name, "method": method, "epochs": budget, "loss": run.final["loss"], "rate": None})
    return rows


def passes() -> list[dict[str, Any]]:
    """The seconds of a pass, as the data is cut into more and more portions."""
    rows: list[dict[str, Any]] = []
    for portions in (8, 40, 80, 160, 400):
        for backups in (0, 1):
            seconds = [_seconds(portions, backups, slow) for slow in ({}, {SLOW: FACTOR})]
            rows.append({"portions": portions, "backups": backups, "undisturbed_s": seconds[0], "slow_s": seconds[1]})
    return rows


def _seconds(portions: int, backups: int, slow: dict[int, float]) -> float:
    steps = portions // WORKERS
    data = torch.randn(1600, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    task = pl.Task(
        model=lambda: nn.Linear(4, 1).double(),
        loss=lambda model, batch: (model(batch[0]) - 1).square().mean(),
        data=(data,),
        batch=len(data) // steps,
        optimizer=_sgd(0.1, 0.0),
        epochs=PASSES,
    )
    cluster = pl.Cluster(workers=WORKERS, compute=pl.Stragglers(pl.Constant(PASS_S * WORKERS / portions), slow=slow))
    return pl.simulate(task, pl.Sandblaster(backups=backups), cluster).seconds / PASSES


def tables(lost: list[dict[str, Any]], timed: list[dict[str, Any]]) -> list[Table]:
    first = Table("", "", *[f"{budget} epochs" for budget in BUDGETS], title="training loss")
    for name in TASKS:
        for method in dict.fromkeys(r["method"] for r in lost):
            of = {r["epochs"]: r for r in lost if (r["task"], r["method"]) == (name, method)}
            told = [f"{of[b]['loss']:.4g}" + (f" (rate {of[b]['rate']:.2g})" if of[b]["rate"] else "") for b in BUDGETS]
            first.add_row(name, method, *told)
    second = Table("portions", "backups", "undisturbed", "one 10x slower", "ratio", title="seconds of a pass")
    for r in timed:
        ratio = r["slow_s"] / r["undisturbed_s"]
        second.add_row(
            str(r["portions"]), str(r["backups"]), f"{r['undisturbed_s']:.3f}", f"{r['slow_s']:.3f}", f"{ratio:.2f}"
        )
    return [first, second]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer learning rates")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lost, timed = losses(args.quick), passes()
    for table in tables(lost, timed):
        Console(width=140).print(table)
    if args.json:
        args.json.write_text(json.dumps({"losses": lost, "passes": timed}, indent=2) + "\n")


if __name__ == "__main__":
    main()
