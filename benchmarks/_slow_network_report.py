"""The report of `benchmarks.slow_network`: a table, figures and a chart for each rate."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from rich.table import Table

from benchmarks._slow_network_methods import BATCH, DDP, LIMIT, METHODS, perceptron


@dataclass
class Turn:
    """The times of a method, and the limit measured around it."""

    s: float
    limit_s: float
    MB: float
    cpu_s: float
    period: float


def spread(values: Sequence[float]) -> dict[str, Any]:
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "quartiles": [low, high]}


def summary(rate: str, workers: int, taken: dict[str, list[Turn]], failed: dict[str, str]) -> dict[str, Any]:
    """The whole report of one rate."""
    rows: dict[str, Any] = {}
    shares = {name: [t.limit_s / t.s for t in turns] for name, turns in taken.items()}
    for name, turns in taken.items():
        rows[name] = {
            "ms_per_step": 1e3 * median(t.s for t in turns),
            "cpu_ms_per_step": 1e3 * median(t.cpu_s for t in turns),
            "share_of_limit": spread(shares[name]),
            "megabytes_per_step": mean(t.MB for t in turns),
            "mean_period": mean(t.period for t in turns),
        }
        if DDP in shares:  # Of shares, not of seconds: the speed of the machine changes within a round.
            rows[name]["times_ddp"] = spread(
                [own / theirs for own, theirs in zip(shares[name], shares[DDP], strict=True)]
            )
    return {
        "rate": rate,
        "parameters": sum(p.numel() for p in perceptron().parameters()),
        "batch_per_worker": BATCH,
        "workers": workers,
        "cores": os.cpu_count(),
        "rounds": len(next(iter(taken.values()))),
        "limit_ms": 1e3 * median(t.limit_s for turns in taken.values() for t in turns),
        "rows": rows,
        "failed": failed,
    }


def merged(results: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The table, with rows of methods that were measured apart. Each is compared with the limit and the DDP of its own
    turns."""
    together: list[dict[str, Any]] = []
    for one, other in zip(results, others, strict=True):
        rows = {**other["rows"], **one["rows"]}
        ordered = {m.name: rows[m.name] for m in METHODS if m.name in rows}
        together.append({**one, "rows": ordered, "failed": {**one["failed"], **other["failed"]}})
    return together


def table(result: dict[str, Any]) -> Table:
    title = "{rate}: {parameters:,} parameters, {workers} hosts on {cores} cores, {rounds} rounds".format(**result)
    made = Table("", "ms a step", "of the limit", "x DDP", "MB a step", "period", title=title)
    made.caption = (
        "of the limit: its speed over that without communication; in brackets the quartiles; MB: sent by one host; "
        "period: steps between exchanges"
    )
    for column in made.columns[1:]:
        column.justify = "right"
    made.add_row(LIMIT, f"{result['limit_ms']:.0f}", "1", "", "", "")
    for name, row in result["rows"].items():
        cells = [f"{row['ms_per_step']:.0f}"]
        for ratio in (row["share_of_limit"], row.get("times_ddp")):
            cells.append("" if ratio is None else "{:.2f} ({:.2f}-{:.2f})".format(ratio["median"], *ratio["quartiles"]))
        made.add_row(name, *cells, f"{row['megabytes_per_step']:.2f}", f"{row['mean_period']:.3g}")
    for name, why in result["failed"].items():
        made.add_row(name, why if len(why) < 60 else f"{why[:57]}...", "", "", "", "")
    return made


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """A bar for each method, as long as its share of the limit; a panel for each rate."""
    import vl_convert

    values = [
        {"method": name, "rate": result["rate"], "share": row["share_of_limit"]["median"], "ours": "(" in name}
        for result in results
        for name, row in result["rows"].items()
    ]
    encoding: dict[str, Any] = {
        "y": {"field": "method", "type": "nominal", "sort": None, "axis": {"title": None, "labelLimit": 320}},
        "x": {
            "field": "share",
            "type": "quantitative",
            "scale": {"domain": [0, 1.05]},
            "axis": {"title": "speed, of that without communication", "format": "%"},
        },
    }
    colour = {
        "field": "ours",
        "type": "nominal",
        "legend": None,
        "scale": {"domain": [True, False], "range": ["#2f76d2", "#7d8590"]},
    }
    bars = {"mark": {"type": "bar"}, "encoding": {**encoding, "color": colour}}
    figures = {
        "mark": {"type": "text", "align": "left", "dx": 3},
        "encoding": {**encoding, "text": {"field": "share", "format": ".0%"}},
    }
    spec = {
        "data": {"values": values},
        "facet": {"column": {"field": "rate", "type": "nominal", "sort": [r["rate"] for r in results], "title": None}},
        "spec": {"width": 300, "layer": [bars, figures]},
        "background": "white",
    }
    if path.suffix == ".svg":
        path.write_text(vl_convert.vegalite_to_svg(spec, allowed_base_urls=[]))
    else:
        path.write_bytes(vl_convert.vegalite_to_png(spec, scale=2, allowed_base_urls=[]))
