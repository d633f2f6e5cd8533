"""Workers killed or stopped in synchronous runs, at random moments: four real processes with elastic=True.

With `--where attach` they are those of a user's own loop under `paceline run`; with `--where hosts` two are on each of
two hosts, which are network namespaces, and the link between them may be cut (it needs root and iproute2).

For each method and kind of fault the table shows whether all workers ended with one model, the accuracy beside that of
an undisturbed run, and the longest time between the starts of two steps: it contains the notice of the fault, the
meeting of those that are left, the repeated exchange and the new states.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from benchmarks._elsewhere import HOST_FAULTS, LOOP_FAULTS, host_result, loop_result
from benchmarks._frame import markdown, show, table
from paceline.codecs import OneBit

WORKERS, STEPS, GRADIENT_S = 4, 200, 0.01
STOPPED_S, SILENT_S = 2.5, 1.0
METHODS: dict[str, pl.Strategy] = {
    "AllReduceSGD": pl.AllReduceSGD(),
    "AllReduceSGD, 1 bit": pl.AllReduceSGD(codec=OneBit()),
    "PeriodicAveraging": pl.PeriodicAveraging(period=8),
    "BlockMomentum": pl.BlockMomentum(period=8),
    "DiLoCo": pl.DiLoCo(period=8),
    "EASGD": pl.EASGD(period=4),
}
FAULTS = {  # How many workers are struck at once, by which signal, and how many are replaced.
    "none": (0, signal.SIGKILL, 0),
    "one killed": (1, signal.SIGKILL, 0),
    "one killed and replaced": (1, signal.SIGKILL, 1),
    "two killed at once": (2, signal.SIGKILL, 0),
    "one stopped": (1, signal.SIGSTOP, 0),
}


def task_of(seed: int, steps: int) -> tuple[pl.Task, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    teacher = nn.Linear(20, 5)
    with torch.no_grad():
        teacher.weight.copy_(torch.randn(5, 20, generator=generator))
    inputs = torch.randn(6000, 20, generator=generator)
    labels = teacher(inputs).argmax(1)

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        time.sleep(GRADIENT_S)
        return F.cross_entropy(model(batch[0]), batch[1])

    task = pl.Task(
        model=lambda: nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)),
        loss=loss,
        data=[inputs[:5000], labels[:5000]],
        batch=128,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        steps=steps,
        seed=seed,
    )
    return task, inputs[5000:], labels[5000:]


@contextmanager
def striking(count: int, by: signal.Signals, chance: random.Random) -> Generator[list[int]]:
    """Strike so many workers at one random moment of the run."""
    struck: list[int] = []
    over = threading.Event()

    def run() -> None:
        while len(alive := multiprocessing.active_children()) < WORKERS:
            if over.wait(0.01):
                return
        if over.wait(chance.uniform(0.8, 2.0)):
            return
        for process in chance.sample([p for p in alive if p.pid is not None], count):
            os.kill(process.pid or 0, by)
            struck.append(process.pid or 0)
        if by == signal.SIGSTOP:
            over.wait(STOPPED_S)
            for pid in struck:
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield struck
    finally:
        over.set()
        thread.join()


def result_of(method: str, fault: str, seed: int, steps: int) -> dict[str, Any]:
    count, by, replacements = FAULTS[fault]
    task, inputs, labels = task_of(seed, steps)
    digests: list[str] = []
    training = importlib.import_module("paceline.session.train")  # `paceline.session.train` is the function.
    take = training.take_model

    def taking(model: nn.Module, folder: Path, *, silent_s: float) -> None:
        digests.extend(hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("model-*"))
        take(model, folder, silent_s=silent_s)

    training.take_model = taking
    try:
        with striking(count, by, random.Random(f"{method} {fault} {seed}")) as struck:
            run = pl.train(task, METHODS[method], WORKERS, elastic=True, replacements=replacements, silent_s=SILENT_S)
    finally:
        training.take_model = take
    times: dict[int, list[float]] = defaultdict(list)
    for point in run.trace.points:
        times[point.step].append(point.time)
    begun = [min(times[step]) for step in sorted(times)][1:]
    with torch.no_grad():
        right = (run.model(inputs).argmax(1) == labels).float().mean().item()
    lost = [d.values for d in run.trace.decisions if d.kind == "lost"]
    return {
        "method": method,
        "fault": fault,
        "seed": seed,
        "struck": len(struck),
        "ended": len(digests),
        "models": len(set(digests)),
        "accuracy": round(100 * right, 2),
        "gap_s": round(max(b - a for a, b in pairwise(begun)), 3),
        "meet_s": [round(values["pause_s"], 3) for values in lost],
        "steps": len(times),
    }


def lines_of(runs: list[dict[str, Any]], faults: Collection[str]) -> list[list[str]]:
    lines: list[list[str]] = []
    for method in METHODS:
        for fault in faults:
            own = [run for run in runs if (run["method"], run["fault"]) == (method, fault)]
            if own:
                gaps = [run["gap_s"] for run in own]
                lines.append(
                    [
                        method,
                        fault,
                        str(len(own)),
                        str(sum(run["struck"] for run in own)),
                        str(sum(run["models"] == 1 and run["steps"] >= STEPS and "error" not in run for run in own)),
                        f"{mean(run['ended'] for run in own):.1f}",
                        f"{median(gaps):.2f} s, {max(gaps):.2f} s",
                        f"{mean(run['accuracy'] for run in own):.2f} %",
                    ]
                )
    return lines


PLACES: dict[str, tuple[Collection[str], Callable[[str, str, int, int], dict[str, Any]]]] = {
    "train": (FAULTS, result_of),
    "attach": (LOOP_FAULTS, partial(loop_result, silent_s=SILENT_S, stopped_s=STOPPED_S)),
    "hosts": (HOST_FAULTS, host_result),
}
HEAD = [
    "method",
    "fault",
    "runs",
    "workers struck",
    "runs that ended with one model",
    "workers at the end",
    "longest pause of a run: median, most",
    "accuracy",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--where", choices=PLACES, default="train", help="what the workers run, and where")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS, help="by default all")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = []
    faults, work = PLACES[args.where]
    for strategy in METHODS.values():  # It compiles the kernels, here and not in each worker.
        pl.simulate(task_of(0, 10)[0], strategy, pl.Cluster(workers=WORKERS))
    for seed in range(args.seeds):
        for method in args.methods:
            for fault in faults:
                runs.append(work(method, fault, seed, STEPS))
                print(runs[-1], file=sys.stderr, flush=True)
    lines = lines_of(runs, faults)
    show(markdown(HEAD, lines) if args.markdown else table(HEAD, lines, right=2), width=160)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        text = ",\n".join(map(json.dumps, runs))
        args.json.write_text(f'{{"runs": [\n{text}\n]}}\n')


if __name__ == "__main__":
    main()
