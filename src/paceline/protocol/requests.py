"""Requests: how a rank asks another until it is answered, and how the other one finds out what it has seen before.

A message may be lost or arrive twice, so a sender numbers its requests and sends one again while it has no reply; the
receiver does what a request asks for once, however often it comes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from enum import Enum
from threading import Lock
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from paceline.errors import ClusterError
from paceline.op import Op
from paceline.protocol.messages import Away, Message, PeerDied, Refused, Reply, Request, Returned, Wait, reply_to

if TYPE_CHECKING:
    from paceline.endpoint import Endpoint

M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=Request)
Reason = Literal["unknown type", "older incarnation", "not a member", "duplicate", "malformed", "stranger"]

RETRIES = 12  # A request is sent again so many times before its receiver is given up.


class PeerFinished(ClusterError):
    """The rank that was asked has finished, with all work done."""


# The sender's side.


class Requests:
    """Numbers this rank's requests, and sends each until it is answered.

    `incarnation` counts how often the others have declared this rank dead: requests of an older one are void.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.incarnation = 0
        self._last_id = 0
        # What each rank was sent and has not answered, by its number: the request, or the probe for it.
        self._open: dict[int, dict[int, Request]] = defaultdict(dict)
        self._waiting: set[tuple[int, int]] = set()  # The rank and the number of each request that waits for a reply.
        self._replies: dict[tuple[int, int], Message] = {}  # Replies to one, which another one has received.

    def number(self, request: R) -> R:
        """Give a request its number."""
        self._last_id += 1
        request.request_id = self._last_id
        request.incarnation = self.incarnation
        return request

    async def send(self, rank: int, request: Request, *, probe: Request | None = None) -> None:
        """Send a request, and send it, or the `probe`, again if its receiver was killed and is back."""
        await self.begin(rank, request, probe=probe)

    def begin(self, rank: int, request: Request, *, probe: Request | None = None) -> Op[None]:
        self._open[rank][request.request_id] = request if probe is None else probe
        return self.endpoint.send(rank, request)

    def forget(self, rank: int, request: Request) -> None:
        """The answer to a request is not wanted any longer."""
        self._open[rank].pop(request.request_id, None)

    async def ask(self, rank: int, request: Request, *replies: type[M]) -> M:
        """Number a request, send it, and wait for a reply of one of these types."""
        await self.send(rank, self.number(request))
        return await self.reply(rank, request, *replies)

    async def reply(self, rank: int, request: Request, *replies: type[M], probe: Request | None = None) -> M:
        """Wait for the reply to a request that was sent; or for a message of these types that is no reply.

        While there is none, send the request again, or the `probe`: a small request that asks whether a large one has
        arrived.
        """
        this = rank, request.request_id
        self._waiting.add(this)
        # Also if this is not the first wait for it: a shard may have asked to send it again, and be killed before.
        self._open[rank][request.request_id] = probe or request
        try:
            return await self._reply(this, request, replies)
        finally:
            self._waiting.discard(this)
            self._replies.pop(this, None)
            self.forget(rank, request)

    async def _reply(self, this: tuple[int, int], request: Request, replies: tuple[type[M], ...]) -> M:
        endpoint, rank = self.endpoint, this[0]
        timeouts = 0
        types = (*replies, Wait, Refused, PeerDied, Returned)
        while True:
            message = self._replies.pop(this, None)
            if message is None:
                try:
                    message = await endpoint.recv(src=rank, types=types, timeout=endpoint.retransmit_s)
                except TimeoutError:
                    if this not in self._replies:
                        timeouts += 1
                        self._check_alive(rank, request, timeouts)
                        await self._send_again()
                    continue
            timeouts = 0
            if isinstance(message, Returned):
                await self._send_again()
                continue
            check_reply(endpoint, message)
            if isinstance(message, Reply) and message.request_id != request.request_id:
                # Another request of this rank may wait for it; otherwise it is the second answer to an older one.
                if (other := (rank, message.request_id)) in self._waiting:
                    self._replies[other] = message
            elif isinstance(message, replies):
                return message

    async def _send_again(self) -> None:
        """Send all that has no answer, not only what is waited for: one rank may wait for what another one was sent."""
        for rank, unanswered in [(rank, request) for rank, sent in self._open.items() for request in sent.values()]:
            await self.endpoint.send(rank, unanswered)

    def _check_alive(self, rank: int, request: Request, timeouts: int) -> None:
        name = self.endpoint.layout.name(rank)
        if self.endpoint.has_ended(rank):
            raise PeerFinished(f"{name} has finished") from None
        if timeouts > RETRIES:
            asker = self.endpoint.layout.name(self.endpoint.rank)
            raise ClusterError(
                f"{name} has not answered '{request.tag}' of {asker}, sent {timeouts} times: it is dead or stuck"
            ) from None


