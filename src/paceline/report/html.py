"""Rows as one self-contained HTML page: no scripts, nothing to load, small enough to mail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from paceline.report.chart import Chart, Figure
from paceline.report.charts import find_charts
from paceline.report.columns import Column, best, columns
from paceline.report.row import Row
from paceline.report.swatch import Swatch, swatch_of
from paceline.report.verdict import verdict


@dataclass(frozen=True)
class Cell:
    """A value in the table."""

    text: str
    is_best: bool


@dataclass(frozen=True)
class Line:
    """A row of the table, with the swatch that it has in all charts."""

    row: Row
    swatch: Swatch
    cells: list[Cell]


@dataclass(frozen=True)
class Part:
    """The figures of a chart that has a heading."""

    heading: str
    explanation: str
    figures: list[Figure]


@dataclass(frozen=True)
class Section:
    """Rows whose seconds may be compared with each other: their table and their charts."""

    heading: str
    columns: list[Column]
    lines: list[Line]
    verdict: str
    figures: list[Figure]
    parts: list[Part]

    @property
    def has_best(self) -> bool:
        return any(cell.is_best for line in self.lines for cell in line.cells)


def render(title: str, rows: Sequence[Row], facts: Mapping[str, str], notes: Sequence[str]) -> str:
    """The page as text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((files("paceline.report") / "page.html.jinja").read_text(encoding="utf-8"))
    rows = _styled(rows)
    sections: list[Section] = []
    explained: set[str] = set()
    for heading, clock, real in (("Simulated", "virtual time", False), ("Real processes", "wall time", True)):
        chosen = [row for row in rows if row.real == real]
        if chosen:
            sections.append(_section(heading, clock, chosen, explained))
    return template.render(title=title, sections=sections, facts=facts, notes=notes)


def _styled(rows: Sequence[Row]) -> list[Row]:
    """The rows with their swatches: a method has the same one in all sections."""
    styles: dict[tuple[str, int], int] = {}
    seen: Counter[tuple[str, bool]] = Counter()
    styled: list[Row] = []
    for row in rows:
        key = (row.name, seen[row.name, row.real])  # Two rows of one section with the same name are two methods.
        seen[row.name, row.real] += 1
        styled.append(replace(row, style=styles.setdefault(key, len(styles))))
    return styled


def write(path: str | Path, title: str, rows: Sequence[Row], facts: Mapping[str, str], notes: Sequence[str]) -> None:
    """Save the page.  `facts` describe the run (cluster, task, seed, versions); `notes` are remarks for the reader."""
    # A name from a file system may contain bytes that are not text; they become question marks.
    Path(path).write_text(render(title, rows, facts, notes), encoding="utf-8", errors="replace")


def _section(heading: str, clock: str, rows: list[Row], explained: set[str]) -> Section:
    chosen = columns(rows)
    winners = best(rows, chosen)
    lines = [
        Line(row, swatch_of(row, i), [Cell(column.text(row), (i, j) in winners) for j, column in enumerate(chosen)])
        for i, row in enumerate(rows)
    ]
    section = Section(heading, chosen, lines, verdict(rows), figures=[], parts=[])
    for chart in find_charts():
        figures = chart.draw(rows, clock)
        if chart.heading is None:
            section.figures.extend(figures)
        elif figures:
            section.parts.append(Part(chart.heading, _explanation(chart, explained), figures))
    return section


def _explanation(chart: Chart, explained: set[str]) -> str:
    """The explanation of a chart, only where the chart is first on the page."""
    if chart.explanation in explained:
        return ""
    explained.add(chart.explanation)
    return chart.explanation
