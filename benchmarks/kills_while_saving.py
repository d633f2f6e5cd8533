"""A run killed by SIGKILL while it writes a checkpoint, all processes at once, and started again.

Each kill falls on another moment of writing.  Half of them come right before an operation on a file of the checkpoint
(it is opened, renamed or removed, or its folder is made), chosen by lot from all operations of a run, on the first or
on the second worker.  The other half come at a random time after a save has begun.  Afterwards every checkpoint that
has a manifest must be whole, and the run that continues must end with the same bits as one that was never stopped.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paceline as pl
from paceline.checkpoint import BrokenCheckpoint, Checkpoint, Folder
from paceline.checkpoint.folder import UnusableCheckpoint
from paceline.checkpoint.manifest import NAME

WORKERS, STEPS, EVERY = 2, 12, 3
METHODS: dict[str, pl.Strategy] = {
    "all-reduce": pl.AllReduceSGD(),
    "all-reduce by one-bit": pl.AllReduceSGD(codec=pl.codecs.OneBit()),
    "averaging, delayed": pl.PeriodicAveraging(period=4, delay=2),
    "adaptive averaging": pl.AdaptiveAveraging(period=2, warmup=2, sampling=6),
    "block momentum": pl.BlockMomentum(period=4),
    "DiLoCo, streaming": pl.DiLoCo(period=4, fragments=2, delay=1),
}
CHANGES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}  # As sys.addaudithook names them.


def task(width: int) -> pl.Task:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16 * STEPS, width, generator=generator)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 1))

    return pl.Task(
        model=model,
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        data=(x, x[:, :4].sum(1, keepdim=True)),
        batch=16,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        steps=STEPS,
    )


class Operations:
    """Counts the operations on files of a folder in one worker's process, and kills the job before a given one."""

    def __init__(self, folder: Path, worker: str, kill_before: int | None, report: Callable[[int], None]) -> None:
        self._folder = str(folder)
        self._worker = worker
        self._kill_before = kill_before
        self._report = report
        self._count = 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in CHANGES or multiprocessing.current_process().name != self._worker:
            return
        if not str(arguments[0]).startswith(self._folder) or (event == "open" and not writes(arguments)):
            return
        self._count += 1
        self._report(self._count)
        if self._count == self._kill_before:
            os.killpg(os.getpgrp(), signal.SIGKILL)


def writes(arguments: tuple[Any, ...]) -> bool:
    """Whether a file is opened to be written."""
    _, mode, flags = arguments
    return any(letter in (mode or "") for letter in "wa+x") or bool((flags or 0) & (os.O_WRONLY | os.O_RDWR))


class Job:
    """A run in a session of its own, so that all of its processes can be killed at once."""

    def __init__(self, width: int, method: pl.Strategy, folder: Path, out: Path) -> None:
        self._arguments = (width, method, folder, out)
        self._counts = multiprocessing.get_context("fork").Array("i", WORKERS)
        self.process: Any = None

    def start(self, worker: int = 0, kill_before: int | None = None) -> None:
        self.process = multiprocessing.get_context("fork").Process(target=self._run, args=(worker, kill_before))
        self.process.start()

    def _run(self, worker: int, kill_before: int | None) -> None:
        os.setsid()
        width, method, folder, out = self._arguments
        for rank in range(WORKERS):
            report = lambda count, rank=rank: self._counts.__setitem__(rank, count)  # noqa: E731
            sys.addaudithook(Operations(folder, f"worker-{rank}", kill_before if rank == worker else None, report))
        torch.set_num_threads(1)
        warnings.simplefilter("error", UnusableCheckpoint)  # A broken checkpoint would be passed over with a warning.
        saved = pl.Checkpoints(folder, every=f"{EVERY} steps")
        run = pl.train(task(width), method, WORKERS, ordered=True, checkpoint=saved)
        torch.save(run.model.state_dict(), out)

    @property
    def operations(self) -> list[int]:
        """Of each worker, so far."""
        return list(self._counts)

    def end(self) -> int:
        self.process.join()
        return self.process.exitcode

    def kill(self) -> None:
        with suppress(ProcessLookupError):  # It has ended.
            os.killpg(self.process.pid, signal.SIGKILL)


def kill_during_a_save(job: Job, folder: Path, which: int, after_s: float) -> None:
    """Kill a job some time after it has begun its save number `which`."""
    path = Folder(folder).at(which * EVERY)
    while not path.exists() and job.process.is_alive():
        time.sleep(0.0005)
    time.sleep(after_s)
    job.kill()


