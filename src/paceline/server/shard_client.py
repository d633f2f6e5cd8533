"""ShardClient: a worker's requests to all shards, repeated until they are answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from paceline.protocol.messages import Away, Message, Request
from paceline.protocol.requests import PeerFinished, Requests
from paceline.server.messages import (
    AskToSave,
    Bring,
    DrawNow,
    DrawWork,
    Idle,
    Leave,
    ProbeExchange,
    ProbePush,
    Pull,
    Push,
    RunEnded,
    SendAgain,
    Start,
    Update,
    Value,
    Wake,
)
from paceline.strategy import MissedEnd
from paceline.worker.replica import Replica

R = TypeVar("R", bound=Request)

# Besides the reply itself, a shard may answer any request by one of these.
ANY = (SendAgain, Away, Bring, RunEnded, AskToSave)
IDLE = (DrawWork, DrawNow, Leave)  # Requests whose reply may take as long as other workers work.


class OnAsk(Protocol):
    """Handles a message that the run is to be saved; a worker that is idle waits for others."""

    async def __call__(self, message: AskToSave, *, is_idle: bool) -> None: ...


class ShardClient:
    """Sends requests, and sends what shards need before they can reply.

    A worker that was declared dead loses its work: `drop_work` forgets it, and `draw_again` asks for other work.
    """

    def __init__(self, replica: Replica, slices: Sequence[slice]) -> None:
        self.replica, self.endpoint = replica, replica.endpoint
        self.shards = list(self.endpoint.layout.server_ranks)
        self.slices = slices
        self.requests = Requests(self.endpoint)
        self.has_joined = False
        self._told: list[Idle | Wake] = []
        self.drop_work: Callable[[], None] = lambda: None
        self.draw_again: Callable[[], Awaitable[Request]] | None = None
        self.on_ask: OnAsk | None = None  # The run is to be saved.
        self.restore: Callable[[], Awaitable[None]] | None = None  # Of a resumed run: the shards have a value then.

    async def tell_all(self, kind: type[Idle | Wake]) -> None:
        """Tell all shards.  That this worker is idle they are told again if they are killed: others may wait for it."""
        self.forget_told()
        self._told = self.numbered([kind() for _ in self.shards])
        for rank, request in zip(self.shards, self._told, strict=True):
            await self.requests.send(rank, request)
            if kind is Wake:
                self.requests.forget(rank, request)

    def forget_told(self) -> None:
        """The shards need not know any longer that this worker is idle."""
        for rank, request in zip(self.shards, self._told, strict=False):
            self.requests.forget(rank, request)
        self._told = []

    async def join(self) -> None:
        """Worker 0 sends the first value."""
        if not self.has_joined:
            self.has_joined = True
            if self.restore is not None:
                await self.restore()
            elif self.endpoint.rank == 0:
                await self._bring()

    async def _bring(self) -> None:
        for rank, where in zip(self.shards, self.slices, strict=True):
            await self.endpoint.send(rank, Start(self.replica.params[where]))

    def numbered(self, requests: list[R]) -> list[R]:
        """Give requests to all shards the same number."""
        if not requests:  # There is one shard, and it was asked alone.
            return requests
        self.requests.number(requests[0])
        for request in requests[1:]:
            request.request_id = requests[0].request_id
            request.incarnation = requests[0].incarnation
        return requests

    async def send(self, requests: Mapping[int, Request]) -> None:
        """Send requests to shards, by their ranks."""
        await self.join()
        sends = [self.requests.begin(rank, request, probe=_probe_of(request)) for rank, request in requests.items()]
        for send in sends:
            await send

    async def answer(self, rank: int, request: Request, replies: tuple[type[Message], ...]) -> Message:
        """The reply of a shard to a request, after everything that the shard needs before it."""
        while True:
            try:
                answer = await self.requests.reply(rank, request, *replies, *ANY, probe=_probe_of(request))
            except PeerFinished:
                answer = RunEnded()
            if isinstance(answer, RunEnded):  # A worker that joins too late has nothing to do.
                raise MissedEnd
            if isinstance(answer, Bring):
                await self._bring()
            elif isinstance(answer, Away):
                request, replies = await self._come_back(rank, request, replies)
            elif isinstance(answer, SendAgain):
                await self.endpoint.send(rank, request)
            elif isinstance(answer, AskToSave):
                if self.on_ask is not None:
                    await self.on_ask(answer, is_idle=isinstance(request, IDLE))
            else:
                return answer

    async def _come_back(
        self, rank: int, request: Request, replies: tuple[type[Message], ...]
    ) -> tuple[Request, tuple[type[Message], ...]]:
        """This worker was declared dead after a timeout: others do its work, and its pushes since then do not count.

        Returns the request that takes the place of the old one, and its replies.
        """
        if request.incarnation == self.requests.incarnation:
            self.requests.incarnation += 1
            self.drop_work()
            await self.tell_all(Wake)
        if isinstance(request, (DrawWork, DrawNow)):
            assert self.draw_again is not None
            return await self.draw_again(), replies
        again = self.requests.number(Pull())
        await self.requests.send(rank, again)
        return again, (Value,)


def _probe_of(request: Request) -> Request | None:
    """Send a large request again only if the shard has not seen it."""
    if isinstance(request, Update):
        probe = ProbePush if isinstance(request, Push) else ProbeExchange
        return probe(request_id=request.request_id, incarnation=request.incarnation)
    return None
