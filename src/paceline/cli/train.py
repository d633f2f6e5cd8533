"""`paceline train settings.toml`: a training from a settings file, on processes of this machine or as a rank of a
job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# Other flags are keys of the file.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def train(
    context: typer.Context,
    settings: Annotated[Path, typer.Argument(help="A settings file; `paceline init` writes one to start from.")],
) -> None:
    """Train by a settings file, on processes of this machine, or as a rank of a job that a launcher started.

    Any key of the file can be given as a flag: --workers 8, --strategy.period 16, --optimizer.lr=0.1.
    """
    from paceline.cli._training import file_and_flags, train_by_settings

    train_by_settings(*file_and_flags([str(settings), *context.args]))