def where(folder: Path) -> str:
    """What a kill has left of the save that it interrupted."""
    if not folder.is_dir():
        return "before the first save"
    incomplete = [path for path in Folder(folder).steps() if not (path / NAME).exists()]
    if not incomplete:
        return "between two saves, or while an old checkpoint was removed"
    files = [path.name for path in incomplete[-1].iterdir()]
    if any(name.startswith(f".{NAME}") for name in files):
        return "while the manifest was written"
    if any(name.endswith(".partial") for name in files):
        return "while a file was written, before its renaming"
    if len(files) == 2 * WORKERS:
        return "all files renamed, before the manifest"
    return "between the renaming of two files" if files else "before the first file"


def sound(folder: Path) -> tuple[int, int]:
    """How many checkpoints have a manifest, and how many of these are not whole."""
    broken = 0
    found = Folder(folder).complete()
    for path in found:
        try:
            Checkpoint(path).verify()
        except BrokenCheckpoint as error:
            print(error, file=sys.stderr)
            broken += 1
    return len(found), broken


def same(a: Path, b: Path) -> bool:
    one, other = torch.load(a, weights_only=True), torch.load(b, weights_only=True)
    return all(torch.equal(one[name], other[name]) for name in one)


def campaign(kills: int, width: int, seed: int, base: Path) -> dict[str, Any]:
    chance = random.Random(seed)
    wholes: dict[str, Path] = {}
    totals: dict[str, list[int]] = {}
    save_s: dict[str, float] = {}
    for name, method in METHODS.items():
        job = Job(width, method, base / "undisturbed", base / f"{name}.pt")
        began = time.monotonic()
        job.start()
        if job.end():
            raise RuntimeError(f"the undisturbed run of {name} failed")
        save_s[name] = (time.monotonic() - began) / (STEPS // EVERY) / 2
        wholes[name], totals[name] = base / f"{name}.pt", job.operations
        shutil.rmtree(base / "undisturbed")
    counts: Counter[str] = Counter()
    places: Counter[str] = Counter()
    began = time.monotonic()
    for i in range(kills):
        name = list(METHODS)[i % len(METHODS)]
        folder, out = base / "run", base / "run.pt"
        job = Job(width, METHODS[name], folder, out)
        if i // len(METHODS) % 2:
            job.start()
            kill_during_a_save(job, folder, chance.randint(1, STEPS // EVERY), chance.uniform(0, save_s[name]))
        else:
            worker = chance.randrange(WORKERS)
            job.start(worker, chance.randint(1, totals[name][worker]))
        has_ended = job.end() == 0
        counts["killed"] += not has_ended
        counts["ended before the kill"] += has_ended
        places[where(folder)] += not has_ended
        complete, broken = sound(folder)
        counts["checkpoints verified"] += complete
        counts["checkpoints broken"] += broken
        again = Job(width, METHODS[name], folder, out)
        again.start()
        counts["runs that did not continue"] += again.end() != 0
        counts["runs that ended with other bits"] += not (out.exists() and same(out, wholes[name]))
        counts["files left over"] += sum(".partial" in path.name for path in folder.rglob("*"))
        shutil.rmtree(folder)
        out.unlink(missing_ok=True)
        print(f"{i + 1} of {kills}: {name}, {dict(counts)}", file=sys.stderr, flush=True)
    return {
        "kills": kills,
        "seed": seed,
        "parameters": sum(p.numel() for p in task(width).build().parameters()),
        "seconds": round(time.monotonic() - began),
        "operations of a run": {name: totals[name] for name in METHODS},
        "counts": dict(counts),
        "places": dict(places.most_common()),
    }


def page(found: dict[str, Any]) -> str:
    rows = [*found["counts"].items(), *((f"killed {place}", count) for place, count in found["places"].items())]
    lines = [
        "# Killed while a checkpoint is written",
        "",
        "`python -m benchmarks.kills_while_saving` writes this page.  Two real workers train a model of "
        f"{found['parameters']:,} parameters for {STEPS} steps, with a checkpoint every {EVERY} steps, by each of "
        f"{len(METHODS)} methods in turn ({', '.join(METHODS)}).  All processes are killed at once by SIGKILL while a "
        "checkpoint is written: half of the kills right before an operation on a file, chosen by lot from those of a "
        "whole run, half at a random time after a save has begun.  Then all checkpoints with a manifest are verified, "
        "the same command is run again, and its model is compared bit by bit with that of a run that was never "
        "stopped.",
        "",
        "|  |  |",
        "| --- | --- |",
        *(f"| {name} | {count} |" for name, count in rows),
        "",
        f"{found['kills']} runs in {found['seconds']} s, by the seed {found['seed']}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=120, help="how often a run is killed")
    parser.add_argument("--width", type=int, default=1000, help="of the model, which has this many times itself")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md, as in docs/results/kills-while-saving")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        found = campaign(args.kills, args.width, args.seed, Path(base))
    if args.out is None:
        print(page(found))
        return
    args.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(page(found))


if __name__ == "__main__":
    main()
