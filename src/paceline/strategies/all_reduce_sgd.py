"""Synchronous SGD: every step takes the mean gradient of all workers.

With n samples on each of N workers it equals one machine with N*n samples, for any optimizer.  Buckets are exchanged
while backward still runs.  With a codec it is 1-bit SGD or a similar method.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import sqrt

import torch
from torch import Tensor

from paceline.codecs import Codec
from paceline.collectives import groups_of
from paceline.families.adam import warn_if_adaptive
from paceline.op import Op
from paceline.strategy import Strategy
from paceline.worker.replica import Replica, train_alone


@dataclass(frozen=True)
class AllReduceSGD(Strategy):
    """Average gradients at every step: the reference for accuracy, and the most communication.

    `group` is a number of workers: gradients are summed within groups of this size first, and then between groups.  By
    default a group is a host, if hosts have several workers.  `clip` limits the norm of the mean gradient, as
    torch.nn.utils.clip_grad_norm_ does.
    """

    codec: Codec | None = None
    group: int | None = None
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.group is not None and self.group < 1:
            raise ValueError(f"AllReduceSGD(group={self.group}): a group has at least 1 worker")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"AllReduceSGD(clip={self.clip}): the largest norm of a gradient must be positive")

    @property
    def needs_unscaled(self) -> str | None:
        if self.clip is None:
            return None
        return (
            f"clip={self.clip} would be the norm of the gradient times the scale; leave clip out, and clip in the loop "
            "after scaler.unscale_(session.optimizer), or train in bfloat16, which needs no scaler"
        )

    @property
    def has_own_momentum(self) -> bool:
        return self.codec is not None and self.codec.has_momentum

    def samples_of_step(self, samples: float, workers: int) -> float:
        return samples

    async def worker(self, w: Replica) -> None:
        codec_state = w.codec_state(self.codec)
        if w.workers == 1 and self.clip is None:
            return await train_alone(w)
        if w.workers > 1:
            warn_if_adaptive("AllReduceSGD", self.codec, w)
        groups = None if self.group is None else groups_of(w.endpoint.ranks, self.group)
        means: list[Op[Tensor]] = []
        for _ in w.steps():
            g = await w.gradient(each=lambda bucket: means.append(w.mean(bucket, codec_state, groups=groups)))
            while means:
                await means.pop(0)
            if self.clip is not None:
                own = w.learner.flat.counted_once(partial(squared_norm, g), slice(0, g.numel()))
                [squared] = await w.learner.sum_over_stages([own])
                g.mul_(min(1.0, self.clip / (sqrt(squared) + 1e-6)))
            await w.step(g)
        await w.mean_of_buffers()


def squared_norm(g: Tensor, where: slice) -> float:
    return float(torch.linalg.vector_norm(g[where])) ** 2
