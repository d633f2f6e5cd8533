"""Pairing: exchanges between two peers, one at a time for each worker.  What one gives, the other gets, exactly once.

A worker offers a copy of its vector to a peer and continues.  The peer subtracts a part from its own vector and replies
with it; the worker adds it to its vector, whatever that is by then.  The sum over both does not change.

Until its offer is answered, a worker takes part in no other exchange: two exchanges with one vector would
overlap.  Workers never wait for each other in a circle:

- If two workers have sent offers to each other, each has the other's copy.  Both compute the same exchange, and no
  reply is needed.
- Each offer has a priority, a hash of its number.  A worker with an open offer that receives another offer refuses it
  ("busy") if its priority is the lower one, and otherwise answers it later.  So along a chain of waiting workers
  priorities fall, and no chain is a circle.  Each offer has a new priority, so no worker is refused for ever.
- If a peer dies, offers to it are void.  If it is only silent, it may have taken its part already: the offer is set
  aside, and repeated when the peer is back.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import ClassVar

from msgspec.structs import replace
from torch import Tensor

from paceline.families.peers import Peers, Service
from paceline.protocol.messages import Message, Number, Numbered, Reply, Request, reply_to
from paceline.protocol.requests import Deduplicator, Requests, Verdict


class PairOffer(Request):
    """A copy of the sender's vector.  `answered` is the receiver's newest offer that the sender has answered."""

    copy: Tensor
    answered: Number = 0
    era: Number = 0


class PairShare(Reply):
    """What the receiver adds to its vector.

    If the offers of both have crossed, `answered` is the sender's own offer: it needs no reply.
    """

    share: Tensor
    answered: Number = 0


class PairBusy(Reply):
    """There is no exchange: the sender's own offer is open and has the higher priority."""


class PairAck(Numbered):
    """The share with that number has arrived."""


