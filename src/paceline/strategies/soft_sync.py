"""Softsync (Zhang, Gupta, Lian & Liu 2016): a shard waits for some gradients, whoever they are from, and applies their mean.

Between ASGD (`updates=1`) and a mean of all workers (`updates` as many as there are), with stale gradients scaled down.  The
mean staleness is (workers - 1) / updates, whatever the workers' speeds.  The paper counts the other way round: its n-softsync has
workers / n updates in a mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.families.server_strategy import ServerStrategy
from paceline.server.rules import Every, Rule, Scaled, Sgd


@dataclass(frozen=True)
class SoftSync(ServerStrategy):
    """Apply the mean of every `updates` gradients, each divided by its staleness.  Without a number, half as many as workers."""

    lr: float = 0.1
    updates: int | None = None
    scale: Literal["1/tau", "1/(tau+1)"] | None = "1/tau"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shard_rule(2)  # It refuses what cannot be.

    def shard_rule(self, workers: int) -> Rule:
        rule = Every(Sgd(self.lr), max(1, workers // 2) if self.updates is None else self.updates)
        return rule if self.scale is None else Scaled(rule, self.scale)
