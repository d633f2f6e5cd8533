"""What a run in the simulator shows while it goes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from paceline.monitor.channel import LocalChannel
from paceline.monitor.monitor import Monitors, Watch
from paceline.monitor.reader import RankReaders
from paceline.monitor.watched import Watched
from paceline.sim.simulator import Simulator
from paceline.task import Trainee
from paceline.worker.run import WorkerRun


def watches(
    monitors: Monitors, simulator: Simulator, workers: int, runs: Sequence[tuple[WorkerRun, Trainee]]
) -> dict[int, Watch]:
    """A watch of each worker; none without monitors.  `workers` are there from the beginning, the others join later."""
    if not monitors:
        return {}
    by_rank = RankReaders(simulator.trace)
    channel = LocalChannel()
    return {
        run.rank: monitors.watch(
            Watched(
                rank=run.rank,
                workers=workers,
                ranks=[other.rank for other, _ in runs],
                trace=simulator.trace,
                now=lambda: simulator.now,
                reader=partial(by_rank.reader, run.rank),
                channel=channel,
                lr=run.lr,
                steps=lambda trainee=trainee: trainee.timetable.total_steps,
                samples_before=trainee.timetable.samples_before,
                epochs_before=trainee.timetable.epochs_before if trainee.task.samples else lambda step: None,
                notes_syncs=lambda run=run: run.replica.batch.notes_syncs,
                is_simulated=True,
            )
        )
        for run, trainee in runs
    }
