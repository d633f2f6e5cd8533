"""Elastic averaging in numpy, from Zhang, Choromanska and LeCun (2015) and the EA-wild paper (2020).

Worker j begins step k at k * seconds[j] and ends it at (k + 1) * seconds[j]; messages take no time.  eta(k) is the
learning rate of step k, alpha(k) the share of the difference by which worker and centre move: eta(k) * rho, or a
constant.  Worker and centre meet at steps k that the period divides (not at step 0, where they are equal), with the
gradient and the force both taken before the move.  Every function returns the centre.

The papers stop after the last step.  Ours then let every worker meet the centre once more, so that its last steps
count; where the end is different, the function says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Vector = np.ndarray[Any, np.dtype[np.float64]]
Gradient = Callable[[Vector, int, int], Vector]
Number = Callable[[int], float]


def together(
    w: Vector, gradient: Gradient, workers: int, steps: int, *, eta: Number, alpha: Number, period: int
) -> Vector:
    """EASGD, synchronous: all workers meet the centre at the same step.

    Workers go on without data to the next meeting, and this is the last one.  If the last step is a meeting, no other
    follows.
    """
    x = [w for _ in range(workers)]
    last = steps - 1
    for k in range(-(-last // period) * period + 1):
        force = [alpha(min(k, last)) * (x[j] - w) if k % period == 0 else 0.0 * w for j in range(workers)]
        if k <= last:
            x = [x[j] - eta(k) * gradient(x[j], j, k) for j in range(workers)]
        x = [x[j] - force[j] for j in range(workers)]
        w = w + sum(force, 0.0 * w)
    return w


def begun(seconds: Sequence[float], steps: int) -> list[tuple[int, int]]:
    """The worker and the step of every minibatch in the order of their beginnings, and of every worker's end."""
    begins = sorted((k * s, j, k) for j, s in enumerate(seconds) for k in range(steps + 1))
    return [(j, k) for _, j, k in begins]


def in_turn(workers: int, steps: int) -> list[tuple[int, int]]:
    """The same for workers that meet in the order of their ranks."""
    return [(j, k) for k in range(steps + 1) for j in range(workers)]


def one_by_one(
    w: Vector,
    gradient: Gradient,
    order: Sequence[tuple[int, int]],
    *,
    eta: Number,
    alpha: Number,
    period: int,
    mu: float = 0.0,
) -> Vector:
    """Asynchronous EASGD, with mu EAMSGD: v = mu v - eta gradient(x + mu v).  EA-wild is the same, if no write is lost.

    With the order `in_turn` it is the round robin.  A worker's own steps depend on no other, so each is taken when it
    begins.
    """
    workers = 1 + max(j for j, _ in order)
    steps = max(k for _, k in order)
    x = [w for _ in range(workers)]
    v = [np.zeros_like(w) for _ in range(workers)]
    for j, k in order:
        is_end = k == steps
        meets = k > 0 and (is_end or k % period == 0)
        force = alpha(min(k, steps - 1)) * (x[j] - w) if meets else 0.0 * w
        w = w + force
        if not is_end:
            v[j] = mu * v[j] - eta(k) * gradient(x[j] + mu * v[j], j, k)
            x[j] = x[j] + v[j] - force
    return w


def in_changing_groups(
    w: Vector,
    gradient: Gradient,
    seconds: Sequence[float],
    steps: int,
    *,
    groups_at: Callable[[int], Sequence[Sequence[int]]],
    regroup: int,
    eta: Number,
    alpha: Number,
    period: int,
) -> Vector:
    """EA-wild in groups that are drawn anew every `regroup` steps; their members begin with the mean of their models.

    A group is as fast as its slowest member, and begins when all members have ended their step before.
    """
    x = [w for _ in seconds]
    ends = [0.0 for _ in seconds]

    def begin(group: Sequence[int]) -> float:
        return max(ends[j] for j in group)

    groups = groups_at(0)
    for k in range(steps):
        if k % regroup == 0:
            groups = groups_at(k)
            for group in groups:
                mean = sum((x[j] for j in group), 0.0 * w) / len(group)
                for j in group:
                    x[j] = mean
        for group in sorted(groups, key=begin):
            model = x[group[0]]
            force = alpha(k) * (model - w) if k > 0 and k % period == 0 else 0.0 * w
            w = w + force
            mean = sum((gradient(model, j, k) for j in group), 0.0 * w) / len(group)
            end = begin(group) + max(seconds[j] for j in group)
            for j in group:
                x[j] = model - eta(k) * mean - force
                ends[j] = end
    for group in sorted(groups, key=begin):
        w = w + alpha(steps - 1) * (x[group[0]] - w)
    return w
