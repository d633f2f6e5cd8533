"""DC-ASGD (Zheng et al., ICML 2017): asynchronous SGD whose shards correct stale gradients.

The gradient at the current value is estimated from the gradient at the value that the worker had read, with lam * g * g
as the diagonal of the Hessian.  With lam = 0, or without delay, it is ASGD.  For each worker a shard stores the value
that the worker read last.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.families.server_strategy import ServerStrategy
from paceline.server.rules import Compensated, Rule, Sgd


@dataclass(frozen=True)
class DelayCompensated(ServerStrategy):
    """Push every gradient; shards correct it for its delay.  By default `lam` is 0.04, or 2 with `adaptive`."""

    lr: float = 0.1
    lam: float | None = None
    adaptive: bool = False
    decay: float = 0.95
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shard_rule(1)

    def shard_rule(self, workers: int) -> Rule:
        lam = (2.0 if self.adaptive else 0.04) if self.lam is None else self.lam
        return Compensated(
            Sgd(self.lr, weight_decay=self.weight_decay), lam=lam, adaptive=self.adaptive, decay=self.decay
        )
