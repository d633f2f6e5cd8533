"""Local steps with a learning rate that rises at the beginning."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.state import per_worker
from paceline.worker.replica import Replica


class RampedSteps:
    """Local steps with a learning rate that rises at the beginning.

    A step is proportional to the learning rate, with momentum and weight decay too, so the step itself is scaled: the
    optimizer's own rates remain those of its schedule.
    """

    def __init__(self, factor: Callable[[int], float], w: Replica) -> None:
        self.factor = factor
        self.w = w
        self.passed = w.state("ramp", rule=per_worker, steps=0)
        self._before = torch.empty_like(w.params)

    async def step(self) -> None:
        factor = self.factor(self.passed.steps)
        if factor < 1:
            self._before.copy_(self.w.params)
        await self.w.local_step()
        if factor < 1:
            torch.lerp(self._before, self.w.params, factor, out=self.w.params)
        self.passed.steps += 1
