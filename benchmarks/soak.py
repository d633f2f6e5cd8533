"""A soak: memory, descriptors and threads of every process of a job, for a long time, by three kinds of method.

Each job runs for its share of the time, with a checkpoint every few seconds where the method has them.  Every process
is sampled by /proc.  After a warm-up a line is fitted to each process's memory by least squares: its slope is in
megabytes for 1,000 steps of the first worker.

Each process keeps the newest entries of its trace, so its memory grows until there are twice `--kept` of a kind.  The
library's own number, 100,000, fills in tens of thousands of steps; a smaller one shows what else grows.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paceline as pl
from benchmarks._frame import markdown
from paceline.engines import job as jobs_of_ranks
from paceline.engines import server_process

WORKERS = 2
WARM_UP = 0.25  # The share of the time after which lines are fitted.
JOBS: dict[str, tuple[pl.Strategy, bool]] = {  # And whether it is saved.
    "AllReduceSGD": (pl.AllReduceSGD(), True),
    "Gossip": (pl.Gossip(), True),
    "ParameterServer": (pl.ParameterServer(rule=pl.rules.Sgd(lr=0.01)), False),
}


def task(width: int) -> pl.Task:
    x = torch.randn(4096, width, generator=torch.Generator().manual_seed(0))
    return pl.Task(
        model=lambda: nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        data=(x, x[:, :4].sum(1, keepdim=True)),
        batch=32,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        steps=10**8,
    )


def work(name: str, width: int, folder: str, step: Any) -> None:
    os.setsid()
    torch.set_num_threads(1)
    strategy, is_saved = JOBS[name]
    checkpoint = pl.Checkpoints(folder, every="5s") if is_saved else None

    def progress(k: int) -> None:
        step.value = k

    pl.train(task(width), strategy, WORKERS, checkpoint=checkpoint, progress=progress)


def processes(first: int) -> set[int]:
    """A process and its descendants, also those in sessions of their own."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    children[int(fields[1])].append(int(entry.name))
    found: set[int] = set()
    new = [first]
    while new:
        found.add(new[-1])
        new += children[new.pop()]
    return found


def sample(pid: int) -> tuple[float, int, int]:
    """Resident megabytes, descriptors and threads of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    rss = int(status["RssAnon"].split()[0]) + int(status["RssShmem"].split()[0])
    return rss / 1024, len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"])


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the line through these points by least squares."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    squares = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / squares if squares else 0.0


def soaked(name: str, seconds: float, width: int) -> dict[str, Any]:
    step = multiprocessing.get_context("fork").Value("q", 0)
    samples: dict[int, list[tuple[float, int, float, int, int]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as base:
        job = multiprocessing.get_context("fork").Process(target=work, args=(name, width, f"{base}/run", step))
        job.start()
        assert job.pid is not None
        began = time.monotonic()
        saved: set[str] = set()
        while (passed := time.monotonic() - began) < seconds and job.is_alive():
            for pid in processes(job.pid):
                with suppress(OSError, KeyError):
                    samples[pid].append((passed, step.value, *sample(pid)))
            saved |= {path.name for path in Path(base).glob("run/step-*")}
            time.sleep(min(2.0, seconds / 60))
        has_failed = not job.is_alive()
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.join()
    rows: list[dict[str, Any]] = []
    for pid, found in samples.items():
        late = [s for s in found if s[0] >= WARM_UP * seconds]
        if len(late) < 10:
            continue  # A process of the start.
        steps = [s[1] / 1000 for s in late]
        first, last = late[0], late[-1]
        rows.append(
            {
                "process": "launcher" if pid == job.pid else f"process {len(rows)}",
                "samples": len(late),
                "MB": [round(first[2], 2), round(last[2], 2)],
                "MB for 1,000 steps": slope(steps, [s[2] for s in late]),
                "descriptors": [min(s[3] for s in late), max(s[3] for s in late), first[3], last[3]],
                "descriptors for 1,000 steps": slope(steps, [s[3] for s in late]),
                "threads": [min(s[4] for s in late), max(s[4] for s in late), first[4], last[4]],
                "threads for 1,000 steps": slope(steps, [s[4] for s in late]),
            }
        )
    return {
        "method": name,
        "seconds": round(seconds),
        "steps": int(step.value),
        "checkpoints seen": len(saved),
        "failed": has_failed,
        "processes": rows,
    }


def page(found: dict[str, Any]) -> str:
    rows = [
        [
            job["method"],
            row["process"],
            f"{job['steps']:,}",
            str(job["checkpoints seen"]),
            f"{row['MB'][0]:.1f} to {row['MB'][1]:.1f}",
            f"{row['MB for 1,000 steps']:+.3f}",
            "{} to {}".format(*row["descriptors"][:2]),
            f"{row['descriptors for 1,000 steps']:+.3f}",
            "{} to {}".format(*row["threads"][:2]),
            f"{row['threads for 1,000 steps']:+.3f}",
        ]
        for job in found["jobs"]
        for row in job["processes"]
    ]
    head = ["method", "process", "steps", "checkpoints", "MB", "MB / 1,000 steps"]
    head += ["descriptors", "/ 1,000 steps", "threads", "/ 1,000 steps"]
    worst = max(row["MB for 1,000 steps"] for job in found["jobs"] for row in job["processes"])
    return (
        "# A soak\n\n"
        f"`python -m benchmarks.soak --minutes {found['minutes']:g} --kept {found['kept']} --out docs/results/soak` "
        "writes this page.  "
        f"{(__doc__ or '').strip()}\n\n"
        f"This run took {found['minutes']:g} minutes in all, on a machine with other work, with {WORKERS} workers and "
        f"a model of {found['parameters']:,} parameters.  Memory is what a process has of its own and in shared memory "
        f"(RssAnon and RssShmem).  The steepest line is {worst:+.3f} MB for 1,000 steps; the bar is below 1.\n\n"
        + markdown(head, rows)
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="of all jobs together")
    parser.add_argument("--width", type=int, default=128, help="of the model's hidden layer")
    parser.add_argument("--kept", type=int, default=2000, help="entries of each kind that a trace keeps at least")
    parser.add_argument("--only", choices=list(JOBS), help="this method alone")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md, as in docs/results/soak")
    args = parser.parse_args()
    import_first = torch.nn.Linear(1, 1)
    torch.optim.SGD(import_first.parameters(), lr=0.1)  # Its imports are not the jobs'.
    jobs_of_ranks.SPANS_KEPT = server_process.SPANS_KEPT = args.kept  # The processes of all jobs are forked.
    jobs = []
    names = [args.only] if args.only else list(JOBS)
    for name in names:
        jobs.append(soaked(name, args.minutes * 60 / len(names), args.width))
        print(json.dumps(jobs[-1]), file=sys.stderr, flush=True)
    parameters = sum(p.numel() for p in task(args.width).build().parameters())
    found = {"minutes": args.minutes, "kept": args.kept, "parameters": parameters, "jobs": jobs}
    if args.out is None:
        print(page(found))
        return
    args.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(page(found))


if __name__ == "__main__":
    main()
