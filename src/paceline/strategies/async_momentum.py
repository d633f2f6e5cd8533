"""Asynchronous momentum SGD: where the velocity lives.

At the server there is one, which every push advances; at the workers each has its own, in its optimizer, and pushes its steps.
Asynchrony acts like a momentum of 1 - 1/workers by itself (Mitliagkas et al. 2016): many workers want less.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.families.server_strategy import ServerStrategy
from paceline.server.rules import Momentum, Rule


@dataclass(frozen=True)
class AsyncMomentum(ServerStrategy):
    """Push every gradient; shards give them momentum, with `unit_gain` scaled so that it does not enlarge the steps."""

    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    unit_gain: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shard_rule(1)

    def shard_rule(self, workers: int) -> Rule:
        return Momentum(self.lr, self.momentum, self.nesterov, self.unit_gain)
