"""WorkSource: the work items that a worker draws from the first shard.

In a pipeline the first stage draws, and tells the other stages what it got; so they work on the same minibatches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from enum import IntEnum

import torch

from paceline.protocol.messages import Request
from paceline.server.dispatcher import MOST_DRAWN
from paceline.server.messages import AllDone, Deferred, DrawNow, DrawWork, Idle, NoWork, Wake, Work
from paceline.server.shard_client import ShardClient
from paceline.server.work_queue import WorkItem
from paceline.worker.replica import Replica

DRAWN = (Work, Deferred, NoWork, AllDone)


class News(IntEnum):
    """What the first stage tells the others: a work item, that it waits for one, or that all work is done."""

    ITEM = 0
    WAITING = 1
    OVER = 2


class WorkSource:
    """Draws work items in advance, so that a worker does not wait for them.

    `steps` counts the steps begun since the last push.
    """

    def __init__(self, replica: Replica, client: ShardClient) -> None:
        self.replica, self.endpoint = replica, replica.endpoint
        self.steps = 0
        self.before_item: Callable[[], Awaitable[None]] = _nothing  # The worker is between two items.
        self.done = 0  # Work items that were pushed in this incarnation.
        self.had = 0  # The shards that have the items since the last push already, one a bit.
        self.has_lost_item = False  # Whether the item of the current step goes to another worker.
        self._client = client
        client.draw_again = self._draw_again
        self._first_step = replica.cursor.step
        self._hand: deque[WorkItem] = deque()  # The next work items of this worker.
        self._ahead = 1  # How many work items it wants to have while it works.
        self._is_in_hook = False  # Whether the next step of a worker's own data is announced, and not begun.
        self._drawn: DrawWork | DrawNow | None = None  # The request for more that has no reply yet.

    def take_steps(self, done: int | None = None) -> tuple[int, int]:
        """The steps begun since the last push, and the shards that have them already; the count starts again.

        With `done`, only so many of them.
        """
        steps = self.steps if done is None else min(done, self.steps)
        self.steps -= steps
        self.done += steps
        had = 0 if self.steps else self.had
        if not self.steps:
            self.had = 0
        return steps, had

    @property
    def unpushed(self) -> int:
        """The steps that are done and not pushed, for a worker between two steps."""
        is_begun = not (self._is_in_hook or self.replica.learner.has_global_data)  # A user's loop: before the gradient.
        return max(0, self.steps - is_begun)

    def drop(self) -> None:
        """Drop the work items: other workers do them."""
        self._hand.clear()
        if self._drawn is not None:
            self._client.requests.forget(self._client.shards[0], self._drawn)
        self._drawn = None
        self.steps = self.done = self.had = 0
        self.has_lost_item = True

    async def _draw_again(self) -> Request:
        return await self._ask(1, now=True)

    async def next(self, before_waiting: Callable[[], Awaitable[None]] | None = None) -> bool:
        """Turn to the next minibatch; False if all work is done.

        If other workers have the last work items, a worker waits: it takes over if one of them dies.  `before_waiting`
        must push what it has not pushed.
        """
        w = self.replica
        self.has_lost_item = False
        if not w.learner.has_global_data:  # The user's loop has its own data.
            self._is_in_hook = True
            has_data = w.cursor.advance()
            self._is_in_hook = False
            if has_data:
                self.steps += 1
                return True
            if before_waiting is not None and self.steps:
                await before_waiting()
            return False
        if w.learner.stage:
            return await self._follow(before_waiting)
        while True:
            if not self._hand and not await self._draw(before_waiting):
                return False
            # An item that some shards have is pushed alone: these get a push without samples.
            if before_waiting is None or not (self.steps and (self.had or self._hand[0].had)):
                break
            await before_waiting()
        self.has_lost_item = False  # What was lost while it waited was not this item.
        await self.before_item()
        if not self._hand and not await self._draw(before_waiting):  # It was declared dead meanwhile.
            return False
        item = self._hand.popleft()
        await self._tell(News.ITEM, item)
        w.cursor.seek(item.step, item.data_shard, item.parts)
        self.had = item.had
        self.steps += 1
        if self._drawn is None and len(self._hand) < self._ahead:
            await self._ask(self._ahead - len(self._hand))
        return True

    async def _ask(self, wanted: int, *, now: bool = False) -> DrawWork:
        end = self.replica.cursor.last_step
        assert end is not None
        extent = torch.tensor([self._first_step, end, self.replica.cursor.shards])
        self._drawn = request = self._client.requests.number(DrawWork(extent, wanted, now))
        await self._client.requests.send(self._client.shards[0], request)
        return request  # Meanwhile it may have been dropped.

    async def _draw(self, before_waiting: Callable[[], Awaitable[None]] | None) -> bool:
        await self._client.join()
        was_asked = self._drawn is not None
        began = self.endpoint.now()
        is_idle = False
        while True:
            if self._drawn is None:
                await self._ask(1, now=True)
                continue
            answer = await self._client.answer(self._client.shards[0], self._drawn, DRAWN)
            assert isinstance(answer, DRAWN)
            if answer.incarnation != self._client.requests.incarnation:
                self._drawn = None
                continue
            if isinstance(answer, Deferred):
                self._drawn = DrawNow(request_id=answer.request_id, incarnation=answer.incarnation)
                await self._client.requests.send(self._client.shards[0], self._drawn)
                continue
            if not isinstance(answer, NoWork):
                break
            self._ahead = 1
            await self._tell(News.WAITING)
            await self._wait(before_waiting)
            is_idle = True
        self._drawn = None
        if isinstance(answer, AllDone):
            self._client.forget_told()
            await self._tell(News.OVER)
            if before_waiting is not None and self.steps:
                await before_waiting()
            return False
        if is_idle:
            await self._client.tell_all(Wake)
        elif was_asked and self.endpoint.now() - began > 0.001:  # It should have asked earlier, for more.
            self._ahead = min(2 * self._ahead, MOST_DRAWN)
        had = [0] * len(answer.items) if answer.had is None else answer.had.tolist()
        for numbers, shards in zip(answer.items.tolist(), had, strict=True):
            self._hand.append(WorkItem(*numbers)._replace(had=shards))
        return True

    async def _wait(self, before_waiting: Callable[[], Awaitable[None]] | None) -> None:
        """Push what was not pushed, and let no other worker wait for this one."""
        if before_waiting is not None and self.steps:
            await before_waiting()
        await self._client.tell_all(Idle)

    # Stages.

    async def _tell(self, news: News, item: WorkItem | None = None) -> None:
        learner = self.replica.learner
        if learner.stages > 1:
            await learner.of_first_stage([news, *((0, 0) if item is None else item[:2])])

    async def _follow(self, before_waiting: Callable[[], Awaitable[None]] | None) -> bool:
        """Do what the first stage has told; False if all work is done."""
        await self._client.join()
        is_idle = False
        while True:
            news, step, data_shard = map(int, await self.replica.learner.of_first_stage([0, 0, 0]))
            if news == News.OVER:
                if before_waiting is not None and self.steps:
                    await before_waiting()
                return False
            if news == News.ITEM:
                break
            await self._wait(before_waiting)
            is_idle = True
        if is_idle:
            await self._client.tell_all(Wake)
        self.replica.cursor.seek(step, data_shard)
        self.steps += 1
        return True


async def _nothing() -> None:
    pass
