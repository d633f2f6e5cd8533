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
