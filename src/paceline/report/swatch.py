"""Swatch: the colour, dash and mark of a row, in the table and in every chart."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.report.row import Row

# Each has a contrast of at least 3:1 with white and with near-black, so all have about the same luminance.
COLOURS = ("#2f76d2", "#d9600a", "#2b9348", "#9a5be0", "#d93664", "#0b93a6", "#a5762a", "#7d8590")
DASHES = ((), (6, 3), (2, 2))
# The marks at the ends of lines, for readers who cannot distinguish the colours: SVG paths in a square from -1 to 1.
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


@dataclass(frozen=True)
class Swatch:
    """How line number `index` is drawn."""

    colour: str
    dash: tuple[int, ...]
    mark: str


def swatch_of(row: Row, place: int) -> Swatch:
    """The swatch of a row that is at this place of its section."""
    return swatch(place if row.style is None else row.style)


def swatch(index: int) -> Swatch:
    """Colours repeat after eight lines, with another dash.

    >>> swatch(0).colour == swatch(8).colour, swatch(0).dash == swatch(8).dash
    (True, False)
    """
    n = len(COLOURS)
    return Swatch(COLOURS[index % n], DASHES[index // n % len(DASHES)], MARKS[index % n])
