"""Slurm's srun.

Only inside a job step: a batch script that is run without srun also sees SLURM_PROCID=0, but it is one process.
"""

from __future__ import annotations

import re

from paceline.engines.launchers import BATCH_SYSTEM, Announced, Environ, number, value

# Steps with an id above this are no srun's: a batch script's own, an interactive shell's, a container's.
LAST_STEP = 0xFFFFFFF0


def announced(environ: Environ) -> Announced | None:
    step = number(environ, "SLURM_STEP_ID")
    rank = number(environ, "SLURM_PROCID")
    if step is None or rank is None or step.value >= LAST_STEP:
        return None
    return Announced(
        launcher="Slurm",
        rank=rank,
        world=number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=value(number(environ, "SLURM_LOCALID")),
        local_world=_tasks_on_this_node(environ),
        job_id=f"{environ.get('SLURM_JOB_ID', '')}.{step.value}",
        level=BATCH_SYSTEM,
    )


def _tasks_on_this_node(environ: Environ) -> int | None:
    """The entry of this node in a list such as "2(x3),1": three nodes of two tasks, then one of one."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE"))
    node = number(environ, "SLURM_NODEID")
    if text is None or node is None:
        return None
    per_node: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return None
        per_node += [int(match[1])] * int(match[2] or 1)
    return per_node[node.value] if node.value < len(per_node) else None
