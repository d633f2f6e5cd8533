"""Steps of a worker's own optimizer that are not applied at once: the method sends them, and applies what it sends."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.worker.replica import Replica


class LocalUpdates:
    """What the optimizer of a worker would change.

    Changes from elsewhere belong into all of `vectors`: while a step is awaited, they are no part of it.
    """

    def __init__(self, w: Replica) -> None:
        self.vectors = [w.params]
        self._w = w
        self._before: Tensor | None = None

    async def next(self) -> Tensor:
        """The next step, which has not been applied; the parameters are as they were."""
        params = self._w.params
        if self._before is None:
            self._before = torch.empty_like(params)
        self._before.copy_(self._w.learner.flat.round(params))
        self.vectors.append(self._before)
        await self._w.local_step()
        self.vectors.pop()
        update = self._before - params
        params.copy_(self._before)
        return update
