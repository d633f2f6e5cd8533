"""WorkerSaves: a worker's save points; see `paceline.server.save_points` for those of a shard.

Slot `unpushed`: the steps and samples since the last push, and whether the worker takes part in a run that was saved.
With another number of workers they are zero: what a worker has learnt since its last push is forgotten, and the work
behind it is done again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from paceline.errors import ClusterError
from paceline.server.accumulator import Accumulator
from paceline.server.messages import AskToSave, Restore, Restored, Saved, SavePoint
from paceline.server.shard_client import ShardClient
from paceline.server.work_source import WorkSource
from paceline.state import Resize, Slot, copied, resize_rule
from paceline.worker.replica import Replica

# What a worker keeps that starts from the parameters of the shards: see `WorkerSaves`.
FRESH: dict[str, Any] = {
    "steps": 0,
    "samples": 0.0,
    "rate": 1.0,
    "begun": 0,
    "continues": 0,
    "early": 0,
    "versions": [],
}


@resize_rule("forgotten")
def forgotten(values: Sequence[dict[str, Any]], resize: Resize) -> dict[str, Any]:
    """With another number of workers the values are those of the beginning."""
    return {**values[0], **copied(FRESH)}


class WorkerSaves:
    """Brings one worker to save points.  It is the `Rest` of the worker's cursor."""

    def __init__(
        self,
        replica: Replica,
        client: ShardClient,
        work: WorkSource,
        unpushed: Accumulator,
        versions: list[int],
        *,
        unit: int,
    ) -> None:
        self.settle: Callable[[], Awaitable[object]] | None = None  # Of the strategy: end what is in flight,
        self.again: Callable[[], Awaitable[object]] | None = None  # and ask again after an early reply.
        self.is_early = False  # Whether a reply was early, and the worker has not asked again.
        self._replica, self._cursor = replica, replica.cursor
        self._endpoint = replica.endpoint
        self._client = client
        self._work = work
        self._unpushed = unpushed
        self._versions = versions
        self._unit = unit
        self._passed = 0  # The last save point that this worker has passed,
        self._asked = 0  # and the newest that it has heard of.
        self._is_at_point = False
        self._has_ended = False
        self._is_idle = False  # Whether it stands at a save point while it waits for work, or for the end.
        self._member = replica.rank if replica.cursor.shard is None else replica.cursor.shard
        self._slot: Slot = replica.state("unpushed", rule=forgotten, **FRESH)
        unpushed.steps = self._slot.steps
        unpushed.samples = self._slot.samples
        unpushed.rate = self._slot.rate
        work.steps = self._slot.begun
        if self.has_value:
            versions[:] = self._slot.versions
        client.on_ask = self._hear
        work.before_item = self._follow
        client.restore = self._restore if replica.cursor.restored is not None else None
        replica.cursor.rest = self

    @property
    def continues(self) -> bool:
        """Whether this worker continues from its own saved state."""
        return bool(self._slot.continues)

    @property
    def has_value(self) -> bool:
        """Whether this worker was saved with a value of the shards that it knows, and the shards are as many still."""
        return self.continues and not self.was_early and len(self._slot.versions) == len(self._versions)

    @property
    def was_early(self) -> bool:
        """Whether the saved worker was still to ask again."""
        return bool(self._slot.early)

    @property
    def member(self) -> int:
        """The data shard of this worker, which names its state."""
        return self._member

    @property
    def shards(self) -> int:
        return len(self._client.shards)

    @property
    def number(self) -> int:
        """The save point at which this worker stands, or that it has passed last."""
        return self._passed

    @property
    def is_asked(self) -> bool:
        """Whether the worker is to come to a save point."""
        with suppress(TimeoutError):
            while not self._is_at_point:
                message = self._endpoint.recv(types=(AskToSave,), timeout=0.0).wait()
                assert isinstance(message, AskToSave)
                self.note(message.number)
        return self.has_heard

    @property
    def has_heard(self) -> bool:
        """The same, by the messages that were read until now."""
        return not self._is_at_point and self._asked > self._passed

    def note(self, number: int) -> None:
        """Shards have named this save point."""
        self._asked = max(self._asked, number)

    def join(self, number: int) -> None:
        """This worker is new: it takes no part in save points that were asked for before."""
        self._passed = max(self._passed, number)

    async def _hear(self, message: AskToSave, *, is_idle: bool) -> None:
        """The run is to be saved; a worker that has nothing to do is saved while it waits."""
        self.note(message.number)
        if is_idle and self.has_heard:
            self._is_idle = True
            self._cursor.on_rest()
            if self._asked > self._passed:  # The driver saves nothing by itself.
                await self.reach()
            self._is_idle = False

    async def _follow(self) -> None:
        """Be saved before the next item; the driver's own hook is not called for every item of a step."""
        if self.has_heard:
            self._cursor.on_rest()
            if self.has_heard:  # The driver saves nothing by itself.
                await self.reach()
        await self.go_on()

    async def reach(self) -> None:
        """Stand at a save point until all workers do.  ClusterError if the run is not saved there."""
        if self._has_ended:
            return
        number = self._asked if self._asked > self._passed else self._passed + 1
        self._is_at_point = True
        try:
            for rank in self._client.shards:
                await self._endpoint.send(rank, AskToSave(number))
            if self.settle is not None:
                await self.settle()
            vars(self._slot).update(
                steps=self._unpushed.steps,
                samples=self._unpushed.samples,
                rate=self._unpushed.rate,
                begun=self._work.unpushed,
                continues=1,
                early=int(self.is_early),
                versions=list(self._versions),
            )
            where = self._cursor.place_of(f"rest {number}")
            marks = [SavePoint(number, self._member, where) for _ in self._client.shards]
            await self._client.send(dict(zip(self._client.shards, self._client.numbered(marks), strict=True)))
            answers = [
                await self._client.answer(rank, mark, (Saved,))
                for rank, mark in zip(self._client.shards, marks, strict=True)
            ]
            self._passed = number
        finally:
            self._is_at_point = False
        whys = [a.why if isinstance(a, Saved) else "this worker was believed dead" for a in answers]
        if why := next(filter(None, whys), None):
            raise ClusterError(why)

    async def go_on(self) -> None:
        """Ask again for what was answered early, so that the worker could come to the save point."""
        if self.is_early and not self._is_idle:
            self.is_early = False
            if self.again is not None:
                await self.again()

    def end(self) -> None:
        """This worker has the final value.  A longer run starts from that of the shards."""
        self._has_ended = True
        vars(self._slot).update(copied(FRESH))

    async def _restore(self) -> None:
        """This worker continues from a checkpoint: so do the shards."""
        path = self._cursor.restored
        assert path is not None
        steps = self._work.steps
        position = max(0, self._cursor.step - steps)
        requests = [Restore(path, steps, position, self._unit) for _ in self._client.shards]
        await self._client.send(dict(zip(self._client.shards, self._client.numbered(requests), strict=True)))
        for rank, request in zip(self._client.shards, requests, strict=True):
            await self._client.answer(rank, request, (Restored,))
