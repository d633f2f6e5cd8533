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
        self.inner = inner
        self._is_made = False
        super().__init__([{**group} for group in inner.param_groups], inner.defaults)
        self._is_made = True
        self._take = take
        self._is_stepping = False
        self._guard = inner.register_step_pre_hook(self._refuse_direct_step)

    # Always the inner optimizer's, also after it has loaded other ones; what torch's constructor sets is left to itself.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.param_groups if self._is_made else self.__dict__["param_groups"]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self._is_made:
            self.inner.param_groups = groups
        else:
            self.__dict__["param_groups"] = groups

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self._is_made:
            self.inner.state = state

    def _refuse_direct_step(self, *_: Any) -> None:
        if not self._is_stepping:
            raise RuntimeError(
                "optimizer.step() would go past the strategy: call session.step(), or session.optimizer.step() where one is needed"
            )

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
            raise ValueError(
                "session.optimizer.step(closure): a closure would compute gradients behind the strategy's back; call backward() before"
            )
        self._take(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_made:
            raise ValueError("the parameters under a session are fixed: add parameter groups before attach")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def release(self) -> None:
        """Give the user's optimizer back."""
        self._guard.remove()
