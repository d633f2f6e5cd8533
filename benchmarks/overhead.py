"""The cost of communication in a user's loop: AllReduceSGD under `paceline.attach`, compared with DDP.

Two processes of one thread each train copies of one model, and take turns in blocks of steps: local (no communication),
DDP, DDP with gradient_as_bucket_view, paceline on each rank's own batches (as in the others) and paceline on
`session.shard`. A block takes as long as its slower rank. Ratios are taken within a round; the table shows their median
and quartiles over all rounds. It also shows the CPU time of both ranks, which is the cost of the work even when other
programs use the cores.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl

WORKERS = 2
Batch = tuple[Tensor, Tensor]


def mlp() -> nn.Module:
    """7,994,818 parameters."""
    widths = [784, 2048, 2048, 1064]
    layers = [layer for n, m in pairwise(widths) for layer in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(widths[-1], 10))


def cnn() -> nn.Module:
    """162,710 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1568, 100), nn.ReLU(), nn.Linear(100, 10)),
    )


@dataclass(frozen=True)
class Setting:
    """A model, the samples of one step of one worker, and the steps of one block."""

    model: Callable[[], nn.Module]
    batch: int
    steps: int


SETTINGS = {"mlp": Setting(mlp, batch=64, steps=5), "cnn": Setting(cnn, batch=32, steps=40)}
LOCAL, DDP, DDP_VIEWS, OURS, OURS_SHARD = (
    "no communication",
    "DDP",
    "DDP, bucket views",
    "paceline",
    "paceline, session.shard",
)


class Trainer:
    """A user's loop over one copy of the model, a block of steps at a time."""

    def __init__(
        self,
        model: nn.Module,
        batches: Iterator[Batch],
        wrap: Callable[[nn.Module, torch.optim.Optimizer], tuple[nn.Module, Any]],
    ):
        self.batches = batches
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        self.model, self.stepper = wrap(model, optimizer)
        self.optimizer = optimizer

    def block(self, steps: int) -> tuple[float, float]:
        """The seconds a step of the slower rank, and the CPU seconds of both."""
        dist.barrier()
        began, began_cpu = time.perf_counter(), time.process_time()
        for x, y in islice(self.batches, steps):
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.stepper.step()
        mine = torch.tensor([time.perf_counter() - began, time.process_time() - began_cpu])
        everyones = [torch.empty_like(mine) for _ in range(WORKERS)]
        dist.all_gather(everyones, mine)
        seconds, cpu = zip(*(t.tolist() for t in everyones), strict=True)
        return max(seconds) / steps, sum(cpu) / steps


def forever(batches: list[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches


def measure(setting: Setting, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """The seconds a step of each contestant, and its CPU seconds, in each round."""
    torch.manual_seed(0)
    model = setting.model()
    everyones = [
        (torch.randn(WORKERS * setting.batch, 1, 28, 28), torch.randint(10, (WORKERS * setting.batch,)))
        for _ in range(8)
    ]
    rank = dist.get_rank()
    mine = [(x.chunk(WORKERS)[rank], y.chunk(WORKERS)[rank]) for x, y in everyones]
    sessions: list[Any] = []

    def attached(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        sessions.append(pl.attach(model, optimizer, pl.AllReduceSGD()))
        return model, sessions[-1]

    trainers = {
        LOCAL: Trainer(copy.deepcopy(model), forever(mine), lambda m, o: (m, o)),
        DDP: Trainer(copy.deepcopy(model), forever(mine), lambda m, o: (nn.parallel.DistributedDataParallel(m), o)),
        DDP_VIEWS: Trainer(
            copy.deepcopy(model),
            forever(mine),
            lambda m, o: (nn.parallel.DistributedDataParallel(m, gradient_as_bucket_view=True), o),
        ),
        OURS: Trainer(copy.deepcopy(model), forever(mine), attached),
        OURS_SHARD: Trainer(copy.deepcopy(model), iter(()), attached),
    }
    trainers[OURS_SHARD].batches = sessions[-1].shard(forever(everyones))
    names, taken = list(trainers), {name: [] for name in trainers}
    for trainer in trainers.values():
        trainer.block(max(3, setting.steps // 4))
    for r in range(rounds):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            taken[name].append(trainers[name].block(setting.steps))
    for session in sessions:
        session.close()
    return taken


def work(rank: int, port: int, names: list[str], rounds: int, results: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORKERS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in names:
        taken = measure(SETTINGS[name], rounds)
        if rank == 0:
            results.put((name, taken))
    dist.destroy_process_group()


def summary(name: str, taken: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """The whole report of one model: each contestant compared with the faster DDP, and its loss to communication."""
    seconds = {contestant: [s for s, _ in blocks] for contestant, blocks in taken.items()}
    peer = min((DDP, DDP_VIEWS), key=lambda n: median(seconds[n]))
    numel = sum(p.numel() for p in SETTINGS[name].model().parameters())
    rows: dict[str, Any] = {}
    for contestant, own in seconds.items():
        ratios = [theirs / ours for theirs, ours in zip(seconds[peer], own, strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        lost = median(1 - least / ours for least, ours in zip(seconds[LOCAL], own, strict=True))
        rows[contestant] = {
            "ms_per_step": 1e3 * median(own),
            "steps_per_s": 1 / median(own),
            "cpu_ms_per_step": 1e3 * median(cpu for _, cpu in taken[contestant]),
            "ratio": middle,
            "ratio_quartiles": [low, high],
            "communication": lost,
        }
    return {
        "model": name,
        "parameters": numel,
        "batch_per_worker": SETTINGS[name].batch,
        "peer": peer,
        "rounds": len(seconds[peer]),
        "rows": rows,
    }


def table(result: dict[str, Any]) -> Table:
    title = (
        "{model}: {parameters:,} parameters, {batch_per_worker} samples a worker and step, 2 workers, {rounds} rounds"
    ).format(**result)
    made = Table("", "ms a step", "CPU ms", "steps/s", "ratio", "quartiles", "lost", title=title)
    made.caption = f"ratio: steps/s over those of {result['peer']}; lost: part of a step that goes to communication"
    for column in made.columns[1:]:
        column.justify = "right"
    for contestant, row in result["rows"].items():
        low, high = row["ratio_quartiles"]
        times = f"{row['ms_per_step']:.2f}", f"{row['cpu_ms_per_step']:.2f}", f"{row['steps_per_s']:.1f}"
        made.add_row(
            contestant, *times, f"{row['ratio']:.3f}", f"{low:.3f} - {high:.3f}", f"{row['communication']:.1%}"
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--model", choices=SETTINGS, action="append", help="only this one; can be repeated")
    parser.add_argument("--rounds", type=int, help="blocks of each contestant")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    names: list[str] = args.model or list(SETTINGS)
    rounds = args.rounds or (6 if args.quick else 30)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    workers = [
        context.Process(target=work, args=(rank, port, names, rounds, results), daemon=True) for rank in range(WORKERS)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        if worker.exitcode:
            raise SystemExit(f"a worker ended with exit code {worker.exitcode}")
    summaries = [summary(*results.get()) for _ in names]
    for result in summaries:
        Console().print(table(result))
    if args.json:
        args.json.write_text(json.dumps(summaries, indent=2))


if __name__ == "__main__":
    main()
