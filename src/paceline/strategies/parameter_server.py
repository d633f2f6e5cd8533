"""Asynchronous SGD on a sharded parameter server: workers push gradients and pull parameters, nobody waits.

Each shard holds one slice of the model and applies what arrives in order of arrival by its rule.  With one worker it equals
that rule run on one machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.replica import Replica
from paceline.server.rules import Rule, Sgd
from paceline.server.shard import Shard
from paceline.server.store import Store
from paceline.strategy import Strategy


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Push every gradient to the shards, go on from what they hold: no worker waits for another."""

    rule: Rule = Sgd()  # noqa: RUF009 (frozen)
    servers: int = 2
    is_ordered: ClassVar[bool] = False
    steps_locally: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.servers < 1:
            raise ValueError(f"ParameterServer(servers={self.servers}): at least 1 shard must hold the parameters")

    async def worker(self, w: Replica) -> None:
        store = Store(w)
        w.params.copy_(await store.pull())
        for _ in w.steps_alone():
            w.params.copy_(await store.exchange(await w.gradient()))
        await store.leave()

    async def server(self, s: Shard) -> None:
        while request := await s.request():
            if request.kind == "push":
                await s.apply(self.rule, request)
            await s.reply(request)
