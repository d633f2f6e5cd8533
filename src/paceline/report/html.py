"""Rows as one self-contained page: no scripts, nothing fetched, small enough to mail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from paceline.report import charts, text
from paceline.report.row import Row, best


@dataclass(frozen=True)
class Line:
    """A row with the swatch it is drawn in and the columns it leads."""

    row: Row
    swatch: charts.Swatch
    leads: frozenset[str]


@dataclass(frozen=True)
class Figure:
    """A drawing, what it shows, and the methods that had nothing to draw."""

    subject: str
    svg: Markup
    absent: list[str]


@dataclass(frozen=True)
class Histogram:
    """How stale the updates of one line's servers were, drawn in its colour."""

    line: Line
    svg: Markup


@dataclass(frozen=True)
class Section:
    """Rows whose seconds may be compared with each other, and their drawings; histograms of those that have servers."""

    heading: str
    clock: str
    lines: list[Line]
    figures: list[Figure]
    histograms: list[Histogram]


def render(title: str, rows: Sequence[Row], facts: Mapping[str, str], notes: Sequence[str]) -> str:
    """The page as text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(
        seconds=text.seconds, nbytes=text.nbytes, percent=text.percent, factor=text.factor, staleness=text.staleness
    )
    template = environment.from_string((files("paceline.report") / "page.html.jinja").read_text(encoding="utf-8"))
    virtual, real = [r for r in rows if not r.real], [r for r in rows if r.real]
    sections = [_section("Simulated", "virtual time", virtual), _section("Real processes", "wall time", real)]
    return template.render(title=title, sections=[s for s in sections if s.lines], facts=facts, notes=notes)


def write(path: str | Path, title: str, rows: Sequence[Row], facts: Mapping[str, str], notes: Sequence[str]) -> None:
    """Save the page; `facts` say what was run (cluster, task, seed, versions), `notes` what to bear in mind."""
    # A name that came through a file system may hold bytes that are no text; they show as question marks.
    Path(path).write_text(render(title, rows, facts, notes), encoding="utf-8", errors="replace")


def _section(heading: str, clock: str, rows: list[Row]) -> Section:
    winners = best(rows)
    lines = [Line(row, charts.swatch(i), frozenset(c for j, c in winners if i == j)) for i, row in enumerate(rows)]
    drawings = {
        f"accuracy against {clock}": charts.accuracy_over_time(rows, clock),
        "accuracy against bytes sent per worker": charts.accuracy_over_bytes(rows),
    }
    figures = [
        # The drawings are ours and hold none of the user's words, so they alone are not escaped.
        Figure(subject, Markup(drawing.svg), [row.name for i, row in enumerate(rows) if i not in drawing.shown])
        for subject, drawing in drawings.items()
        if drawing is not None
    ]
    histograms = [
        Histogram(line, Markup(svg))
        for line in lines
        if (svg := charts.staleness(line.row.staleness, line.swatch.colour)) is not None
    ]
    return Section(heading, clock, lines, figures, histograms)
