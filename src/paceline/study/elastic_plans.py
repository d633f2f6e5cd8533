"""Fault plans of elastic runs: one of the first workers lives, and is never taken for dead.

Without it the state of the run would be lost with the last worker that has it.  The job's store is beside that worker,
so no partition cuts it off from the store.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.sim.fault_schedule import check_faults
from paceline.sim.faults import Faults
from paceline.sim.generations import keeper_of
from paceline.strategy import Strategy

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


def is_possible(faults: Faults, strategy: Strategy, workers: int) -> bool:
    """Whether a run of the strategy may have these faults, which are some of those that were drawn."""
    try:
        check_faults(faults, strategy, workers, 1, elastic=strategy.needs.ordered)
    except ValueError:
        return False
    if not strategy.needs.ordered:
        return True
    kept = with_survivor(faults, workers)
    return all(len(getattr(kept, name)) == len(getattr(faults, name)) for name in ("deaths", "suspicions", "pauses"))
