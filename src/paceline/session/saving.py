"""Saving: the checkpoints of a run on real processes, in `train` and in a user's own loop."""

from __future__ import annotations

import itertools
import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed import PrefixStore, Store

from paceline import __version__
from paceline.checkpoint import BrokenCheckpoint, Checkpoint, Checkpoints, Folder
from paceline.checkpoint.cadence import Cadence, Losses, Lost, awaited
from paceline.checkpoint.manifest import FORMAT, Manifest, Model
from paceline.checkpoint.saver import CheckpointFailed, Saver, now
from paceline.elastic import ElasticEndpoint
from paceline.errors import ClusterError
from paceline.op import drive
from paceline.slot_values import Copies
from paceline.strategy import Strategy
from paceline.worker.run import WorkerRun

PATIENCE_S = (
    120.0  # How long workers that do not wait for each other wait for a file of another one, which may be dead.
)
_opened = itertools.count()  # All ranks count the same, so it names the keys of each.


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
        self._stages = stages
        self._more = more
        self._settings = settings
        self._saved_at: int | None = None
        self._has_ended = False
        self._copies = Copies()
        self._store = store
        self._elastic = elastic
        self._losses: Losses = elastic.rendezvous.why_lost if elastic is not None else lambda rank: None
        self._timeout_s = timeout_s
        self._name = "" if elastic is not None else f"{next(_opened)}"
        self._take_place(rank, workers)
        shared = self._shared() if elastic is None or workers == 1 else PrefixStore("saving/begin", store)
        self._folder = Folder(settings.folder)
        endpoint = run.replica.endpoint
        # A worker that replaces a dead one has its state from another worker, and not from the disk.
        is_replacement = endpoint.rank not in endpoint.layout.worker_ranks or (
            elastic is not None and elastic.has_joined_late
        )
        self._from = None if is_replacement else self._found(shared, timeout_s)
        if is_replacement and rank == 0 and elastic is None:
            self._folder.claim()
        # Workers that do not wait for each other stand at no common step: the first one says when they are saved.
        self._is_together = run.strategy.needs.ordered
        self._saver, self._cadence = self._opened(None)
        flat = run.replica.learner.flat
        trained = flat.names if whole is None else [n for n, p in whole.named_parameters() if p.requires_grad]
        self._model = Model.of(flat.model if whole is None else whole, trained)
        self._trained = list(flat.names)
        self._buffers = [name for name, _ in flat.model.named_buffers()]

    def _take_place(self, rank: int, workers: int) -> None:
        self._rank = rank
        self._processes = workers
        self._workers = workers // self._stages
        self._worker, self._stage = divmod(rank, self._stages)

    def _shared(self) -> Store | None:
        """The part of the store for the saving of these workers."""
        if self._processes == 1:
            return None
        name = self._name if self._elastic is None else f"of generation {self._elastic.number}"
        return PrefixStore(f"saving/{name}", self._store)

    def _opened(self, saved: float | None) -> tuple[Saver, Cadence]:
        shared = self._shared()
        saver = Saver(
            self._folder,
            self._settings.keep,
            rank=self._rank,
            workers=self._processes,
            store=shared,
            timeout_s=self._timeout_s if self._is_together else min(self._timeout_s, PATIENCE_S),
            losses=self._losses,
        )
        cadence = Cadence(
            self._settings,
            self._run.replica.plan,
            store=shared if self._is_together else None,
            is_first=self._rank == 0 or not self._is_together,
            timeout_s=self._timeout_s,
            saved=saved,
            losses=self._losses,
        )
        return saver, cadence

    def change(self) -> None:
        """The workers of the run have changed: from now on these save it."""
        assert self._elastic is not None
        rank, workers = self._elastic.rank, self._elastic.layout.workers
        self._saver.abandon()
        self._tell_failure()
        self._take_place(rank, workers)
        if rank == 0:
            self._folder.release()
            self._folder.claim(takes_over=True)
        self._saver, self._cadence = self._opened(self._cadence.saved)
        self._cadence.start(self._run.replica.cursor.step - 1)  # It may be due at the very next step.

    # Continue.

    def _found(self, store: Store | None, timeout_s: float) -> Checkpoint | None:
        """The checkpoint to continue from; the first worker chooses it, and says so to all."""
        key = "checkpoint/from"
        if self._rank:
            assert store is not None
            try:
                found = json.loads(awaited(store, key, timeout_s, losses=self._losses))
            except Lost as why:
                raise ClusterError(f"rank 0 has not said which checkpoint to continue from: {why}") from None
            if found["error"] is not None:
                raise BrokenCheckpoint(found["error"])
            return None if found["path"] is None else Checkpoint(self._folder.path / found["path"])
        chosen: Checkpoint | None = None
        failure: Exception | None = None
        try:
            chosen = _chosen(self._folder, resume=self._settings.resume)
        except (ValueError, OSError) as error:
            failure = error
        if store is not None:
            path = None if chosen is None else chosen.path.name
            store.set(key, json.dumps({"path": path, "error": None if failure is None else str(failure)}))
        if failure is not None:
            self._folder.release()
            raise failure
        return chosen

    def resume(
        self, load: Callable[[dict[str, Any]], None], check: Callable[[dict[str, Any]], None] = lambda more: None
    ) -> dict[str, Any] | None:
        """Continue from the chosen checkpoint: `load` gets this worker's state.  Before, `check` may refuse the rest.

        What was saved beside the states is returned, that of the first worker for a worker that was not there.  None if
        there is no checkpoint.
        """
        if self._from is None:
            self._cadence.start(self._run.replica.cursor.step)
            return None
        checkpoint = self._from
        if (why := checkpoint.manifest.model.difference(self._model)) is not None:
            raise ValueError(
                f"{checkpoint.path}: it is a checkpoint of another model: {why}; give the folder of this model, or an "
                "empty one"
            )
        try:
            _check_stages(checkpoint, self._stages, self._stage, self._trained)
            source = _source(checkpoint, self._worker, self._workers, is_together=self._is_together)
            more = checkpoint.part(source, self._stage)["more"]
            check(more)
            load(checkpoint.state(self._worker, self._workers, self._stage))
        except ValueError as error:
            raise ValueError(f"{checkpoint.path}: {error}") from error
        if self._rank == 0:
            _warn_of_settings(checkpoint, self._run.strategy)
        self._from = None
        self._saved_at = checkpoint.step
        self._cadence.start(checkpoint.step)
        return more

    # Save.

    def step(self, step: int) -> None:
        """The run stands before this step: save it if that is due."""
        self._tell_failure()
        rest = self._run.replica.cursor.rest
        is_due = (self._is_together or self._rank == 0) and self._cadence.is_due(step) and step != self._saved_at
        if is_due or (rest is not None and rest.is_asked):
            self.save(step)

    def save(self, step: int) -> None:
        """Save the run, which stands before this step.

        Without a common step, every worker but the first has its own.
        """
        replica = self._run.replica
        rest = replica.cursor.rest
        try:
            drive(self._run.states.before_save())
        except ClusterError as error:
            if rest is None:
                raise
            return self._saver.give_up(step, str(error), f"rest {rest.number}")
        flat = replica.learner.flat
        flat.refresh()
        self._saver.wait()  # The memory of its copies is used again.
        values: dict[str, Any] = {"state": self._run.state_dict(self._copies), "more": self._more()}
        if self._worker == 0:
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
            workers=self._workers,
            model=self._model,
            settings=settings_of(self._run.strategy),
            stages=self._stages,
        )
        self._saved_at = step
        key = None if rest is None else "end" if self._has_ended else f"rest {rest.number}"
        self._saver.save(step, values, lambda number: replace(manifest, number=number), key)

    def rest(self) -> None:
        """Others save the run, and this worker has no data left."""
        self.save(self._run.replica.cursor.step)

    def finish(self, end: int) -> None:
        """The run has ended, and its data before the step `end`: save it a last time, and wait until that is written.

        A longer run continues with that step.  A method may have taken empty steps after it, to end what was in flight.
        """
        cursor = self._run.replica.cursor
        cursor.step = min(cursor.step, end)
        self._has_ended = True
        if self._run.missed_end and self._elastic is not None:
            pass
        elif self._run.missed_end:
            self._saver.give_up(cursor.step, "this worker was believed dead, and missed the end", "end")
        elif cursor.step != self._saved_at or not self._is_together:
            self.save(cursor.step)
        self.close()
        self._tell_failure()

    def close(self) -> None:
        """Wait for what is being written, and let other jobs use the folder."""
        self._saver.wait()
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


