"""Stale synchronous parallel (Ho et al. 2013): asynchronous, but no worker gets too far ahead of the slowest.

With `bound=0` all workers are at the same step.  If also updates become visible only when every worker has pushed its
own (`visible="clock"`), it is AllReduceSGD.  Without a bound it is ASGD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.families.server_strategy import ServerStrategy
from paceline.server.gates import Bound, Gate
from paceline.server.rules import Every, Rule, Sgd


@dataclass(frozen=True)
class StaleSynchronous(ServerStrategy):
    """Push every gradient; wait before a step that is more than `bound` steps ahead of the slowest worker."""

    lr: float = 0.1
    bound: int = 4
    visible: Literal["at once", "clock"] = "at once"
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shard_rule(1)
        self.shard_gate()
        if self.visible not in ("at once", "clock"):
            raise ValueError(
                f"StaleSynchronous(visible={self.visible!r}): updates become visible 'at once' or by the 'clock'"
            )
        if self.visible == "clock" and self.bound:
            raise ValueError(
                f"StaleSynchronous(bound={self.bound}, visible='clock'): updates become visible when all workers have "
                "sent theirs, so none is ahead, and visible='clock' requires bound=0; give that, or visible='at once'"
            )

    def shard_rule(self, workers: int) -> Rule:
        rule = Sgd(self.lr, weight_decay=self.weight_decay)
        return Every(rule, workers) if self.visible == "clock" else rule

    def shard_gate(self) -> Gate:
        return Bound(self.bound)
