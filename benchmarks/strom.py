"""The bytes of an update of Strom's method at its thresholds, with 14.6 million parameters; and its accuracy.

The paper gives 0.21 MB at a threshold of 2 and 4.5 KB at 15, for a speech model of that size whose gradients are sums
over a minibatch. Here it is a perceptron of that size on Fashion-MNIST. Its loss is a sum over the worker's samples
too, so the thresholds are in the same units. But the gradients themselves differ, so only the order of the sizes can be
compared.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from paceline.codecs.threshold import Header
from paceline.data import fashion_mnist
from paceline.study.demo import CLUSTER, Demo

SIZES = (784, 2510, 2510, 2510, 10)
WORKERS, SAMPLES = 4, 128  # Of one gradient.
RATE = 0.05  # Of a mean over all samples of all workers.
SOURCE = {2.0: (0.21e6, 52_500), 15.0: (4.5e3, 1_125)}  # Bytes and values of an update.


@dataclass(frozen=True)
class Weighed(pl.codecs.Threshold):
    """A threshold codec that records each message: its number of values, its bytes, and later its bytes with a Rice
    code and with a code by frequencies."""

    first: int = 0  # The first message whose coded sizes are recorded.
    notes: list[tuple[int, int, int, int]] = field(
        default_factory=list[tuple[int, int, int, int]], repr=False, compare=False
    )

    def encode(self, x: Tensor, rng: torch.Generator | None = None) -> Tensor:
        data = super().encode(x, rng)
        coders = (pl.codecs.Threshold(self.tau, entropy=True), pl.codecs.Entropy(pl.codecs.Threshold(self.tau)))
        rice, frequencies = (c.encode(x).numel() if len(self.notes) >= self.first else 0 for c in coders)
        self.notes.append((Header.of(data).sent, data.numel(), rice, frequencies))
        return data


def values(state: Any, slot: str) -> dict[str, Any]:
    """The content of one slot of a saved state."""
    return state["slots"][slot]["values"]


def pixels(images: Tensor) -> Tensor:
    return (images.float().view(-1, 784) / 255 - 0.2860) / 0.3530


def perceptron(linear: Callable[[int, int], nn.Module] = nn.Linear) -> nn.Module:
    layers = [module for a, b in pairwise(SIZES) for module in (linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Ledger:
    """Rounds layer values and gradients to so few bits that all sums of them are exact, and adds up all gradients."""

    def __init__(self) -> None:
        self.totals: list[Tensor] = []

    def model(self) -> nn.Module:
        self.totals.clear()
        return perceptron(self.linear)

    def linear(self, inputs: int, outputs: int) -> nn.Module:
        layer = Noted(inputs, outputs, [len(self.totals), len(self.totals) + 1], self)
        for p in layer.parameters():
            p.data.mul_(2**20).round_().div_(2**20)
            self.totals.append(torch.zeros(p.numel(), dtype=torch.float64))
        return layer

    def __deepcopy__(self, memo: Any) -> Ledger:
        return self  # All workers have one.


class Noted(nn.Linear):
    def __init__(self, inputs: int, outputs: int, places: list[int], ledger: Ledger) -> None:
        super().__init__(inputs, outputs)
        self.places, self.ledger = places, ledger

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = (
            NotingGradient.apply(p, self.ledger.totals[i]) for p, i in zip(self.parameters(), self.places, strict=True)
        )
        return F.linear(input, weight, bias)


class NotingGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Tensor) -> Tensor:
        ctx.total = total
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rounded = g.mul(2**10).round().div(2**10)
        ctx.total.add_(rounded.view(-1))
        return rounded, None


def speech_sized(
    steps: int, workers: int, model: Callable[[], nn.Module] = perceptron, path: Path | None = None
) -> pl.Task:
    data = fashion_mnist.load(path)
    return pl.Task(
        model=model,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="sum"),
        data=(pixels(data.images), data.labels.long()),
        batch=SAMPLES * workers,
        steps=steps,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),  # Strom has its own rate.
    )


def sizes(steps: int, path: Path | None) -> list[dict[str, Any]]:
    """The updates of the last quarter of a run, when the residuals have their usual size."""
    rows: list[dict[str, Any]] = []
    for tau in SOURCE:
        messages = WORKERS * steps
        codec = Weighed(tau=tau, limit=math.inf, first=messages - messages // 4)
        task = speech_sized(steps, WORKERS, path=path)
        run = pl.simulate(task, pl.Strom(codec, lr=RATE / (SAMPLES * WORKERS)), pl.Cluster(WORKERS), strict=False)
        points = sorted((p.time, p.loss) for p in run.trace.points if p.loss is not None)
        quarters = [points[: len(points) // 4], points[-len(points) // 4 :]]
        last = codec.notes[codec.first :]
        rows.append(
            {
                "tau": tau,
                "steps": steps,
                "numel": run.params.numel(),
                "loss": [mean(loss for _, loss in quarter) / SAMPLES for quarter in quarters],
                **dict(zip(("sent", "words", "rice", "frequencies"), map(mean, zip(*last, strict=True)), strict=True)),
                "by step": [mean(n[0] for n in codec.notes[i * WORKERS : (i + 1) * WORKERS]) for i in range(steps)],
            }
        )
    return rows


def mass(steps: int, path: Path | None) -> dict[str, Any]:
    """Whether two models of that size end exactly at the sum of all gradients, minus the residuals."""
    ledger, rate, codec = Ledger(), 2.0**-14, Weighed(tau=2.0, limit=math.inf)
    task = speech_sized(steps, 2, ledger.model, path)
    start = torch.cat([p.detach().view(-1) for p in task.build().parameters()]).double()
    run = pl.simulate(task, pl.Strom(codec, lr=rate), pl.Cluster(2), strict=False)
    residuals = [values(state, "codec.residuals")["residual"].double() for state in run.states]
    expected = start - rate * (torch.cat(ledger.totals) - residuals[0] - residuals[1])
    models = [values(state, "model")["params"].double() for state in run.states]
    return {
        "steps": steps,
        "values": expected.numel(),
        "values that moved": int((models[0] != start).sum()),
        "values sent": sum(note[0] for note in codec.notes),
        "values that are not exact": [int((m != expected).sum()) for m in models],
        "waiting in residuals": float(residuals[0].abs().sum() + residuals[1].abs().sum()),
    }


def accuracy(epochs: int) -> list[dict[str, Any]]:
    """The demo's task and cluster."""
    workers = CLUSTER.workers
    methods: dict[str, pl.Strategy] = {
        "AllReduceSGD()": pl.AllReduceSGD(),
        "Gossip()": pl.Gossip(),
        "Gossip(Exponential())": pl.Gossip(pl.topologies.Exponential()),
        "Gossip(RandomPairs())": pl.Gossip(pl.topologies.RandomPairs()),
        "Strom(None, lr=0.2/8)": pl.Strom(None, lr=0.2 / workers),
        "Strom(Threshold(0.01), lr=0.2/8)": pl.Strom(pl.codecs.Threshold(tau=0.01, limit=math.inf), lr=0.2 / workers),
        "Strom(Threshold(0.05), lr=0.2/8)": pl.Strom(pl.codecs.Threshold(tau=0.05, limit=math.inf), lr=0.2 / workers),
        "Strom(Threshold(0.05), lr=0.2/8, few_steps=24)": pl.Strom(
            pl.codecs.Threshold(tau=0.05, limit=math.inf), lr=0.2 / workers, few=2, few_steps=24
        ),
        "Strom(Threshold(0.2), lr=0.2/8)": pl.Strom(pl.codecs.Threshold(tau=0.2, limit=math.inf), lr=0.2 / workers),
    }
    rows: list[dict[str, Any]] = []
    for name, strategy in methods.items():
        run = pl.simulate(Demo(epochs).task(), strategy, CLUSTER)
        sent = sum(run.trace.bytes_sent(rank) for rank in range(workers)) / workers
        rows.append({"method": name, "accuracy": run.final["accuracy"], "bytes": sent, "seconds": run.seconds})
    return rows


