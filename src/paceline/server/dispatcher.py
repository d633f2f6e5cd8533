"""Dispatcher: the first shard gives out work and notes what is done."""

from __future__ import annotations

import copy

import torch

from paceline.endpoint import Endpoint
from paceline.protocol.messages import Reply, Request, reply_to
from paceline.protocol.requests import Refusal
from paceline.server.messages import AllDone, Deferred, DrawNow, DrawWork, NoWork, Update, Work
from paceline.server.work_queue import WorkItem, WorkQueue

MOST_DRAWN = 64  # Parts of minibatches that a worker is given at once.


class Dispatcher:
    """Workers draw work items.  In a user's own loop each worker has its own data, and it is counted how many steps are
    done of each."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._queue: WorkQueue | None = None
        self._drawn: dict[int, tuple[DrawWork, list[WorkItem]]] = {}  # What each was given last, and for which request.
        self.drawing: list[DrawWork] = []  # Requests for which there was no work.
        self._deferred: dict[int, DrawWork] = {}  # What each wanted in advance when there was little left.
        self._data_shards: dict[int, int] = {}  # The data shards of workers that have replaced a dead one,
        self._done: dict[int, int] = {}  # and how many minibatches were done of each.

    async def draw(self, request: DrawWork, workers: int) -> None:
        """A worker wants work, now or in advance."""
        src, drawn = request.src, self._drawn.get(request.src)
        if drawn is not None and _is_same(drawn[0], request):  # Its reply was lost.
            return await self._give(*drawn)
        if any(_is_same(other, request) for other in self.drawing):
            return await self._reply(request, NoWork())
        queue = self._opened(request)
        # Few at the end, and none in advance, so that all end at the same time.
        left, workers = queue.left, max(1, workers)
        if left <= workers and not request.now and queue.held(src):
            self._deferred[src] = request
            return await self._reply(request, Deferred())
        fair = max(1, left // (2 * workers))
        if taken := queue.take(src, min(request.wanted, fair, MOST_DRAWN)):
            await self._give(request, taken)
        elif queue.is_over:
            await self._reply(request, AllDone())
        else:
            self.drawing = [*(other for other in self.drawing if other.src != src), request]
            await self._reply(request, NoWork())

    def _opened(self, request: DrawWork) -> WorkQueue:
        """The queue of work, which the first request begins."""
        extent = request.extent
        if (extent.dtype, tuple(extent.shape)) != (torch.int64, (3,)):
            raise Refusal(
                f"the extent of work is three int64 numbers, not {extent.dtype} of shape {tuple(extent.shape)}"
            )
        first, last, data_shards = extent.tolist()
        if data_shards != self.endpoint.layout.workers:
            raise Refusal(
                f"it wants minibatches cut into {data_shards} parts, and they are cut into "
                f"{self.endpoint.layout.workers}"
            )
        if self._queue is None:
            try:
                self._queue = WorkQueue(first, last, data_shards)
            except ValueError as error:
                raise Refusal(str(error)) from error
        return self._queue

    async def draw_now(self, request: DrawNow, workers: int) -> None:
        """A worker needs now what it has wanted in advance."""
        deferred = self._deferred.get(request.src)
        if deferred is None or not _is_same(deferred, request):
            raise Refusal("it has not drawn work in advance with this request_id")
        wanted = copy.copy(deferred)
        wanted.now = True
        await self.draw(wanted, workers)

    async def _give(self, request: DrawWork, items: list[WorkItem]) -> None:
        self._drawn[request.src] = request, items
        await self._reply(request, Work(torch.tensor(items, dtype=torch.int64)))

    async def _reply(self, request: Request, reply: Reply) -> None:
        await self.endpoint.send(request.src, reply_to(request, reply))

    def check(self, push: Update) -> None:
        """Refuse an update that claims more work than its sender was given."""
        if self._queue is not None and push.steps > self._queue.held(push.src):
            raise Refusal(f"it says that it has done {push.steps} parts, and was given {self._queue.held(push.src)}")

    async def note(self, push: Update) -> None:
        """What an update says is done."""
        if not push.steps:
            return
        if self._queue is not None:
            self._queue.do(push.src, push.steps)
            await self._say_if_over()
        else:
            data_shard = self._data_shards.get(push.src, push.src)
            self._done[data_shard] = self._done.get(data_shard, 0) + push.steps

    def data_shard(self, worker: int, data_shard: int) -> int:
        """A worker takes the place of another; how far that one's part of the data has come."""
        self._data_shards[worker] = data_shard
        return self._done.get(data_shard, 0)

    def leave(self, worker: int) -> None:
        """A worker that has gone wants nothing more."""
        self.drawing = [request for request in self.drawing if request.src != worker]
        self._deferred.pop(worker, None)

    async def hand_on(self, dead: int) -> None:
        """What a dead worker has not done is for those who have nothing to do."""
        if self._queue is not None:
            self._queue.lose(dead)
            self._drawn.pop(dead, None)
            while self.drawing and self._queue.left:
                request = self.drawing.pop(0)
                await self._give(request, self._queue.take(request.src))
            await self._say_if_over()

    async def _say_if_over(self) -> None:
        if self._queue is not None and self._queue.is_over:
            while self.drawing:
                await self._reply(self.drawing.pop(0), AllDone())


def _is_same(a: Request, b: Request) -> bool:
    return (a.src, a.incarnation, a.request_id) == (b.src, b.incarnation, b.request_id)
