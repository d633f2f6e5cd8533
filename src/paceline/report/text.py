"""Rows as a table in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from paceline.report.columns import best, columns
from paceline.report.row import Row


def table(rows: Sequence[Row], title: str | None = None) -> Table:
    """One line for each method.  The best value of each column is bold.  Rows of real processes are at the end."""
    chosen = columns(rows)
    winners = best(rows, chosen)
    out = Table(title=None if title is None else Text(title), title_justify="left")
    out.add_column("method", no_wrap=True)
    for column in chosen:
        out.add_column(Text(column.heading), justify="right")
    for real in (False, True):
        for i, row in enumerate(rows):
            if row.real == real:
                cells = [
                    Text(column.text(row), style="bold" if (i, j) in winners else "") for j, column in enumerate(chosen)
                ]
                out.add_row(Text(row.name), *cells)  # Text, because a name with [brackets] is not markup.
        out.add_section()
    return out