def print_all(found: dict[str, Any]) -> None:
    console = Console(width=140)
    if "sizes" in found:
        table = Table(
            "tau",
            "values",
            "of all",
            "as words",
            "the source's",
            "in a Rice code",
            "by frequencies",
            "bits a value",
            "loss",
        )
        for row in found["sizes"]:
            theirs = SOURCE[row["tau"]][0]
            table.add_row(
                f"{row['tau']:g}",
                f"{row['sent']:,.0f}",
                f"{row['sent'] / row['numel']:.3%}",
                *(f"{row[key] / 1e3:,.1f} kB" for key in ("words",)),
                f"{theirs / 1e3:,.1f} kB",
                *(f"{row[key] / 1e3:,.1f} kB" for key in ("rice", "frequencies")),
                f"{8 * row['rice'] / max(1, row['sent']):.1f}",
                " to ".join(f"{loss:.2f}" for loss in row["loss"]),
            )
        console.print(table)
    if "mass" in found:
        console.print(found["mass"])
    if "accuracy" in found:
        table = Table("", "test accuracy", "MB a worker", "virtual s")
        for row in found["accuracy"]:
            table.add_row(row["method"], f"{row['accuracy']:.1%}", f"{row['bytes'] / 1e6:.2f}", f"{row['seconds']:.1f}")
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=("sizes", "mass", "accuracy"), action="append", help="only this one")
    parser.add_argument("--steps", type=int, default=60, help="steps of the large model")
    parser.add_argument("--epochs", type=int, default=20, help="epochs of the small task")
    parser.add_argument("--data", type=Path, help="the folder of Fashion-MNIST's files")
    parser.add_argument("--json", type=Path, help="the file to which the figures are added")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    for part in args.part or ("sizes", "mass", "accuracy"):
        if part == "accuracy":
            found[part] = accuracy(args.epochs)
        else:
            found[part] = sizes(args.steps, args.data) if part == "sizes" else mass(4, args.data)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))
    print_all(found)


if __name__ == "__main__":
    main()
