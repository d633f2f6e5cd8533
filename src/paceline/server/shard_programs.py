"""ShardPrograms: the coordinator sends the same operations to all shards of vectors, and gets their inner products."""

from __future__ import annotations

from collections import deque
from math import inf

import torch

from paceline.endpoint import Endpoint
from paceline.errors import ClusterError
from paceline.protocol.messages import Message, PeerDied, Reply, Request, Returned, Wait, reply_to
from paceline.protocol.requests import RETRIES, Deduplicator, Requests, Verdict, check_reply
from paceline.server.messages import Products, RunProgram


class ShardPrograms:
    """Operations that wait to be sent, and the messages of workers that arrive while the shards run them.

    `received` has the requests of workers that the coordinator has handled: the reply to a repeated one is `Wait`.
    """

    def __init__(self, endpoint: Endpoint, shards: list[int], received: Deduplicator) -> None:
        self.endpoint, self.shards = endpoint, shards
        self.requests = Requests(endpoint)
        self.later: deque[Message] = deque()  # Messages to be handled once the shards have replied.
        self._received = received
        self.unsent: list[str] = []  # Operations, as lines of a program.

    def then(self, operation: str, *given: str | float) -> None:
        """Queue an operation.  It is sent with the next program."""
        self.unsent.append(" ".join([operation, *(g if isinstance(g, str) else repr(g) for g in given)]))

    async def run(self) -> list[float]:
        """Run the queued operations on all shards; the inner products among them, summed over shards."""
        if not self.unsent:
            return []
        program = torch.frombuffer(bytearray("\n".join(self.unsent).encode()), dtype=torch.uint8)
        self.unsent = []
        answers = await self._ask(self.requests.number(RunProgram(program)))
        return torch.stack([answer.products for answer in answers]).sum(0).tolist()

    async def _ask(self, asked: RunProgram) -> list[Products]:
        """The replies of all shards.  After a timeout the request is sent again to shards that have not replied."""
        endpoint, answers = self.endpoint, dict[int, Products]()
        timeouts, due = 0, 0.0
        while missing := [rank for rank in self.shards if rank not in answers]:
            if endpoint.now() >= due:
                for rank in missing:
                    await endpoint.send(rank, asked)
                timeouts += 1
                due = inf if endpoint.retransmit_s is None else endpoint.now() + endpoint.retransmit_s
            try:
                message = await endpoint.recv(timeout=None if due == inf else max(0.0, due - endpoint.now()))
            except TimeoutError:
                if timeouts > RETRIES:
                    name = endpoint.layout.name(missing[0])
                    raise ClusterError(f"{name} has not answered the coordinator: it is dead or stuck") from None
                continue
            if isinstance(message, Returned):
                due = 0.0 if message.src in missing else due
            elif message.src in missing and isinstance(message, (Reply, PeerDied)):
                check_reply(endpoint, message)
                if isinstance(message, Products) and message.request_id == asked.request_id:
                    answers[message.src] = message
                    timeouts = 0
            elif isinstance(message, Request) and self._is_repeated(message):
                await endpoint.send(message.src, reply_to(message, Wait()))
            else:
                self.later.append(message)
        return [answers[rank] for rank in self.shards]

    def _is_repeated(self, request: Request) -> bool:
        waiting = {(m.src, m.request_id) for m in self.later if isinstance(m, Request)}
        return (request.src, request.request_id) in waiting or self._received.judge(request) is Verdict.REPEATED
