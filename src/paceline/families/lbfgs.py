"""L-BFGS: the two-loop recursion on named vectors, which are on shards (Nocedal and Wright, chapter 7)."""

from __future__ import annotations

from collections import deque
from math import sqrt
from typing import NamedTuple

from paceline.server.coordinator import Coordinator


class Pair(NamedTuple):
    """The names of the vectors s (a step) and y (the change of the gradient); rho = 1 / (y.s), gamma = y.s / y.y."""

    s: str
    y: str
    rho: float
    gamma: float


async def direction(c: Coordinator, pairs: deque[Pair]) -> float:
    """Set d to minus the approximate inverse Hessian times g, by the two-loop recursion; return its slope.

    Without pairs it is steepest descent, with a step of length 1.
    """
    c.then("copy", "g", "d")
    if not pairs:
        norm = sqrt(await c.dot("g", "g"))
        if norm:
            c.then("scale", -1 / norm, "d")
        return -norm
    alphas: list[float] = []
    for p in reversed(pairs):
        alphas.append(p.rho * await c.dot(p.s, "d"))
        c.then("axpy", -alphas[-1], p.y, "d")
    c.then("scale", pairs[-1].gamma, "d")
    for p in pairs:
        beta = p.rho * await c.dot(p.y, "d")
        c.then("axpy", alphas.pop() - beta, p.s, "d")
    c.then("scale", -1.0, "d")
    return await c.dot("d", "g")
