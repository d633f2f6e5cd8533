"""Accuracy against time and against bytes, and how stale updates were, as static SVG drawn by Vega-Lite without a browser or a network.

The drawings hold no words of the user's: a line is known by its colour, its dash and the mark at its end, and whoever sets the
chart on a page names them with `swatch`.  Text and axes take the colour of the page, so one drawing serves light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import vl_convert

from paceline.report.row import Row

# At least 3:1 against white and against near-black alike, which leaves a narrow band of luminance: neighbours differ in hue.
COLOURS = ("#2f76d2", "#d9600a", "#2b9348", "#9a5be0", "#d93664", "#0b93a6", "#a5762a", "#7d8590")
DASHES = ((), (6, 3), (2, 2))
# The marks at the ends of lines, for those who cannot tell the colours apart: SVG paths in a square from -1 to 1.
MARKS = (
    "M-.9,0A.9,.9,0,1,1,.9,0A.9,.9,0,1,1,-.9,0Z",
    "M-.8,-.8H.8V.8H-.8Z",
    "M0,-1L1,.8H-1Z",
    "M0,-1.15L1.15,0L0,1.15L-1.15,0Z",
    "M0,1L1,-.8H-1Z",
    "M-1,-.35H-.35V-1H.35V-.35H1V.35H.35V1H-.35V.35H-1Z",
    "M-.8,-1L1,0L-.8,1Z",
    "M.8,-1L-1,0L.8,1Z",
)
POINTS_PER_LINE = 500
POINTS_PER_CHART = 8000
BARS = 40


@dataclass(frozen=True)
class Swatch:
    """How line number `index` is drawn."""

    colour: str
    dash: tuple[int, ...]
    mark: str


def swatch(index: int) -> Swatch:
    """Colours repeat after eight lines, with another dash.

    >>> swatch(0).colour == swatch(8).colour, swatch(0).dash == swatch(8).dash
    (True, False)
    """
    n = len(COLOURS)
    return Swatch(COLOURS[index % n], DASHES[index // n % len(DASHES)], MARKS[index % n])


@dataclass(frozen=True)
class Drawing:
    """An SVG and the numbers of the rows that had a point to draw."""

    svg: str
    shown: frozenset[int]


def accuracy_over_time(rows: Sequence[Row], clock: str) -> Drawing | None:
    """None if there is no point to draw.  `clock` says whose seconds they are: virtual or wall."""
    lines = [finite((seconds, accuracy) for seconds, _, accuracy in row.curve) for row in rows]
    longest = max((line[-1][0] for line in lines if line), default=0.0)
    unit, length = (
        ("h", 3600.0)
        if longest >= 3 * 3600
        else ("min", 60.0)
        if longest >= 300 and not wants_log(lines)
        else ("s", 1.0)
    )
    lines = [[(seconds / length, accuracy) for seconds, accuracy in line] for line in lines]
    return _draw(lines, x_title=f"{clock} ({unit})", x_label="format(datum.value, ',~r')")


def accuracy_over_bytes(rows: Sequence[Row]) -> Drawing | None:
    """None if there is no point to draw."""
    lines = [finite((sent, accuracy) for _, sent, accuracy in row.curve) for row in rows]
    # 25000000 is written 25 MB, as in the table.
    label = "datum.value == 0 ? '0' : replace(format(datum.value, '~s'), regexp('([a-zA-Z]?)$'), ' $1B')"
    return _draw(lines, x_title="bytes sent per worker", x_label=label)


def staleness(counts: Mapping[int, int], colour: str) -> str | None:
    """What share of the updates was how stale, as an SVG; None if there were no updates."""
    total = sum(counts.values())
    if not total:
        return None
    width, updates = bars(counts)
    # From 0, where the first update of every run is, and never so short that a single bar fills the chart.
    low, high = min(0, *updates), max(max(updates), 7 * width) + width
    tick = round_step(high - low, most=8)
    # A straggler's one update among thousands is what the chart is looked at for: no bar is too low to be seen.
    lowest = max(updates.values()) / 100
    spec: dict[str, Any] = {
        "width": 250,
        "height": 120,
        "data": {
            # A bar stands around the whole numbers it counts: 3 from 2.5 to 3.5.
            "values": [
                {"from": first - 0.5, "to": first + width - 0.5, "share": max(n, lowest) / total}
                for first, n in updates.items()
            ]
        },
        "mark": {"type": "bar", "color": colour, "binSpacing": 1, "aria": False},
        "encoding": {
            "x": {
                "field": "from",
                "type": "quantitative",
                "bin": "binned",
                "scale": {"domain": [low - 0.5, high - 0.5], "nice": False},
                "axis": {
                    "title": "staleness",
                    "values": list(range(-(-low // tick) * tick, high, tick)),
                    "labelExpr": "datum.value == 0 ? '0' : format(datum.value, '~s')",
                    "grid": False,
                },
            },
            "x2": {"field": "to"},
            "y": {
                "field": "share",
                "type": "quantitative",
                "scale": {"nice": 3},
                # As wide as 100%, so that charts below one another stand in line.
                "axis": {"title": "updates", "format": "~%", "tickCount": 3, "minExtent": 38},
            },
        },
    }
    return _svg(spec)


def bars(counts: Mapping[int, int]) -> tuple[int, dict[int, int]]:
    """How many numbers each bar of a histogram stands for, and by the first of them how often they occur; the empty bars are left out.

    >>> bars({0: 5, 1: 2, 7: 1})
    (1, {0: 5, 1: 2, 7: 1})
    >>> bars({0: 5, 3: 2, 99: 1})
    (5, {0: 7, 95: 1})
    """
    numbers = [number for number, n in counts.items() if n]
    width = round_step(max(numbers) - min(0, *numbers) + 1, most=BARS)
    found: dict[int, int] = {}
    for number in sorted(numbers):
        first = number // width * width
        found[first] = found.get(first, 0) + counts[number]
    return width, found


def round_step(length: int, most: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, ... of which at most so many cover the length.

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
    """Those that can be drawn: a run that diverges has a line up to where it did."""
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def thin(line: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most so many points, evenly chosen, the first and the last among them.

    >>> thin([(float(i), 0.0) for i in range(1001)], most=3)
    [(0.0, 0.0), (500.0, 0.0), (1000.0, 0.0)]
    """
    if len(line) <= most:
        return line
    return [line[round(i * (len(line) - 1) / (most - 1))] for i in range(most)]


