"""`paceline checkpoint show | verify | export`: what is in a checkpoint, whether it is whole, and its model alone."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Action(StrEnum):
    show = "show"
    verify = "verify"
    export = "export"


def checkpoint(
    action: Annotated[Action, typer.Argument(help="What to do.")],
    folder: Annotated[Path, typer.Argument(help="A folder of checkpoints, or one checkpoint in it.")],
    output: Annotated[Path | None, typer.Argument(help="export: the safetensors file to write.")] = None,
) -> None:
    """Show a folder's checkpoints, verify them, or export the model of the newest one as a plain state_dict.

    Without other action each one's step, time and size are shown.  `verify` reads every byte.  `export` writes the
    parameters and buffers of the model to a safetensors file: for an averaging method, the mean of its workers.
    """
    from paceline.cli import _checkpoints

    if action is Action.export:
        if output is None:
            raise ValueError(
                f"paceline checkpoint export {folder}: name the file to write, as in: paceline checkpoint export "
                f"{folder} model.safetensors"
            )
        _checkpoints.export(folder, output)
    elif output is not None:
        raise ValueError(f"paceline checkpoint {action} {folder} {output}: only export writes a file; leave it out")
    elif action is Action.show:
        _checkpoints.show(folder)
    else:
        _checkpoints.verify(folder)
