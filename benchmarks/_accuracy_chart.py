"""Accuracy against bytes as an SVG, for `benchmarks.accuracy`: one mark per method, coloured by family, shaped by
codec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import vl_convert

from paceline.report.axes import log_ticks
from paceline.report.swatch import COLOURS

GREY = "#7d8590"  # Readable on white and on near-black.
TEXT = {"labelColor": GREY, "titleColor": GREY, "labelFontSize": 12, "titleFontSize": 12.5, "titleFontWeight": "normal"}
STROKES = {"domainColor": GREY, "tickColor": GREY, "gridColor": GREY, "gridOpacity": 0.2}
LOOK: dict[str, Any] = {"view": {"stroke": None}, "axis": {**TEXT, **STROKES}, "legend": TEXT}
LEAST = 85.0  # Percent; values below are not drawn.


def chart(rows: Sequence[dict[str, Any]]) -> str:
    """`rows` have a label, a family, a codec, an accuracy with its spread, and bytes."""
    shown = [row for row in rows if row["accuracy"] >= LEAST]
    values = [
        {
            **{name: row[name] for name in ("label", "family", "codec", "accuracy")},
            "megabytes": row["bytes"] / 1e6,
            "low": row["accuracy"] - row["spread"],
            "high": row["accuracy"] + row["spread"],
        }
        for row in shown
    ]
    families, codecs = (list(dict.fromkeys(row[name] for row in shown)) for name in ("family", "codec"))
    low, high = (choose(value["megabytes"] for value in values) for choose in (min, max))
    log = {"type": "log", "domain": [low / 1.1, high * 1.1], "nice": False}
    axis = {"values": log_ticks(low / 1.1, high * 1.1), "format": ",~r"}
    x = {
        "field": "megabytes",
        "type": "quantitative",
        "title": "MB sent per worker, logarithmic",
        "scale": log,
        "axis": axis,
    }
    y = {"type": "quantitative", "title": "test accuracy, %", "scale": {"zero": False, "nice": True}}
    legend = {"symbolOpacity": 1, "orient": "bottom", "direction": "horizontal", "columns": 4}
    colour = {
        "field": "family",
        "type": "nominal",
        "title": "method",
        "scale": {"domain": families, "range": list(COLOURS)},
        "legend": legend,
    }
    shapes = ["circle", "triangle-up", "square", "diamond", "cross", "triangle-down"]
    shape = {
        "field": "codec",
        "type": "nominal",
        "title": "codec",
        "scale": {"domain": codecs, "range": shapes},
        "legend": legend,
    }
    spec: dict[str, Any] = {
        "width": 600,
        "height": 420,
        "padding": {"left": 2, "right": 40, "top": 8, "bottom": 2},
        "background": None,
        "data": {"values": values},
        "layer": [
            {
                "mark": {"type": "rule", "strokeWidth": 1.25, "opacity": 0.6},
                "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": colour},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
                "encoding": {"x": x, "y": {**y, "field": "accuracy"}, "color": colour, "shape": shape},
            },
            {
                "mark": {"type": "text", "align": "left", "dx": 7, "dy": -6, "fontSize": 10, "color": GREY},
                "encoding": {"x": x, "y": {**y, "field": "accuracy"}, "text": {"field": "label"}},
            },
        ],
        "config": {**LOOK, "legend": {**TEXT, "symbolBaseFillColor": GREY}},
    }
    return vl_convert.vegalite_to_svg(spec, allowed_base_urls=[])
