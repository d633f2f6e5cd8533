"""L-BFGS with Armijo's line search (Nocedal and Wright, algorithms 7.4 and 3.1), as Sandblaster runs it over shards."""

from __future__ import annotations

import numpy as np


class Spent(Exception):
    """No evaluation is left."""


def lbfgs(w, loss, gradient, *, history, evaluations, c1=1e-4, trials=20):
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
        slope = d @ g
        t = 1.0
        found = None
        try:
            for _ in range(trials if slope < 0 else 0):
                trial, g_trial = evaluate(w + t * d)
                if trial <= value + c1 * t * slope:
                    found = w + t * d
                    break
                t /= 2
        except Spent:
            return w
        if found is None:
            if not pairs:
                return w
            pairs = []  # Start again with steepest descent.
            continue
        s = found - w
        y = g_trial - g
        if s @ y > 1e-10 * np.linalg.norm(s) * np.linalg.norm(y):
            pairs = [*pairs, (s, y)][-history:]
        w = found
        value = trial
        g = g_trial


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
