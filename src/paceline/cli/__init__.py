"""The command line.

A command is a file in this folder, with a function of the same name: it is found by itself.  The function parses its
arguments, calls the library and prints.  `CONTEXT` in the file holds the command's settings for click, if it has any.
Files that start with an underscore are not commands.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from pkgutil import iter_modules
from typing import Annotated

import typer

from paceline.errors import ClusterError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help=(__import__("paceline").__doc__ or ""),
)
for _name in sorted(module.name for module in iter_modules(__path__) if not module.name.startswith("_")):
    _module = import_module(f"{__name__}.{_name}")
    app.command(context_settings=getattr(_module, "CONTEXT", None))(getattr(_module, _name))


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from paceline import __version__

        print(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options before the command."""


def _one_line(message: Warning | str, category: type[Warning], *_: object) -> str:
    return f"{category.__name__}: {message}\n"


def main() -> None:
    """Show an error of the user or of the cluster, and a warning, in one line, without a traceback."""
    warnings.formatwarning = _one_line
    try:
        app()
    except (ValueError, ClusterError) as error:
        if report := getattr(error, "report", None):  # The traceback of a module of the user's.
            print(report, file=sys.stderr)
        print(f"paceline: {error}", file=sys.stderr)
        sys.exit(1)
