"""Every metric against time: a line for each method."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.report.axes import finite, wants_log
from paceline.report.chart import Chart, Figure
from paceline.report.lines import Line, XAxis, draw_lines
from paceline.report.metric import metrics
from paceline.report.row import Row


def draw(rows: Sequence[Row], clock: str) -> list[Figure]:
    figures: list[Figure] = []
    for metric in metrics(rows):
        lines = [
            finite((seconds, values[metric.name]) for seconds, _, values in row.curve if metric.name in values)
            for row in rows
        ]
        unit, length = _unit(lines)
        scaled = [[(seconds / length, y) for seconds, y in line] for line in lines]
        axis = XAxis(clock, title=f"{clock} ({unit})", label="format(datum.value, ',~r')")
        figures += draw_lines(rows, scaled, metric, axis)
    return figures


def _unit(lines: Sequence[Line]) -> tuple[str, float]:
    """The unit for the longest line, and its seconds."""
    longest = max((line[-1][0] for line in lines if line), default=0.0)
    if longest >= 3 * 3600:
        return "h", 3600.0
    return ("min", 60.0) if longest >= 300 and not wants_log(lines) else ("s", 1.0)


CHART = Chart(draw, order=1)
