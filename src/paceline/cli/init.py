"""`paceline init`: a settings file to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("settings.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a commented settings file that trains a small model within a minute."""
    from paceline.settings.template import TEMPLATE

    if path.is_dir():
        raise ValueError(f"paceline init {path}: it is a folder; give the name of a file, such as {path}/settings.toml")
    if path.exists() and not force:
        raise ValueError(
            f"paceline init {path}: the file is there already; give another name, or --force to replace it"
        )
    if not path.absolute().parent.is_dir():
        raise ValueError(f"paceline init {path}: there is no folder {path.absolute().parent}")
    path.write_text(TEMPLATE)
    print(f"{path} is written.  Train by it:  paceline train {path}")
