"""Accuracy against workers as an SVG, for `benchmarks.async_accuracy`: one line per method, with the spread over
seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import vl_convert

from benchmarks._accuracy_chart import LOOK
from paceline.report.swatch import COLOURS

APART = 1.035  # The factor between methods on the x axis, so that none hides another.
ERRORS = (10, 12, 15, 20, 30, 50, 90)  # Percent.


def chart(rows: Sequence[dict[str, Any]]) -> str:
    """`rows` have a method, workers and an accuracy with its spread. The scale of errors is logarithmic, so that all
    lines are readable."""
    methods, counts = (list(dict.fromkeys(row[name] for row in rows)) for name in ("method", "workers"))
    values = [
        {
            "method": row["method"],
            "workers": row["workers"] * APART ** (methods.index(row["method"]) - (len(methods) - 1) / 2),
            "error": 100 - row["accuracy"],
            "least": max(1.0, 100 - row["accuracy"] - row["spread"]),
            "most": min(100.0, 100 - row["accuracy"] + row["spread"]),
        }
        for row in rows
    ]
    ends = [min(counts) / 1.3, max(counts) * 1.3]
    worst = min(95.0, 1.05 * max(value["most"] for value in values))
    x = {
        "field": "workers",
        "type": "quantitative",
        "title": "workers",
        "scale": {"type": "log", "domain": ends, "nice": False},
        "axis": {"values": sorted(counts), "format": "d", "grid": False},
    }
    y = {
        "field": "error",
        "type": "quantitative",
        "title": "test accuracy, %; errors on a logarithmic scale",
        "scale": {"type": "log", "domain": [10, worst], "reverse": True, "nice": False, "clamp": True},
        "axis": {
            "values": [error for error in ERRORS if error <= worst],
            "labelExpr": "format(100 - datum.value, 'd')",
        },
    }
    colour = {
        "field": "method",
        "type": "nominal",
        "title": None,
        "scale": {"domain": methods, "range": list(COLOURS)},
        "legend": {"symbolOpacity": 1, "orient": "bottom", "columns": 2, "labelLimit": 400},
    }
    spec: dict[str, Any] = {
        "width": 600,
        "height": 420,
        "padding": {"left": 2, "right": 20, "top": 8, "bottom": 2},
        "background": None,
        "data": {"values": values},
        "layer": [
            {"mark": {"type": "line", "strokeWidth": 1.75}, "encoding": {"x": x, "y": y, "color": colour}},
            {
                "mark": {"type": "rule", "strokeWidth": 1.25, "opacity": 0.6},
                "encoding": {"x": x, "y": {**y, "field": "least"}, "y2": {"field": "most"}, "color": colour},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1},
                "encoding": {"x": x, "y": y, "color": colour},
            },
        ],
        "config": LOOK,
    }
    return vl_convert.vegalite_to_svg(spec, allowed_base_urls=[])
