"""What `paceline checkpoint` does."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from paceline.checkpoint import BrokenCheckpoint, Checkpoint, Folder
from paceline.checkpoint.files import write_tensors
from paceline.checkpoint.manifest import NAME
from paceline.errors import ClusterError


def paths(folder: Path) -> list[Path]:
    """The complete checkpoints that a folder holds, or the one that it is."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder; give that of Checkpoints(folder), or a step-... in it")
    found = [folder] if (folder / NAME).exists() else Folder(folder).complete()
    if not found:
        raise ValueError(f"{folder}: there is no complete checkpoint, which has a {NAME}")
    return found


def show(folder: Path) -> None:
    table = Table("checkpoint", "step", "written", "strategy", "workers", "parameters", "MB", "paceline", "torch")
    for path in paths(folder):
        try:
            found = Checkpoint(path)
        except BrokenCheckpoint as error:
            table.add_row(path.name, str(error))
            continue
        m = found.manifest
        numel = sum(_numel(layout.shape) for layout in m.model.parameters)
        sizes = (f"{numel:,}", f"{found.nbytes / 1e6:,.1f}")
        workers = str(m.workers) if m.stages == 1 else f"{m.workers} of {m.stages} stages"
        workers += f" and {m.shards} servers" if m.shards else ""
        workers += f", without {list(m.missing)}" if m.missing else ""
        table.add_row(path.name, f"{m.step:,}", m.written, m.strategy, workers, *sizes, m.paceline, m.torch)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def verify(folder: Path) -> None:
    broken: list[str] = []
    for path in paths(folder):
        try:
            Checkpoint(path).verify()
        except BrokenCheckpoint as error:
            broken.append(str(error))
        else:
            print(f"{path}: whole")
    if broken:
        raise ClusterError("; ".join(broken))


def export(folder: Path, output: Path) -> None:
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise ValueError(f"{output}: give the name of a file, in a folder that exists")
    newest = Checkpoint(folder) if (folder / NAME).exists() else Folder(folder).newest()
    if newest is None:
        paths(folder)
        raise AssertionError  # It says what is missing.
    model = newest.model()
    write_tensors(output, model)
    print(f"{output}: {len(model)} tensors of step {newest.step:,}, from {newest.path}")


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for n in shape:
        numel *= n
    return numel
