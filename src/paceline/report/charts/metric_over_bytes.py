"""Every metric against the bytes that a worker has sent: a line for each method."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.report.axes import finite
from paceline.report.chart import Chart, Figure
from paceline.report.lines import XAxis, draw_lines
from paceline.report.metric import metrics
from paceline.report.row import Row

# 25000000 is written as 25 MB, like in the table.
LABEL = "datum.value == 0 ? '0' : replace(format(datum.value, '~s'), regexp('([a-zA-Z]?)$'), ' $1B')"
AXIS = XAxis("bytes sent per worker", title="bytes sent per worker", label=LABEL)


def draw(rows: Sequence[Row], clock: str) -> list[Figure]:
    figures: list[Figure] = []
    for metric in metrics(rows):
        lines = [
            finite((nbytes, values[metric.name]) for _, nbytes, values in row.curve if metric.name in values)
            for row in rows
        ]
        figures += draw_lines(rows, lines, metric, AXIS)
    return figures


CHART = Chart(draw, order=2)
