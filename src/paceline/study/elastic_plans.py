"""Fault plans of elastic runs: one of the first workers lives, and is never taken for dead.

Without it the state of the run would be lost with the last worker that has it.  The job's store is beside that worker,
so no partition cuts it off from the store.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.sim.faults import Faults
from paceline.sim.generations import keeper_of

OF_ELASTIC = ("crash", "join", "suspicion")  # Faults that only an elastic run of a synchronous method outlives.


def with_survivor(faults: Faults, workers: int) -> Faults:
    """The plan without the faults that would make the last worker that knows the run's state count as dead."""
    deaths = dict(faults.deaths)
    if all(rank in deaths for rank in range(workers)):
        del deaths[max(range(workers), key=lambda rank: (deaths[rank], rank))]
    faults = replace(faults, deaths=deaths)
    keeper = keeper_of(faults, workers)
    return replace(
        faults,
        suspicions=[(rank, time) for rank, time in faults.suspicions if rank != keeper],
        pauses=[pause for pause in faults.pauses if pause.rank != keeper or not faults.changes_members],
    )