def _check_stages(checkpoint: Checkpoint, stages: int, stage: int, trained: list[str]) -> None:
    """Raise ValueError if the model was cut into other stages."""
    if checkpoint.manifest.stages != stages:
        raise ValueError(
            f"it is a checkpoint of a model in {checkpoint.manifest.stages} stages, and this run has {stages}: give "
            f"train(stages={checkpoint.manifest.stages}), or start anew from the export"
        )
    saved = checkpoint.part(0, stage)["trained"]
    if stages > 1 and saved != trained:
        raise ValueError(
            f"stage {stage} of the saved model has the parameters {saved}, and that of this run {trained}: give "
            "train(stages=[...]) with the layers at which the saved stages begin"
        )


def _chosen(folder: Folder, *, resume: bool) -> Checkpoint | None:
    """The checkpoint to continue from, in a folder that this job claims."""
    folder.claim()
    if resume:
        return folder.newest_sound()
    if found := folder.complete():
        raise ValueError(
            f"Checkpoints({str(folder.path)!r}, resume=False): the folder has checkpoints already, the last of which "
            f"is {found[-1].name}; leave out resume=False to continue from it, or give another folder"
        )
    return None


def _source(checkpoint: Checkpoint, worker: int, workers: int, *, is_together: bool) -> int:
    """The worker whose place in the data this one continues."""
    if workers != checkpoint.manifest.workers and not is_together:
        steps = [state["step"] for state in checkpoint.states()]
        return steps.index(min(steps))
    return worker if worker < checkpoint.manifest.workers else 0
