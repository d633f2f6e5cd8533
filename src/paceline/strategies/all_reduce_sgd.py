"""Synchronous SGD: every step takes the mean gradient of all workers.

With n samples on each of N workers it equals one machine with N*n samples, whatever the optimizer.  Buckets are exchanged
while backward still runs.  With a codec it is 1-bit SGD and its relatives.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.codecs import Codec
from paceline.op import Op
from paceline.replica import Replica
from paceline.strategy import Strategy


@dataclass(frozen=True)
class AllReduceSGD(Strategy):
    """Average gradients at every step: the reference for accuracy, and the most communication."""

    codec: Codec | None = None

    async def worker(self, w: Replica) -> None:
        if w.workers == 1:
            return await w.train_alone()
        link = w.link(self.codec)
        means: list[Op[Tensor]] = []
        for _ in w.steps():
            g = await w.gradient(each=lambda bucket: means.append(w.mean_of_bucket(bucket, link)))
            while means:
                await means.pop(0)
            await w.step(g)
        await w.mean_of_buffers()