class Pairing(Service):
    """This worker's exchanges of a vector.  `share(mine, theirs)` is subtracted here, and added at the peer."""

    types: ClassVar = (PairOffer, PairShare, PairBusy, PairAck)

    def __init__(self, peers: Peers, vector: Tensor, share: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._peers = peers
        self._endpoint = peers.endpoint
        self._vector = vector
        self._share = share
        self._requests = Requests(peers.endpoint)
        self._seen = Deduplicator()
        self._copy: Tensor | None = None
        self._partner: int | None = None  # The peer that has not answered the open offer,
        self._offer: PairOffer | None = None  # that offer,
        self._sent_at = 0.0  # and when it was sent last.
        self._held: list[PairOffer] = []  # Offers to be answered after the open one.
        self._aside: dict[int, PairOffer] = {}  # Offers to silent peers, which these may have answered.
        peers.add(self)

    async def offer(self, data_shard: int | None) -> None:
        """Offer an exchange to the member with that data shard, unless an older offer is open.

        Retransmit an open offer if it is due: a worker that computes gradients never waits for a timeout.
        """
        if self._partner is not None:
            retransmit_s = self._endpoint.retransmit_s
            if retransmit_s is not None and self._endpoint.now() - self._sent_at > retransmit_s:
                await self.retransmit()
            return
        partner = None if data_shard is None else self._peers.with_data_shard(data_shard)
        if partner is None or partner in self._aside:
            return
        if self._copy is None or self._endpoint.in_use(self._copy):
            self._copy = self._endpoint.send_buffer(self._vector)
        self._copy.copy_(self._vector)
        self._partner = partner
        self._offer = self._requests.number(PairOffer(self._copy, era=self._peers.era))
        await self.retransmit()

    async def wait(self) -> None:
        """Wait until no offer of this worker to a member is open."""
        await self._peers.wait_until(
            lambda: self._partner is None and not any(self._peers.is_member(rank) for rank in self._aside)
        )

    async def retransmit(self) -> None:
        for rank in self._aside:
            if self._peers.is_member(rank):
                await self._repeat(rank)
        if self._partner is not None and self._offer is not None:
            self._sent_at = self._endpoint.now()
            self._offer = replace(self._offer, answered=self._seen.newest(self._partner))
            await self._peers.send(self._partner, self._offer)

    async def _repeat(self, rank: int) -> None:
        """Ask for the answer to an offer that was set aside."""
        self._aside[rank] = replace(self._aside[rank], answered=self._seen.newest(rank))
        await self._peers.send(rank, self._aside[rank])

    async def handle(self, message: Message) -> None:
        src = message.src
        if not self._peers.is_member(src):
            return
        match message:
            case PairOffer():
                await self._answer(message)
            case PairAck():
                self._seen.drop_reply(src, message.request_id)
            case PairShare():
                self._seen.skip(src, message.answered)
                if self._endpoint.retransmit_s is not None:
                    await self._peers.send(src, PairAck(request_id=message.request_id))
                if self._is_answer(message):
                    self._vector.add_(message.share.to(self._vector.device))
                    await self._close()
                elif self._is_late_answer(message):
                    self._vector.add_(message.share.to(self._vector.device))
                    del self._aside[src]
            case PairBusy():
                if self._is_answer(message):
                    await self._close()
                elif self._is_late_answer(message):
                    del self._aside[src]
            case _:
                pass

    async def peer_died(self, rank: int) -> None:
        self._held = [offer for offer in self._held if offer.src != rank]
        self._seen.forget(rank)
        self._aside.pop(rank, None)
        if self._partner == rank:
            await self._close()

    async def peer_suspected(self, rank: int) -> None:
        self._held = [offer for offer in self._held if offer.src != rank]
        if self._partner == rank and self._offer is not None:
            self._aside[rank] = replace(self._offer, copy=self._offer.copy.clone())
            await self._close()

    async def peer_returned(self, rank: int) -> None:
        if rank in self._aside:
            await self._repeat(rank)

    def _is_answer(self, reply: Reply) -> bool:
        """Whether a reply answers the open offer."""
        return self._offer is not None and self._partner == reply.src and self._offer.request_id == reply.request_id

    def _is_late_answer(self, reply: Reply) -> bool:
        """Whether a reply answers an offer that was set aside."""
        aside = self._aside.get(reply.src)
        return aside is not None and aside.request_id == reply.request_id

    async def _answer(self, offer: PairOffer) -> None:
        src, mine = offer.src, self._offer
        if self._seen.judge(offer) is not Verdict.NEW:  # The reply may have been lost.
            if (reply := self._seen.kept_reply(offer)) is not None:
                await self._peers.send(src, reply)
        elif (aside := self._aside.get(src)) is not None and offer.answered < aside.request_id:
            self._noted(offer, PairShare(self._give(aside.copy, offer), aside.request_id))  # They have crossed.
            del self._aside[src]
        elif mine is None:
            await self._peers.send(src, self._noted(offer, PairShare(self._give(self._vector, offer))))
        elif self._partner == src and offer.answered < mine.request_id:
            # The offers have crossed.  Send the reply only if the peer repeats its offer: it has not got this worker's.
            self._noted(offer, PairShare(self._give(mine.copy, offer), mine.request_id))
            await self._close()
        elif priority(src, offer.request_id) < priority(self._peers.rank, mine.request_id):
            await self._peers.send(src, self._noted(offer, PairBusy()))
        elif all(held.src != src for held in self._held):
            self._held.append(offer)

    def _give(self, mine: Tensor, offer: PairOffer) -> Tensor:
        share = self._share(mine, offer.copy.to(self._vector.device))
        self._vector.sub_(share)
        return share

    def _noted(self, offer: PairOffer, reply: Reply) -> Reply:
        """Note that an offer is answered.  Keep the reply if it can be lost."""
        self._seen.note(offer)
        return reply_to(offer, reply) if self._endpoint.retransmit_s is None else self._seen.keep(offer.src, reply)

    async def _close(self) -> None:
        """The open offer is answered: answer those that have waited for it."""
        self._partner = None
        self._offer = None
        held = self._held
        self._held = []
        for offer in held:
            await self._answer(offer)


def priority(rank: int, number: int) -> tuple[int, int]:
    """The priority of an offer.  It looks random, is the same on all workers, and no two offers have the same."""
    return zlib.crc32(f"{rank}/{number}".encode()), rank
