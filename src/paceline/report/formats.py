"""Numbers as text: seconds, bytes, per cent, factors and staleness."""

from __future__ import annotations

import math
from collections.abc import Mapping

from paceline.trace import mean

MISSING = "-"


def seconds(value: float | None) -> str:
    """Three digits and a unit below two minutes, the two largest units above.

    >>> seconds(0.00005), seconds(0.0123), seconds(4.5), seconds(90)
    ('50.0 us', '12.3 ms', '4.50 s', '90.0 s')
    >>> seconds(200), seconds(7500), seconds(2e5), seconds(0), seconds(None)
    ('3 min 20 s', '2 h 05 min', '2 d 08 h', '0 s', '-')
    """
    if value is None or not math.isfinite(value):
        return MISSING if value is None else str(value)
    if value < 0:
        return "-" + seconds(-value)
    if value < 119.95:
        return _scaled(value, [(1e-9, "ns"), (1e-6, "us"), (1e-3, "ms"), (1.0, "s")])
    if value < 3599.5:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes} min {rest:02} s"
    if value < 86370:
        hours, rest = divmod(round(value / 60), 60)
        return f"{hours} h {rest:02} min"
    days, rest = divmod(round(value / 3600), 24)
    return f"{days} d {rest:02} h"


def nbytes(value: float | None) -> str:
    """Bytes in decimal units, like the bandwidth of networks: a MB is 10^6 bytes.

    >>> nbytes(0), nbytes(640), nbytes(45_395), nbytes(25e6), nbytes(1.5e12)
    ('0 B', '640 B', '45.4 kB', '25.0 MB', '1.50 TB')
    """
    if value is None or not math.isfinite(value):
        return MISSING if value is None else str(value)
    if abs(value) < 1000:
        return f"{value:.0f} B" if round(value) < 1000 else "1.00 kB"
    return _scaled(value, [(1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB"), (1e15, "PB")])


def percent(value: float | None) -> str:
    """A share from 0 to 1.  NaN is shown, because a run that diverged is a result.

    >>> percent(0.97777), percent(1), percent(float("nan")), percent(None)
    ('97.8%', '100.0%', 'nan', '-')
    """
    if value is None or not math.isfinite(value):
        return MISSING if value is None else str(value)
    return f"{100 * value:.1f}%"


def number(value: float | None) -> str:
    """A value without a unit.

    >>> number(0.123456), number(12345678.0), number(float("nan")), number(None)
    ('0.1235', '1.235e+07', 'nan', '-')
    """
    return MISSING if value is None else f"{value:.4g}"


def factor(value: float | None) -> str:
    """A speed-up.

    >>> factor(7.64), factor(0.5), factor(128.2), factor(None)
    ('7.64x', '0.50x', '128x', '-')
    """
    if value is None or not math.isfinite(value):
        return MISSING if value is None else str(value)
    return f"{_three_digits(value)}x"


def staleness(counts: Mapping[int, int]) -> str:
    """The mean and the maximum.

    >>> staleness({0: 1, 3: 8, 7: 1}), staleness({0: 999, 2: 1}), staleness({250: 1, 4096: 1}), staleness({})
    ('3.1 (max 7)', '<0.1 (max 2)', '2,173 (max 4,096)', '-')
    """
    middle = mean(counts)
    if middle is None:
        return MISSING
    decimals = 1 if middle < 99.95 else 0
    figure = "<0.1" if 0 < middle < 0.05 else f"{middle:,.{decimals}f}"
    return f"{figure} (max {max(number for number, n in counts.items() if n):,})"


def _scaled(value: float, units: list[tuple[float, str]]) -> str:
    if value == 0:
        return f"0 {units[-1][1]}"
    # The largest unit in which the rounded figure is at least 1: 0.9999 s is 1.00 s, not 1000 ms.
    scale, unit = max((u for u in units if abs(value) >= 0.9995 * u[0]), default=units[0])
    return f"{_three_digits(value / scale)} {unit}"


def _three_digits(value: float) -> str:
    if abs(value) < 9.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0f}"
