"""Shard: one slice of the parameters, held by one rank, so that its updates are serial by construction."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.endpoint import Endpoint, Message
from paceline.server.rules import Rule


class Shard:
    """What a server role works with.  It serves once worker 0 has sent the first value, and until the last worker left."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.value = torch.empty(0)
        self.version = 0
        self._present = set(endpoint.layout.worker_ranks)
        self._early: list[Message] = []  # what overtook the first value

    async def request(self) -> Message | None:
        """The next push or pull; None when nobody is left who could ask."""
        while self._present:
            message = self._early.pop(0) if self._early and self.value.numel() else await self.endpoint.recv()
            if message.kind == "start":
                self.value = message.tensors[0].clone()
            elif message.kind == "leave":
                self._present.discard(message.src)
            elif self.value.numel():
                return message
            else:
                self._early.append(message)
        return None

    async def apply(self, rule: Rule, push: Message) -> None:
        """Let a rule do what an update asks for.  One without samples changes nothing and makes no new version."""
        if not push.samples:
            return
        update: Tensor = push.tensors[0]
        if update.shape != self.value.shape:
            raise ValueError(f"rank {push.src} pushed {tuple(update.shape)} values to a shard of {tuple(self.value.shape)}")
        staleness = self.version - push.version
        work = lambda: rule.apply(self.value, update, staleness=staleness)  # noqa: E731
        await self.endpoint.compute(work, kind="apply", nbytes=push.nbytes)
        self.endpoint.trace.point(self.endpoint.now(), self.endpoint.rank, self.version, push.samples, None, staleness)
        self.version += 1

    async def reply(self, request: Message) -> None:
        """Send the value as it is now, with its version."""
        await self.endpoint.send(request.src, Message("value", (self.value,), version=self.version))
