"""LoopSaving: the checkpoints of a session in the user's own loop.

A run is saved when the loop asks `session.shard` for its next minibatch: only then all that the user does in a step is
done, such as the step of a learning-rate scheduler.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from paceline.checkpoint import Checkpoints
from paceline.checkpoint.settings import HasState
from paceline.engines.job import Job
from paceline.needs import Offers, check
from paceline.session.feed import Feed
from paceline.session.loop import Loop
from paceline.session.resuming import load_and_start, refuse_served
from paceline.session.saving import Saving
from paceline.session.watching import LoopWatch

Load = Callable[[dict[str, Any]], None]


class UnsavedRun(RuntimeWarning):
    """A session was given a folder for checkpoints, and its loop never came to a place where it is saved."""


class LoopSaving:
    """Saves a session: when its settings say so, and when the user calls `save`."""

    def __init__(self, job: Job, loop: Loop, feed: Feed, watch: LoopWatch, load: Load) -> None:
        """`load` takes a state of this rank, of a method without servers."""
        self._job = job
        self._loop = loop
        self._feed = feed
        self._load = partial(load_and_start, loop, watch, job.store) if loop.run.strategy.needs.servers else load
        self._also: Mapping[str, HasState] = {}
        self._savings: dict[str, Saving] = {}
        self._last_step = -1  # For which it was found out whether to save.
        self._is_before_next = False  # Whether a minibatch was fetched that is still to be trained.
        self.resumed: int | None = None
        self._automatic: Saving | None = None

    def begin(self, settings: Checkpoints) -> None:
        """Continue from the newest checkpoint, if there is one, and save the run when that is due."""
        self._also = settings.also
        self._automatic = self._saving(settings)
        self._feed.on_minibatch = partial(self._before_minibatch, self._automatic)
        self._loop.replica.cursor.on_rest = partial(self._at_rest, self._automatic)
        self._automatic.begin()
        if not self._resume(self._automatic) and self._loop.run.strategy.needs.servers:
            self._loop.start()
            self._feed.start()

    def _saving(self, settings: Checkpoints) -> Saving:
        path = os.path.realpath(settings.folder)
        elastic = self._job.elastic
        if path not in self._savings:
            check(self._loop.run.strategy, Offers("session.save", unbroken=False))
            if self._loop.learner.parts is not None:
                raise ValueError(
                    "a checkpoint of a model of DTensors: save the model and the optimizer by "
                    "torch.distributed.checkpoint"
                )
            self._savings[path] = Saving(
                settings,
                self._loop.run,
                rank=self._job.rank if elastic is None else elastic.rank,
                workers=self._job.workers if elastic is None else elastic.layout.workers,
                store=self._job.store,
                timeout_s=self._job.timeout_s,
                more=self._more,
                elastic=elastic,
            )
        return self._savings[path]

    def change(self) -> None:
        """The workers of the run have changed."""
        if self._automatic is not None:
            self._automatic.change()

    def _refuse_elastic(self, call: str) -> None:
        if self._job.elastic is not None:
            raise ValueError(
                f"{call} with attach(elastic=True): a worker that joins later does not make the calls that it has "
                "missed; give attach(checkpoint=pl.Checkpoints(folder)), which saves and resumes by itself"
            )

    # Save.

    def save(self, folder: str | os.PathLike[str], *, wait: bool) -> None:
        """Save the run as it is between two steps."""
        self._refuse_elastic("session.save()")
        self._loop.check_between_steps("session.save()")
        saving = self._saving(Checkpoints(folder, keep=None))
        self._is_before_next = False
        saving.save(self._loop.replica.cursor.step)
        if wait:
            saving.wait()

    def _before_minibatch(self, automatic: Saving) -> None:
        step = self._loop.replica.cursor.step
        has_gradient = self._loop.driver.waits_for_step or self._loop.epoch.has_open_gradient
        if step == self._last_step or has_gradient:
            return
        self._last_step = step
        self._is_before_next = True
        automatic.step(step)

    def _at_rest(self, automatic: Saving) -> None:
        self._is_before_next = False
        automatic.rest()

    def _more(self) -> dict[str, Any]:
        return {
            "place": self._feed.place.save(before_next=self._is_before_next),
            "also": {name: value.state_dict() for name, value in self._also.items()},
        }

    # Resume.

    def resume(self, folder: str | os.PathLike[str]) -> bool:
        """Continue from the newest checkpoint of a folder; whether there is one."""
        self._refuse_elastic("session.resume()")
        refuse_served(self._loop.run.strategy, f"session.resume({os.fspath(folder)!r})")
        return self._resume(self._saving(Checkpoints(folder, keep=None)))

    def _resume(self, saving: Saving) -> bool:
        more = saving.resume(self._load, self._check_also)
        if more is None:
            return False
        for name, value in self._also.items():
            value.load_state_dict(more["also"][name])
        self._feed.place.load(more["place"])
        self.resumed = self._loop.replica.cursor.step
        self._last_step = self.resumed
        return True

    def _check_also(self, more: dict[str, Any]) -> None:
        saved = more["also"]
        if missing := sorted(set(self._also) - set(saved)):
            raise ValueError(
                f"Checkpoints(also={{{missing[0]!r}: ...}}): the checkpoint has no state of it, only of "
                f"{sorted(saved) or 'nothing'}; leave it out, or start in an empty folder"
            )
        if left := sorted(set(saved) - set(self._also)):
            raise ValueError(
                f"the checkpoint has the states of {left}, which this run does not give: add them to "
                "Checkpoints(also=...)"
            )

    # The end.

    def finish(self) -> None:
        """The loop has ended without an error, and the strategy with it."""
        if self._automatic is not None and self._last_step < 0 <= self._loop.last_own_step:
            warnings.warn(
                UnsavedRun(
                    f"attach(checkpoint=...) saved nothing in {self._loop.last_own_step + 1} steps: it saves when "
                    "session.shard yields a minibatch to a model in training mode; read the data by session.shard, or "
                    "call session.save(folder) between two steps"
                ),
                stacklevel=4,
            )
            self._automatic.abandon("the loop never came to a place where it is saved")
        elif self._automatic is not None:
            self._is_before_next = False
            self._automatic.finish(max(self._loop.last_own_step + 1, self.resumed or 0))

    def close(self, *, failed: bool) -> None:
        for saving in self._savings.values():
            saving.close(failed=failed)
