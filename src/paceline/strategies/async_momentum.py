"""Asynchronous momentum SGD, with one velocity on the server, which every push updates.

(In ASGD each worker has its own velocity, in its optimizer, and pushes its steps.)  Asynchrony alone acts like a
momentum of 1 - 1/workers (Mitliagkas et al. 2016), so use a smaller momentum with many workers.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.families.server_strategy import ServerStrategy
from paceline.server.rules import Momentum, Rule


@dataclass(frozen=True)
class AsyncMomentum(ServerStrategy):
    """Push every gradient; shards apply it with momentum.  `unit_gain` scales it so that steps do not become larger."""

    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    unit_gain: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shard_rule(1)

    def shard_rule(self, workers: int) -> Rule:
        return Momentum(self.lr, self.momentum, self.nesterov, self.unit_gain, weight_decay=self.weight_decay)
