"""The command line: each command parses, calls the library and prints, in a file of its own."""

from __future__ import annotations

import sys

import typer

from paceline.cli import codecs, demo, run, strategies
from paceline.errors import ClusterError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help=(__import__("paceline").__doc__ or ""),
)
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)(run.run)
app.command()(demo.demo)
app.command()(strategies.strategies)
app.command()(codecs.codecs)


def main() -> None:
    """Users' mistakes and the world's failures are told in a line, without a traceback."""
    try:
        app()
    except (ValueError, ClusterError) as error:
        print(f"paceline: {error}", file=sys.stderr)
        sys.exit(1)
