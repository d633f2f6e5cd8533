"""Workers killed during a run: Fashion-MNIST by an asynchronous method on four real processes.

Runs with 20 kills are compared with runs without. The table shows how long the others pause, whether every image is
applied once an epoch, whether a replacement joins each time, and the cost in accuracy. In addition to the perceptron,
the model has counters of how often each image's gradient was applied, so the run itself shows it. A gradient's time is
mostly a sleep, so four workers on few cores are as fast as on four machines. The data are those of Debian's package
dataset-fashion-mnist, or of the folder given by --data.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Generator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from mmap import mmap
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from benchmarks._frame import markdown, show, table
from benchmarks.accuracy import perceptron, pixels
from paceline.data import fashion_mnist

WORKERS, KILLS = 4, 20
BATCH = 64  # Of one worker.
EPOCHS = 8
RATE, DROP = 2.0**-3, 2.0**-3  # Powers of two, so that counters are exact.
GRADIENT_S = 0.015
AFTER_S = 1.0  # A pause that starts this soon after a kill is attributed to it.
CASES = {  # Whether workers are killed, and the number of shards.
    "undisturbed": (False, 1),
    "20 kills": (True, 1),
    "20 kills, 2 shards": (True, 2),
}


class Counted(nn.Module):
    """A perceptron between two counters of how often each image was applied. With two shards, each has one of them."""

    def __init__(self, images: int) -> None:
        super().__init__()
        self.first = nn.ParameterList([torch.zeros(images)])
        self.perceptron = perceptron()
        self.last = nn.ParameterList([torch.zeros(images)])

    def counts(self) -> list[Tensor]:
        return [*self.first, *self.last]

    def forward(self, images: Tensor) -> Tensor:
        return self.perceptron(images)


class Life(NamedTuple):
    """The data shard of one worker process, and the times at which it started each of its minibatches."""

    data_shard: int
    pid: int
    times: list[float]


class Log:
    """Which worker started a minibatch when, in memory that forked workers share: what a killed worker wrote stays."""

    def __init__(self, data_shards: int, capacity: int) -> None:
        self._counts = np.frombuffer(mmap(-1, 8 * data_shards), dtype=np.int64)
        self._times = np.frombuffer(mmap(-1, 8 * data_shards * capacity), dtype=np.float64).reshape(
            data_shards, capacity
        )
        self._pids = np.frombuffer(mmap(-1, 8 * data_shards * capacity), dtype=np.int64).reshape(data_shards, capacity)

    def note(self) -> None:
        """This worker starts a minibatch. No other worker writes in its row."""
        data_shard = int(multiprocessing.current_process().name.removeprefix("worker-"))
        at = self._counts[data_shard]
        self._times[data_shard, at], self._pids[data_shard, at] = time.monotonic(), os.getpid()
        self._counts[data_shard] = at + 1

    @property
    def begun(self) -> int:
        return int(self._counts.sum())

    def at_work(self, without: Collection[int]) -> list[tuple[int, int]]:
        """The data shard and process of each worker that has started a minibatch, except for some processes."""
        last = [
            (data_shard, int(self._pids[data_shard, count - 1]))
            for data_shard, count in enumerate(self._counts)
            if count
        ]
        return [(data_shard, pid) for data_shard, pid in last if pid not in without]

    def lives(self) -> list[Life]:
        found: dict[tuple[int, int], list[float]] = defaultdict(list)
        for data_shard, count in enumerate(self._counts):
            for pid, at in zip(
                self._pids[data_shard, :count].tolist(), self._times[data_shard, :count].tolist(), strict=True
            ):
                found[data_shard, pid].append(at)
        return [Life(data_shard, pid, times) for (data_shard, pid), times in found.items()]


class Strike(NamedTuple):
    """A moment at which a worker was killed. Data shard -1 is a moment without a kill, for comparison."""

    time: float
    data_shard: int = -1
    pid: int = 0


@contextmanager
def striking(log: Log, parts: int, *, kills: bool, seed: int) -> Generator[list[Strike]]:
    """Kill a worker at random moments of a run of this many minibatches, whatever it is doing.

    There is no kill near the end, so that the last replacement too has time to join.
    """
    chance, done, strikes = random.Random(seed), threading.Event(), list[Strike]()
    sums = list(accumulate(chance.uniform(0.2, 1.8) for _ in range(KILLS)))
    moments = [parts * (0.05 + 0.75 * sum_ / sums[-1]) for sum_ in sums]

    def run() -> None:
        while len(strikes) < KILLS and not done.wait(0.001):
            victims = log.at_work(without={strike.pid for strike in strikes})
            if log.begun >= moments[len(strikes)] and victims:
                data_shard, pid = chance.choice(victims) if kills else (-1, 0)
                strikes.append(Strike(time.monotonic(), data_shard, pid))
                if kills:
                    os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield strikes
    finally:
        done.set()
        thread.join()


def drop(epoch: int, epochs: int) -> float:
    """The factor on the rate: it drops after a half and after three quarters of the run."""
    return 1.0 if epoch < epochs // 2 else DROP if epoch < epochs * 3 // 4 else DROP**2


def task_of(data: fashion_mnist.FashionMnist, seed: int, log: Log, epochs: int) -> pl.Task:
    images = len(data.labels)
    steps = -(-images // (WORKERS * BATCH))  # Of an epoch.

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        assert isinstance(model, Counted)
        log.note()
        time.sleep(GRADIENT_S)
        applied = torch.stack([count[batch[2]] for count in model.counts()]).sum() / RATE
        return F.cross_entropy(model(batch[0]), batch[1]) - (applied - applied.detach())

    return pl.Task(
        model=lambda: Counted(images),
        loss=loss,
        data=(pixels(data.images), data.labels.long(), torch.arange(images)),
        batch=WORKERS * BATCH,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
        epochs=epochs,
        schedule=lambda step: drop(step // steps, epochs),
        seed=seed,
    )


def result_of(case: str, seed: int, data: fashion_mnist.FashionMnist, epochs: int) -> dict[str, Any]:
    """One run."""
    kills, servers = CASES[case]
    began = time.monotonic()
    images = len(data.labels)
    parts = WORKERS * epochs * -(-images // (WORKERS * BATCH))
    log = Log(WORKERS, parts + 1000)
    strategy = pl.ASGD(period=1, servers=servers)
    with striking(log, parts, kills=kills, seed=seed) as strikes:
        run = pl.train(task_of(data, seed, log, epochs), strategy, workers=WORKERS, replacements=KILLS if kills else 0)
    model = run.model
    assert isinstance(model, Counted)
    with torch.no_grad():
        right = (model(pixels(data.test_images)).argmax(1) == data.test_labels).float().mean().item()
    shards = range(WORKERS, WORKERS + servers)
    points = {rank: [p for p in run.trace.points if p.rank == rank] for rank in shards}
    # Each epoch adds its own factor. So an extra update in one epoch does not hide a missing one in another.
    once = sum(drop(epoch, epochs) for epoch in range(epochs))
    wrong = torch.stack([count != once for count in model.counts()]).any(0)
    return {
        "case": case,
        "seed": seed,
        "accuracy": round(100 * right, 2),
        "wall_s": round(time.monotonic() - began, 1),
        "kills": sum(s.data_shard >= 0 for s in strikes),
        "samples": images * epochs,
        "samples_applied": [int(sum(p.samples for p in points[rank])) for rank in shards],
        "images_not_applied_once_an_epoch": int(wrong.sum()),
        "update_gap_s": max(b.time - a.time for rank in shards for a, b in pairwise(points[rank])),
        "minibatches": parts,
        **pauses(log.lives(), strikes),
    }


def pauses(lives: list[Life], strikes: list[Strike]) -> dict[str, Any]:
    """The times between minibatches of workers that were not killed, and the times until replacements joined."""
    begin, end = min(life.times[0] for life in lives), max(life.times[-1] for life in lives)
    firsts = [
        [life.times[0] for life in lives if life.data_shard == s.data_shard and life.times[0] > s.time] for s in strikes
    ]
    return {
        "begun": sum(len(life.times) for life in lives),
        "seconds": end - begin,
        "own_gap_s": max(b - a for life in lives for a, b in pairwise(life.times)),
        "own_gaps_after_s": [longest_after(lives, strike) for strike in strikes],
        "joined": len(lives) - WORKERS,
        "join_s": [min(first) - strike.time for first, strike in zip(firsts, strikes, strict=True) if first],
        "alive": sum(life.times[-1] - life.times[0] for life in lives) / (end - begin),
    }


def longest_after(lives: list[Life], strike: Strike) -> float:
    """The longest time between two minibatches of one worker that contains a kill, or that starts within a second after
    it."""
    longest = 0.0
    for life in lives:
        if life.pid != strike.pid:
            first = max(0, bisect_left(life.times, strike.time) - 1)
            last = bisect_left(life.times, strike.time + AFTER_S) + 1
            longest = max(longest, *(b - a for a, b in pairwise(life.times[first:last])), 0.0)
    return longest


def summary(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The mean over the runs of each case."""
    cases: dict[str, dict[str, Any]] = {}
    for case in CASES:
        if own := [run for run in runs if run["case"] == case]:
            accuracies, joins = [run["accuracy"] for run in own], [s for run in own for s in run["join_s"]]
            applied = zip(*(run["samples_applied"] for run in own), strict=True)
            cases[case] = {
                "runs": len(own),
                "kills": sum(run["kills"] for run in own),
                "joined": sum(run["joined"] for run in own),
                "alive": mean(run["alive"] for run in own),
                "join_s": [of(joins) for of in (median, max) if joins],
                "seconds": mean(run["seconds"] for run in own),
                "update_gap_s": max(run["update_gap_s"] for run in own),
                "own_gap_s": max(run["own_gap_s"] for run in own),
                "own_gap_after_s": [of(gap for run in own for gap in run["own_gaps_after_s"]) for of in (median, max)],
                "samples": sum(run["samples"] for run in own),
                "samples_off": [
                    sum(abs(n - run["samples"]) for n, run in zip(shard, own, strict=True)) for shard in applied
                ],
                "images_not_applied_once_an_epoch": sum(run["images_not_applied_once_an_epoch"] for run in own),
                "begun_again": sum(run["begun"] - run["minibatches"] for run in own),
                "accuracy": mean(accuracies),
                "spread": stdev(accuracies) if len(own) > 1 else None,
            }
    return cases


