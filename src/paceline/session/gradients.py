"""Gradients: a model's gradient, in `.grad` for the user's loop and in one vector for the strategy."""

from __future__ import annotations

from torch import Tensor

from paceline.worker.flat import FlatModel


class Gradients:
    """Moves a gradient between the parameters' `.grad` and the flat vector."""

    def __init__(self, flat: FlatModel) -> None:
        self._flat = flat

    def unscale(self, scale: Tensor | None) -> None:
        """Divide the vector by the factor of the user's gradient scaler."""
        if scale is not None:
            self._flat.grads.div_(scale.to(self._flat.grads))

    def unscale_each(self, scale: Tensor | None) -> None:
        """Divide every `.grad`, which is not in the vector, by the factor of the user's gradient scaler."""
        if scale is None:
            return
        for p in self._flat.parameters:
            if p.grad is not None:
                p.grad.div_(scale.to(p.grad))

    def expose(self, g: Tensor) -> None:
        """Let the optimizer, and the user's code before it, read `g` from `.grad`."""
        self._flat.expose_all(g)
