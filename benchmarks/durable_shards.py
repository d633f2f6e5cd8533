"""What shards that come back cost, and how fast they are back.

Pairs of runs in turn, without and with `durability="process"`: steps per second, and their ratio. Then runs in which a
shard is killed again and again: how long its workers wait for the first reply of the next process, and whether each
sample was applied exactly once in every shard.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import paceline as pl
from benchmarks._frame import markdown, show, table
from paceline.engines.server_process import NAME

WORKERS = 2
SIZES = {"0.4 MB": 100_000, "25 MB": 6_250_000}  # Of the parameters of one shard.
COST_HEAD = ["parameters", "steps/s without", "steps/s with", "ratio", "from", "to", "pairs"]
BACK_HEAD = ["parameters", "kills", "wait, median", "longest", "samples not applied once"]


class Counters(nn.Module):
    """A parameter for each sample, and others beside them, so that there is something to send."""

    def __init__(self, samples: int, numel: int) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(samples))
        self.rest = nn.Parameter(torch.zeros(numel - samples))


def counting(steps: int, numel: int, batch: int = 8) -> pl.Task:
    """Each sample adds one to a parameter of its own."""
    rows = torch.eye(steps * batch)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        assert isinstance(model, Counters)
        return -(batch[0] @ model.seen).sum() + 0.0 * model.rest.sum()

    return pl.Task(
        model=lambda: Counters(len(rows), numel),
        loss=loss,
        data=[rows],
        batch=batch,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        steps=steps,
    )


def strategy(durability: str) -> pl.ParameterServer:
    return pl.ParameterServer(rule=pl.rules.Sgd(lr=1.0), servers=1, durability=durability)  # pyright: ignore[reportArgumentType]


def rate(run: pl.Run, steps: int) -> float:
    """Updates per second from a tenth of the run on: the first steps load kernels."""
    times = sorted(span.stop for span in run.trace.spans if span.kind == "gradient")
    times = times[len(times) // 10 :]
    return (len(times) - 1) / (times[-1] - times[0])


def costs(numel: int, steps: int, pairs: int) -> tuple[list[float], list[float]]:
    plain: list[float] = []
    durable: list[float] = []
    for i in range(pairs):
        for durability, rates in (("none", plain), ("process", durable))[:: 1 if i % 2 else -1]:
            run = pl.train(counting(steps, numel), strategy(durability), workers=WORKERS)
            rates.append(rate(run, steps))
    return plain, durable


def shards() -> list[int]:
    """The processes of this user that hold shards, and are alive."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            before, _, after = stat.read_text().rpartition(")")
            if before.partition("(")[2] == NAME and after.split()[0] != "Z":
                found.append(int(stat.parent.name))
    return found


def killer(times: int, every: int) -> tuple[Callable[[int], None], list[int]]:
    """A progress function that kills the shard every so many steps, if it is another process than the last time."""
    killed: list[int] = []

    def progress(step: int) -> None:
        there = [pid for pid in shards() if pid not in killed]
        if step >= every * (len(killed) + 1) and len(killed) < times and there:
            os.kill(there[0], signal.SIGKILL)
            killed.append(there[0])

    return progress, killed


def returns(numel: int, kills: int, every: int) -> tuple[int, list[float], int]:
    """How many kills there were, how long workers waited after each, and how many samples were not applied once."""
    progress, killed = killer(kills, every)
    task = counting(every * (kills + 2), numel)
    slow = replace(task, loss=lambda model, batch: (time.sleep(0.002), task.loss(model, batch))[1])
    run = pl.train(slow, strategy("process"), workers=WORKERS, progress=progress, timeout_s=120)
    waits = sorted((s.stop - s.start for s in run.trace.spans if s.kind == "recv" and s.rank == 0), reverse=True)
    counted = run.params[: task.samples]
    return len(killed), waits[: len(killed)], int(counted.ne(1.0).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    parser.add_argument("--json", type=Path, default=Path("docs/results/durable-shards.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    cost_rows: list[list[str]] = []
    back_rows: list[list[str]] = []
    for name, numel in SIZES.items():
        steps = 600 if numel < 1e6 else 60
        plain, durable = costs(numel, steps, given.pairs)
        ratios = sorted(b / a for a, b in zip(plain, durable, strict=True))
        figures = [f"{median(plain):.0f}", f"{median(durable):.0f}", f"{median(ratios):.2f}"]
        cost_rows.append([name, *figures, f"{ratios[0]:.2f}", f"{ratios[-1]:.2f}", str(given.pairs)])
        # A shard that is killed ten times in succession, each within a second, is not started again: five kills a run.
        back = [returns(numel, 5, every=30 if numel < 1e6 else 6) for _ in range(given.kills // 5)]
        waits = [wait for _, each, _ in back for wait in each]
        wrong = sum(each for _, _, each in back)
        kills = sum(each for each, _, _ in back)
        back_rows.append([name, str(kills), f"{median(waits):.2f} s", f"{max(waits):.2f} s", str(wrong)])
    tables = {"cost": [COST_HEAD, *cost_rows], "back": [BACK_HEAD, *back_rows]}
    given.json.write_text(json.dumps(tables, indent=1) + "\n")
    for title, (head, *rows) in tables.items():
        if given.markdown:
            print(markdown(head, rows), end="\n\n")
        else:
            show(table(head, rows, title=title), width=100)


if __name__ == "__main__":
    main()
