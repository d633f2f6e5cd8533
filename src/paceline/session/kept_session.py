"""KeptSession: the part of a session that hands its state on: to checkpoints, to a later run, to workers that join."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from paceline.checkpoint import Checkpoints
from paceline.checkpoint.settings import HasState
from paceline.elastic import ElasticEndpoint
from paceline.endpoint import Endpoint
from paceline.engines.job import Job
from paceline.needs import Offers, check
from paceline.op import drive
from paceline.session.feed import Feed
from paceline.session.loop import Loop
from paceline.session.loop_members import LoopMembers
from paceline.session.loop_saving import LoopSaving
from paceline.session.resuming import check_states
from paceline.session.watching import LoopWatch
from paceline.strategy import Strategy


class KeptSession:
    """What `Session` sets up."""

    job: Job
    loop: Loop
    strategy: Strategy
    _endpoint: Endpoint
    _feed: Feed
    _members: LoopMembers | None  # Of a run whose workers may die and join.
    _saving: LoopSaving
    _watch: LoopWatch

    @property
    def _is_whole(self) -> bool:
        """Whether this rank holds whole tensors."""
        return self.loop.learner.parts is None

    def _release(self, *, failed: bool) -> None:
        raise NotImplementedError

    # Workers that join and leave.

    def take_part(self, endpoint: ElasticEndpoint, also: Mapping[str, HasState]) -> None:
        """Begin as a worker of a run whose workers may die and join.  `attach` calls it."""
        try:
            self._members = LoopMembers(endpoint, self.loop, self._feed, also)
            self._members.start()
        except BaseException:
            self._release(failed=True)
            raise

    # Save and resume.

    def save(self, folder: str | os.PathLike[str], *, wait: bool = False) -> None:
        """Save everything to a new checkpoint in `folder`, between two steps; all ranks call it.

        The files are written while training goes on.  With `wait` the call ends when they are on the disk.
        """
        self._saving.save(folder, wait=wait)

    def begin(self, checkpoint: Checkpoints) -> None:
        """Continue from a checkpoint, if there is one, and save the run from now on.  `attach` calls it."""
        try:
            self._saving.begin(checkpoint)
            if self._members is not None:
                self._members.on_changed = self._saving.change
        except BaseException as error:
            self.loop.guard.whereabouts.leave(error)
            self._release(failed=True)
            raise

    def resume(self, folder: str | os.PathLike[str]) -> bool:
        """Continue from the newest checkpoint in `folder`, before the first step; whether there is one."""
        return self._saving.resume(folder)

    @property
    def resumed(self) -> int | None:
        """The step of the checkpoint from which this session continued; None if there was none."""
        return self._saving.resumed

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs that remain of `count`: those that a resumed run has ended are left out.

        An epoch is a pass over a loader by `shard`, in training mode.
        """
        return self._feed.place.remaining(count)

    def model_state_dict(self) -> dict[str, Any]:
        """A copy of the model's state_dict, to save.  Inside the block parameters are views of one vector, and
        torch.save would write all of it for each file, and safetensors would refuse."""
        state = self.loop.learner.flat.model.state_dict()
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}

    def state_dict(self) -> dict[str, Any]:
        """This rank's state between two steps, in slots: parameters, optimizer state, the strategy's state.

        It waits for the exchange in flight, so the other ranks must still be training.  To resume with another number
        of workers, give the states of all ranks to `resized`.
        """
        if not self._is_whole:
            raise ValueError(
                "session.state_dict() of a model of DTensors: save the model and the optimizer by "
                "torch.distributed.checkpoint"
            )
        self.loop.check_between_steps("session.state_dict()")
        self.loop.learner.flat.refresh()
        drive(self.loop.run.states.before_save())
        return self.loop.run.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state; call it before the first step.  A state that does not fit changes nothing."""
        check(self.strategy, Offers("session.load_state_dict", unbroken=False))
        if self._members is not None:
            raise ValueError(
                "session.load_state_dict() with attach(elastic=True): a worker that joins gets its state from the "
                "others; leave one of them out"
            )
        with self.loop.guard.during("in session.load_state_dict()"):
            store = None if self.strategy.needs.collectives else self.job.store
            check_states(state, type(self.strategy).__name__, self._endpoint, store)
        self._load(state)

    def _load(self, state: dict[str, Any]) -> None:
        """Go on from a state of this worker; one that does not fit changes nothing."""
        run = self.loop.run
        before = self.state_dict()
        try:
            run.load_state_dict(state)
            self._watch.restart()
            self.loop.start()
            run.states.check_complete()
        except BaseException:
            run.load_state_dict(before)
            self._watch.restart()
            self.loop.start()
            raise
