"""LAMB beside its paper's formula (I4 of the reference of methods)."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.optimizers import LAMB
from tests.laws.tasks import close, numbers


def lamb(w: Tensor, gradients: list[Tensor], *, lr: float, decay: float, eps: float) -> Tensor:
    """Written out: Adam's direction with the decay in it, times the ratio of the two norms; 1 if either is 0."""
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, g in enumerate(gradients, 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        u = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + eps) + decay * w
        ratio = w.norm() / u.norm() if w.norm() and u.norm() else 1.0
        w = w - lr * ratio * u
    return w


@given(
    seed=st.integers(0, 50),
    steps=st.integers(1, 4),
    decay=st.sampled_from([0.0, 0.01, 1.0]),
    scale=st.sampled_from([0.0, 1e-3, 1.0]),
    zero=st.sampled_from(["none", "weights", "gradients"]),
)
def test_steps_are_those_of_the_paper_also_of_layers_of_zeros_and_with_gradients_of_zero(
    seed, steps, decay, scale, zero
):
    layer = torch.nn.Parameter(numbers(3, 4, seed=seed) * (zero != "weights"))
    gradients = [numbers(3, 4, seed=seed + 100 + k) * scale * (zero != "gradients") for k in range(steps)]
    expected = lamb(layer.detach().clone(), gradients, lr=0.1, decay=decay, eps=1e-6)
    optimizer = LAMB([layer], lr=0.1, weight_decay=decay)
    for g in gradients:
        layer.grad = g
        optimizer.step()
    assert close(layer.detach(), expected, rtol=1e-9)
