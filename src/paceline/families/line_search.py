"""Line searches: the length of a step along a descent direction (Nocedal and Wright, chapter 3).

Each tries step lengths, starting with 1, until one meets its condition.  It returns the point it has tried last; None
if no length is good.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import isfinite, nan, sqrt
from typing import NamedTuple

TRIALS = 20  # The most in one search.


class Point(NamedTuple):
    """A step length, the value of the function there, and its slope along the direction."""

    t: float
    value: float
    slope: float = nan


Trial = Callable[[float], Awaitable[Point]]


async def armijo(trial: Trial, start: Point, *, c1: float) -> Point | None:
    """Halve the step until the value has fallen by at least `c1` times what the slope at the start predicts.

    >>> from paceline.op import Ready, drive
    >>> drive(armijo(lambda t: Ready("point", Point(t, (t - 0.2) ** 2)), Point(0.0, 0.04, -0.4), c1=1e-4)).t
    0.25
    """
    for n in range(TRIALS):
        last = await trial(0.5**n)
        if _has_fallen(last, start, c1):
            return last
    return None


async def strong_wolfe(trial: Trial, start: Point, *, c1: float, c2: float) -> Point | None:
    """As Armijo, and the slope must be at most `c2` times as steep as at the start.

    Extend the step while the function falls; then narrow the bracket.

    >>> from paceline.op import Ready, drive
    >>> parabola = lambda t: Ready("point", Point(t, (t - 9) ** 2, 2 * (t - 9)))
    >>> drive(strong_wolfe(parabola, Point(0.0, 81.0, -18.0), c1=1e-4, c2=1e-3)).t
    9.0
    """
    low = start
    t = 1.0
    tried = 1
    while True:
        last = await trial(t)
        if not _has_fallen(last, start, c1) or (low is not start and last.value >= low.value):
            high = last
            break
        if abs(last.slope) <= -c2 * start.slope or tried == TRIALS:
            return last
        if last.slope >= 0:
            low, high = last, low
            break
        t = _beyond(low, last)
        low = last
        tried += 1
    for _ in range(TRIALS - tried):
        last = await trial(t := _between(low, high))
        if not _has_fallen(last, start, c1) or last.value >= low.value:
            high = last
            continue
        if abs(last.slope) <= -c2 * start.slope:
            return last
        if last.slope * (high.t - low.t) >= 0:
            high = low
        low = last
    if low is start:
        return None
    return low if low is last else await trial(low.t)


def _has_fallen(point: Point, start: Point, c1: float) -> bool:
    return point.value <= start.value + c1 * point.t * start.slope


def _beyond(a: Point, b: Point) -> float:
    """The minimum of the cubic through both points if it is beyond both, at most 10 times as far; otherwise twice as
    far."""
    best = _lowest(a, b)
    return min(best, 10 * b.t) if best is not None and best > 1.01 * b.t else 2 * b.t


def _between(a: Point, b: Point) -> float:
    """The minimum of the cubic through both points, not too near to either; the middle if the cubic has no minimum."""
    first, width = min(a.t, b.t), abs(b.t - a.t)
    best = _lowest(a, b)
    return first + width / 2 if best is None else min(max(best, first + 0.05 * width), first + 0.95 * width)


def _lowest(a: Point, b: Point) -> float | None:
    """The minimum of the cubic with the values and slopes of both points; None if it has none."""
    if a.t > b.t:
        a, b = b, a
    if not all(isfinite(v) for v in (*a, *b)) or a.t == b.t:
        return None
    p = a.slope + b.slope - 3 * (a.value - b.value) / (a.t - b.t)
    square = p * p - a.slope * b.slope
    if square < 0 or not (below := b.slope - a.slope + 2 * sqrt(square)):
        return None
    return b.t - (b.t - a.t) * (b.slope + sqrt(square) - p) / below
