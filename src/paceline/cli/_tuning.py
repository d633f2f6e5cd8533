"""What `paceline tune` does with a settings file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path


def tune_by_settings(
    path: Path,
    flags: Sequence[str],
    rates: int | list[float],
    *,
    budget: str,
    part: float,
    seeds: int,
    results: Path | None,
    is_real: bool,
) -> None:
    """Search, print the table, and say how to train with what was found."""
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from paceline.cli._training import prepared
    from paceline.settings import load, naming
    from paceline.settings.first_step import check_first_step
    from paceline.settings.rate_flags import rate_flags
    from paceline.study.tune import tune
    from paceline.study.tuned import tune_table

    settings = load(path, flags)
    recipe, task = prepared(path, settings, settings.workers)
    with naming(path):
        check_first_step(recipe, task)
    if not is_real:
        torch.set_num_threads(1)
    console = Console(highlight=False)
    columns = (TextColumn("trials"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        shown = bar.add_task("", total=None)
        found = tune(
            task,
            recipe.strategy,
            None if is_real else recipe.cluster(),
            workers=settings.workers if is_real else None,
            rates=rates,
            budget=budget,
            part=part,
            seeds=seeds,
            results=results,
            progress=lambda done, most: bar.update(shown, completed=done, total=most),
        )
    console.print(tune_table(found))
    console.print(found.verdict())
    factor = found.rate / found.own
    changed = rate_flags(recipe, factor)
    if changed is None:
        console.print(f"Train with it:  multiply the learning rates of {path} by {factor:.4g}.")
    else:
        command = shlex.join(["paceline", "train", str(path), *flags, *changed])
        console.print(f"Train with it:  {command}", soft_wrap=True)
