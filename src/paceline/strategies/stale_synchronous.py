"""Stale synchronous parallel (Ho et al. 2013): asynchronous, but nobody gets more than a bound ahead of the slowest.

With a bound of 0 all go in step; if updates then become visible only when all have made theirs (`visible="clock"`), it is
AllReduceSGD.  Without a bound it is ASGD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.families.server_strategy import ServerStrategy
from paceline.server.gates import Bound, Gate
from paceline.server.rules import Every, Rule, Sgd


@dataclass(frozen=True)
class StaleSynchronous(ServerStrategy):
    """Push every gradient; wait before an iteration that would be more than `bound` ahead of the slowest worker's."""

    lr: float = 0.1
    bound: int = 4
    visible: Literal["at once", "clock"] = "at once"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shard_rule(1)
        self.shard_gate()
        if self.visible not in ("at once", "clock"):
            raise ValueError(
                f"StaleSynchronous(visible={self.visible!r}): updates are visible 'at once' or by the 'clock'"
            )
        if self.visible == "clock" and self.bound:
            raise ValueError(
                f"StaleSynchronous(bound={self.bound}, visible='clock'): updates are gathered by the clock only with a bound of 0"
            )

    def shard_rule(self, workers: int) -> Rule:
        return Every(Sgd(self.lr), workers) if self.visible == "clock" else Sgd(self.lr)

    def shard_gate(self) -> Gate:
        return Bound(self.bound)
