"""`paceline strategies`: a list of the training strategies."""

from __future__ import annotations

from typing import Annotated

import typer


def strategies(
    name: Annotated[str | None, typer.Argument(help="Only this one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List the training strategies with their settings."""
    from paceline.cli._listing import show
    from paceline.strategies import STRATEGIES

    show("strategy", STRATEGIES, name, as_json)
