"""What a run on real processes shows while it goes, in `train` and in a user's own loop."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from paceline.engines.job import Job
from paceline.monitor.channel import StoreChannel
from paceline.monitor.monitor import Monitor, Monitors, Watch
from paceline.monitor.reader import reader
from paceline.monitor.relay import Receiver, Sender
from paceline.monitor.watched import Facts, Watched
from paceline.session.loop import Loop
from paceline.session.terms import Terms
from paceline.task import Trainee
from paceline.trace import Trace
from paceline.worker.run import WorkerRun

UNWATCHED = Watch([], lambda index, record: None)


class Watching:
    """The monitors of a call of `train`, and its `progress`, which takes the first worker's step."""

    def __init__(self, monitor: Monitor | Sequence[Monitor] | None, progress: Callable[[int], None] | None) -> None:
        self.progress = progress
        self._monitors = Monitors(monitor)
        self._sent: Path | None = None  # Where a forked worker sends its records.
        self._received: Receiver | None = None

    @contextmanager
    def worker(self, job: Job, run: WorkerRun, trainee: Trainee, depth: int) -> Generator[Watch]:
        """In this block this process works.  Of a replica in stages, only the process with the first one is watched."""
        if not self._monitors or job.rank % depth:
            yield UNWATCHED
            return
        own = Trace(keep=1000)
        watched = _watched(job, run, own, rank=job.rank // depth, workers=job.workers // depth, trainee=trainee)
        facts = Facts(repr(run.strategy), watched.workers, watched.steps())
        shows_here = self._sent is None and watched.is_first
        with self._monitors.shown(facts) if shows_here else nullcontext(), ExitStack() as hooks:
            watch = self._monitors.watch(watched, None if self._sent is None else Sender(self._sent).show)
            if watch.is_on:
                for hook in _timed(trainee.optimizer, watched, own):
                    hooks.callback(hook.remove)
            yield watch

    @contextmanager
    def forked(self, folder: Path, terms: Terms, processes: int) -> Generator[None]:
        """In this block, workers that are forked from this process work, and send their records to it."""
        facts = Facts(repr(terms.strategy), processes // terms.depth, terms.task.total_steps)
        if not self._monitors:
            yield
            return
        self._sent = folder / "records"
        receiver = self._received = Receiver(self._sent)
        try:
            with self._monitors.shown(facts):
                yield
                self._pump()
        finally:
            self._received = None
            receiver.close()

    def leave(self, progress: Callable[[int], None] | None) -> None:
        """This process is a forked worker; `progress` takes its step."""
        self.progress = progress
        self._monitors.leave()

    def show(self, step: int) -> None:
        """Show what forked workers have sent, and the step of the first one."""
        self._pump()
        if self.progress is not None:
            self.progress(step)

    def _pump(self) -> None:
        if self._received is not None:
            self._received.pump(self._monitors.show)


class LoopWatch:
    """The monitors of a session.  What the user's own loop does between two turns of the strategy is computing."""

    def __init__(self, monitor: Monitor | Sequence[Monitor] | None, job: Job, loop: Loop) -> None:
        self._monitors = Monitors(monitor)
        self._watch = UNWATCHED
        self._is_shown = False
        ranks = loop.replica.endpoint.ranks
        # Several ranks may hold the parts of one replica: those with the first part are watched.
        if not self._monitors or ranks[0] != 0:
            return
        self._loop = loop
        self._own = Trace(keep=1000)
        self._watched = _watched(job, loop.run, self._own, rank=self._rank(job), workers=len(ranks))
        self._since = self._watched.now()
        if self._watched.is_first:
            steps = loop.replica.plan.steps
            self._monitors.begin(Facts(repr(loop.run.strategy), len(ranks), steps))
            self._is_shown = True
        self._watch = self._monitors.watch(self._watched)
        if self._watch.is_on:
            loop.run.on_step = self._step
            loop.driver.on_turn = self._note_turn

    def _rank(self, job: Job) -> int:
        """This worker's, among those of its group."""
        return job.rank if job.elastic is not None else self._loop.replica.endpoint.ranks.index(job.rank)

    def restart(self) -> None:
        """The run goes on from a saved state."""
        if self._watch.is_on:
            self._watch = self._monitors.watch(self._watched)

    def look(self) -> None:
        """Show an evaluation now, not after the next step."""
        self._watch.look()

    def end(self, *, failed: bool) -> None:
        watch, self._watch = self._watch, UNWATCHED
        try:
            if not failed:
                watch.end()
        except BaseException:
            failed = True
            raise
        finally:
            if self._is_shown:
                self._is_shown = False
                self._monitors.end(failed=failed)

    def __enter__(self) -> LoopWatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(failed=kind is not None)

    def _step(self, step: int) -> None:
        self._watch.step(step)

    def _note_turn(self, is_strategys: bool) -> None:
        now = self._watched.now()
        if is_strategys:
            self._own.span(self._watched.rank, "loop", self._since, now)
        self._since = now


def _watched(
    job: Job, run: WorkerRun, own: Trace, *, rank: int, workers: int, trainee: Trainee | None = None
) -> Watched:
    trace = job.endpoint.trace
    batch = run.replica.batch
    plan = run.replica.plan
    timetable = None if trainee is None else trainee.timetable

    def samples_before(step: int) -> int | None:
        if timetable is not None:
            return timetable.samples_before(step)
        return round(batch.total * workers) if batch.is_counted else None

    def epochs_before(step: int) -> float | None:
        if trainee is not None:
            return None if trainee.task.samples is None else trainee.timetable.epochs_before(step)
        return step / plan.steps_per_epoch if plan.steps_per_epoch else None

    return Watched(
        rank=rank,
        workers=workers,
        ranks=range(workers),
        trace=trace,
        now=job.endpoint.now,
        reader=lambda: reader(trace),
        channel=StoreChannel(job.store),
        lr=run.lr,
        steps=lambda: plan.steps if timetable is None else timetable.total_steps,
        samples_before=samples_before,
        epochs_before=epochs_before,
        notes_syncs=lambda: batch.notes_syncs,
        host=str(job.hosts.own),
        own=own,
    )


def _timed(optimizer: torch.optim.Optimizer, watched: Watched, own: Trace) -> list[Any]:
    """Note the time of each step of an optimizer."""
    since = 0.0

    def begin(*_: Any) -> None:
        nonlocal since
        since = watched.now()

    def end(*_: Any) -> None:
        own.span(watched.rank, "step", since, watched.now())

    return [optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end)]
