"""`paceline torture`: strategies under random faults by seed."""

from __future__ import annotations

from typing import Annotated

import typer


def torture(
    strategy: Annotated[list[str] | None, typer.Option(help="A strategy by name; give it again for another.")] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds, from 0 on.")] = 1000,
    seed: Annotated[int | None, typer.Option(help="Only this seed: repeat a failing run.")] = None,
    faults: Annotated[str, typer.Option(help="Kinds of faults, with commas between them: crash,pause.")] = "",
    processes: Annotated[int, typer.Option(help="How many processes run seeds.")] = 1,
    json: Annotated[str, typer.Option(help="Write the table to this file too.")] = "",
) -> None:
    """Run strategies in the simulator with random faults, and check in each run that nothing is lost or doubled.

    A seed that breaks an invariant is shown with the command that repeats it and the smallest plan of faults.
    """
    from paceline.cli._torture import torture_all

    kinds = [kind.strip() for kind in faults.split(",") if kind.strip()]
    chosen = range(seeds) if seed is None else [seed]
    if torture_all(strategy or [], chosen, kinds, processes=processes, path=json):
        raise typer.Exit(1)
