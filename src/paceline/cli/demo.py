"""`paceline demo`: a comparison of strategies, on data that comes with the package."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.progress import Progress

    from paceline.report import Row
    from paceline.study.demo import Demo

NOTES = [
    "Simulated rows compute real gradients; only their time is virtual. The same strategy code runs on real processes.",
    "Wall time of real processes on one machine is not comparable with virtual time behind a slow link.",
]


def demo(
    report: Annotated[Path, typer.Option(help="Where to write the report.")] = Path("report.html"),
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the digits, for each strategy.")] = 20,
) -> None:
    """Compare six settings on a simulated cluster behind a slow link, and run one on real processes."""
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from paceline.report import html, text, verdict
    from paceline.study.demo import Demo

    _check_path(report)
    torch.set_num_threads(1)  # The models are small, and the simulator has one thread.
    console = Console()
    name = TextColumn("{task.description:<36}")
    with Progress(
        name, BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeElapsedColumn(), console=console
    ) as bar:
        rows = ShownRun(Demo(epochs), bar).rows()
    console.print(text.table(rows))
    console.print(verdict.verdict(rows), highlight=False)
    html.write(report, "Handwritten digits behind a slow link", rows, _facts(epochs), NOTES)
    console.print(f"Report: {report}")


def _check_path(report: Path) -> None:
    """Refuse a file that cannot be written before the work, not after it."""
    folder = report.absolute().parent
    if report.is_dir():
        raise ValueError(f"paceline demo --report {report}: it is a folder; give the name of a file")
    if not folder.is_dir():
        raise ValueError(f"paceline demo --report {report}: there is no folder {folder}")
    if not os.access(report if report.exists() else folder, os.W_OK):
        raise ValueError(f"paceline demo --report {report}: it cannot be written")


class ShownRun:
    """The demo with a progress bar."""

    def __init__(self, job: Demo, bar: Progress) -> None:
        self._job = job
        self._bar = bar
        self._shown = bar.add_task("", total=job.total_steps)
        self._steps = job.task().total_steps
        self._before = -self._steps  # The steps of the runs before this one.

    def rows(self) -> list[Row]:
        rows = self._job.rows(self._starts, self._steps_to)
        self._bar.update(self._shown, description="done", completed=self._job.total_steps)
        return rows

    def _starts(self, name: str) -> None:
        self._before += self._steps
        self._bar.update(self._shown, description=name, completed=self._before)

    def _steps_to(self, step: int) -> None:
        self._bar.update(self._shown, completed=self._before + step + 1)


def _facts(epochs: int) -> dict[str, str]:
    import torch

    from paceline import __version__
    from paceline.study.demo import CLUSTER, REAL_WORKERS

    return {
        "Simulated cluster": f"{CLUSTER.workers} workers, gradients of about 20 ms each, "
        f"{CLUSTER.bandwidth} and {CLUSTER.latency} to each",
        "Real processes": f"{REAL_WORKERS} on this machine",
        "Task": "handwritten digits, 8x8 pixels, 1,437 to learn from and 360 to test; "
        f"a perceptron of 19,210 parameters, {epochs} epochs",
        "Seed": str(CLUSTER.seed),
        "Versions": f"paceline {__version__}, torch {torch.__version__}",
    }
