"""Dispatcher: the first shard leases work items to workers and counts what is done.

Slot `work`: the position of the queue, the items that are leased, and the steps that are done of each data shard.  A
worker of a resumed run says which of its items it has done and not pushed; the others are free again.  Of several
shards only the first has the queue.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from paceline.endpoint import Endpoint
from paceline.protocol.messages import Reply, Request, reply_to
from paceline.protocol.requests import Deduplicator, Refusal, Verdict
from paceline.server.landings import Landings
from paceline.server.messages import AllDone, Deferred, DrawNow, DrawWork, NoWork, Restore, SoFar, Update, Work
from paceline.server.snapshots import message_of, plain_message
from paceline.server.work_queue import Lease, WorkItem, WorkQueue
from paceline.state import Resize, StateStore, Values, resize_rule

MOST_DRAWN = 64  # The most work items that a worker gets at once.
MOST_UNLANDED = 4 * MOST_DRAWN  # So many items of a worker are kept before the other shards are asked for them.


@resize_rule("first shard")
def first_shard(values: Sequence[Values], resize: Resize) -> Sequence[Values]:
    """The first shard has the work queue; the others have none."""
    return [values[0], *({**values[0], "queue": None} for _ in range(resize.count - 1))]


class Dispatcher:
    """Workers draw work items.  In a user's own loop each worker has its own data; then the steps done are counted."""

    def __init__(self, endpoint: Endpoint, states: StateStore) -> None:
        self.endpoint = endpoint
        self._queue: WorkQueue | None = None
        self._requests = Deduplicator()
        self._drawn: dict[int, tuple[DrawWork, list[WorkItem]]] = {}  # The last items of each, with its request.
        self.drawing: list[DrawWork] = []  # Requests for which there was no work.
        self._deferred: dict[int, DrawWork] = {}  # Requests in advance, when there was little work left.
        self._data_shards: dict[int, int] = {}  # The data shards of workers that have replaced a dead one.
        self._done: dict[int, int] = {}  # The steps that are done of each data shard.
        self.applied: Callable[[], Mapping[int, int]] = dict  # Of each worker: the items behind updates that are saved.
        self._landings = Landings(endpoint)
        self._shards = len(endpoint.layout.server_ranks)
        states.bind("work", rule=first_shard, save=self._save, load=self._load, check=self._check_saved)

    # State.

    def _save(self) -> Values:
        queue = None if self._queue is None else _by_data_shard(self._queue.save(self.applied()), self._data_shards)
        return {"queue": queue, "done": dict(self._done)}

    def _check_saved(self, values: Any) -> None:
        if not isinstance(values, dict) or values.keys() != {"queue", "done"}:
            holds = sorted(values) if isinstance(values, dict) else type(values).__name__
            raise ValueError(f"the saved slot 'work' holds {holds}, and a dispatcher has 'done' and 'queue'")
        if values["queue"] is not None:
            WorkQueue.load(values["queue"])

    def _load(self, values: Values) -> None:
        self._queue = None if values["queue"] is None else WorkQueue.load(values["queue"], shards=self._shards)
        if self._queue is not None:
            self._queue.recut(self.endpoint.layout.workers)
            for rank in [rank for rank in self._queue.leases if rank not in self.endpoint.layout.worker_ranks]:
                self._queue.keep(rank, 0)
        self._done = dict(values["done"])
        self._drawn.clear()
        self.drawing.clear()
        self._deferred.clear()
        self._data_shards.clear()

    def go_on(self, request: Restore) -> None:
        """A worker of a resumed run: it goes on with the items that it has done, and not with the others."""
        if request.src not in self.endpoint.layout.worker_ranks:  # It replaces one that died at the start.
            return
        if self._queue is not None:
            if request.steps > (held := self._queue.held(request.src)):
                raise Refusal(f"it has done {request.steps} parts that are not pushed, and was given {held}")
            self._queue.keep(request.src, request.steps)
        else:
            self._done[request.src] = request.position

    @property
    def is_settled(self) -> bool:
        """Whether it is known which shards have the items of lost workers, so that the work can be saved."""
        return self._queue is None or not self._queue.lost

    def snapshot(self) -> Values:
        """All that is known, as plain values; unlike what is saved for another run, with the work that is leased."""
        return {
            "queue": None if self._queue is None else self._queue.snapshot(),
            "done": dict(self._done),
            "drawn": [[plain_message(draw), [list(i) for i in items]] for draw, items in self._drawn.values()],
            "drawing": [plain_message(draw) for draw in self.drawing],
            "deferred": [plain_message(draw) for draw in self._deferred.values()],
            "data_shards": dict(self._data_shards),
            "requests": self._requests.snapshot(),
            "landings": self._landings.snapshot(),
        }

    def restore(self, saved: Values) -> None:
        self._queue = None if saved["queue"] is None else WorkQueue.restored(saved["queue"], shards=self._shards)
        self._done = dict(saved["done"])
        drawn = [(message_of(draw, DrawWork), items) for draw, items in saved["drawn"]]
        self._drawn = {draw.src: (draw, [WorkItem(*item) for item in items]) for draw, items in drawn}
        self.drawing = [message_of(draw, DrawWork) for draw in saved["drawing"]]
        deferred = [message_of(draw, DrawWork) for draw in saved["deferred"]]
        self._deferred = {draw.src: draw for draw in deferred}
        self._data_shards = dict(saved["data_shards"])
        self._requests.restore(saved["requests"])
        self._landings.restore(saved["landings"])

    # Requests.

    async def draw(self, request: DrawWork, workers: int) -> None:
        """A worker wants work, now or in advance."""
        src = request.src
        if self._requests.accept(request) in (Verdict.OLD, Verdict.VOID):  # It has arrived late.
            return
        drawn = self._drawn.get(src)
        if drawn is not None and _is_same(drawn[0], request):  # Its reply was lost.
            return await self._give(*drawn)
        if any(_is_same(other, request) for other in self.drawing):
            return await self._reply(request, NoWork())
        queue = self._opened(request)
        # Few at the end, and none in advance, so that all end at the same time.
        left = queue.left
        workers = max(1, workers)
        if left <= workers and not request.now and queue.held(src):
            self._deferred[src] = request
            return await self._reply(request, Deferred())
        fair = max(1, left // (2 * workers))
        if taken := queue.take(src, min(request.wanted, fair, MOST_DRAWN), request.incarnation):
            await self._give(request, taken)
        elif queue.is_over:
            await self._reply(request, AllDone())
        else:
            self.drawing = [*(other for other in self.drawing if other.src != src), request]
            await self._reply(request, NoWork())

    def _opened(self, request: DrawWork) -> WorkQueue:
        """The work queue; the first request creates it."""
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
                self._queue = WorkQueue(first, last, data_shards, shards=self._shards)
            except ValueError as error:
                raise Refusal(str(error)) from error
        self._queue.extend(last)
        return self._queue

    async def draw_now(self, request: DrawNow, workers: int) -> None:
        """A worker needs the work now that it has asked for in advance."""
        if self._requests.judge(request) in (Verdict.OLD, Verdict.VOID):
            return
        deferred = self._deferred.get(request.src)
        if deferred is None or not _is_same(deferred, request):
            raise Refusal("it has not drawn work in advance with this request_id")
        wanted = copy.copy(deferred)
        wanted.now = True
        await self.draw(wanted, workers)

    async def _give(self, request: DrawWork, items: list[WorkItem]) -> None:
        self._drawn[request.src] = request, items
        had = torch.tensor([item.had for item in items]) if any(item.had for item in items) else None
        await self._reply(request, Work(_numbers(items), had))

    async def _reply(self, request: Request, reply: Reply) -> None:
        await self.endpoint.send(request.src, reply_to(request, reply))

    def check(self, push: Update) -> None:
        """Refuse an update that claims more work than its sender was given."""
        if self._queue is not None and push.steps > self._queue.held(push.src):
            raise Refusal(f"it says that it has done {push.steps} parts, and was given {self._queue.held(push.src)}")

    async def note(self, push: Update) -> None:
        """Count the work behind an update as done."""
        if not push.steps:
            return
        if self._queue is not None:
            self._queue.do(push.src, push.steps)
            await self._land(push.src)
        else:
            data_shard = self._data_shards.get(push.src, push.src)
            self._done[data_shard] = self._done.get(data_shard, 0) + push.steps

    def data_shard(self, worker: int, data_shard: int) -> int:
        """A worker takes over a data shard; how many steps of it are done."""
        self._data_shards[worker] = data_shard
        return self._done.get(data_shard, 0)

    def leave(self, worker: int) -> None:
        """Drop the requests of a worker that has left or died."""
        self.drawing = [request for request in self.drawing if request.src != worker]
        self._deferred.pop(worker, None)

    async def lose(self, worker: int) -> None:
        """A worker was lost: once it is known which shards have which of its items, the others get the rest."""
        self._drawn.pop(worker, None)
        if self._queue is None:
            return
        if (lost := self._queue.lose(worker)) is None:
            await self._hand_on()
        else:
            await self._landings.ask(lost[0], 0, is_lost=True)

    async def let_go(self, worker: int) -> None:
        """A worker has left: all shards have what it has done."""
        self._drawn.pop(worker, None)
        if self._queue is None:
            return
        if (lost := self._queue.lose(worker)) is not None:
            which, lease = lost
            self._landings.forget(which)
            self._queue.settle(which, [lease.done] * self._shards)
        await self._hand_on()

    async def _land(self, worker: int) -> None:
        """A worker has done items.  Of several shards all must have them before they count as done."""
        assert self._queue is not None
        lease = self._queue.leases[worker]
        if self._queue.is_done_here:
            for other, last in self._queue.leases.items():
                await self._ask_for(other, last)
        elif len(lease.items) - lease.undone > MOST_UNLANDED:
            await self._ask_for(worker, lease)
        await self._say_if_over()

    async def _ask_for(self, worker: int, lease: Lease) -> None:
        which = worker, lease.incarnation
        if lease.items and not self._landings.is_asked(which):
            await self._landings.ask(which, lease.done, is_lost=False)

    async def landed(self, message: SoFar) -> None:
        """A shard says how many items of a worker it has."""
        if self._queue is None or (counts := self._landings.answered(message)) is None:
            return
        which = message.worker, message.incarnation
        if message.is_lost:
            self._queue.settle(which, [self._queue.lost[which].done, *counts])
            await self._hand_on()
        else:
            self._queue.leases[message.worker].land(min(counts))
        if self._queue.is_done_here:
            for worker, lease in self._queue.leases.items():
                await self._ask_for(worker, lease)
        await self._say_if_over()

    @property
    def due(self) -> float | None:
        """When to ask other shards again."""
        return self._landings.due

    async def ask_again(self, *, at_once: bool = False) -> None:
        await self._landings.ask_again(at_once=at_once)

    async def _hand_on(self) -> None:
        """Give items that are free again to workers that wait for work."""
        assert self._queue is not None
        while self.drawing and self._queue.left:
            request = self.drawing.pop(0)
            await self._give(request, self._queue.take(request.src, incarnation=request.incarnation))
        await self._say_if_over()

    async def _say_if_over(self) -> None:
        if self._queue is not None and self._queue.is_over:
            while self.drawing:
                await self._reply(self.drawing.pop(0), AllDone())


def _by_data_shard(saved: Values, data_shards: Mapping[int, int]) -> Values:
    """In a resumed run the worker of a data shard goes on, also where another rank had replaced it."""
    leased = {data_shards.get(rank, rank): items for rank, items in saved["leased"].items()}
    return {**saved, "leased": leased}


def _numbers(items: Sequence[WorkItem]) -> torch.Tensor:
    """Work items as rows: the step and the part of each; and the number of parts, if one of them has its own."""
    width = 3 if any(item.parts for item in items) else 2
    return torch.tensor([item[:width] for item in items], dtype=torch.int64)


def _is_same(a: Request, b: Request) -> bool:
    return (a.src, a.incarnation, a.request_id) == (b.src, b.incarnation, b.request_id)