def wants_log(lines: Sequence[list[tuple[float, float]]]) -> bool:
    """Whether the lines end so far apart that a linear axis would press some of them against its left edge.

    >>> wants_log([[(0.0, 0.1), (5.0, 0.9)], [(0.0, 0.1), (400.0, 0.9)]])
    True
    """
    ends = [line[-1][0] for line in lines if line and line[-1][0] > 0]
    return len(ends) > 1 and max(ends) > 10 * min(ends)


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between the two, few enough to be read.

    >>> log_ticks(0.3, 25.0), log_ticks(1e3, 70e6)
    ([0.3, 1.0, 3.0, 10.0], [1000.0, 10000.0, 100000.0, 1000000.0, 10000000.0])
    """
    decades = math.log10(high / low)
    digits = (1, 2, 5) if decades < 1.5 else (1, 3) if decades < 4 else (1,)
    every = math.ceil(decades / 7)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    # Through text, because 3 * 10**-1 is not 0.3.
    ticks = [float(f"{digit}e{power}") for power in range(first, last + 1, every) for digit in digits]
    return [tick for tick in ticks if low <= tick <= high]


def _draw(lines: list[list[tuple[float, float]]], *, x_title: str, x_label: str) -> Drawing | None:
    axis: dict[str, Any] = {"title": x_title, "labelExpr": x_label, "tickCount": 6}
    scale: dict[str, Any] = {"type": "linear", "zero": True}
    if wants_log(lines):
        ends = [line[-1][0] for line in lines if line and line[-1][0] > 0]
        # Zero has no place on a logarithmic axis, and the first hundredth of the shortest line is of no interest.
        lines = [[(x, y) for x, y in line if x >= min(ends) / 100] for line in lines]
        low, high = (choose(x for line in lines for x, _ in line) for choose in (min, max))
        ticks = log_ticks(low, high)
        axis |= {"title": f"{x_title}, logarithmic", "values": ticks, "tickCount": len(ticks)}
        scale = {"type": "log", "domain": [low, high], "nice": False}
    most = max(2, min(POINTS_PER_LINE, POINTS_PER_CHART // max(1, len(lines))))
    lines = [thin(line, most) for line in lines]
    shown = [i for i, line in enumerate(lines) if line]
    if not shown:
        return None
    styles = [swatch(i) for i in shown]
    encoding: dict[str, Any] = {
        "x": {"field": "x", "type": "quantitative", "scale": scale, "axis": axis},
        "y": {
            "field": "y",
            "type": "quantitative",
            "scale": {"zero": False, "nice": True},
            "axis": {"title": "accuracy", "format": "~%", "tickCount": 6},
        },
        "color": {
            "field": "line",
            "type": "nominal",
            "legend": None,
            "scale": {"domain": shown, "range": [s.colour for s in styles]},
        },
    }
    dash = {
        "field": "line",
        "type": "nominal",
        "legend": None,
        "scale": {"domain": shown, "range": [list(s.dash) for s in styles]},
    }
    mark = {
        "field": "line",
        "type": "nominal",
        "legend": None,
        "scale": {"domain": shown, "range": [s.mark for s in styles]},
    }
    spec: dict[str, Any] = {
        "width": 440,
        "height": 300,
        "layer": [
            {
                "data": {"values": [{"line": i, "x": x, "y": y} for i in shown for x, y in lines[i]]},
                "mark": {"type": "line", "strokeWidth": 1.75, "strokeJoin": "round", "aria": False},
                "encoding": {**encoding, "strokeDash": dash},
            },
            {
                "data": {"values": [{"line": i, "x": lines[i][-1][0], "y": lines[i][-1][1]} for i in shown]},
                "mark": {"type": "point", "filled": True, "size": 64, "opacity": 1, "aria": False},
                "encoding": {**encoding, "shape": mark},
            },
        ],
    }
    return Drawing(_svg(spec), frozenset(shown))


def _svg(spec: dict[str, Any]) -> str:
    """A drawing that takes the page's colour for its words and axes."""
    axis = {
        "domainColor": "currentColor",
        "domainOpacity": 0.5,
        "tickColor": "currentColor",
        "tickOpacity": 0.5,
        "tickSize": 4,
        "gridColor": "currentColor",
        "gridOpacity": 0.1,
        "labelColor": "currentColor",
        "labelFontSize": 12,
        "labelPadding": 4,
        "titleColor": "currentColor",
        "titleFontSize": 12.5,
        "titleFontWeight": "normal",
        "titlePadding": 10,
    }
    frame = {
        "padding": {"left": 2, "right": 8, "top": 8, "bottom": 2},
        "background": None,
        "config": {"aria": False, "view": {"stroke": None}, "axis": axis},
    }
    # An empty list of allowed addresses: nothing is ever fetched.
    return vl_convert.vegalite_to_svg(spec | frame, allowed_base_urls=[])
