"""Replies of a server to its workers, and the refusals among them."""

from __future__ import annotations

from paceline.endpoint import Endpoint
from paceline.errors import ClusterError
from paceline.protocol.messages import Away, Message, Numbered, PeerSuspected, Reply, reply_to
from paceline.protocol.requests import Refusal, Refusals
from paceline.server.logged_endpoint import LoggedEndpoint
from paceline.server.queues import Event


class Replies:
    """Sends replies, and counts refusals by reason."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.refusals = Refusals()

    async def send(self, request: Numbered, reply: Reply) -> None:
        await self.endpoint.send(request.src, reply_to(request, reply))

    async def is_taken(self, dst: int, reply: Reply) -> bool:
        """Send a reply that may be large; False if the receiver has not taken it in time."""
        try:
            await self.endpoint.send(dst, reply)
        except ClusterError:
            if isinstance(self.endpoint, LoggedEndpoint):  # What is not in its log must not have an effect.
                self.endpoint.find_out(PeerSuspected(src=dst))
                return True
            return False
        return True

    async def refuse(self, message: Message, why: Refusal) -> None:
        """Count a message that is refused, and tell its sender if it is a request."""
        self.refusals.add(why.reason, f"a '{message.tag}' of {self.endpoint.layout.name(message.src)}: {why}")
        if isinstance(message, Numbered):
            await self.send(message, why.reply())

    def note_duplicate(self, message: Message) -> None:
        name = self.endpoint.layout.name(message.src)
        self.refusals.add("duplicate", f"a '{message.tag}' of {name}: it has arrived before")

    async def tell_away(self, request: Event | Numbered) -> None:
        """The sender of a request was declared dead before it was answered."""
        text = "it was declared dead; it may join"
        self.refusals.add("older incarnation", f"a request of {self.endpoint.layout.name(request.src)}: {text}")
        away = Away(reason=text, request_id=request.request_id, incarnation=request.incarnation)
        await self.endpoint.send(request.src, away)
