"""What monitors cost in a user's loop: AllReduceSGD under `paceline.attach` with each of them, compared with none.

It is the loop of `benchmarks.overhead`: two processes of one thread each take turns in blocks of steps.  One model is
so small that a step is little else than paceline's own work.  The table shows how much processor time of both ranks
each monitor adds to a step, and how much of wall time, against the same round without a monitor: medians and quartiles
over all rounds.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

import paceline as pl
from benchmarks.overhead import WORKERS, Setting, Trainer, cnn, forever


def linear() -> nn.Module:
    """7,850 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


SETTINGS = {"linear": Setting(linear, batch=8, steps=100), "cnn": Setting(cnn, batch=32, steps=10)}
NONE = "no monitor"
MONITORS: dict[str, Callable[[Path], pl.Monitor | None]] = {
    NONE: lambda folder: None,
    "ProgressBar": lambda folder: pl.ProgressBar(),
    "Recorder": lambda folder: pl.Recorder(folder / "seldom.jsonl"),
    "Recorder(every=1)": lambda folder: pl.Recorder(folder / "often.jsonl", every=1),
    "Statistics(20)": lambda folder: pl.Statistics(20, out=folder / "statistics.txt"),
    "Statistics(1)": lambda folder: pl.Statistics(1, out=folder / "often.txt"),
}
Times = dict[str, list[tuple[float, float]]]


def measure(setting: Setting, rounds: int, folder: Path) -> Times:
    """The seconds a step with each monitor, and the CPU seconds of both ranks, in each round."""
    torch.manual_seed(0)
    model = setting.model()
    batches = [(torch.randn(setting.batch, 1, 28, 28), torch.randint(10, (setting.batch,))) for _ in range(8)]
    sessions: list[Any] = []

    def trainer(make: Callable[[Path], pl.Monitor | None]) -> Trainer:
        def attached(model: Any, optimizer: Any) -> tuple[Any, Any]:
            sessions.append(pl.attach(model, optimizer, pl.AllReduceSGD(), monitor=make(folder)))
            return model, sessions[-1]

        return Trainer(copy.deepcopy(model), forever(batches), attached)

    trainers = {name: trainer(make) for name, make in MONITORS.items()}
    names, taken = list(trainers), {name: [] for name in trainers}
    for made in trainers.values():
        made.block(setting.steps)
    for r in range(rounds):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            taken[name].append(trainers[name].block(setting.steps))
    for session in reversed(sessions):
        session.close()
    return taken


def work(rank: int, port: int, rounds: int, folder: Path, results: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORKERS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(TTY_COMPATIBLE="1", TERM="xterm", COLUMNS="120")
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (the terminal)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, setting in SETTINGS.items():
        (folder / name).mkdir(exist_ok=True)
        taken = measure(setting, rounds, folder / name)
        if rank == 0:
            results.put((name, taken))
    dist.destroy_process_group()


def summary(name: str, taken: Times) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for monitor, blocks in taken.items():
        added = [[1e6 * (own[i] - none[i]) for own, none in zip(blocks, taken[NONE], strict=True)] for i in range(2)]
        rows[monitor] = {
            "ms_per_step": 1e3 * median(seconds for seconds, _ in blocks),
            "cpu_ms_per_step": 1e3 * median(cpu for _, cpu in blocks),
            "added_us": quantiles(added[0], n=4),
            "added_cpu_us": quantiles(added[1], n=4),
        }
    return {"model": name, "rounds": len(taken[NONE]), "rows": rows}


def table(result: dict[str, Any]) -> Table:
    made = Table("", "ms", "CPU ms", "more us", "quartiles", "more CPU us", "quartiles")
    made.title = f"{result['model']}: a step of {WORKERS} workers, {result['rounds']} rounds"
    for column in made.columns[1:]:
        column.justify = "right"
    for monitor, row in result["rows"].items():
        cells = [f"{row['ms_per_step']:.3f}", f"{row['cpu_ms_per_step']:.3f}"]
        for low, middle, high in (row["added_us"], row["added_cpu_us"]):
            cells += [f"{middle:.0f}", f"{low:.0f} to {high:.0f}"]
        made.add_row(monitor, *cells)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60, help="blocks with each monitor")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        given = (port, args.rounds, Path(folder), results)
        workers = [context.Process(target=work, args=(rank, *given), daemon=True) for rank in range(WORKERS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
            if worker.exitcode:
                raise SystemExit(f"a worker ended with exit code {worker.exitcode}")
    summaries = [summary(*results.get()) for _ in SETTINGS]
    for result in summaries:
        Console(width=120).print(table(result))
    if args.json:
        args.json.write_text(json.dumps(summaries, indent=2))


if __name__ == "__main__":
    main()
