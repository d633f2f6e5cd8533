"""Landings: which work items are in all shards, so that a worker that dies between two of them loses nothing.

An update is one message to each shard, and a worker may die when some have it.  Each shard counts how many work items
of each worker are in its value.  The first shard, which leases them, asks the others: before it says that all work is
done; now and then, so that it may forget items; and when a worker is lost.  Then the others answer only once they take
nothing of that worker any more.  An item that some shards lack is leased again, with the shards that have it, and these
do not get it a second time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.endpoint import Endpoint
from paceline.server.messages import HowFar, SoFar, Update

ASK_AGAIN_S = 0.5  # The first shard may have been killed before it got the answer.

Worker = tuple[int, int]  # A rank and its incarnation.


class Applied:
    """How many work items of each worker are in this shard, and who waits until there are more: the first shard."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._counts: dict[Worker, int] = {}
        self._awaited: dict[Worker, int] = {}

    def snapshot(self) -> dict[str, Any]:
        return {"counts": dict(self._counts), "awaited": dict(self._awaited)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self._counts = dict(saved["counts"])
        self._awaited = dict(saved["awaited"])

    async def note(self, update: Update) -> None:
        """An update was applied."""
        if update.done:
            which = update.src, update.incarnation
            self._counts[which] = update.done
            if update.done >= self._awaited.get(which, update.done + 1):
                await self._tell(which)

    async def answer(self, question: HowFar) -> None:
        """Answer now, or once there are as many as the first shard waits for."""
        which = question.worker, question.incarnation
        if question.is_lost or self._counts.get(which, 0) >= question.least:
            await self._tell(which, is_lost=question.is_lost)
        else:
            self._awaited[which] = question.least

    async def _tell(self, which: Worker, *, is_lost: bool = False) -> None:
        self._awaited.pop(which, None)
        first = self.endpoint.layout.server_ranks[0]
        await self.endpoint.send(first, SoFar(*which, self._counts.get(which, 0), is_lost))


@dataclass
class Question:
    """What the first shard has asked, and the counts of those that have answered, by rank."""

    least: int
    is_lost: bool
    counts: dict[int, int] = field(default_factory=dict[int, int])


class Landings:
    """The questions of the first shard."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.others = list(endpoint.layout.server_ranks[1:])
        self._open: dict[Worker, Question] = {}
        self._due = 0.0

    def snapshot(self) -> dict[str, Any]:
        asked = {which: [q.least, q.is_lost, dict(q.counts)] for which, q in self._open.items()}
        return {"open": asked, "due": self._due}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self._open = {which: Question(*asked) for which, asked in saved["open"].items()}
        self._due = saved["due"]

    def is_asked(self, which: Worker) -> bool:
        return which in self._open

    def forget(self, which: Worker) -> None:
        """The answer is not wanted any longer."""
        self._open.pop(which, None)

    async def ask(self, which: Worker, least: int, *, is_lost: bool) -> None:
        """Ask the others how many items of a worker they have, once they have `least`; or, if it `is_lost`, at last."""
        if not self._open:
            self._due = self.endpoint.now() + self._again_s
        self._open[which] = Question(least, is_lost)
        await self._send(which)

    def answered(self, message: SoFar) -> list[int] | None:
        """A shard has answered; the counts of all others, once they all have."""
        which = message.worker, message.incarnation
        question = self._open.get(which)
        if question is None or question.is_lost is not message.is_lost or message.done < question.least:
            return None  # The answer to an older question.
        question.counts[message.src] = message.done
        if len(question.counts) < len(self.others):
            return None
        del self._open[which]
        return [question.counts[rank] for rank in self.others]

    @property
    def due(self) -> float | None:
        """When to ask again those that have not answered."""
        return self._due if self._open else None

    async def ask_again(self, *, at_once: bool = False) -> None:
        """Ask those that have not answered, if it is time, or `at_once`: one of them was killed and is back."""
        now = self.endpoint.now()
        if self._open and (at_once or now >= self._due):
            self._due = now + self._again_s
            for which in self._open:
                await self._send(which)

    @property
    def _again_s(self) -> float:
        return min(self.endpoint.retransmit_s or ASK_AGAIN_S, ASK_AGAIN_S)

    async def _send(self, which: Worker) -> None:
        question = self._open[which]
        for rank in self.others:
            if rank not in question.counts:
                await self.endpoint.send(rank, HowFar(*which, question.least, question.is_lost))
