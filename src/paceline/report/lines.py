"""Line charts: a metric against time or bytes, with a line for each row.

The drawings do not contain the names of rows.  A line has the colour, dash and mark of its row's swatch in the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.report.axes import log_ticks, thin, wants_log
from paceline.report.chart import Figure
from paceline.report.metric import Metric
from paceline.report.row import Row
from paceline.report.swatch import swatch_of
from paceline.report.vega import svg

POINTS_PER_LINE = 500
POINTS_PER_CHART = 8000

Line = list[tuple[float, float]]


@dataclass(frozen=True)
class XAxis:
    """A horizontal axis: its name in the caption, its title, and the Vega expression of its labels."""

    name: str
    title: str
    label: str


def draw_lines(rows: Sequence[Row], lines: Sequence[Line], metric: Metric, axis: XAxis) -> list[Figure]:
    """One figure; none if no row has a point to draw.  `lines` has a line for each row, maybe an empty one."""
    lines, x = _x_channel(lines, axis)
    most = max(2, min(POINTS_PER_LINE, POINTS_PER_CHART // max(1, len(lines))))
    lines = [thin(line, most) for line in lines]
    shown = [i for i, line in enumerate(lines) if line]
    if not shown:
        return []
    styles = [swatch_of(rows[i], i) for i in shown]
    channels = {"x": x, "y": _y_channel(metric), "color": _by_line(shown, [s.colour for s in styles])}
    dashes = _by_line(shown, [list(s.dash) for s in styles])
    marks = _by_line(shown, [s.mark for s in styles])
    spec: dict[str, Any] = {
        "width": 440,
        "height": 300,
        "layer": [
            {
                "data": {"values": [{"line": i, "x": x, "y": y} for i in shown for x, y in lines[i]]},
                "mark": {"type": "line", "strokeWidth": 1.75, "strokeJoin": "round", "aria": False},
                "encoding": {**channels, "strokeDash": dashes},
            },
            {
                "data": {"values": [{"line": i, "x": lines[i][-1][0], "y": lines[i][-1][1]} for i in shown]},
                "mark": {"type": "point", "filled": True, "size": 64, "opacity": 1, "aria": False},
                "encoding": {**channels, "shape": marks},
            },
        ],
    }
    subject = f"{metric.name} against {axis.name}"
    return [Figure(f"{subject}, one line a method", svg(spec), _caption(subject, metric, rows, shown))]


def _x_channel(lines: Sequence[Line], axis: XAxis) -> tuple[Sequence[Line], dict[str, Any]]:
    """The lines and their horizontal axis, which is logarithmic if the lines end far apart."""
    settings: dict[str, Any] = {"title": axis.title, "labelExpr": axis.label, "tickCount": 6}
    scale: dict[str, Any] = {"type": "linear", "zero": True}
    if wants_log(lines):
        ends = [line[-1][0] for line in lines if line and line[-1][0] > 0]
        # A logarithmic axis has no zero, and the first hundredth of the shortest line is not interesting.
        lines = [[(x, y) for x, y in line if x >= min(ends) / 100] for line in lines]
        drawn = [x for line in lines for x, _ in line]
        low = min(drawn)
        high = max(drawn)
        ticks = log_ticks(low, high)
        settings |= {"title": f"{axis.title}, logarithmic", "values": ticks, "tickCount": len(ticks)}
        scale = {"type": "log", "domain": [low, high], "nice": False}
    return lines, {"field": "x", "type": "quantitative", "scale": scale, "axis": settings}


def _y_channel(metric: Metric) -> dict[str, Any]:
    axis: dict[str, Any] = {"title": metric.name, "format": "~%" if metric.is_share else "~g", "tickCount": 6}
    return {"field": "y", "type": "quantitative", "scale": {"zero": False, "nice": True}, "axis": axis}


def _by_line(shown: Sequence[int], values: Sequence[Any]) -> dict[str, Any]:
    """A channel with one value for each line."""
    scale = {"domain": shown, "range": values}
    return {"field": "line", "type": "nominal", "legend": None, "scale": scale}


def _caption(subject: str, metric: Metric, rows: Sequence[Row], shown: Sequence[int]) -> str:
    directions = {"higher": "further up and to the left", "lower": "further down and to the left"}
    direction = "further to the left" if metric.better is None else directions[metric.better]
    caption = f"{subject[0].upper()}{subject[1:]}; {direction} is better. Lines are drawn as marked in the table."
    absent = [row.name for i, row in enumerate(rows) if i not in shown]
    return f"{caption} Nothing to draw for {', '.join(absent)}." if absent else caption
