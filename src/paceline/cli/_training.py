"""What `paceline train` and `paceline simulate` share: the settings file, the header, and the result."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.monitor import Monitor
    from paceline.run import Run
    from paceline.settings import Recipe, Settings
    from paceline.task import Task


def file_and_flags(words: Sequence[str]) -> tuple[Path, list[str]]:
    """The settings file, which can stand anywhere among the flags, and these.

    >>> file_and_flags(["--workers", "4", "settings.toml", "--seed=3"])
    (PosixPath('settings.toml'), ['--workers', '4', '--seed=3'])
    """
    file: str | None = None
    flags: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("--") or file is not None:
            flags.append(word)
            if "=" not in word and word.startswith("--") and rest:
                flags.append(rest.pop(0))
        else:
            file = word
    if file is None:
        raise ValueError(f"{' '.join(words)}: there is no settings file among these words; `paceline init` writes one")
    return Path(file), flags


def train_by_settings(path: Path, flags: Sequence[str]) -> None:
    """Train on forked processes, or as a rank of a launched job, of which only the first shows and writes anything."""
    from paceline.engines.place import detect
    from paceline.session.train import train
    from paceline.settings import load, naming

    settings = load(path, flags)
    place = detect()
    is_rank = place is not None and place.world > 1
    workers = place.world if place is not None and is_rank else settings.workers
    if is_rank and settings.workers not in (1, workers):
        raise ValueError(
            f"workers = {settings.workers} under a launcher that started {workers} processes: start as many, leave out "
            f"`workers`, or give --workers {workers}"
        )
    recipe, task = prepared(path, settings, workers)
    is_first = place is None or place.rank == 0
    if is_first:
        where = f"as ranks of {place.engine}" if place is not None and is_rank else "on processes of this machine"
        _show_header(path, recipe, task, f"{workers} workers {where}")
    how = settings.processes
    with naming(path):
        checkpoint = recipe.checkpoints()
    watching = monitors(path, settings)
    run = train(
        task,
        recipe.strategy,
        None if is_rank else workers,
        ordered=how.ordered,
        nonfinite=how.nonfinite,
        timeout_s=how.timeout,
        replacements=how.replacements,
        elastic=how.elastic,
        monitor=watching,
        checkpoint=checkpoint,
    )
    if is_first:
        _show_result(run, recipe, "s")


def simulate_by_settings(path: Path, flags: Sequence[str]) -> None:
    """Train on a simulated cluster."""
    import torch

    from paceline.settings import load, naming
    from paceline.sim import simulate

    settings = load(path, flags)
    recipe, task = prepared(path, settings, settings.workers)
    with naming(path):
        cluster = recipe.cluster()
    _show_header(path, recipe, task, f"simulated, {cluster.bandwidth} and {cluster.latency} to each worker")
    torch.set_num_threads(1)  # As workers of `train` have.
    watching = monitors(path, settings)
    run = simulate(task, recipe.strategy, cluster, nonfinite=settings.processes.nonfinite, monitor=watching)
    _show_result(run, recipe, "virtual s")


def prepared(path: Path, settings: Settings, workers: int) -> tuple[Recipe, Task]:
    """The recipe and its task; files that cannot be written are refused now."""
    from paceline.settings import Recipe, naming
    from paceline.settings.saving import check_writable

    with naming(path):
        files = {
            "save.model": settings.save.model,
            "save.trace": settings.save.trace,
            "log.metrics": settings.log.metrics,
        }
        for key, name in files.items():
            if name is not None:
                check_writable(Path(name), key)
        recipe = Recipe(settings, workers, Path.cwd())
        return recipe, recipe.task()


def monitors(path: Path, settings: Settings) -> list[Monitor]:
    """What the table [log] asks for."""
    from paceline.monitor import ProgressBar, Recorder, Statistics
    from paceline.settings import naming

    log = settings.log
    found: list[Monitor] = [ProgressBar()] if log.progress else []
    with naming(path):
        if log.metrics is not None or log.tensorboard is not None:
            found.append(Recorder(log.metrics, tensorboard=log.tensorboard))
        if log.statistics:
            found.append(Statistics(log.statistics))
    return found


def _show_header(path: Path, recipe: Recipe, task: Task, how: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from paceline.settings import naming
    from paceline.settings.first_step import check_first_step
    from paceline.settings.header import header

    with naming(path):  # It builds the model.
        lines = header(recipe, task) | {"runs": how}
        check_first_step(recipe, task)
    table = Table.grid(padding=(0, 2))
    for name, text in lines.items():
        table.add_row(name, text)
    Console(highlight=False).print(table)


def _show_result(run: Run, recipe: Recipe, seconds: str) -> None:
    """Print how the run ended, and write the files that the settings ask for; of a run that diverged not the model."""
    from rich.console import Console

    from paceline.settings.saving import save_model

    console = Console(highlight=False)
    values = ", ".join(f"{name} {_shown(name, value)}" for name, value in run.final.items())
    sent = run.trace.bytes_sent(0) / 1e6
    console.print(f"[bold]{values or 'done'}[/bold]: {run.seconds:.1f} {seconds}, {sent:,.1f} MB sent by worker 0")
    save = recipe.settings.save
    if save.trace is not None:
        run.trace.save(save.trace)
        console.print(f"trace: {save.trace}")
    if recipe.settings.processes.nonfinite != "pass":
        _check_finite(run, save.model)
    if save.model is not None:
        save_model(run.model, Path(save.model))
        console.print(f"model: {save.model}")


def _check_finite(run: Run, file: str | None) -> None:
    """Raise FloatingPointError if training has diverged: a run that goes on after a NaN would end as if all were
    well."""
    last = {point.rank: point for point in run.trace.points if point.loss is not None}
    if not run.params.isfinite().all():
        what = "the model at the end of the run holds NaN or infinity"
    elif last and not any(isfinite(point.loss or 0.0) for point in last.values()):
        what = f"the last loss of every worker is not finite, that of worker {min(last)} is {last[min(last)].loss}"
    else:
        return
    kept = "" if file is None else f"; {file} was not written"
    raise FloatingPointError(
        f"training has diverged: {what}{kept}.  Lower the learning rate or warm it up; `paceline tune` looks for one"
    )


def _shown(name: str, value: float) -> str:
    return f"{100 * value:.2f} %" if name == "accuracy" else f"{value:.4f}"