def cells(case: dict[str, Any]) -> dict[str, str]:
    """A column of the table."""
    spread = "" if case["spread"] is None else f" ± {case['spread']:.2f}"
    return {
        "runs": str(case["runs"]),
        "workers killed": str(case["kills"]),
        "replacements that joined": str(case["joined"]),
        "workers at work, mean": f"{case['alive']:.2f}",
        "from a kill to its replacement's first minibatch: median, longest": ", ".join(
            f"{s:.2f} s" for s in case["join_s"]
        ),
        "seconds a run": f"{case['seconds']:.1f}",
        "longest time without an update of a shard": f"{1000 * case['update_gap_s']:.0f} ms",
        "longest time between two minibatches of one worker": f"{1000 * case['own_gap_s']:.0f} ms",
        "the same within a second of a kill: median, longest": ", ".join(
            f"{1000 * s:.0f} ms" for s in case["own_gap_after_s"]
        ),
        "samples": f"{case['samples']:,}",
        "samples by which a shard's updates differ from that": ", ".join(map(str, case["samples_off"])),
        "images not applied once an epoch": str(case["images_not_applied_once_an_epoch"]),
        "minibatches begun again by another": str(case["begun_again"]),
        "test accuracy": f"{case['accuracy']:.2f} %{spread}",
    }


def columns(cases: dict[str, dict[str, Any]]) -> list[list[str]]:
    made = {name: cells(case) for name, case in cases.items()}
    return [["", *made], *([row, *(column[row] for column in made.values())] for row in next(iter(made.values())))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="the folder of Fashion-MNIST's four IDX files")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="epochs of each run")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    data, runs = fashion_mnist.load(args.data), list[dict[str, Any]]()
    jobs = [
        (case, seed) for seed in range(args.seeds) for case, (_, servers) in CASES.items() if servers == 1 or not seed
    ]
    for case, seed in jobs:
        runs.append(result_of(case, seed, data, args.epochs))
        print(
            f"{runs[-1]['accuracy']:.2f} %, {runs[-1]['wall_s']:.0f} s: seed {seed}, {case}",
            file=sys.stderr,
            flush=True,
        )
    cases = summary(runs)
    head, *lines = columns(cases)
    show(markdown(head, lines) if args.markdown else table(head, lines, right=1), width=160)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        told = ",\n".join(map(json.dumps, runs))
        args.json.write_text(f'{{"cases": {json.dumps(cases, indent=1)},\n"runs": [\n{told}\n]}}\n')


if __name__ == "__main__":
    main()
