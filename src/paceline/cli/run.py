"""`paceline run -n 4 train.py ...`: run a script on several local workers."""

from __future__ import annotations

from typing import Annotated

import typer

# Arguments after the script belong to the script.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def run(
    context: typer.Context,
    script: Annotated[
        str, typer.Argument(help="The training script (or module, with -m), followed by its own arguments.")
    ],
    n: Annotated[int, typer.Option("-n", "--workers", help="Worker processes to start.")] = 1,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module's name.")] = False,
    port: Annotated[int, typer.Option(help="Port of the rendezvous on loopback; 0: any free one.")] = 0,
    restarts: Annotated[int, typer.Option(help="How often to start all workers again after a failure.")] = 0,
    replacements: Annotated[
        int | None,
        typer.Option(
            help="How many killed workers to replace while the others continue (servers, peers, elastic=True)."
        ),
    ] = None,
    prefix: Annotated[bool, typer.Option(help="Begin each line of several workers with the worker's number.")] = True,
) -> None:
    """Run a script that calls paceline.attach or paceline.train, on several processes of this machine."""
    from paceline.engines.launch import launch

    launch(
        [script, *context.args],
        n,
        port=port,
        is_module=module,
        restarts=restarts,
        replacements=replacements,
        prefix=prefix,
    )
