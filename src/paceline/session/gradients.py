"""Gradients: a model's gradient, in `.grad` for the user's loop and in one vector for the strategy."""

from __future__ import annotations

from torch import Tensor

from paceline.worker.flat import FlatModel


class Gradients:
    """Moves a gradient between the parameters' `.grad` and the flat vector.

    A parameter that backward did not reach has `.grad = None`, before and after: no optimizer may change it, not even
    by weight decay.
    """

    def __init__(self, flat: FlatModel) -> None:
        self._flat = flat
        self._unreached: list[int] = []

    def reach_all(self) -> None:
        """Let every parameter have a gradient, zeros if backward does not reach it: another worker may have one."""
        self._unreached = []

    def collect(self) -> None:
        """Copy every `.grad` to the vector, and note which parameters have none."""
        self._unreached = [i for i, p in enumerate(self._flat.parameters) if p.grad is None]
        self._flat.collect_all()

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
        if g.data_ptr() != self._flat.grads.data_ptr():
            self._flat.grads.copy_(g)
        for i in range(len(self._flat.parameters)):
            self._flat.expose(i)
        for i in self._unreached:
            self._flat.parameters[i].grad = None
