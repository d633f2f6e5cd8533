"""Axes and points of charts: steps, ticks, and which points to draw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def round_step(length: int, most: int) -> int:
    """The smallest step of 1, 2, 5, 10, 20, ... with which at most `most` steps cover the length.

    >>> round_step(40, most=40), round_step(41, most=40), round_step(1000, most=8)
    (1, 2, 200)
    """
    power = 1
    while True:
        for step in (power, 2 * power, 5 * power):
            if step * most >= length:
                return step
        power *= 10


def finite(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that can be drawn: the line of a run that diverged ends where it diverged."""
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def thin(line: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most `most` points, evenly chosen, with the first and the last one.

    >>> thin([(float(i), 0.0) for i in range(1001)], most=3)
    [(0.0, 0.0), (500.0, 0.0), (1000.0, 0.0)]
    """
    if len(line) <= most:
        return line
    return [line[round(i * (len(line) - 1) / (most - 1))] for i in range(most)]


def wants_log(lines: Sequence[list[tuple[float, float]]]) -> bool:
    """Whether the ends of the lines are so far apart that short lines would be too small on a linear axis.

    >>> wants_log([[(0.0, 0.1), (5.0, 0.9)], [(0.0, 0.1), (400.0, 0.9)]])
    True
    """
    ends = [line[-1][0] for line in lines if line and line[-1][0] > 0]
    return len(ends) > 1 and max(ends) > 10 * min(ends)


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between the two, few enough to read.

    >>> log_ticks(0.3, 25.0), log_ticks(1e3, 70e6)
    ([0.3, 1.0, 3.0, 10.0], [1000.0, 10000.0, 100000.0, 1000000.0, 10000000.0])
    """
    decades = math.log10(high / low)
    digits = (1, 3) if decades < 4 else (1,)
    if decades < 1.5:
        digits = (1, 2, 5)
    every = math.ceil(decades / 7)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    # From text, because 3 * 10**-1 is not 0.3.
    ticks = [float(f"{digit}e{power}") for power in range(first, last + 1, every) for digit in digits]
    return [tick for tick in ticks if low <= tick <= high]
