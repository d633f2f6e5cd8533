"""`paceline demo`: the library's main job on data that comes with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    report: Annotated[Path, typer.Option(help="Where to write the report.")] = Path("report.html"),
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the digits, for each strategy.")] = 20,
) -> None:
    """Compare all strategies on a simulated cluster behind a slow link, and run one on real processes."""
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from paceline import __version__
    from paceline.report import html, text
    from paceline.study.demo import CLUSTER, REAL_WORKERS, Demo

    torch.set_num_threads(1)  # The models are small, and the simulator is one thread.
    console = Console()
    job = Demo(epochs)
    steps = job.task().total_steps
    with Progress(
        TextColumn("{task.description:<36}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        console=console,
    ) as bar:
        shown = bar.add_task("", total=job.total_steps)
        done = -steps

        def starts(name: str) -> None:
            nonlocal done
            done += steps
            bar.update(shown, description=name, completed=done)

        rows = job.rows(starts, lambda k: bar.update(shown, completed=done + k + 1))
        bar.update(shown, description="done", completed=job.total_steps)
    console.print(text.table(rows))
    facts = {
        "Simulated cluster": f"{CLUSTER.workers} workers, gradients of about 20 ms each, {CLUSTER.bandwidth} and {CLUSTER.latency} to each",
        "Real processes": f"{REAL_WORKERS} on this machine",
        "Task": f"handwritten digits, 8x8 pixels, 1,437 to learn from and 360 to test; a perceptron of 19,210 parameters, {epochs} epochs",
        "Seed": str(CLUSTER.seed),
        "Versions": f"paceline {__version__}, torch {torch.__version__}",
    }
    notes = [
        "Simulated rows compute real gradients; only their time is virtual. The same strategy code runs on real processes.",
        "Wall time of real processes on one machine is not comparable with virtual time behind a slow link.",
    ]
    html.write(report, "Handwritten digits behind a slow link", rows, facts, notes)
    console.print(f"Report: {report}")
