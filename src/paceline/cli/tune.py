"""`paceline tune settings.toml`: a short search for the learning rate of a settings file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# Other flags are keys of the file.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def tune(
    context: typer.Context,
    settings: Annotated[Path, typer.Argument(help="A settings file; its learning rate is the middle of the search.")],
    rates: Annotated[str, typer.Option(help="How many rates over three decades, or the rates: 0.01,0.03,0.1.")] = "7",
    budget: Annotated[str, typer.Option(help="How long the first trials are.")] = "0.25 epochs",
    part: Annotated[float, typer.Option(help="The share of the data that trials read.")] = 0.25,
    seeds: Annotated[int, typer.Option(help="Trials of each rate.")] = 2,
    results: Annotated[Path | None, typer.Option(help="Keep trials in this file, and go on from it.")] = None,
    real: Annotated[bool, typer.Option(help="Real processes in place of the simulator.")] = False,
) -> None:
    """Find a learning rate by short trials on a part of the data.

    Any key of the file can be given as a flag, as with `paceline train`.
    """
    from paceline.cli._training import file_and_flags
    from paceline.cli._tuning import tune_by_settings

    given = _rates(rates)
    file, flags = file_and_flags([str(settings), *context.args])
    tune_by_settings(file, flags, given, budget=budget, part=part, seeds=seeds, results=results, is_real=real)


def _rates(text: str) -> int | list[float]:
    try:
        return int(text) if "," not in text and "." not in text else [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"paceline tune --rates {text}: give a number of rates, or rates with commas between them, as in "
            "0.01,0.03,0.1"
        ) from None
