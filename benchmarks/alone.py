"""The cost of a session for one worker: the loop of `benchmarks.overhead`, plain and under `paceline.attach`.

There is no launcher. Both take turns in blocks of steps in one process with one thread. Ratios are taken within a
round; the table shows their median and quartiles over all rounds. 1.000 means that a session costs nothing.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import paceline as pl
from benchmarks.overhead import SETTINGS, Setting

STRATEGIES = {
    "AllReduceSGD": pl.AllReduceSGD(),
    "PeriodicAveraging": pl.PeriodicAveraging(),
    "BlockMomentum": pl.BlockMomentum(),
}


def measure(setting: Setting, rounds: int) -> dict[str, list[float]]:
    """Seconds a step of each contestant in each round."""
    torch.manual_seed(0)
    model = setting.model()
    x, y = torch.randn(setting.batch, 1, 28, 28), torch.randint(10, (setting.batch,))
    loops: dict[str, tuple[nn.Module, torch.optim.Optimizer, Any]] = {}
    for name in ("plain", *STRATEGIES):
        own = copy.deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), lr=1e-3, momentum=0.9)
        loops[name] = (own, optimizer, optimizer if name == "plain" else pl.attach(own, optimizer, STRATEGIES[name]))

    def block(name: str, steps: int) -> float:
        own, optimizer, stepper = loops[name]
        began = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(own(x), y).backward()
            stepper.step()
        return (time.perf_counter() - began) / steps

    names, taken = list(loops), {name: [] for name in loops}
    for name in names:
        block(name, setting.steps)
    for r in range(rounds):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            taken[name].append(block(name, setting.steps))
    for name in STRATEGIES:
        loops[name][2].close()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="blocks of each contestant")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    made = Table("", "ms a step", "ratio to the plain loop", "quartiles", title="one worker, no launcher")
    for model, setting in SETTINGS.items():
        taken = measure(setting, args.rounds)
        for name, seconds in taken.items():
            low, middle, high = quantiles(
                [plain / own for plain, own in zip(taken["plain"], seconds, strict=True)], n=4
            )
            rows.append(
                {
                    "model": model,
                    "strategy": name,
                    "ms_per_step": 1e3 * median(seconds),
                    "ratio": middle,
                    "quartiles": [low, high],
                }
            )
            made.add_row(f"{model}, {name}", f"{1e3 * median(seconds):.2f}", f"{middle:.3f}", f"{low:.3f} - {high:.3f}")
    Console().print(made)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
