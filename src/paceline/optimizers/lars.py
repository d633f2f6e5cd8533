"""LARS (You, Gitman and Ginsburg 2017): layer-wise adaptive rate scaling.

Momentum SGD in which every layer has a rate of its own, in proportion to the norm of its weights over that of its
gradient.  A step then changes every layer by about the same share of its norm, whatever the scale of its gradient, so
that larger batches bear the higher rates that they need.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from paceline.optimizers.layerwise import Layerwise, norms

# pyright: reportPrivateUsage=false


class LARS(Layerwise):
    """Momentum SGD with the factor trust * |w| / (|g| + weight_decay * |w| + eps) on the gradient g of each layer w.

    A layer of zeros, or with a zero gradient, has the factor 1, as parameters of at most one dimension have, and those
    of groups with adapt=False.  All have the weight decay of their group.  With `clip` no factor is above 1.

    In the paper the velocity has the learning rate in it: when the rate falls, steps stay large for a while.  Here it
    has not, as in torch's SGD, which is the momentum correction of Goyal et al. (2017): velocities scale with the rate.
    With correct_momentum=False it is as in the paper.  At a constant rate the two are equal.

    >>> layer = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
    >>> for scale in (1.0, 1e6):
    ...     layer.grad = scale * torch.tensor([[0.0, 1.0]])
    ...     LARS([layer], lr=1.0, trust=0.1).step()
    ...     print(layer.data)
    tensor([[3.0000, 3.5000]])
    tensor([[3.0000, 3.0390]])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        trust: float = 0.001,
        eps: float = 1e-8,
        nesterov: bool = False,
        clip: bool = False,
        adapt: bool | None = None,
        correct_momentum: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "eps": eps,
            "nesterov": nesterov,
            "clip": clip,
            "adapt": adapt,
            "correct_momentum": correct_momentum,
        }
        super().__init__(params, defaults)

    def check_group(self, group: Mapping[str, Any]) -> None:
        if not 0 <= group["momentum"] < 1:
            raise ValueError(f"LARS(momentum={group['momentum']}): the momentum must be at least 0 and below 1")
        if not 0 < group["trust"] < float("inf"):
            raise ValueError(f"LARS(trust={group['trust']}): the trust coefficient must be finite and above 0")
        if group["nesterov"] and not group["momentum"]:
            raise ValueError("LARS(nesterov=True, momentum=0): Nesterov's step needs a momentum; leave nesterov out")

    def update(self, group: Mapping[str, Any], params: list[Tensor], *, is_adapted: bool) -> None:
        grads = [p.grad for p in params if p.grad is not None]
        decay = group["weight_decay"]
        updates = torch._foreach_add(grads, params, alpha=decay) if decay else grads
        if is_adapted:
            updates = torch._foreach_mul(updates, factors(group, norms(params), norms(grads)).unbind())
        rate = group["lr"]
        if momentum := group["momentum"]:
            # The rate is a factor either of what goes into the velocity, or of the velocity.
            inside, rate = (1.0, rate) if group["correct_momentum"] else (rate, 1.0)
            velocities = [self._velocity(p) for p in params]
            torch._foreach_mul_(velocities, momentum)
            torch._foreach_add_(velocities, updates, alpha=inside)
            if group["nesterov"]:
                updates = torch._foreach_add(torch._foreach_mul(updates, inside), velocities, alpha=momentum)
            else:
                updates = velocities
        torch._foreach_add_(params, updates, alpha=-rate)

    def _velocity(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        return state["momentum_buffer"]


def factors(group: Mapping[str, Any], weights: Tensor, grads: Tensor) -> Tensor:
    """The factor on each layer's step, from the norms of its weights and its gradient."""
    found = group["trust"] * weights / (grads + group["weight_decay"] * weights + group["eps"])
    found = torch.where((weights > 0) & (grads > 0), found, 1.0)
    return found.clamp_(max=1.0) if group["clip"] else found
