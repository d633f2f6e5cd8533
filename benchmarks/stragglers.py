"""Samples a second when one of four workers is five times slower: simulated, and on real processes.

The limit is the sum of the workers' own speeds: samples over the time of their gradients, in the same run. A gradient's
time is a sleep, so four workers on few cores are as fast as on four machines. In the simulator it is the same in
virtual time, over a link of 10 Gbit/s.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl

WORKERS, SLOW, FACTOR = 4, 3, 5
GRADIENT_S = 0.02
METHODS: dict[str, pl.Strategy] = {
    "AllReduceSGD()": pl.AllReduceSGD(),
    "PeriodicAveraging(period=8)": pl.PeriodicAveraging(period=8),
    "ParameterServer()": pl.ParameterServer(rule=pl.rules.Sgd(lr=0.05)),
    "StaleSynchronous(bound=4)": pl.StaleSynchronous(lr=0.05, bound=4),
    "ASGD(period=4)": pl.ASGD(period=4),
    "ASGD(period=4, pipeline=True)": pl.ASGD(period=4, pipeline=True),
}


def task(steps: int, *, sleeps: bool) -> pl.Task:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(4000, 64, generator=generator), torch.randint(10, (4000,), generator=generator)

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        if sleeps:
            slow = multiprocessing.current_process().name == f"worker-{SLOW}"
            time.sleep(GRADIENT_S * (FACTOR if slow else 1))
        return F.cross_entropy(model(batch[0]), batch[1])

    return pl.Task(
        model=lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)),
        loss=loss,
        data=(inputs, labels),
        batch=64,
        steps=steps,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    )


def speeds(trace: pl.Trace) -> dict[str, Any]:
    """The speed of all workers together, and the sum of their own speeds."""
    own: list[float] = []
    total, begin, end = 0, float("inf"), 0.0
    for rank in range(WORKERS):
        spans = [s for s in trace.spans if s.rank == rank and s.kind == "gradient"]
        samples = sum(p.samples for p in trace.points if p.rank == rank)
        own.append(samples / sum(s.stop - s.start for s in spans))
        total, begin, end = total + samples, min(begin, spans[0].start), max(end, spans[-1].stop)
    return {"samples_per_s": total / (end - begin), "own": own, "share": total / (end - begin) / sum(own)}


def measured(steps: int) -> list[dict[str, Any]]:
    cluster = pl.Cluster(
        workers=WORKERS, compute=[GRADIENT_S * (FACTOR if rank == SLOW else 1) for rank in range(WORKERS)]
    )
    rows: list[dict[str, Any]] = []
    for name, strategy in METHODS.items():
        simulated = speeds(pl.simulate(task(steps, sleeps=False), strategy, cluster).trace)
        real = speeds(pl.train(task(steps, sleeps=True), strategy, workers=WORKERS).trace)
        rows += [
            {"method": name, "where": "simulated", **simulated},
            {"method": name, "where": "real processes", **real},
        ]
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    made = Table("", "", "samples/s", "of the sum of the workers' own speeds")
    for column in made.columns[2:]:
        column.justify = "right"
    for row in rows:
        made.add_row(row["method"], row["where"], f"{row['samples_per_s']:,.0f}", f"{row['share']:.2f}")
    return made


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import vl_convert

    places = ["simulated", "real processes"]
    encoding: dict[str, Any] = {
        "y": {"field": "method", "type": "nominal", "sort": None, "axis": {"title": None, "labelLimit": 320}},
        "yOffset": {"field": "where", "sort": places},
        "x": {
            "field": "share",
            "type": "quantitative",
            "scale": {"domain": [0, 1]},
            "axis": {"title": "samples a second, of the sum of the workers' own speeds", "format": "%"},
        },
    }
    colour = {"field": "where", "type": "nominal", "sort": places, "legend": {"title": None, "orient": "bottom"}}
    bars = {
        "mark": {"type": "bar"},
        "encoding": {**encoding, "color": {**colour, "scale": {"range": ["#2f76d2", "#d95f02"]}}},
    }
    words = {
        "mark": {"type": "text", "align": "left", "dx": 3},
        "encoding": {**encoding, "text": {"field": "share", "format": ".0%"}},
    }
    values = [{"method": r["method"], "where": r["where"], "share": r["share"]} for r in rows]
    spec = {"data": {"values": values}, "width": 420, "layer": [bars, words], "background": "white"}
    if path.suffix == ".svg":
        path.write_text(vl_convert.vegalite_to_svg(spec, allowed_base_urls=[]))
    else:
        path.write_bytes(vl_convert.vegalite_to_png(spec, scale=2, allowed_base_urls=[]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a short run")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--plot", type=Path, help="where to write a chart, .svg or .png")
    args = parser.parse_args()
    rows = measured(60 if args.quick else 300)
    Console(width=120).print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))
    if args.plot:
        draw(rows, args.plot)


if __name__ == "__main__":
    main()
