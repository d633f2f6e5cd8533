"""SessionOptimizer: a session's step in the shape of a torch optimizer.

What wraps, schedules or scales optimizers (Accelerate, Lightning, LR schedulers, GradScaler) finds what it expects: the
user's own parameter groups and state, and a `step()`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Take = Callable[[Tensor | None, Tensor | None], None]


class SessionOptimizer(torch.optim.Optimizer):
    """Shares `param_groups` and `state` with the user's optimizer; its step is the session's."""

    # GradScaler then always calls step(), with the scale and its verdict as attributes, instead of leaving a rank's step
    # out behind the strategy's back.
    _step_supports_amp_scaling = True

    def __init__(self, inner: torch.optim.Optimizer, take: Take) -> None:
        super().__init__([{**group} for group in inner.param_groups], inner.defaults)
        self.inner, self._take = inner, take
        self._is_stepping = False
        self._share()
        self._guard = inner.register_step_pre_hook(self._refuse_direct_step)

    def _share(self) -> None:
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def _refuse_direct_step(self, *_: Any) -> None:
        if not self._is_stepping:
            raise RuntimeError("optimizer.step() would go past the strategy: call session.step(), or session.optimizer.step() where one is needed")

    def inner_step(self) -> None:
        """The user's own optimizer's step."""
        self._is_stepping = True
        try:
            self.inner.step()
        finally:
            self._is_stepping = False

    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The session's step."""
        if closure is not None:
            raise ValueError("session.optimizer.step(closure): a closure would compute gradients behind the strategy's back; call backward() before")
        self._take(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "inner"):
            raise ValueError("the parameters under a session are fixed: add parameter groups before attach")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self._share()

    def release(self) -> None:
        """Give the user's optimizer back."""
        self._guard.remove()
