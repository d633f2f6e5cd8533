"""Save points: the moments at which all workers of a shard have stopped, so that the run can be saved.

A worker that wants to save tells the shards, and these tell the other workers.  Each worker goes on to the end of its
step, and says so to all shards.  A shard that has heard it of all its workers copies its state, and lets them go on.
So an update is in the states of all shards or of none, and no update is on its way.

A worker whose reply the gate or the rule holds back could not come to the end of its step, since it waits for workers
that have stopped.  It gets an early reply, and asks again after the save point.

A worker that dies is not waited for.  One that joined after another shard had passed the save point sends updates of
the time after it; they wait until this shard has passed it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from paceline.endpoint import Endpoint
from paceline.protocol.messages import Request, Wait
from paceline.server.membership import Membership
from paceline.server.messages import AskToSave, Leave, Saved, SavePoint, Update
from paceline.server.replies import Replies
from paceline.server.snapshots import message_of, plain_message

PATIENCE_S = 120.0  # A shard that waits for longer gives up, and nothing is saved.

Copy = Callable[[SavePoint, list[int]], None]
"""Copies the state of a shard, to be written where the request says.  Raises ValueError if it cannot be saved.

The list has the data shards whose workers are dead, and not replaced.
"""


class SavePoints:
    """The save points of one shard."""

    def __init__(self, endpoint: Endpoint, members: Membership, replies: Replies) -> None:
        self.endpoint = endpoint
        self.copy: Copy = lambda request, dead: None
        self.on_loss: Callable[[SavePoint], None] = lambda request: None  # A worker died after it stood there.
        self.may_pass: Callable[[], bool] = lambda: True  # Whether nothing is unknown that is to be saved.
        self.has_ended = False  # The driver stops the run at a save point.
        self.passed = 0  # The number of the last save point that this shard has passed.
        self.later: list[Update] = []  # Updates of the time after the coming save point.
        self._members = members
        self._replies = replies
        self._number = 0  # Of the save point that was asked for last,
        self._asked_at = 0.0  # and when.
        self._marks: dict[int, SavePoint] = {}  # By worker.
        self._last: dict[int, SavePoint] = {}  # Those of the last save point.
        self._past: set[int] = set()  # Workers that passed the coming save point at another shard.
        self._why = ""  # Why the last one was not saved.

    def snapshot(self) -> dict[str, Any]:
        """All that is known, as plain values."""
        return {
            "passed": self.passed,
            "later": [plain_message(update) for update in self.later],
            "number": self._number,
            "asked_at": self._asked_at,
            "marks": [plain_message(mark) for mark in self._marks.values()],
            "last": [plain_message(mark) for mark in self._last.values()],
            "past": sorted(self._past),
            "why": self._why,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.passed, self._number = saved["passed"], saved["number"]
        self._asked_at, self._why = saved["asked_at"], saved["why"]
        self.later = [message_of(update, Update) for update in saved["later"]]
        marks, last = ([message_of(mark, SavePoint) for mark in saved[name]] for name in ("marks", "last"))
        self._marks = {mark.src: mark for mark in marks}
        self._last = {mark.src: mark for mark in last}
        self._past = set(saved["past"])

    @property
    def number(self) -> int:
        """The newest save point that was asked for."""
        return max(self._number, self.passed)

    @property
    def is_asked(self) -> bool:
        """Whether a save point was asked for, and not passed."""
        return self._number > self.passed

    @property
    def due(self) -> float | None:
        """When this shard gives up the save point."""
        return self._asked_at + PATIENCE_S if self.is_asked else None

    async def ask(self, number: int) -> None:
        """A worker wants to save the run."""
        if number <= self.number:
            return
        self._number = number
        self._asked_at = self.endpoint.now()
        self._marks = {src: mark for src, mark in self._marks.items() if mark.number >= number}
        for worker in [*self._members.roster.members, *self._members.leaving]:
            await self.endpoint.send(worker, AskToSave(number))

    def join(self, worker: int) -> None:
        """A worker has joined: it takes no part in a save point that was asked for before."""
        if self.is_asked:
            self._past.add(worker)

    async def remind(self, request: Request) -> None:
        """A worker has sent something: where messages may be lost, it may not know of the save point."""
        if self.is_asked and self.endpoint.retransmit_s is not None and request.src not in self._marks:
            await self.endpoint.send(request.src, AskToSave(self._number))

    async def stand(self, request: SavePoint, *, is_over: bool = False) -> None:
        """A worker stands at a save point; with `is_over` all others have left."""
        if request.number <= self.passed or is_over:
            # A worker that has left sends nothing any more, so it may be late.
            is_whole = request.number == self.passed and request.src in self._members.leaving
            late = self._why if is_whole else "this worker came to the save point after the others had left it"
            return await self._replies.send(request, Saved(late))
        await self.ask(request.number)
        if request.src in self._marks:
            await self._replies.send(request, Wait())
        self._marks[request.src] = request

    def end(self, leaving: Mapping[int, Leave]) -> None:
        """All workers have left: copy the final state, if the run is saved at its end."""
        if where := next((leave.where for leave in leaving.values() if leave.where), ""):
            there = {leave.member for leave in leaving.values()}
            dead = [rank for rank in self.endpoint.layout.worker_ranks if rank not in there]
            with suppress(ValueError):  # The first worker misses the files, and says so.
                self.copy(SavePoint(self.number + 1, where=where), dead)

    def holds(self, update: Update) -> bool:
        """Whether an update must wait, because its sender has passed the coming save point elsewhere, or joined here
        after it was asked for."""
        if update.saves <= self.passed and update.src not in self._past:
            return False
        self._past.add(update.src)
        self._number = max(self._number, update.saves)
        self.later.append(update)
        return True

    async def pass_if_complete(self) -> list[Update]:
        """Copy the state if all workers stand at the save point; the updates that have waited for that."""
        members = self._members.roster.members
        there = {src for src, mark in self._marks.items() if mark.number >= self._number} | self._past
        if not self.is_asked or not self._marks:
            return []
        if all(worker in there for worker in members) and self.may_pass():
            await self._pass("")
        elif self.endpoint.now() >= self._asked_at + PATIENCE_S:
            missing = [self.endpoint.layout.name(worker) for worker in members if worker not in there]
            what = f"{' and '.join(missing)} did not come to the end of a step" if missing else "a shard did not answer"
            await self._pass(f"{what} for {PATIENCE_S:g} s")
        else:
            return []
        waited, self.later = self.later, []
        return waited

    async def _pass(self, why: str) -> None:
        marks, self._marks = self._marks, {}
        known = {*self._members.roster.members, *self._members.leaving}
        whole = {worker: mark for worker, mark in marks.items() if worker in known}  # The others have died here.
        dead = self._dead(whole)
        if not why and 0 in dead:
            why = "worker 0, which completes a checkpoint, is dead or was not there"
        try:
            if not why:
                self.copy(next(iter(whole.values())), dead)
        except ValueError as error:
            why = str(error)
        self.passed = self._number
        self._past.clear()
        self._why = why[:2000]
        self._last = marks
        for worker in marks.keys() - whole.keys():
            self.lose(worker)
        for request in marks.values():
            await self._replies.send(request, Saved(self._why))

    def lose(self, worker: int) -> None:
        """A worker has died: the files of its last save point may be missing."""
        if (request := self._last.pop(worker, None)) is not None and request.where:
            self.on_loss(request)

    def _dead(self, marks: Mapping[int, SavePoint]) -> list[int]:
        """The data shards whose workers are dead, and not replaced."""
        there = {mark.member for mark in marks.values()} | {*self._members.leaving, *self._members.roster.members}
        return [rank for rank in self.endpoint.layout.worker_ranks if rank not in there]
