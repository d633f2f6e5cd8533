"""Accuracy against time as an SVG, for `benchmarks.solvers`: one line per solver, in the simulator and on real
processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

import vl_convert

from benchmarks._accuracy_chart import GREY, LOOK
from paceline.report.axes import log_ticks, wants_log
from paceline.report.swatch import swatch

Curve = list[tuple[float, float]]  # Seconds, and percent.
LEAST = 70.0  # Percent; values below are not drawn.
ERRORS = (6, 8, 10, 12, 14, 16, 20, 25, 30)  # Percent.


def mean_of(curves: Sequence[Sequence[Sequence[float]]]) -> Curve:
    """The mean time and accuracy of several runs, which are evaluated after as many samples each.

    >>> mean_of([[[1.0, 640, 80.0]], [[2.0, 640, 82.0]]])
    [(1.5, 81.0)]
    """
    return [(mean(e[0] for e in at), mean(e[2] for e in at)) for at in zip(*curves, strict=True)]


def chart(panels: Mapping[str, Mapping[str, Curve]], target: float) -> str:
    """A panel has a title and the curves of solvers by name. The scale of errors is logarithmic, so that all lines are
    readable."""
    shown = {
        title: {name: [p for p in c if p[1] >= LEAST] for name, c in curves.items()} for title, curves in panels.items()
    }
    names = list(dict.fromkeys(name for curves in shown.values() for name in curves))
    errors = [100 - accuracy for curves in shown.values() for curve in curves.values() for _, accuracy in curve] + [
        100 - target
    ]
    ends = [min(errors) / 1.04, max(errors) * 1.04]
    spec: dict[str, Any] = {
        "padding": {"left": 2, "right": 20, "top": 8, "bottom": 2},
        "background": None,
        "spacing": 30,
        "hconcat": [
            panel(title, curves, names, ends, target, is_first=not i) for i, (title, curves) in enumerate(shown.items())
        ],
        "config": {**LOOK, "title": {"color": GREY, "fontSize": 12.5, "fontWeight": "normal"}},
    }
    return vl_convert.vegalite_to_svg(spec, allowed_base_urls=[])


def panel(
    title: str, curves: Mapping[str, Curve], names: list[str], ends: list[float], target: float, *, is_first: bool
) -> dict[str, Any]:
    """If solvers end far apart, the time axis is logarithmic."""
    lines = [curve for curve in curves.values() if curve]
    x: dict[str, Any] = {"field": "seconds", "type": "quantitative", "title": "s", "scale": {"zero": True}}
    x["axis"] = {"grid": False, "tickCount": 6, "format": "~r"}
    if wants_log(lines):
        low, high = (choose(seconds for line in lines for seconds, _ in line) for choose in (min, max))
        x |= {"title": "s, logarithmic", "scale": {"type": "log", "domain": [low / 1.1, high * 1.1], "nice": False}}
        x["axis"] = {"grid": False, "values": log_ticks(low / 1.1, high * 1.1), "format": ",~r"}
    y = {
        "field": "error",
        "type": "quantitative",
        "title": "test accuracy, %; errors on a logarithmic scale" if is_first else None,
        "scale": {"type": "log", "domain": ends, "reverse": True, "nice": False},
        "axis": {
            "values": [e for e in ERRORS if ends[0] <= e <= ends[1]],
            "labelExpr": "format(100 - datum.value, 'd')",
        },
    }
    styles = [swatch(i) for i in range(len(names))]
    legend = {"symbolOpacity": 1, "orient": "bottom", "columns": 3, "labelLimit": 400}
    solver = {"field": "solver", "type": "nominal", "title": None, "legend": legend}
    colour = {**solver, "scale": {"domain": names, "range": [style.colour for style in styles]}}
    shape = {**solver, "scale": {"domain": names, "range": [style.mark for style in styles]}}
    drawn = [
        (name, [{"solver": name, "seconds": s, "error": 100 - a} for s, a in curve])
        for name, curve in curves.items()
        if curve
    ]
    return {
        "title": title,
        "width": 340,
        "height": 320,
        "layer": [
            {
                "data": {"values": [{"error": 100 - target}]},
                "mark": {"type": "rule", "strokeDash": [4, 3], "color": GREY},
                "encoding": {"y": y},
            },
            {
                "data": {"values": [point for _, points in drawn for point in points]},
                "mark": {"type": "line", "strokeWidth": 1.75, "strokeJoin": "round"},
                "encoding": {"x": x, "y": y, "color": colour},
            },
            {
                "data": {"values": [points[-1] for _, points in drawn]},
                "mark": {"type": "point", "filled": True, "size": 64, "opacity": 1},
                "encoding": {"x": x, "y": y, "color": colour, "shape": shape},
            },
        ],
    }
