"""The common parts of benchmarks: arguments, runs in separate processes, the file of the runs, and tables."""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

Run = dict[str, Any]  # The figures of one run.


def arguments(doc: str | None, file: str, *, runs_of: str = "method") -> argparse.ArgumentParser:
    """The arguments of a benchmark that keeps its runs in a file of docs/results, and draws a chart next to it."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="the folder of Fashion-MNIST's four IDX files")
    parser.add_argument("--seeds", type=int, default=3, help=f"runs of each {runs_of}")
    parser.add_argument(
        "--processes", type=int, default=2, help="runs at a time; with 0, only show the runs in the file"
    )
    parser.add_argument("--fresh", action="store_true", help="ignore the runs in the file")
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    where = "where to keep the runs; the chart is written next to it"
    parser.add_argument("--json", type=Path, default=Path("docs/results") / file, help=where)
    return parser


def accuracy_of(inputs: Tensor, labels: Tensor) -> Callable[[nn.Module], dict[str, float]]:
    """A task's evaluation: the percentage of these samples that a model classifies correctly."""

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"accuracy": 100 * (model(inputs).argmax(1) == labels).float().mean().item()}

    return evaluate


def worked(work: Callable[..., Run], jobs: Sequence[tuple[Any, ...]], processes: int) -> Iterator[Run]:
    """The result of `work` for each job, in the order in which they finish. Each runs in a process with one thread,
    this many at a time."""
    if jobs:
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            yield from pool.imap_unordered(partial(_alone, work), jobs)


def _alone(work: Callable[..., Run], job: tuple[Any, ...]) -> Run:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # A run that diverges says so.
    result = work(*job)
    gc.collect()  # Replicas and their state refer to each other.
    return result


def read_runs(path: Path, **settings: Any) -> list[Run]:
    """The runs in a file, if they have the current settings."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    return kept["runs"] if kept and all(kept.get(name) == value for name, value in settings.items()) else []


def write_runs(path: Path, runs: Iterable[Run], **settings: Any) -> None:
    """Write one run a line."""
    lines = ",\n".join(f"  {json.dumps(run)}" for run in runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{json.dumps(settings)[:-1]}, "runs": [\n{lines}\n]}}\n')


def spread(values: Sequence[float], form: str) -> str:
    """The mean and deviation of values, in a format such as "{:.2f}". One value has no deviation."""
    return form.format(mean(values)) + (f" ± {form.format(stdev(values))}" if len(values) > 1 else "")


def table(
    head: Sequence[str], lines: Iterable[Sequence[str]], *, title: str | None = None, right: int | None = None
) -> Table:
    """A table. The columns from number `right` on are aligned right."""
    made = Table(*head, title=title)
    for column in made.columns[len(head) if right is None else right :]:
        column.justify = "right"
    for line in lines:
        made.add_row(*line)
    return made


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """The same table as Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *lines])


def as_code(lines: Iterable[Sequence[str]]) -> list[list[str]]:
    """Lines that each begin with a call, as Markdown."""
    return [[f"`{name}`", *rest] for name, *rest in lines]


def show(shown: str | Table, *, width: int) -> None:
    """Print it: a table as wide as the terminal, or `width` wide without a terminal."""
    if isinstance(shown, str):
        print(shown)
    else:
        Console(width=None if sys.stdout.isatty() else width).print(shown)
