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
            _divide(self._flat.grads, scale)

    def unscale_exposed(self, scale: Tensor | None) -> None:
        """The same after `expose`: some of the gradients that the optimizer reads are copies of parts of the vector."""
        self.unscale(scale)
        if scale is not None:
            for p in self._flat.narrow.parameters.values():
                if p.grad is not None:
                    _divide(p.grad, scale)

    def unscale_each(self, scale: Tensor | None) -> None:
        """Divide every `.grad`, which is not in the vector, by the factor of the user's gradient scaler."""
        if scale is None:
            return
        for p in self._flat.parameters:
            if p.grad is not None:
                _divide(p.grad, scale)

    def expose(self, g: Tensor) -> None:
        """Let the optimizer, and the user's code before it, read `g` from `.grad`."""
        self._flat.expose_all(g)

    def take_changed(self) -> Tensor:
        """The vector, with what the user's code has changed in `.grad` since `expose`."""
        self._flat.take_changed()
        return self._flat.grads


def _divide(g: Tensor, scale: Tensor) -> None:
    if g.element_size() < 4:  # A scale of 65536 is infinite in float16.
        g.copy_(g.float().div_(scale.to(g.device)))
    else:
        g.div_(scale.to(g))
