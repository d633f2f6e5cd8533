"""torchrun, `paceline run`, and every other launcher that sets torch's own variables."""

from __future__ import annotations

from paceline.engines.launchers import AGENT, Announced, Environ, number, value


def announced(environ: Environ) -> Announced | None:
    rank = number(environ, "RANK")
    world = number(environ, "WORLD_SIZE")
    if rank is None or world is None:
        return None
    # An agent on each host sets this one.  Without it, RANK and WORLD_SIZE may be left over from anything.
    by_agent = "TORCHELASTIC_RUN_ID" in environ
    return Announced(
        launcher="torchrun",
        rank=rank,
        world=world,
        local_rank=value(number(environ, "LOCAL_RANK")),
        local_world=value(number(environ, "LOCAL_WORLD_SIZE")),
        level=AGENT if by_agent else None,
    )
