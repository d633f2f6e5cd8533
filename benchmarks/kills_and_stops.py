"""Workers killed and stopped at random: every method whose workers do not wait for each other, on real processes.

A small perceptron learns handwritten digits on four workers. In disturbed runs a worker chosen at random is killed by
SIGKILL, or stopped by SIGSTOP and continued after up to three times the silence after which it counts as dead. A
gradient's time is mostly a sleep, so four workers on few cores are as fast as on four machines.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch._dynamo  # So that forked processes need not.
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from benchmarks._frame import markdown, show, table
from paceline.data import digits
from tests.dist.starting import everything, leftovers

WORKERS, BATCH, EPOCHS = 4, 128, 25
GRADIENT_S = 0.01
SILENT_S = 0.6
LIMIT_S = 240.0
STOPS = 0.4  # The share of stops among kills and stops.
METHODS: dict[str, pl.Strategy] = {
    "ParameterServer": pl.ParameterServer(rule=pl.rules.Sgd(lr=0.1), servers=2),
    "StaleSynchronous": pl.StaleSynchronous(lr=0.1, bound=4, servers=2),
    "SoftSync": pl.SoftSync(lr=0.1, updates=2),
    "Downpour": pl.Downpour(),
    "ASGD": pl.ASGD(),
    "AsyncDiLoCo": pl.AsyncDiLoCo(period=8),
    "AsyncEASGD": pl.AsyncEASGD(),
    "Gossip": pl.Gossip(),
    "Strom": pl.Strom(None, lr=0.1 / WORKERS),
    "Hogwild": pl.Hogwild(),
    "EAWild": pl.EAWild(),
}


def task_of(seed: int) -> pl.Task:
    x, y, _, _ = digits()

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        time.sleep(GRADIENT_S)
        return F.cross_entropy(model(batch[0]), batch[1])

    return pl.Task(
        model=lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        loss=loss,
        data=(x, y),
        batch=BATCH,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        epochs=EPOCHS,
        seed=seed,
    )


@contextmanager
def disturbing(seed: int, events: int) -> Iterator[dict[str, int]]:
    """Kill or stop one of this process's workers, again and again; how often each was done."""
    chance, over, done = random.Random(seed), threading.Event(), {"kills": 0, "stops": 0}

    def disturb() -> None:
        over.wait(1.0)
        while sum(done.values()) < events and not over.wait(chance.uniform(0.05, 0.35)):
            workers = [p.pid for p in multiprocessing.active_children() if p.name.startswith("worker-") and p.pid]
            if not workers:
                continue
            pid, is_stop = chance.choice(workers), chance.random() < STOPS
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if is_stop else signal.SIGKILL)
                done["stops" if is_stop else "kills"] += 1
                if is_stop:
                    over.wait(chance.uniform(0.1, 3 * SILENT_S))
                    os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join()


def run(method: str, seed: int, events: int) -> dict[str, Any]:
    """One run in a process of its own, with a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="stops-"))
    before, began = everything(folder), time.monotonic()
    result = Path(f"{folder}.json")
    process = multiprocessing.get_context("fork").Process(target=child, args=(method, seed, events, folder, result))
    process.start()
    process.join(LIMIT_S)
    is_hanging = process.is_alive()
    if is_hanging:
        process.kill()
        process.join()
    seconds = time.monotonic() - began
    left = leftovers(before, folder)
    while left and time.monotonic() < began + seconds + 5.0:
        time.sleep(0.1)
        left = leftovers(before, folder)
    found: dict[str, Any] = {"ended": "hangs" if is_hanging else "no result"}
    if result.exists():
        found = json.loads(result.read_text())
        result.unlink()
    return {
        "method": method,
        "seed": seed,
        "disturbed": events > 0,
        "seconds": round(seconds, 1),
        "left": left,
        **found,
    }


def child(method: str, seed: int, events: int, folder: Path, result: Path) -> None:
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None
    torch.set_num_threads(1)
    _, _, x, y = digits()
    task, found = task_of(seed), dict[str, Any]()
    with disturbing(seed, events) as done:
        try:
            ended = pl.train(task, METHODS[method], WORKERS, replacements=events, silent_s=SILENT_S, timeout_s=120.0)
            found = {"ended": "finished", "accuracy": round(100 * accuracy(ended.model, x, y), 2)}
            shards = range(WORKERS, WORKERS + METHODS[method].servers)
            applied = [sum(int(p.samples) for p in ended.trace.points if p.rank == rank) for rank in shards]
            found |= {"samples": len(task.data[0]) * EPOCHS, "samples_applied": applied}
        except BaseException as error:
            found = {"ended": f"{type(error).__name__}: {error}".partition("\n")[0]}
    result.write_text(json.dumps(found | done))
    os._exit(0)


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


HEAD = [
    "method",
    "runs",
    "kills",
    "stops",
    "finished",
    "left behind",
    "undisturbed",
    "disturbed",
    "seconds, undisturbed and disturbed",
    "samples applied too often or not at all",
]


def line_of(method: str, runs: list[dict[str, Any]]) -> list[str]:
    calm, wild = ([r for r in runs if r["disturbed"] is is_wild] for is_wild in (False, True))
    seconds = ", ".join(f"{mean(r['seconds'] for r in own):.1f}" if own else "-" for own in (calm, wild))
    off = [abs(n - r["samples"]) for r in wild for n in r.get("samples_applied", [])]
    return [
        method,
        str(len(wild)),
        str(sum(r.get("kills", 0) for r in wild)),
        str(sum(r.get("stops", 0) for r in wild)),
        str(sum(r["ended"] == "finished" for r in wild)),
        str(sum(len(r["left"]) for r in wild)),
        spread([r["accuracy"] for r in calm if "accuracy" in r]),
        spread([r["accuracy"] for r in wild if "accuracy" in r]),
        seconds,
        str(sum(off)) if off else "-",
    ]


def spread(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{mean(values):.2f} %" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--events", type=int, default=30, help="kills and stops in each disturbed run")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each kind")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", type=Path, help="where to keep the runs; those in it are not run again")
    args = parser.parse_args()
    runs: list[dict[str, Any]] = json.loads(args.json.read_text())["runs"] if args.json and args.json.exists() else []
    done = {(r["method"], r["seed"], r["disturbed"]) for r in runs}
    for method, seed, events in product(args.methods, range(args.seeds), (0, args.events)):
        if (method, seed, events > 0) not in done:
            runs.append(run(method, seed, events))
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
        if args.json:
            told = ",\n".join(map(json.dumps, runs))
            args.json.write_text(f'{{"runs": [\n{told}\n]}}\n')
    found = [method for method in METHODS if any(r["method"] == method for r in runs)]
    lines = [line_of(method, [r for r in runs if r["method"] == method]) for method in found]
    show(markdown(HEAD, lines) if args.markdown else table(HEAD, lines, right=1), width=200)


if __name__ == "__main__":
    main()
