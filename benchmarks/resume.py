"""Runs that are stopped at random steps and continued from the disk, by every synchronous method, in the simulator.

The model has dropout and BatchNorm, the optimizer momentum.  With the same number of workers the whole state at the end
must have the same bits as that of a run that was never stopped.  Then each run goes from 4 workers to 2, and to 3, at
random steps: its loss at the end is compared with that of 4 workers throughout.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import paceline as pl
from benchmarks._frame import markdown
from paceline.checkpoint import Checkpoint
from tests.laws.every import ORDERED, Case
from tests.laws.tasks import regression, squared_error
from tests.laws.test_checkpoint import equal, written
from tests.laws.test_strategies import restless

STEPS = 40


def task() -> pl.Task:
    return regression(steps=STEPS, batch=12, samples=45, model=restless, bucket_bytes=100)


def smooth() -> pl.Task:
    return regression(steps=STEPS, batch=12, samples=45, bucket_bytes=100)


def on_disk(folder: Path, states: list[dict[str, Any]]) -> Checkpoint:
    found = Checkpoint(written(folder, states))
    found.verify()
    return found


def exact(case: Case, stops: int, chance: random.Random, folder: Path) -> int:
    """How many of so many runs, each stopped at a random step, end with other bits than the unbroken one."""
    workers = pl.Cluster(workers=4)
    whole = pl.simulate(task(), case.strategy, workers)
    different = 0
    for i in range(stops):
        stopped = pl.simulate(task(), case.strategy, workers, stop_at=chance.randrange(1, STEPS))
        states = on_disk(folder / f"exact-{i}", stopped.states).states()
        rest = pl.simulate(task(), case.strategy, workers, resume=states)
        different += not equal(rest.states, whole.states)
    return different


def loss(run: pl.Run) -> float:
    batch = smooth().part(0, 0, 1)
    return float(squared_error(run.model, batch))


def other_workers(case: Case, chance: random.Random, folder: Path) -> float:
    """The loss at the end after 4, 2 and 3 workers, as a multiple of that with 4 workers throughout."""
    whole = loss(pl.simulate(smooth(), case.strategy, pl.Cluster(workers=4)))
    first, second = sorted(chance.sample(range(1, STEPS), 2))
    run = pl.simulate(smooth(), case.strategy, pl.Cluster(workers=4), stop_at=first)
    found = on_disk(folder / "two", run.states)
    states = [found.state(worker, 2) for worker in range(2)]
    run = pl.simulate(smooth(), case.strategy, pl.Cluster(workers=2), resume=states, stop_at=second)
    found = on_disk(folder / "three", run.states)
    states = [found.state(worker, 3) for worker in range(3)]
    return loss(pl.simulate(smooth(), case.strategy, pl.Cluster(workers=3), resume=states)) / whole


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stops", type=int, default=10, help="random steps for each method")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md, as in docs/results/resume")
    args = parser.parse_args()
    torch.set_num_threads(1)
    chance = random.Random(args.seed)
    began = time.monotonic()
    methods: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as base:
        for name, case in ORDERED.items():
            folder = Path(base) / str(len(methods))
            folder.mkdir()
            ratios = []
            for i in range(3):
                (folder / str(i)).mkdir()
                ratios.append(other_workers(case, chance, folder / str(i)))
            methods[name] = {"stops": args.stops, "with other bits": exact(case, args.stops, chance, folder)}
            methods[name]["losses after 4, 2 and 3 workers"] = ratios
    found = {"seed": args.seed, "seconds": round(time.monotonic() - began), "methods": methods}
    rows = [
        [name, str(m["stops"]), str(m["with other bits"]), ", ".join(f"{r:.4f}" for r in m[list(m)[-1]])]
        for name, m in methods.items()
    ]
    stops = sum(m["stops"] for m in methods.values())
    wrong = sum(m["with other bits"] for m in methods.values())
    every = [r for m in methods.values() for r in m["losses after 4, 2 and 3 workers"]]
    text = (
        "# Stopped at a random step, and continued\n\n"
        f"`python -m benchmarks.resume --out docs/results/resume` writes this page.  {(__doc__ or '').strip()}\n\n"
        f"Of {stops} stops of {len(methods)} methods, {wrong} ended with other bits, the optimizer's state, residuals, "
        "random numbers and buffers included.  Each state went through the files of a checkpoint.  With 4, 2 and 3 "
        f"workers the loss at the end was between {min(every):.3f} and {max(every):.3f} times that of 4 workers "
        f"throughout, in the median {median(every):.4f} (three runs a method, of {STEPS} steps).\n\n"
    )
    text += markdown(["method", "stops", "with other bits", "loss after 4, 2, 3 workers / 4 workers"], rows) + "\n"
    if args.out is None:
        print(text)
        return
    args.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
