"""LAMB (You et al., ICLR 2020): AdamW in which every layer has a rate of its own.

As LARS does with momentum SGD's step, it scales Adam's: a step changes every layer by the learning rate times the norm
of its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from paceline.optimizers.layerwise import Layerwise, norms

# pyright: reportPrivateUsage=false


class LAMB(Layerwise):
    """AdamW whose step u of each layer w, with the weight decay in it, has the factor |w| / |u|.

    The paper's function of the norm |w| is the identity here.  A layer of zeros, or with a step of zero, has the factor
    1, as parameters of at most one dimension have, and those of groups with adapt=False: they take AdamW's steps.

    >>> layer = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
    >>> layer.grad = torch.tensor([[-7.0, 0.0]])
    >>> LAMB([layer], lr=0.1, weight_decay=0.0).step()
    >>> layer.data
    tensor([[3.5000, 4.0000]])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        adapt: bool | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": adapt})

    def check_group(self, group: Mapping[str, Any]) -> None:
        betas = group["betas"]
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"LAMB(betas={betas}): give two numbers, each at least 0 and below 1")

    def update(self, group: Mapping[str, Any], params: list[Tensor], *, is_adapted: bool) -> None:
        lr, decay = group["lr"], group["weight_decay"]
        beta1, beta2 = group["betas"]
        grads = [p.grad for p in params if p.grad is not None]
        states = [self._state_of(p) for p in params]
        means, variances = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
        counts = count_steps([s["step"] for s in states])
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(variances, beta2)
        torch._foreach_addcmul_(variances, grads, grads, 1 - beta2)
        roots = torch._foreach_sqrt(variances)
        torch._foreach_div_(roots, [sqrt(1 - beta2**t) for t in counts])
        torch._foreach_add_(roots, group["eps"])
        if not is_adapted:  # The operations of torch's AdamW, in its order.
            torch._foreach_mul_(params, 1 - lr * decay)
            torch._foreach_addcdiv_(params, means, roots, [-(lr / (1 - beta1**t)) for t in counts])
            return
        updates = torch._foreach_div(means, roots)
        torch._foreach_div_(updates, [1 - beta1**t for t in counts])
        if decay:
            torch._foreach_add_(updates, params, alpha=decay)
        weights, lengths = norms(params), norms(updates)
        factors = torch.where((weights > 0) & (lengths > 0), weights / lengths, 1.0)
        torch._foreach_mul_(updates, factors.unbind())
        torch._foreach_add_(params, updates, alpha=-lr)

    def _state_of(self, p: Tensor) -> dict[str, Any]:
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        return state


def count_steps(counters: list[Tensor]) -> list[float]:
    """Count one more step, and return the numbers of the steps.  Counters are on the CPU: no device waits for them."""
    torch._foreach_add_(counters, 1.0)
    return torch.stack(counters).tolist()
