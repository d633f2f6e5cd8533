"""Members: a worker's part in the changes of who takes part in its run.

The workers change between two steps, when all stand at the same one with nothing in flight.  The strategy's role is
stopped there as for a saved state.  The states become those of the new number of workers by the rules of their slots,
and the role starts again from them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from paceline.collectives import barrier
from paceline.elastic.endpoint import ElasticEndpoint
from paceline.elastic.rendezvous import Arrival, LeftOut, Over
from paceline.elastic.states import State, gathered
from paceline.endpoint import Endpoint
from paceline.errors import ClusterError, DifferentCollectives
from paceline.state import resized_for
from paceline.strategy import MissedEnd, Stopped
from paceline.worker.run import WorkerRun


class Paused(Stopped):
    """Raised in a strategy before a step at which the workers of the run change."""


class Members:
    """`on_change` gets this worker's rank and the number of workers, before its state is loaded.

    `more` gives what a worker has beside its run's state, and `take_more` gets that of another one in a newcomer.
    """

    def __init__(
        self,
        run: WorkerRun,
        endpoint: ElasticEndpoint,
        *,
        on_change: Callable[[int, int], None],
        more: Callable[[], dict[str, Any]] = dict,
        take_more: Callable[[dict[str, Any]], None] = lambda more: None,
    ) -> None:
        self._run = run
        self._endpoint = endpoint
        self._on_change = on_change
        self._more = more
        self._take_more = take_more
        self.on_changed: Callable[[], None] = lambda: None  # Called with the new state loaded.
        endpoint.slots = lambda: run.states.exchanged
        endpoint.step = lambda: run.replica.cursor.step
        run.interruptions = self

    def before(self, step: int) -> None:
        """Called before every step; it stops the role where the workers change."""
        if self._endpoint.is_due:
            raise Paused

    async def train(self, role: Callable[[], Awaitable[None]]) -> None:
        """Run the strategy to the end of the run, with all changes on the way."""
        while True:
            is_left_out = False
            try:
                return await self._train(role)
            except LeftOut:  # An error in what follows is not one "during handling" of this.
                is_left_out = True
            if is_left_out:
                self._endpoint.come_back()

    async def _train(self, role: Callable[[], Awaitable[None]]) -> None:
        endpoint = self._endpoint
        if endpoint.is_newcomer:
            try:
                await self.change(None)
            except Over:
                raise MissedEnd from None
        while True:
            is_paused = False
            try:
                await role()
            except Paused:
                is_paused = True
            if not is_paused:
                endpoint.rendezvous.leave(endpoint.committed)
                return
            await self._run.states.before_save()
            await self.change(self._run.state_dict())

    async def change(self, state: State | None) -> None:
        """Meet all workers, and go on from the state that follows from those of all."""
        endpoint = self._endpoint
        committed = endpoint.committed
        began = endpoint.now()
        before = 0 if state is None else state["workers"]
        own = None if state is None else {"run": state, "more": self._more()}

        def arrival(error: ClusterError | None = None) -> Arrival:
            said = endpoint.arrival(is_paused=True, cause="" if error is None else str(error))
            return replace(said, committed=committed)

        generation = await endpoint.rendezvous.meet(arrival())
        new: State | None = None
        while new is None:
            if not generation.is_new:  # Some have not paused yet.
                generation = await endpoint.rendezvous.meet(arrival())
                continue
            committed = generation.committed
            try:
                new = await _own_state(generation.endpoint, own)
            except (LeftOut, DifferentCollectives):
                raise
            except _Unconfirmed as error:
                generation = await endpoint.rendezvous.meet(arrival(error))
                if generation.committed > committed:  # Another worker has come to the end of the barrier.
                    new = error.state
            except ClusterError as error:
                generation = await endpoint.rendezvous.meet(arrival(error))
        endpoint.enter(generation)
        endpoint.renew(committed + 1)
        workers = endpoint.layout.workers
        self._run.replica.batch.rank = endpoint.rank
        self._run.replica.cursor.shards = workers
        self._on_change(endpoint.rank, workers)
        self._run.load_state_dict(new["run"])
        if state is None:
            self._take_more(new["more"])
        self.on_changed()
        endpoint.note("workers", before=before, workers=len(endpoint.ranks), pause_s=endpoint.now() - began)


class _Unconfirmed(ClusterError):
    """This worker has its state, and does not know whether all others have theirs."""

    def __init__(self, state: State, why: str) -> None:
        super().__init__(why)
        self.state = state


async def _own_state(endpoint: Endpoint, own: State | None) -> State:
    """This worker's state, from those of all that have one; beside it what the first of them has."""
    everyones = await gathered(endpoint, own)
    run = resized_for([each["run"] for each in everyones], endpoint.layout.workers, endpoint.rank)
    new: State = {"run": run, "more": everyones[0]["more"]}
    if len(endpoint.ranks) > 1:
        try:
            await barrier(endpoint)
        except DifferentCollectives:
            raise
        except ClusterError as error:
            raise _Unconfirmed(new, str(error)) from error
    return new
