"""What saving costs: the seconds that training waits, those until the files are on the disk, and the share of a minute.

One worker trains a perceptron of about 100 million parameters by momentum SGD, in rounds of the same number of steps
with a checkpoint and without one, by turns.  `slower` is what a checkpoint adds to the time of a round, also by the
thread that writes: the median of the pairs of rounds, and their quartiles.  Of a minute it is the overhead of a
checkpoint every minute.  `processor` is what it adds to the processor time of the process, which other programs on the
machine disturb less; it is the time that training loses where no core is free.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import paceline as pl
from paceline.checkpoint import Checkpoint, Folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--width", type=int, default=5773, help="of the three hidden layers")
    parser.add_argument("--rounds", type=int, default=6, help="with a checkpoint, and as many without")
    parser.add_argument("--seconds", type=float, default=12.0, help="about how long a round lasts")
    parser.add_argument("--folder", type=Path, help="where to write; by default a temporary folder")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    width = args.width
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    x = torch.randn(8, width)
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    waits: list[float] = []
    written: list[float] = []
    times: dict[bool, list[float]] = {True: [], False: []}
    busy: dict[bool, list[float]] = {True: [], False: []}
    with pl.attach(model, optimizer, pl.AllReduceSGD()) as session:

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            session.step()

        step()
        began = time.perf_counter()
        for _ in range(3):
            step()
        steps = max(1, round(args.seconds / ((time.perf_counter() - began) / 3)))
        session.save(folder, wait=True)  # The first one is slower: it takes new memory.
        for i in range(2 * args.rounds):
            is_saved = i % 2 == 0
            used = time.process_time()
            began = time.perf_counter()
            if is_saved:
                session.save(folder)
                waits.append(time.perf_counter() - began)
            for _ in range(steps):
                step()
                newest = Folder(folder).newest() if is_saved and len(written) < len(waits) else None
                if newest is not None and newest.manifest.number == len(waits) + 1:
                    written.append(time.perf_counter() - began)
            times[is_saved].append(time.perf_counter() - began)
            busy[is_saved].append(time.process_time() - used)
    numel = sum(p.numel() for p in model.parameters())
    newest = Folder(folder).newest()
    assert isinstance(newest, Checkpoint)
    low, slower, high = _quartiles(times)
    _, processor, _ = _quartiles(busy)
    table = Table(
        "parameters", "MB", "steps a round", "waits, s", "written after, s", "slower, s", "of a minute", "processor, s"
    )
    cells = [f"{numel:,}", f"{newest.nbytes / 1e6:,.0f}", str(steps), f"{median(waits):.2f}"]
    cells += [f"{median(written):.1f}" if written else "-", f"{slower:.2f} ({low:.2f} to {high:.2f})"]
    table.add_row(*cells, f"{100 * slower / 60:.1f} %", f"{processor:.2f}")
    Console(width=130).print(table)
    shutil.rmtree(folder)


def _quartiles(figures: dict[bool, list[float]]) -> list[float]:
    """Of what a round with a checkpoint takes more than the next one without."""
    return quantiles([a - b for a, b in zip(figures[True], figures[False], strict=True)], n=4)


if __name__ == "__main__":
    main()
