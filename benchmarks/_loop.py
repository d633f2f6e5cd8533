"""A user's own loop, or a call of train, of one worker of `benchmarks.kills_synchronous`: it writes what became of it.

Its arguments are "attach" or "train", the method, the seed, the steps, the seconds of silence, and a folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from benchmarks.kills_synchronous import METHODS, task_of


def attached(method: str, seed: int, steps: int, silent_s: float, here: Path) -> tuple[Any, pl.Trace]:
    task, inputs, labels = task_of(seed, steps)
    torch.manual_seed(seed)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(*task.data), 128, shuffle=True)  # pyright: ignore
    with pl.attach(model, optimizer, METHODS[method], elastic=True, silent_s=silent_s) as session:
        (here / f"pid-{os.getpid()}").touch()
        for _ in session.epochs(-(-steps // len(loader))):
            for batch in session.shard(loader):
                optimizer.zero_grad()
                task.loss(model, batch).backward()
                session.step()
    return (model, inputs, labels), session.trace


def trained(method: str, seed: int, steps: int, silent_s: float, here: Path) -> tuple[Any, pl.Trace]:
    task, inputs, labels = task_of(seed, steps)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        (here / f"pid-{os.getpid()}").touch()
        return task.loss(model, batch)

    run = pl.train(replace(task, loss=loss), METHODS[method], elastic=True, silent_s=silent_s)
    return (run.model, inputs, labels), run.trace


def main() -> None:
    kind, method, seed, steps, silent_s, folder = sys.argv[1:]
    torch.set_num_threads(1)
    work = attached if kind == "attach" else trained
    (model, inputs, labels), trace = work(method, int(seed), int(steps), float(silent_s), Path(folder))
    times: dict[int, list[float]] = defaultdict(list)
    for point in trace.points:
        times[point.step].append(point.time)
    begun = [min(times[step]) for step in sorted(times)][1:]
    with torch.no_grad():
        right = (model.eval()(inputs).argmax(1) == labels).float().mean().item()
        values = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().tobytes()
    said = {
        "model": hashlib.sha256(values).hexdigest(),
        "accuracy": 100 * right,
        "steps": [min(times), max(times)] if times else [],
        "gap_s": max((b - a for a, b in pairwise(begun)), default=0.0),
        "lost": [d.values["pause_s"] for d in trace.decisions if d.kind == "lost"],
        "workers": [d.values["workers"] for d in trace.decisions if d.kind == "workers"],
    }
    (Path(folder) / f"end-{os.getpid()}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
