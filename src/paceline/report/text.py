"""Rows as a table in the terminal, and figures as people read them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from paceline.report.row import Row, best
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
    """Decimal units, as networks are sold: a MB is 10^6 bytes.

    >>> nbytes(0), nbytes(640), nbytes(45_395), nbytes(25e6), nbytes(1.5e12)
    ('0 B', '640 B', '45.4 kB', '25.0 MB', '1.50 TB')
    """
    if value is None or not math.isfinite(value):
        return MISSING if value is None else str(value)
    if abs(value) < 1000:
        return f"{value:.0f} B" if round(value) < 1000 else "1.00 kB"
    return _scaled(value, [(1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB"), (1e15, "PB")])


def percent(value: float | None) -> str:
    """An accuracy; NaN stays visible, because a run that diverged is a result.

    >>> percent(0.97777), percent(1), percent(float("nan")), percent(None)
    ('97.8%', '100.0%', 'nan', '-')
    """
    if value is None or not math.isfinite(value):
        return MISSING if value is None else str(value)
    return f"{100 * value:.1f}%"


def factor(value: float | None) -> str:
    """A speed-up.

    >>> factor(7.64), factor(0.5), factor(128.2), factor(None)
    ('7.64x', '0.50x', '128x', '-')
    """
    if value is None or not math.isfinite(value):
        return MISSING if value is None else str(value)
    return f"{_three_digits(value)}x"


def staleness(counts: Mapping[int, int]) -> str:
    """The mean and the largest.

    >>> staleness({0: 1, 3: 8, 7: 1}), staleness({0: 999, 2: 1}), staleness({250: 1, 4096: 1}), staleness({})
    ('3.1 (max 7)', '<0.1 (max 2)', '2,173 (max 4,096)', '-')
    """
    middle = mean(counts)
    if middle is None:
        return MISSING
    figure = "<0.1" if 0 < middle < 0.05 else f"{middle:,.{1 if middle < 99.95 else 0}f}"
    return f"{figure} (max {max(number for number, n in counts.items() if n):,})"


def table(rows: Sequence[Row], title: str | None = None) -> Table:
    """One line a method, the best figure of each column in bold, rows from real processes apart at the end."""
    kinds = {row.real for row in rows}
    clock = "wall time" if kinds == {True} else "time" if kinds == {True, False} else "virtual time"
    out = Table(title=None if title is None else Text(title), title_justify="left")
    out.add_column("method", no_wrap=True)
    has_staleness = any(row.updates for row in rows)
    for heading in (
        "accuracy",
        clock,
        "bytes per worker",
        "speed-up over AllReduceSGD",
        *(["staleness"] if has_staleness else []),
    ):
        out.add_column(heading, justify="right")
    winners = best(rows)
    ordered = sorted(enumerate(rows), key=lambda pair: pair[1].real)
    for place, (i, row) in enumerate(ordered):
        if row.real and place and not ordered[place - 1][1].real:
            out.add_section()
        apart = " wall" if row.real and len(kinds) == 2 else ""
        out.add_row(
            # Text, not str: a name with [brackets] is a name, not markup.
            Text(row.name),
            *(
                Text(words, style="bold" if (i, column) in winners else "")
                for column, words in (
                    ("accuracy", percent(row.accuracy)),
                    ("seconds", seconds(row.seconds) + apart),
                    ("bytes_per_worker", nbytes(row.bytes_per_worker)),
                    ("speedup", factor(row.speedup)),
                    *([("staleness", staleness(row.staleness))] if has_staleness else []),
                )
            ),
        )
    return out


def _scaled(value: float, units: list[tuple[float, str]]) -> str:
    if value == 0:
        return f"0 {units[-1][1]}"
    # The largest unit in which the rounded figure is at least 1: 0.9999 s is 1.00 s, not 1000 ms.
    scale, unit = max((u for u in units if abs(value) >= 0.9995 * u[0]), default=units[0])
    return f"{_three_digits(value / scale)} {unit}"


def _three_digits(value: float) -> str:
    return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f}"
