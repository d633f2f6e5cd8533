"""Fused kernels for rules, compiled by numba: one pass over the value, the update and what a rule remembers; no GIL
meanwhile.

Each says of one element what its rule's docstring says of all; rounding may differ from plain torch's in the last bit,
as torch multiplies and adds in one operation where it can.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from paceline.codecs.kernels.cpu_parts import compiled, share_out


@compiled
def _momentum(
    value: Any, update: Any, velocity: Any, lr: Any, mu: Any, gain: Any, nesterov: bool, first: int, last: int
) -> bool:
    if nesterov:
        for i in range(first, last):
            velocity[i] = mu * velocity[i] + gain * update[i]
            value[i] -= lr * (gain * update[i] + mu * velocity[i])
    else:
        for i in range(first, last):
            velocity[i] = mu * velocity[i] + gain * update[i]
            value[i] -= lr * velocity[i]
    return True


@compiled
def _adagrad(value: Any, update: Any, squares: Any, lr: Any, eps: Any, first: int, last: int) -> bool:
    for i in range(first, last):
        squares[i] += update[i] * update[i]
        value[i] -= lr * update[i] / (np.sqrt(squares[i]) + eps)
    return True


@compiled
def _adam(value: Any, update: Any, mean: Any, square: Any, n: Any, first: int, last: int) -> bool:
    a, b = n[0], n[1]
    scale, eps = n[2], n[3]
    lr = n[4]
    for i in range(first, last):
        mean[i] += a * (update[i] - mean[i])
        square[i] += b * (update[i] * update[i] - square[i])
        value[i] -= lr * mean[i] / (np.sqrt(square[i]) * scale + eps)
    return True


@compiled
def _compensate(update: Any, value: Any, read: Any, lam: Any, first: int, last: int) -> bool:
    for i in range(first, last):
        update[i] += lam * update[i] * update[i] * (value[i] - read[i])
    return True


@compiled
def _compensate_adaptively(
    update: Any, value: Any, read: Any, squares: Any, lam: Any, eps: Any, first: int, last: int
) -> bool:
    for i in range(first, last):
        update[i] += lam / np.sqrt(squares[i] + eps) * update[i] * update[i] * (value[i] - read[i])
    return True


def momentum(
    value: Tensor, update: Tensor, velocity: Tensor, lr: float, mu: float, gain: float, nesterov: bool
) -> None:
    v, u, w = _arrays(value, update, velocity)
    rate, kept, new = _numbers(value, lr, mu, gain)
    share_out(lambda first, last: _momentum(v, u, w, rate, kept, new, nesterov, first, last), len(v), len(v))


def adagrad(value: Tensor, update: Tensor, squares: Tensor, lr: float, eps: float) -> None:
    v, u, s = _arrays(value, update, squares)
    rate, least = _numbers(value, lr, eps)
    share_out(lambda first, last: _adagrad(v, u, s, rate, least, first, last), len(v), len(v))


def adam(
    value: Tensor,
    update: Tensor,
    mean: Tensor,
    square: Tensor,
    betas: tuple[float, float],
    steps: int,
    lr: float,
    eps: float,
) -> None:
    """`steps` counts from 1."""
    v, u, m, s = _arrays(value, update, mean, square)
    first_beta, second_beta = betas
    n = np.array(
        [1 - first_beta, 1 - second_beta, (1 - second_beta**steps) ** -0.5, eps, lr / (1 - first_beta**steps)],
        dtype=v.dtype,
    )
    share_out(lambda first, last: _adam(v, u, m, s, n, first, last), len(v), len(v))


def compensate(update: Tensor, value: Tensor, read: Tensor, lam: float, squares: Tensor | None, eps: float) -> None:
    """update += lam * update^2 * (value - read), where lam is divided by the root of `squares`, if these are given."""
    u, v, r = _arrays(update, value, read)
    factor, least = _numbers(value, lam, eps)
    if squares is None:
        share_out(lambda first, last: _compensate(u, v, r, factor, first, last), len(v), len(v))
    else:
        (s,) = _arrays(squares)
        share_out(lambda first, last: _compensate_adaptively(u, v, r, s, factor, least, first, last), len(v), len(v))


def _arrays(*vectors: Tensor) -> list[Any]:
    return [v.numpy() for v in vectors]


def _numbers(like: Tensor, *values: float) -> list[Any]:
    """Of the vectors' own type: a float64 among float32 values would make all of them float64."""
    kind = like.numpy().dtype.type
    return [kind(value) for value in values]
