"""1-bit Adam (Tang et al., ICML 2021): Adam with compressed communication.

Adam divides by the root of its variance, so the errors of compressed gradients do not average out: AllReduceSGD with a
coarse codec and Adam loses accuracy.  Here gradients are exchanged in full until the variance has settled.  Then the
variance is frozen, and workers exchange their momentum by a codec with error feedback.  With a frozen variance Adam is
momentum SGD with a rate for each value, for which error feedback works.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.codecs import DGC, Codec, OneBit
from paceline.families.adam import AdamMoments, AdamSettings
from paceline.op import Op
from paceline.strategy import Strategy
from paceline.worker.flat import Bucket
from paceline.worker.replica import Replica

SETTLED = 0.96  # The paper's ratio of two norms of the variance, 1 / (1 - beta2) steps apart.
LATEST = 0.2  # The share of a run of known length after which the variance counts as settled.


@dataclass(frozen=True)
class OneBitAdam(Strategy):
    """AdamW whose momentum is compressed by `codec` once the variance has settled.

    It takes the steps itself.  Rates, betas, eps and weight decay are those of the task's optimizer, which is AdamW, or
    Adam without weight decay.  If `betas` are given, the optimizer can be any, and only its rates are used.  `warmup`
    is the number of steps with full gradients.  By default they end when the norm of the variance has changed by less
    than 4 % in 1 / (1 - beta2) steps; if the length of the run is known, after a fifth of it at the latest.
    """

    codec: Codec = field(default=OneBit())
    warmup: int | None = None
    betas: tuple[float, float] | None = None
    eps: float = 1e-8  # This and the next are used only with `betas`.
    weight_decay: float = 0.0

    steps_itself: ClassVar = True

    def __post_init__(self) -> None:
        if self.warmup is not None and self.warmup < 1:
            raise ValueError(f"OneBitAdam(warmup={self.warmup}): a variance needs at least 1 step with full gradients")
        if self.betas is not None and not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"OneBitAdam(betas={self.betas}): both are at least 0 and below 1")
        if self.betas is None and (self.eps, self.weight_decay) != (1e-8, 0.0):
            raise ValueError(
                f"OneBitAdam(eps={self.eps}, weight_decay={self.weight_decay}): without betas these are the "
                "optimizer's; set them there, or give betas=(0.9, 0.999) too"
            )
        if isinstance(getattr(self.codec, "codec", self.codec), DGC):
            raise ValueError(f"OneBitAdam(codec={self.codec}): DGC has its own momentum, besides Adam's; use TopK")

    @property
    def needs_unscaled(self) -> str:
        return "it adds gradients of several steps, whose scales differ; train in bfloat16, which needs no scaler"

    def samples_of_step(self, samples: float, workers: int) -> float:
        return samples

    async def worker(self, w: Replica) -> None:
        moments = self.moments(w)
        m = moments.slot
        codec_state = w.codec_state(self.codec)
        means: list[Op[Tensor]] = []

        def send(bucket: Bucket) -> None:
            if m.is_frozen:
                bucket.grad.copy_(moments.momentum_with(bucket.grad, bucket.where))
            means.append(w.mean(bucket, codec_state if m.is_frozen else None))

        for _ in w.steps():
            g = await w.gradient(each=send)
            while means:
                await means.pop(0)
            await w.step(g, by=moments.step_by_momentum if m.is_frozen else moments.step_by_gradient)
            if not m.is_frozen and m.steps and w.workers > 1 and await self.has_settled(w, moments):
                moments.freeze()
        await w.mean_of_buffers()

    async def has_settled(self, w: Replica, moments: AdamMoments) -> bool:
        """Whether the variance can be frozen after this step; all workers decide the same."""
        m = moments.slot
        if self.warmup is not None:
            return m.steps >= self.warmup
        if w.plan.steps is not None and m.steps >= LATEST * w.plan.steps:
            return True
        if m.steps % round(1 / (1 - moments.beta2)):
            return False
        [norm] = await w.learner.sum_over_stages([moments.norm])
        shared = torch.tensor([norm], dtype=torch.float64)
        await w.endpoint.broadcast(shared, w.endpoint.ranks[0])
        before = m.last_norm
        m.last_norm = float(shared)
        return SETTLED * m.last_norm <= before <= m.last_norm / SETTLED

    def moments(self, w: Replica) -> AdamMoments:
        flat = w.learner.flat
        groups: list[dict[str, Any]] = w.learner.optimizer.param_groups
        if self.betas is None:
            for group in groups:
                check_group(type(w.learner.optimizer), group, tuple(groups[0].get("betas", ())))
        group_of = {id(p): group for group in groups for p in group["params"]}
        own = self.betas is not None
        settings = [
            AdamSettings(
                flat.where(i),
                group,
                eps=self.eps if own else float(group["eps"]),
                decay=self.weight_decay if own else float(group["weight_decay"]),
            )
            for i, p in enumerate(flat.parameters)
            if (group := group_of.get(id(p))) is not None
        ]
        betas = self.betas or tuple(map(float, groups[0]["betas"]))
        return AdamMoments(w, (betas[0], betas[1]), settings)


def check_group(optimizer: type[torch.optim.Optimizer], group: dict[str, Any], betas: tuple[float, ...]) -> None:
    """Raise ValueError for settings of the optimizer that 1-bit Adam does not have."""
    name = optimizer.__name__
    if not issubclass(optimizer, torch.optim.Adam | torch.optim.AdamW):
        raise ValueError(
            f"OneBitAdam with the optimizer {name}: it takes the steps of torch.optim.AdamW or Adam; use one of "
            "them, or give OneBitAdam(betas=(0.9, 0.999)), which uses only the rates of the optimizer"
        )
    is_decoupled = group.get("decoupled_weight_decay", issubclass(optimizer, torch.optim.AdamW))
    if group["weight_decay"] and not is_decoupled:
        raise ValueError(
            f"OneBitAdam with {name}(weight_decay={group['weight_decay']}): this decay is a part of the gradient, "
            "which the frozen variance does not know; use AdamW"
        )
    for setting in ("amsgrad", "maximize"):
        if group.get(setting):
            raise ValueError(f"OneBitAdam with {name}({setting}=True): 1-bit Adam has no {setting}; leave it out")
    if tuple(group["betas"]) != betas:
        raise ValueError(
            f"OneBitAdam with betas {tuple(group['betas'])} and {betas} in two parameter groups: give all the same"
        )
