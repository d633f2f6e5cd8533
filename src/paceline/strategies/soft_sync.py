"""Softsync (Zhang, Gupta, Lian & Liu 2016): a shard waits for some gradients, from any workers, and applies their mean.

It lies between ASGD (`updates=1`) and a mean of all workers (`updates=workers`).  Stale gradients are scaled down.  The
mean staleness is (workers - 1) / updates at any speed of the workers.  The paper's n is different: its n-softsync has
workers / n updates in a mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.families.server_strategy import ServerStrategy
from paceline.server.rules import Every, Rule, Scaled, Sgd


@dataclass(frozen=True)
class SoftSync(ServerStrategy):
    """Apply the mean of every `updates` gradients (default: workers // 2), each divided by its staleness."""

    lr: float = 0.1
    updates: int | None = None
    scale: Literal["1/tau", "1/(tau+1)"] | None = "1/tau"
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shard_rule(2)  # Raises ValueError for wrong settings.

    def shard_rule(self, workers: int) -> Rule:
        updates = max(1, workers // 2) if self.updates is None else self.updates
        rule = Every(Sgd(self.lr, weight_decay=self.weight_decay), updates)
        return rule if self.scale is None else Scaled(rule, self.scale)
