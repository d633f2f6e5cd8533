"""`paceline simulate settings.toml`: the training of a settings file, on a simulated cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# Other flags are keys of the file.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def simulate(
    context: typer.Context,
    settings: Annotated[Path, typer.Argument(help="A settings file; its table [cluster] says what is simulated.")],
) -> None:
    """Train by a settings file on a simulated cluster: real gradients in virtual time.

    Any key of the file can be given as a flag: --workers 64, --cluster.bandwidth 100Mbit/s.
    """
    from paceline.cli._training import file_and_flags, simulate_by_settings

    simulate_by_settings(*file_and_flags([str(settings), *context.args]))
