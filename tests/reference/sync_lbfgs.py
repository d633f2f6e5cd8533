"""L-BFGS with Armijo's line search, or one for the strong Wolfe conditions, as Sandblaster runs it over shards.

Source: Nocedal and Wright, algorithms 7.4, 3.1, 3.5 and 3.6, and the cubic interpolation (3.59).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Spent(Exception):
    """No evaluation is left."""


class Point(NamedTuple):
    """A point along the direction: the step length, the loss, the slope and the gradient."""

    t: float
    value: float
    slope: float
    g: np.ndarray


def lbfgs(w, loss, gradient, *, history, evaluations, search, trials=20):
    """Every evaluation is a pass over all data, which gives the loss and the gradient together."""
    left = evaluations

    def evaluate(point):
        nonlocal left
        if not left:
            raise Spent
        left -= 1
        return loss(point), gradient(point)

    value, g = evaluate(w)
    pairs = []
    while True:
        d = -direction(g, pairs)
        start = Point(0.0, value, d @ g, g)

        def at(t, w=w, d=d):
            value, g = evaluate(w + t * d)
            return Point(t, value, g @ d, g)

        try:
            found = search(at, start, trials) if start.slope < 0 else None
        except Spent:
            return w
        if found is None:
            if not pairs:
                return w
            pairs = []  # Start again with steepest descent.
            continue
        s = found.t * d
        y = found.g - g
        if s @ y > 1e-10 * np.linalg.norm(s) * np.linalg.norm(y):
            pairs = [*pairs, (s, y)][-history:]
        w = w + s
        value = found.value
        g = found.g


def has_fallen(point, start, c1=1e-4):
    return point.value <= start.value + c1 * point.t * start.slope


def armijo(at, start, trials):
    """Halve the step until the loss has fallen enough."""
    return next((point for n in range(trials) if has_fallen(point := at(0.5**n), start)), None)


def wolfe(at, start, trials, c2):
    """Extend the step while the loss falls, then narrow the bracket, until the slope is at most c2 of the first one.

    The point that is returned was evaluated last.  A step grows 2 to 10 times, and stays 5 % away from the ends of a
    bracket.
    """
    low = start
    t = 1.0
    for n in range(1, trials + 1):
        last = at(t)
        if not has_fallen(last, start) or (n > 1 and last.value >= low.value):
            high = last
            break
        if abs(last.slope) <= -c2 * start.slope or n == trials:
            return last
        if last.slope >= 0:
            low, high = last, low
            break
        best = lowest(low, last)
        t = 2 * last.t if best is None or best <= 1.01 * last.t else min(best, 10 * last.t)
        low = last
    for _ in range(trials - n):
        first = min(low.t, high.t)
        width = abs(high.t - low.t)
        best = lowest(low, high)
        last = at(first + 0.5 * width if best is None else np.clip(best, first + 0.05 * width, first + 0.95 * width))
        if not has_fallen(last, start) or last.value >= low.value:
            high = last
            continue
        if abs(last.slope) <= -c2 * start.slope:
            return last
        if last.slope * (high.t - low.t) >= 0:
            high = low
        low = last
    if low is start:
        return None
    return low if low is last else at(low.t)


def lowest(a, b):
    """The minimum of the cubic with the values and slopes of two points; None if it has none."""
    if a.t > b.t:
        a, b = b, a
    d1 = a.slope + b.slope - 3 * (a.value - b.value) / (a.t - b.t)
    square = d1**2 - a.slope * b.slope
    if square < 0 or b.slope - a.slope + 2 * np.sqrt(square) == 0:
        return None
    d2 = np.sqrt(square)
    return b.t - (b.t - a.t) * (b.slope + d2 - d1) / (b.slope - a.slope + 2 * d2)


def direction(g, pairs):
    """The two-loop recursion; without pairs the gradient, at length 1."""
    if not pairs:
        return g / np.linalg.norm(g)
    q = g.copy()
    alphas = []
    for s, y in reversed(pairs):
        alphas.append(s @ q / (y @ s))
        q = q - alphas[-1] * y
    s, y = pairs[-1]
    q = q * (s @ y) / (y @ y)
    for s, y in pairs:
        q = q + (alphas.pop() - y @ q / (y @ s)) * s
    return q
