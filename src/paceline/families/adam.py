"""Adam's arithmetic on the flat vector, for strategies that take its steps themselves; and a warning of coarse codecs.

An optimizer with second moments divides each value by the root of its variance.  A codec that sends only signs, or few
values, makes the variance of most values wrong.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from paceline.codecs import Codec
from paceline.worker.replica import Replica

ADAPTIVE = ("Adadelta", "Adafactor", "Adagrad", "RMSprop")  # Those with "betas" need no name.


class CodecWithAdam(RuntimeWarning):
    """A coarse codec compresses the gradients of an optimizer with second moments, which costs accuracy."""


def warn_if_adaptive(strategy: str, codec: Codec | None, w: Replica) -> None:
    """Warn if a coarse codec meets an optimizer with second moments."""
    optimizer = w.learner.optimizer
    name = type(optimizer).__name__
    has_second_moments = name in ADAPTIVE or any(
        key.rpartition(".")[2] == "betas" for group in optimizer.param_groups for key in group
    )
    if codec is None or not codec.is_coarse or not has_second_moments or w.rank != w.endpoint.ranks[0]:
        return
    text = (
        f"{strategy}(codec={codec}) with the optimizer {name}: a codec that sends only signs or few values spoils its "
        f"second moments, and the model ends worse; use OneBitAdam({codec}), PowerSGD, or SGD with momentum"
    )
    warnings.warn(CodecWithAdam(text), stacklevel=2)


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """What Adam needs for a part of the vector; the rate is read from `group` at every step."""

    where: slice
    group: dict[str, Any]
    eps: float
    decay: float


class AdamMoments:
    """Adam's moments as vectors, the same on all workers, and the steps by them."""

    def __init__(self, w: Replica, betas: tuple[float, float], settings: list[AdamSettings]) -> None:
        self.w = w
        self.beta1, self.beta2 = betas
        self.settings = settings
        wide = torch.zeros_like(w.params, dtype=torch.promote_types(w.params.dtype, torch.float32))
        self.slot = w.state("moments", mean=wide, variance=wide, steps=0, is_frozen=False, last_norm=0.0)

    def momentum_with(self, g: Tensor, where: slice) -> Tensor:
        """This worker's momentum after a gradient of its own."""
        return torch.lerp(self.slot.mean[where], g.to(self.slot.mean.dtype), 1 - self.beta1)

    def step_by_gradient(self, g: Tensor) -> None:
        """A step of Adam, with the same operations as torch's."""
        m = self.slot
        g = g.to(m.mean.dtype)
        m.steps += 1
        m.mean.lerp_(g, 1 - self.beta1)
        m.variance.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
        self._move(1 - self.beta2**m.steps)

    def step_by_momentum(self, momentum: Tensor) -> None:
        """A step with a given momentum; the variance stays."""
        m = self.slot
        m.steps += 1
        m.mean.copy_(momentum)
        self._move(1.0)

    def _move(self, correction: float) -> None:
        m = self.slot
        for s in self.settings:
            lr = float(s.group["lr"])
            root = m.variance[s.where].sqrt().div_(sqrt(correction)).add_(s.eps)
            params = self.w.params[s.where]
            params.mul_(1 - lr * s.decay)
            rate = lr / (1 - self.beta1**m.steps)
            params.copy_(params.to(root.dtype).addcdiv_(m.mean[s.where], root, value=-rate))

    @property
    def norm(self) -> float:
        """The 1-norm of the variance, without the bias of its start at zero."""
        return float(self.slot.variance.sum(dtype=torch.float64)) / (1 - self.beta2**self.slot.steps)

    def freeze(self) -> None:
        """Keep the variance as it is from now on."""
        m = self.slot
        m.variance.div_(1 - self.beta2**m.steps)
        # A value that has had no gradient has no variance: any momentum, divided by eps, would throw it far away.
        m.variance.masked_fill_(m.variance == 0, torch.inf)
        m.is_frozen = True
