"""Open MPI's mpirun and mpiexec."""

from __future__ import annotations

from paceline.engines.launchers import MPI, Announced, Environ, number, value
from paceline.engines.processes import launcher_of


def announced(environ: Environ) -> Announced | None:
    rank = number(environ, "OMPI_COMM_WORLD_RANK")
    if rank is None:
        return None
    return Announced(
        launcher="Open MPI",
        rank=rank,
        world=number(environ, "OMPI_COMM_WORLD_SIZE"),
        local_rank=value(number(environ, "OMPI_COMM_WORLD_LOCAL_RANK")),
        local_world=value(number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")),
        job_id=environ.get("PMIX_NAMESPACE") or launcher_of("OMPI_COMM_WORLD_RANK"),
        level=MPI,
    )
