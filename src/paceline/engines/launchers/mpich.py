"""MPICH's mpiexec (hydra), and those derived from it: Intel MPI, MVAPICH, Cray MPICH.

Hydra gives its jobs no id.  The process that started the ranks of this host, and its start time, identify the job.
"""

from __future__ import annotations

from paceline.engines.launchers import MPI, Announced, Environ, number, value
from paceline.engines.processes import launcher_of


def announced(environ: Environ) -> Announced | None:
    rank = number(environ, "PMI_RANK", "PMIX_RANK")
    if rank is None:
        return None
    namespace = environ.get("PMIX_NAMESPACE") if rank.name == "PMIX_RANK" else None
    return Announced(
        launcher="MPICH",
        rank=rank,
        world=number(environ, "PMI_SIZE"),
        local_rank=value(number(environ, "MPI_LOCALRANKID", "PMI_LOCAL_RANK")),
        local_world=value(number(environ, "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")),
        job_id=namespace or launcher_of(rank.name),
        level=MPI,
    )
