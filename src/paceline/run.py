"""Run: the result of training, simulated or real."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from paceline.trace import Trace


@dataclass
class Run:
    """The trained model and its parameters as one vector, the trace, and (in the simulator) every worker's state."""

    model: nn.Module
    params: Tensor
    trace: Trace
    states: list[dict[str, Any]]
    waits: int = 0

    @property
    def seconds(self) -> float:
        return self.trace.seconds

    @property
    def final(self) -> dict[str, float]:
        """The last evaluation."""
        return self.trace.evaluations[-1].values if self.trace.evaluations else {}
