"""`paceline codecs`: a list of the wire formats."""

from __future__ import annotations

from typing import Annotated

import typer


def codecs(
    name: Annotated[str | None, typer.Argument(help="Only this one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List the wire formats for vectors with their settings."""
    from paceline.cli._listing import show
    from paceline.codecs import CODECS

    show("codec", CODECS, name, as_json)