def check_reply(endpoint: Endpoint, message: Message) -> None:
    """Raise an error if the message says that no request to its sender will be answered any more, or that one was
    refused."""
    name = endpoint.layout.name(message.src)
    if isinstance(message, PeerDied):
        if endpoint.has_ended(message.src):
            raise PeerFinished(f"{name} has finished")
        raise ClusterError(f"{name} is dead, and the run cannot go on without it")
    if isinstance(message, Refused):
        raise ClusterError(f"{name} refused a request of {endpoint.layout.name(endpoint.rank)}: {message.reason}")


# The receiver's side.


class Verdict(Enum):
    """What a receiver makes of a request's number."""

    NEW = "new"
    REPEATED = "repeated"  # It is the newest request of its sender, and has come before.
    OLD = "old"  # Its sender has sent a newer one since.
    VOID = "void"  # It is of an older incarnation.


class Deduplicator:
    """The newest request of each sender, and the reply to it."""

    def __init__(self) -> None:
        self._newest: dict[int, tuple[int, int]] = {}
        self._replies: dict[int, Reply] = {}

    def judge(self, request: Request) -> Verdict:
        """Whether a request is new; it is not noted yet."""
        newest = self._newest.get(request.src, (0, 0))
        if request.incarnation < newest[0]:
            return Verdict.VOID
        this = request.incarnation, request.request_id
        if this == newest:
            return Verdict.REPEATED
        return Verdict.NEW if this > newest else Verdict.OLD

    def note(self, request: Request) -> None:
        """This is the newest request of its sender; there is no reply to it yet."""
        self._newest[request.src] = request.incarnation, request.request_id
        self._replies.pop(request.src, None)

    def accept(self, request: Request) -> Verdict:
        """Judge a request, and note it if it is new."""
        if (verdict := self.judge(request)) is Verdict.NEW:
            self.note(request)
        return verdict

    def keep(self, src: int, reply: Reply) -> Reply:
        """Keep the reply to the newest request of a sender, with that request's number, to be sent again."""
        reply.incarnation, reply.request_id = self._newest[src]
        self._replies[src] = reply
        return reply

    def reply_again(self, request: Request) -> Reply:
        """What a repeated request is answered by: the same as before, or that its sender is to wait."""
        return self._replies.get(request.src) or reply_to(request, Wait())

    def last_reply(self, src: int) -> Reply | None:
        """The reply to the newest request of a sender, if it is still kept."""
        return self._replies.get(src)

    def kept_reply(self, request: Request) -> Reply | None:
        """The reply to this request, if it is still kept."""
        reply = self._replies.get(request.src)
        return reply if reply is not None and reply.request_id == request.request_id else None

    def drop_reply(self, src: int, request_id: int) -> None:
        """The sender of a request has its reply."""
        if (reply := self._replies.get(src)) is not None and reply.request_id == request_id:
            del self._replies[src]

    def newest(self, src: int) -> int:
        """The number of the newest request of a sender; 0 if there was none."""
        return self._newest.get(src, (0, 0))[1]

    def skip(self, src: int, request_id: int) -> None:
        """The sender needs no reply to its requests up to this number, also if they arrive later."""
        incarnation, newest = self._newest.get(src, (0, 0))
        self._newest[src] = incarnation, max(newest, request_id)

    def snapshot(self) -> dict[int, tuple[int, int]]:
        """The newest request of each sender, without the replies."""
        return dict(self._newest)

    def restore(self, saved: Mapping[int, tuple[int, int]]) -> None:
        self._newest = dict(saved)

    def forget(self, src: int) -> None:
        """A sender is dead."""
        self._newest.pop(src, None)
        self._replies.pop(src, None)


class Refusal(ValueError):
    """A receiver does not do what a message asks for, and why."""

    reason: ClassVar[Reason] = "malformed"

    def reply(self) -> Reply:
        return Refused(reason=str(self)[:2000])


class UnknownRequest(Refusal):
    """This receiver does not know the type of message."""

    reason = "unknown type"

    def __init__(self, message: Message) -> None:
        super().__init__(f"there is no request of the type '{message.tag}' here")


class NotAMember(Refusal):
    """The sender is not a member (any longer); it may join."""

    reason = "not a member"

    def reply(self) -> Reply:
        return Away(reason=str(self)[:2000])


class OlderIncarnation(NotAMember):
    """The sender was declared dead after it sent this."""

    reason = "older incarnation"


class Refusals:
    """How many messages were refused, by reason, and what was wrong with the last one."""

    def __init__(self) -> None:
        self.counts: Counter[Reason] = Counter()
        self.last: str | None = None
        self._adding = Lock()  # Several threads of a mailbox refuse.

    def add(self, reason: Reason, text: str) -> None:
        with self._adding:
            self.counts[reason] += 1
            self.last = text

    @property
    def total(self) -> int:
        return self.counts.total()

    @property
    def answered(self) -> int:
        """All but duplicates, which are answered as before or not at all."""
        return self.total - self.counts["duplicate"]
