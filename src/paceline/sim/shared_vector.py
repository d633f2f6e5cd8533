"""A vector in memory that simulated ranks share without a lock.

Ranks read and write it piece by piece, and other ranks run between two pieces.  So a reader may get pieces of different
ages, and a write may be lost if another rank writes at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.endpoint import WriteCounts
from paceline.op import Op
from paceline.stripes import stripe_of

if TYPE_CHECKING:
    from paceline.sim.endpoint import SimEndpoint

PIECES = 8


class SimSharedVector:
    """One rank's access to the vector."""

    def __init__(self, endpoint: SimEndpoint, values: Tensor, writes: WriteCounts, steps: memoryview) -> None:
        self.endpoint = endpoint
        self.values = values
        self.writes = writes
        self.steps = steps

    def read(self, into: Tensor) -> Op[Tensor]:
        return self.endpoint.spawn(self._read(into), kind="read")

    async def _read(self, into: Tensor) -> Tensor:
        for where in pieces(self.values):
            await self.endpoint.move(into[where].nbytes, kind="read")
            into[where] = self.values[where]
        return into

    def add(self, change: Tensor) -> Op[None]:
        return self.endpoint.spawn(self._add(change), kind="write")

    async def _add(self, change: Tensor) -> None:
        for where in pieces(self.values):
            was = self.values[where].clone()
            await self.endpoint.move(was.nbytes, kind="write")
            self.values[where] = was.add_(change[where])

    def draw(self, towards: Tensor, share: float) -> Op[None]:
        return self.endpoint.spawn(self._draw(towards, share), kind="write")

    async def _draw(self, towards: Tensor, share: float) -> None:
        for where in pieces(self.values):
            was = self.values[where].clone()
            await self.endpoint.move(was.nbytes, kind="write")
            self.values[where] = was.lerp_(towards[where], share)


async def change(endpoint: SimEndpoint, values: Tensor, by: Callable[[], object]) -> None:
    """Make the change of shared values that `by` makes, but piece by piece, and only where values differ."""
    before = values.clone()
    by()
    after = values.clone()
    values.copy_(before)
    for where in pieces(values):
        touched = torch.arange(where.start, where.stop, device=values.device)[after[where] != before[where]]
        if len(touched):
            was = values[touched]
            old = before[touched]
            new = after[touched]
            await endpoint.move(2 * was.nbytes, kind="write")
            values[touched] = torch.where(was == old, new, was + (new - old))


def pieces(vector: Tensor) -> Iterator[slice]:
    """Equal slices that cover the vector."""
    parts = min(PIECES, vector.numel())
    return (stripe_of(i, vector.numel(), parts) for i in range(parts))
