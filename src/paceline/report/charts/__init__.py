"""The charts of the page.  A new chart is a new file in this folder: it is found by itself."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from paceline.report.chart import Chart


def find_charts() -> list[Chart]:
    """The `CHART` of every file in this folder, in their order on the page."""
    charts: list[Chart] = []
    for module in iter_modules(__path__):
        name = f"{__name__}.{module.name}"
        chart = getattr(import_module(name), "CHART", None)
        if not isinstance(chart, Chart):
            raise TypeError(f"{name}: a file in this folder must define CHART = Chart(...), not {chart!r}")
        charts.append(chart)
    return sorted(charts, key=lambda chart: chart.order)
