"""Chart: a kind of drawing on the page.  Every file in `report/charts/` defines one, as `CHART`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.report.row import Row


@dataclass(frozen=True)
class Figure:
    """One drawing.  `label` is for screen readers.  `row` is the row that it is about; None: all rows."""

    label: str
    svg: str
    caption: str
    row: int | None = None


@dataclass(frozen=True)
class Chart:
    """`draw` gets the rows and the name of their clock, and returns as many figures as there is data for.

    Charts are on the page in the order of `order`.  With a heading, a chart has a part of the page for itself, and
    `explanation` below the first heading.
    """

    draw: Callable[[Sequence[Row], str], list[Figure]]
    order: int
    heading: str | None = None
    explanation: str = ""
