"""PowerSGD's arithmetic for the CPU, compiled by numba: the same bits as in `codecs/power_sgd.py`, in fewer passes."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from paceline.codecs.kernels.cpu_parts import compiled, share_out

NEGLIGIBLE = 1e-6  # As in the definition.


@compiled
def add_halves(x: Any) -> float:
    """The sum of 2**n numbers, which it overwrites: the upper half is added to the lower one, and so on."""
    n = len(x)
    while n > 1:
        n //= 2
        for i in range(n):
            x[i] += x[i + n]
    return x[0]


@compiled
def unit_beside(row: Any, before: Any, shares: Any, scratch: Any) -> bool:
    """Replace the row by its normalised part orthogonal to the rows before, or by zeros if it has none; False then."""
    for i in range(len(row)):
        scratch[i] = row[i] * row[i]
    norm = np.sqrt(add_halves(scratch))
    if norm == 0.0:
        norm = 1.0
    for i in range(len(row)):
        row[i] = row[i] / norm
    for _ in range(2):
        for j in range(len(before)):
            for i in range(len(row)):
                scratch[i] = row[i] * before[j, i]
            shares[j] = add_halves(scratch)
        for j in range(len(before)):
            share = shares[j]
            for i in range(len(row)):
                row[i] = row[i] - share * before[j, i]
    for i in range(len(row)):
        scratch[i] = row[i] * row[i]
    length = np.sqrt(add_halves(scratch))
    if length <= NEGLIGIBLE:
        row[:] = 0.0
        return False
    for i in range(len(row)):
        row[i] = row[i] / length
    return True


@compiled
def orthonormalise_rows(f: Any, spare: Any, padded: int) -> None:
    rank, n = f.shape
    a = np.zeros((rank, padded))
    shares = np.empty(rank)
    scratch = np.empty(padded)
    for k in range(rank):
        a[k, :n] = f[k]
        is_alive = unit_beside(a[k], a[:k], shares, scratch)
        if spare is not None and not is_alive:
            a[k, :n] = spare[k]
            unit_beside(a[k], a[:k], shares, scratch)
    for k in range(rank):
        for i in range(n):
            f[k, i] = a[k, i]


@compiled
def multiply_rows(p: Any, q: Any, out: Any, first: int, last: int) -> None:
    for i in range(first, last):
        here = out[i]
        factor = p[0, i]
        for j in range(q.shape[1]):
            here[j] = factor * q[0, j]
        for k in range(1, len(q)):
            factor = p[k, i]
            for j in range(q.shape[1]):
                here[j] = here[j] + factor * q[k, j]


def orthonormalise(factor: Tensor, spare: Tensor | None) -> None:
    padded = 1 << max(factor.shape[1] - 1, 0).bit_length()
    orthonormalise_rows(factor.numpy(), None if spare is None else spare.numpy(), padded)


def multiply(p: Tensor, q: Tensor, out: Tensor) -> None:
    left = p.numpy()
    right = q.numpy()
    product = out.numpy()

    def work(first: int, last: int) -> bool:
        multiply_rows(left, right, product, first, last)
        return True

    share_out(work, len(product), product.size)
