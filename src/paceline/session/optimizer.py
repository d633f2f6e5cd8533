"""SessionOptimizer: a session's step as a torch optimizer.

Code that wraps, schedules or scales an optimizer (Accelerate, Lightning, LR schedulers, GradScaler) finds what it
expects: the parameter groups and the state of the user's optimizer, and a `step()`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState

from paceline.worker.learner import evaluates_itself

Closure = Callable[[], Any]

OnStep = Callable[[Tensor | None, bool], None]
"""Takes the factor by which the gradients were multiplied, and whether they overflowed."""


class SessionOptimizer(torch.optim.Optimizer):
    """Shares `param_groups` and `state` with the user's optimizer; its `step` is the session's."""

    # With this, GradScaler always calls step(), with the scale and its verdict as attributes.  Otherwise it would skip
    # the step of one rank, and the strategy would not know.
    _step_supports_amp_scaling = True

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.on_step: OnStep | None = None
        self._is_built = False
        super().__init__([{**group} for group in inner.param_groups], inner.defaults)
        self._is_built = True
        self.has_scaler = False  # Whether a GradScaler takes this step; it may have unscaled the gradients already.
        self._is_stepping = False
        self._closure: Closure | None = None
        self._guard = inner.register_step_pre_hook(self._refuse_direct_step)

    # These are always those of the inner optimizer, also after it has loaded others.  What torch's constructor sets is
    # kept apart.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.param_groups if self._is_built else self.__dict__["param_groups"]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self._is_built:
            self.inner.param_groups = groups
        else:
            self.__dict__["param_groups"] = groups

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self._is_built:
            self.inner.state = state

    def _refuse_direct_step(self, *_: Any) -> None:
        if not self._is_stepping:
            raise RuntimeError(
                "optimizer.step() would bypass the strategy: call session.step(), or session.optimizer.step() where an "
                "optimizer is needed"
            )

    @property
    def needs_closure(self) -> bool:
        """Whether the user's optimizer evaluates the loss itself, several times in a step, as L-BFGS does."""
        return evaluates_itself(self.inner)

    def inner_step(self) -> None:
        """Take the step of the user's optimizer."""
        self._is_stepping = True
        try:
            if self._closure is None:
                self.inner.step()
            else:
                self.inner.step(self._closure)
        finally:
            self._is_stepping = False

    def step(self, closure: Closure | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take the session's step.  A closure computes the loss and its gradient first, as torch's optimizers do."""
        assert self.on_step is not None
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None:
            self._refuse_second_unscale()
        needs_closure = self.needs_closure
        if closure is None and needs_closure:
            raise ValueError(
                f"session.step(): {type(self.inner).__name__} evaluates the loss several times in a step; call "
                "session.optimizer.step(closure) with a function that computes the loss, calls backward() and returns "
                "the loss"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._closure = _after_first(closure, loss) if closure is not None and needs_closure else None
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        self.has_scaler = found_inf is not None
        self.on_step(scale, found_inf is not None and bool(found_inf))
        # A scheduler on the user's own optimizer asks whether it has stepped.  Where servers take the steps, it never
        # does.
        self.inner._opt_called = True  # pyright: ignore
        return loss

    def _refuse_second_unscale(self) -> None:
        """Raise if the user's GradScaler has already unscaled the gradients, under the name of the user's optimizer."""
        frame = sys._getframe()  # pyright: ignore[reportPrivateUsage]
        while frame is not None and frame.f_code is not GradScaler.step.__code__:
            frame = frame.f_back
        # A GradScaler tells the optimizer only its scale.  It keeps what it has unscaled by the id of the optimizer.
        states: dict[int, dict[str, Any]] = getattr(frame and frame.f_locals["self"], "_per_optimizer_states", {})
        if states.get(id(self.inner), {}).get("stage") is OptState.UNSCALED:
            raise RuntimeError(
                "scaler.unscale_(optimizer) and scaler.step(session.optimizer): the gradients would be divided by the "
                "scale twice; give session.optimizer to both"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_built:
            raise ValueError("a session's parameters are fixed: add parameter groups before attach")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def release(self) -> None:
        """Let the user's optimizer step by itself again."""
        self._guard.remove()


def _after_first(closure: Closure, first: Any) -> Closure:
    """A closure whose first evaluation was made already, with the result `first`."""
    results = [first]
    return lambda: results.pop() if results else closure()
