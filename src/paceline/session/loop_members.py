"""LoopMembers: changes of who takes part in a run, in the user's own loop.

The workers change when the loops ask `session.shard` for their next minibatch: all of them do so at the same step, and
only then all that the user does in a step is done.  A newcomer waits in `attach` until the others take it in.  It gets
their state and their place in the data, and its script goes on from there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from torch.amp.grad_scaler import GradScaler

from paceline.checkpoint.settings import HasState
from paceline.elastic import ElasticEndpoint, LeftOut, Members
from paceline.op import drive
from paceline.session.feed import Feed
from paceline.session.loop import Loop

CALL = "attach(elastic=True)"
NO_EPOCHS = (
    f"{CALL}: the loop reads session.shard, and did not ask session.epochs for its epochs: a worker that joins later "
    "would not know in which epoch the others are; write `for epoch in session.epochs(count):` around the pass"
)
NO_SHARD = (
    f"{CALL}: a step was taken without session.shard: the workers change between two of its minibatches, and cut these "
    "anew; read the data by session.shard(loader)"
)
NO_SCHEDULE = (
    f"{CALL}: the optimizer has a learning-rate scheduler, whose state a worker that joins later would not have: give "
    'attach(also={"scheduler": scheduler}), with a scheduler that was built on the optimizer before attach'
)
NO_SCALER = (
    f"{CALL}: a GradScaler takes the steps, whose scale a worker that joins later would not have: give "
    'attach(also={"scaler": scaler})'
)


class LoopMembers(Members):
    """One worker's part, for a session."""

    def __init__(self, endpoint: ElasticEndpoint, loop: Loop, feed: Feed, also: Mapping[str, HasState]) -> None:
        super().__init__(loop.run, endpoint, on_change=self._take_place, more=self._beside, take_more=self._take_beside)
        self._loop = loop
        self._feed = feed
        self._also = also
        self.on_join: Callable[[], None] = lambda: None
        loop.batch.refused_unshared = NO_SHARD
        loop.keeps_watch = True
        feed.on_read = self._before_read
        feed.place.is_alone = True

    def before(self, step: int) -> None:
        """The role goes on: the workers change between two minibatches of the user's loop."""

    async def train(self, role: Callable[[], Awaitable[None]]) -> None:
        await role()

    def start(self) -> None:
        """Start the strategy; a newcomer joins the others before."""
        while self._endpoint.is_newcomer:
            try:
                with self._loop.run.replica.learner.flat.in_vector():
                    drive(self.change(None))
            except LeftOut:  # It was silent while it waited, and asks again.
                self._endpoint.come_back()
        self._loop.start()
        self._loop.run.states.check_complete()

    def leave(self) -> None:
        """This worker has come to the end of the run."""
        self._endpoint.rendezvous.leave(self._endpoint.committed)

    # Between two minibatches.

    def _before_read(self) -> None:
        """Called before a minibatch is read, to be trained on."""
        loop = self._loop
        if not self._feed.place.has_epochs:
            raise ValueError(NO_EPOCHS)
        kept = [*self._also.values()]
        if not kept and any("initial_lr" in group for group in loop.learner.optimizer.param_groups):
            raise ValueError(NO_SCHEDULE)
        if loop.learner.has_scaler and not any(isinstance(value, GradScaler) for value in kept):
            raise ValueError(NO_SCALER)
        if not self._endpoint.is_due or loop.driver.waits_for_step or loop.epoch.has_open_gradient:
            return
        with loop.guard.during("between two minibatches, when the workers changed"), loop.learner.flat.in_vector():
            drive(loop.run.states.before_save())
            state = loop.run.state_dict()
            loop.driver.close()
            drive(self.change(state))
        loop.start()
        loop.run.states.check_complete()

    def _take_place(self, rank: int, workers: int) -> None:
        self._feed.cut_anew(rank, workers)
        self._loop.guard.compare_next()

    def _beside(self) -> dict[str, Any]:
        return {
            "place": self._feed.place.save(before_next=True),
            "also": {name: value.state_dict() for name, value in self._also.items()},
        }

    def _take_beside(self, more: dict[str, Any]) -> None:
        for name, value in self._also.items():
            value.load_state_dict(more["also"][name])
        self._feed.place.load(more["place"])
        self._feed.is_joining = True


def check_also(call: str, also: Mapping[str, Any]) -> None:
    """Raise ValueError unless all of these have a state to hand on."""
    for name, value in also.items():
        if not isinstance(value, HasState) or isinstance(value, type):
            raise ValueError(
                f"{call}(also={{{name!r}: {type(value).__name__}}}): give an object with state_dict() and "
                "load_state_dict(), such as a scheduler or a GradScaler"
            )
