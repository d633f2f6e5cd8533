"""Place: which rank of which job this process is, and how it meets the other ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from paceline.engines.launchers import Announced, Environ, Variable, all_announced
from paceline.engines.meeting import meet_alone, meet_at_master, meet_on_this_host
from paceline.transport.job_key import JobKey


@dataclass(frozen=True)
class Place:
    """This process's place in its job.  `meet(timeout_s)` returns the store through which the ranks find each other."""

    engine: str
    rank: int
    world: int
    meet: Callable[[float], dist.Store]
    local_rank: int | None = None  # None: the engine does not say it.
    local_world: int | None = None
    key: JobKey | None = None  # The job's key, if the engine has made one.


def detect(environ: Environ = os.environ) -> Place | None:
    """The place that a launcher gave to this process; None if no launcher did.

    A torch process group that is already initialised comes first.  Launchers that contradict each other are an error.
    """
    if dist.is_initialized():
        return Place("torch.distributed", dist.get_rank(), dist.get_world_size(), lambda _: _default_store())
    found = all_announced(environ)
    if not found:
        return None
    innermost = max((one.level for one in found if one.level is not None and one.world is not None), default=0)
    own = [one for one in found if one.level is None or one.level >= innermost]
    _check_agreement(own)
    sized = [one for one in own if one.world is not None]
    if not sized:
        raise ValueError(
            f"{own[0].rank} says that {own[0].launcher} started this process, but no variable says how many it "
            "started: set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT on each of them"
        )
    chosen = max(sized, key=lambda one: -1 if one.level is None else one.level)
    assert chosen.world is not None
    if chosen.rank.value >= chosen.world.value:
        raise ValueError(f"{chosen.rank} and {chosen.world}: a rank must be below the number of processes")
    # A launcher further out knows more about the host at times; it counts if it started the same processes.
    same = [one for one in found if one.rank.value == chosen.rank.value and _size(one) == chosen.world.value]
    return _place(chosen, chosen.world.value, [chosen, *same], environ)


def _place(chosen: Announced, world: int, sources: Sequence[Announced], environ: Environ) -> Place:
    rank = chosen.rank.value
    local_rank = next((one.local_rank for one in sources if one.local_rank is not None), None)
    local_world = next((one.local_world for one in sources if one.local_world is not None), None)
    job_id = next((one.job_id for one in sources if one.job_id is not None), None)
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        meet = partial(meet_at_master, rank, world, local_world == world)
    elif world == 1:
        meet = meet_alone
    elif job_id is not None and local_world == world:
        meet = partial(meet_on_this_host, f"{chosen.launcher} {job_id}", rank, world)
    else:
        meet = partial(_cannot_meet, chosen.launcher, world, local_world)
    return Place(chosen.launcher, rank, world, meet, local_rank, local_world)


def _size(one: Announced) -> int | None:
    return None if one.world is None else one.world.value


def _check_agreement(found: Sequence[Announced]) -> None:
    first = found[0]
    for other in found[1:]:
        for one, another in ((first.rank, other.rank), (first.world, other.world)):
            if one is not None and another is not None and one.value != another.value:
                raise ValueError(
                    f"{one} and {another} contradict each other.  If {other.launcher} started this process, unset "
                    f"{_names(first)}; if {first.launcher} did, unset {_names(other)}"
                )


def _names(one: Announced) -> str:
    variables: list[Variable | None] = [one.rank, one.world]
    return " and ".join(variable.name for variable in variables if variable is not None)


def _cannot_meet(launcher: str, world: int, local_world: int | None, timeout_s: float) -> dist.Store:
    here = "" if local_world is None else f", {local_world} of them on this host"
    raise ValueError(
        f"{launcher} started {world} processes{here}, and none of its variables says where they meet: set MASTER_ADDR "
        "to a name or address of the first host, and MASTER_PORT to a free port there, on all of them"
    )


def _default_store() -> dist.Store:
    from torch.distributed.distributed_c10d import _get_default_store  # pyright: ignore[reportPrivateUsage]

    return _get_default_store()
