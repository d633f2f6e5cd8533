"""Saving: the checkpoints of a run on real processes, in `train` and in a user's own loop."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed import Store

from paceline import __version__
from paceline.checkpoint import Checkpoint, Checkpoints, Folder
from paceline.checkpoint.manifest import FORMAT, Manifest, Model
from paceline.checkpoint.saver import CheckpointFailed, now, place_of
from paceline.elastic import ElasticEndpoint
from paceline.errors import ClusterError
from paceline.op import drive
from paceline.session.finding import check_stages
from paceline.session.saving_place import SavingPlace
from paceline.session.stopping import Preempted
from paceline.slot_values import Copies
from paceline.strategy import Strategy
from paceline.worker.run import WorkerRun


class ChangedSettings(RuntimeWarning):
    """A run continues by the same strategy with other settings."""


def settings_of(strategy: Strategy) -> str:
    """A strategy as a call, the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(strategy))


class Saving:
    """Continues a run from the newest checkpoint of a folder, and saves it there when that is due.

    Every worker has one, and calls its methods at the same steps.
    """

    def __init__(
        self,
        settings: Checkpoints,
        run: WorkerRun,
        *,
        rank: int,
        workers: int,
        store: Store,
        timeout_s: float,
        more: Callable[[], Mapping[str, Any]] = dict,
        whole: nn.Module | None = None,
        stages: int = 1,
        elastic: ElasticEndpoint | None = None,
    ) -> None:
        """`more` gives what is saved beside the run's own state.

        `rank` and `workers` count processes.  Each worker is as many of them as its model has `stages`, and `whole` is
        that model; with one stage it is the run's own.  With an `elastic` endpoint the workers may change.
        """
        self._run = run
        self._more = more
        self._settings = settings
        self._saved_at: int | None = None
        self._has_ended = False
        self._is_automatic = False
        self._copies = Copies()
        self._folder = Folder(settings.folder)
        self._place = SavingPlace(
            settings, run, rank=rank, workers=workers, stages=stages, store=store, timeout_s=timeout_s, elastic=elastic
        )
        self._is_replacement, self._from = self._place.found(self._folder)
        self._stopping, self._saver, self._cadence = self._place.opened(self._folder, None)
        flat = run.replica.learner.flat
        trained = flat.names if whole is None else [n for n, p in whole.named_parameters() if p.requires_grad]
        self._model = Model.of(flat.model if whole is None else whole, trained)
        self._trained = list(flat.names)
        self._buffers = [name for name, _ in flat.model.named_buffers()]

    @property
    def _is_together(self) -> bool:
        """Whether all workers are saved before the same step; otherwise the first one says when they are saved."""
        return self._run.replica.cursor.rest is None

    def change(self) -> None:
        """The workers of the run have changed: from now on these save it."""
        self._saver.abandon("the workers of the run have changed")
        self._tell_failure()
        self._place.move()
        if self._place.rank == 0:
            self._folder.release()
            self._folder.claim(takes_over=True)
        before = self._stopping
        before.close()
        self._stopping, self._saver, self._cadence = self._place.opened(self._folder, self._cadence.saved)
        self._stopping.has_signal = before.has_signal
        if self._is_automatic:
            self._stopping.listen()
        self._cadence.start(self._run.replica.cursor.step - 1)  # It may be due at the very next step.

    def begin(self) -> None:
        """The run is saved here from now on, also at its end, and on SIGTERM."""
        self._run.replica.cursor.place_of = self._place_of
        if self._settings.sigterm:
            self._stopping.listen()
            self._is_automatic = True

    def _place_of(self, name: str) -> str:
        return f"{self._place.key}/{place_of(name)}"

    # Continue.

    def resume(
        self, load: Callable[[dict[str, Any]], None], check: Callable[[dict[str, Any]], None] = lambda more: None
    ) -> dict[str, Any] | None:
        """Continue from the chosen checkpoint: `load` gets this worker's state.  Before, `check` may refuse the rest.

        What was saved beside the states is returned, that of the first worker for a worker that was not there.  None if
        there is no checkpoint.
        """
        cursor = self._run.replica.cursor
        checkpoint = self._from
        if checkpoint is not None and checkpoint.manifest.shards:
            cursor.restored = str(checkpoint.path.resolve())
        if checkpoint is None or self._is_replacement:
            self._cadence.start(cursor.step)
            return None
        if (why := checkpoint.manifest.model.difference(self._model)) is not None:
            raise ValueError(
                f"{checkpoint.path}: it is a checkpoint of another model: {why}; give the folder of this model, or an "
                "empty one"
            )
        try:
            check_stages(checkpoint, self._place.stages, self._place.stage, self._trained)
            more = checkpoint.part(self._source(checkpoint), self._place.stage)["more"]
            check(more)
            load(checkpoint.state(self._place.worker, self._place.workers, self._place.stage))
        except ValueError as error:
            raise ValueError(f"{checkpoint.path}: {error}") from error
        if self._place.rank == 0:
            _warn_of_settings(checkpoint, self._run.strategy)
        self._from = None
        self._saved_at = checkpoint.step
        self._cadence.start(checkpoint.step)
        return more

    def _source(self, checkpoint: Checkpoint) -> int:
        """The worker whose place in the data this one continues."""
        if self._place.workers != checkpoint.manifest.workers and not self._run.strategy.needs.ordered:
            steps = [state["step"] for state in checkpoint.states()]
            return checkpoint.saved[steps.index(min(steps))]
        return self._place.worker if self._place.worker in checkpoint.saved else 0

    # Save.

    def step(self, step: int) -> None:
        """The run stands before this step: save it if that is due."""
        self._tell_failure()
        rest = self._run.replica.cursor.rest
        stops = self._is_automatic and self._stops(step)
        if stops and step == self._saved_at and self._is_together:
            self._stop(step, None)
        is_due = (self._is_together or self._place.rank == 0) and self._cadence.is_due(step) and step != self._saved_at
        if stops or is_due or (rest is not None and rest.is_asked):
            self.save(step, stops=stops)
        elif rest is not None:
            drive(rest.go_on())

    def _stops(self, step: int) -> bool:
        """Whether the run is saved now because a worker got SIGTERM."""
        if self._is_together:
            return self._stopping.is_due(step)
        if self._stopping.has_signal:
            self._stopping.tell()
        return self._stopping.has_signal

    def _stop(self, step: int, key: str | None) -> None:
        """The run was saved because of SIGTERM, or could not be: end this process."""
        self._saver.wait_for_all(key)
        if self._place.rank == 0:
            why = self._saver.failure()
            place = f"saved in {self._folder.path} before step {step}; the same command continues it"
            print(f"paceline: SIGTERM: the run is {place if why is None else f'not saved: {why}'}", file=sys.stderr)
        raise Preempted

    def save(self, step: int, *, stops: bool = False) -> None:
        """Save the run, which stands before this step; if it `stops`, end this process then.

        Without a common step, every worker but the first has its own.
        """
        replica = self._run.replica
        rest = replica.cursor.rest
        outer, replica.cursor.place_of = replica.cursor.place_of, self._place_of
        try:
            drive(self._run.states.before_save())
        except ClusterError as error:
            if rest is None:
                raise
            key = f"rest {rest.number}"
            self._saver.give_up(step, str(error), key)
            if stops or (self._is_automatic and self._stopping.is_told()):
                self._stop(step, key)
            return drive(rest.go_on())
        finally:
            replica.cursor.place_of = outer
        flat = replica.learner.flat
        flat.refresh()
        self._saver.wait()  # The memory of its copies is used again.
        values: dict[str, Any] = {"state": self._run.state_dict(self._copies), "more": self._more()}
        if self._place.worker == 0:
            published = replica.published
            trained = set(flat.names)
            frozen = {n: p.detach().cpu().clone() for n, p in flat.model.named_parameters() if n not in trained}
            values |= {"published": self._copies.of(published, "published"), "frozen": frozen}
            values |= {"trained": self._trained, "buffers": self._buffers}
        manifest = Manifest(
            format=FORMAT,
            number=0,
            written=now(),
            paceline=__version__,
            torch=str(torch.__version__),
            strategy=type(self._run.strategy).__name__,
            step=step,
            workers=self._place.workers,
            model=self._model,
            settings=settings_of(self._run.strategy),
            shards=0 if rest is None else rest.shards,
            stages=self._place.stages,
        )
        self._saved_at = step
        key = None if rest is None else "end" if self._has_ended else f"rest {rest.number}"
        self._saver.save(step, values, lambda number: replace(manifest, number=number), key)
        if rest is not None and not self._has_ended:
            stops |= self._is_automatic and self._stopping.is_told()
        if stops:
            self._stop(step, key)
        if rest is not None:
            drive(rest.go_on())

    def rest(self) -> None:
        """Others save the run, and this worker has no data left."""
        self.save(self._run.replica.cursor.step)

    def finish(self, end: int) -> None:
        """The run has ended, and its data before the step `end`: save it a last time, and wait until that is written.

        A longer run continues with that step.  A method may have taken empty steps after it, to end what was in flight.
        """
        cursor = self._run.replica.cursor
        is_served = cursor.rest is not None and cursor.rest.shards > 0
        cursor.step = end if is_served else min(cursor.step, end)  # Any worker may have had the last minibatch.
        self._has_ended = True
        if self._run.missed_end and self._place.elastic is not None:
            pass
        elif self._run.missed_end:
            self._saver.give_up(cursor.step, "this worker was believed dead, and missed the end", "end")
        elif cursor.step != self._saved_at or not self._is_together:
            self.save(cursor.step)
        self.close()
        self._tell_failure()

    def abandon(self, why: str) -> None:
        """The run is not saved at its end."""
        if self._run.strategy.needs.servers:
            self._saver.give_up(self._run.replica.cursor.step, why, "end")

    def close(self, *, failed: bool = False) -> None:
        """Wait for what is being written, and let other jobs use the folder."""
        if failed:  # There is no next step: SIGTERM, which a launcher sends then, ends the wait for other workers.
            self._stopping.close()
            if self._stopping.has_signal:
                self._saver.abandon("the run failed, and got SIGTERM")
        self._saver.wait()
        self._stopping.close()
        self._folder.release()

    def wait(self) -> None:
        """Wait until the last checkpoint is written; raise CheckpointFailed if it was not."""
        self._saver.wait()
        if (why := self._saver.failure()) is not None:
            raise CheckpointFailed(why)

    def _tell_failure(self) -> None:
        if (why := self._saver.failure()) is not None:
            warnings.warn(CheckpointFailed(f"{why}; training goes on"), stacklevel=3)


def _warn_of_settings(checkpoint: Checkpoint, strategy: Strategy) -> None:
    saved, own = checkpoint.manifest.settings, settings_of(strategy)
    if saved and saved != own:
        warnings.warn(
            ChangedSettings(f"{checkpoint.path}: it was saved under {saved}, and continues under {own}"),
            stacklevel=4,
        )
