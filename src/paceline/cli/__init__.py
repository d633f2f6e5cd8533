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

from paceline.errors import MISTAKES, ClusterError, shown_traceback

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
    """Show an error and a warning in one line; an error in code of the user's also with its traceback."""
    warnings.formatwarning = _one_line
    try:
        app()
    except Exception as error:
        if report := getattr(error, "report", "") or shown_traceback(error):
            print(report, file=sys.stderr)
        kind = "" if isinstance(error, (*MISTAKES, ClusterError)) else f"{type(error).__name__}: "
        print(f"paceline: {kind}{error}", file=sys.stderr)
        sys.exit(1)
