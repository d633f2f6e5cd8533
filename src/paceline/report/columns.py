"""The columns of a comparison, for the terminal and for the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.report import formats
from paceline.report.metric import Better, Metric, metrics
from paceline.report.row import Row


@dataclass(frozen=True)
class Column:
    """A column: its heading, a row's value, and the text of the value.  Without `better` no row is the best."""

    heading: str
    value: Callable[[Row], float | None]
    text: Callable[[Row], str]
    better: Better | None = None


def columns(rows: Sequence[Row]) -> list[Column]:
    """The columns for these rows.

    >>> row = Row("sgd", "AllReduceSGD", {"loss": 0.5}, 90.0, 4e6, 1.0)
    >>> {column.heading: column.text(row) for column in columns([row])}
    {'loss': '0.5', 'virtual time': '90.0 s', 'bytes per worker': '4.00 MB', 'speed-up over AllReduceSGD': '1.00x'}
    """
    found = [_metric(metric) for metric in metrics(rows)]
    found.append(_time(rows))
    found.append(Column("bytes per worker", _bytes, lambda row: formats.nbytes(row.bytes_per_worker), "lower"))
    if any(row.speedup is not None for row in rows):
        found.append(Column("speed-up over AllReduceSGD", _speedup, lambda row: formats.factor(row.speedup), "higher"))
    if any(row.updates for row in rows):
        found.append(Column("staleness", lambda row: None, lambda row: formats.staleness(row.staleness)))
    return found


def best(rows: Sequence[Row], columns: Sequence[Column]) -> set[tuple[int, int]]:
    """The (row, column) that hold the best value of their column.

    A tie has several.  A column without a difference has none.  Real and virtual rows are compared separately.

    >>> sgd = Row("sgd", "AllReduceSGD", {"accuracy": 0.98}, 90.0, 4e6, 1.0)
    >>> local = Row("local", "BlockMomentum", {"accuracy": 0.97}, 20.0, 1e5, 4.5)
    >>> sorted(best([sgd, local], columns([sgd, local])))
    [(0, 0), (1, 1), (1, 2), (1, 3)]
    """
    names = [metric.name for metric in metrics(rows)]
    # A method that diverged is often the fastest one.  It is not the best.
    sound = [i for i, row in enumerate(rows) if all(_is_finite(row.metrics.get(name)) for name in names)]
    found: set[tuple[int, int]] = set()
    for real in (False, True):
        chosen = [i for i in sound if rows[i].real == real]
        for j, column in enumerate(columns):
            found |= {(i, j) for i in _best_rows(rows, chosen, column)}
    return found


def _best_rows(rows: Sequence[Row], chosen: Sequence[int], column: Column) -> list[int]:
    values = {i: value for i in chosen if (value := column.value(rows[i])) is not None and math.isfinite(value)}
    if column.better is None or len(set(values.values())) < 2:
        return []
    winner = max(values.values()) if column.better == "higher" else min(values.values())
    return [i for i, value in values.items() if value == winner]


def _metric(metric: Metric) -> Column:
    def value(row: Row) -> float | None:
        return row.metrics.get(metric.name)

    def text(row: Row) -> str:
        return formats.percent(value(row)) if metric.is_share else formats.number(value(row))

    return Column(metric.name, value, text, metric.better)


def _time(rows: Sequence[Row]) -> Column:
    clocks = {row.real for row in rows}
    if len(clocks) < 2:
        heading = "wall time" if clocks == {True} else "virtual time"
        return Column(heading, _seconds, lambda row: formats.seconds(row.seconds), "lower")
    return Column("time", _seconds, lambda row: formats.seconds(row.seconds) + " wall" * row.real, "lower")


def _seconds(row: Row) -> float:
    return row.seconds


def _bytes(row: Row) -> float:
    return row.bytes_per_worker


def _speedup(row: Row) -> float | None:
    return row.speedup


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
