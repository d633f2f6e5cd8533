"""Hogwild! on one and on two real processes: steps a second, and the cost of lost updates.

Dense: a perceptron on Fashion-MNIST. Sparse: logistic regression on 20 of 50,000 features a sample, where a step
touches only its own rows. Three contestants take turns in rounds: one process, two processes, and two processes that
share nothing, which show the limit of the machine. All have one thread each, see as many samples in minibatches of the
same size, and start from the same parameters. Ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from benchmarks._frame import accuracy_of, markdown, show, spread, table
from benchmarks.accuracy import loss, perceptron, pixels
from paceline.data import fashion_mnist

MINIBATCH = 32
FEATURES, ACTIVE, SAMPLES, TESTED = 50_000, 20, 60_000, 10_000


def dense(workers: int, seed: int, folder: Path | None) -> pl.Task:
    data = fashion_mnist.load(folder)
    return pl.Task(
        model=perceptron,
        loss=loss,
        data=(pixels(data.images), data.labels.long()),
        batch=workers * MINIBATCH,
        optimizer=partial(torch.optim.SGD, lr=0.05),
        epochs=2,
        evaluate=accuracy_of(pixels(data.test_images), data.test_labels.long()),
        evaluate_every=10**9,
        seed=seed,
    )


class Linear(nn.Module):
    """A weight for each class and feature. Only those of a sample's features get a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(FEATURES, 2, mode="sum", sparse=True)
        nn.init.zeros_(self.table.weight)

    def forward(self, features: Tensor) -> Tensor:
        return self.table(features)


def cross_entropy(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def sparse(workers: int, seed: int, folder: Path | None) -> pl.Task:
    g = torch.Generator().manual_seed(seed)
    truth = torch.randn(FEATURES, generator=g)
    # Few features are frequent and most are rare, as words are.
    features = (FEATURES * torch.rand(SAMPLES + TESTED, ACTIVE, generator=g).pow(3)).long()
    labels = (truth[features].sum(1) + torch.randn(SAMPLES + TESTED, generator=g) > 0).long()
    (x, tested), (y, expected) = features.split([SAMPLES, TESTED]), labels.split([SAMPLES, TESTED])
    return pl.Task(
        model=Linear,
        loss=cross_entropy,
        data=(x, y),
        batch=workers * MINIBATCH,
        optimizer=partial(torch.optim.SGD, lr=0.5),
        epochs=3,
        evaluate=accuracy_of(tested, expected),
        evaluate_every=10**9,
        seed=seed,
    )


PROBLEMS = {"dense": dense, "sparse": sparse}


def steps_per_second(run: pl.Run) -> float:
    """The rate of all workers together, from the first finished step to the last, without the start of processes."""
    times = sorted(p.time for p in run.trace.points if p.loss is not None)
    return (len(times) - 1) / (times[-1] - times[0])


class Apart(pl.Strategy):
    """Every worker trains its own model."""

    needs = pl.Needs(shared_memory=True)

    async def worker(self, w: pl.Replica) -> None:
        for _ in w.steps_alone():
            await w.local_step()


CASES: dict[str, tuple[int, pl.Strategy]] = {"1": (1, pl.Hogwild()), "2": (2, pl.Hogwild()), "apart": (2, Apart())}


def one_round(problem: str, seed: int, folder: Path | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    order = list(CASES)
    for case in order[seed % len(order) :] + order[: seed % len(order)]:
        workers, strategy = CASES[case]
        run = pl.train(PROBLEMS[problem](workers, seed, folder), strategy, workers=workers)
        found[case] = {"steps_per_s": steps_per_second(run), "accuracy": run.final["accuracy"]}
    return found


def row(problem: str, rounds: list[dict[str, Any]]) -> list[str]:
    cells = [problem, *(f"{median(r[case]['steps_per_s'] for r in rounds):,.0f}" for case in CASES)]
    cells += [ratio(rounds, "2", "1"), ratio(rounds, "2", "apart")]
    return cells + [spread([r[n]["accuracy"] for r in rounds], "{:.2f}") for n in "12"]


def ratio(rounds: list[dict[str, Any]], case: str, to: str) -> str:
    ratios = [r[case]["steps_per_s"] / r[to]["steps_per_s"] for r in rounds]
    q = quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return f"{q[1]:.2f} ({q[0]:.2f}-{q[2]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="the folder of Fashion-MNIST's four IDX files")
    parser.add_argument("--rounds", type=int, default=9, help="runs of one and of two processes")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {problem: [] for problem in PROBLEMS}
    for seed in range(args.rounds):
        for problem, found in results.items():
            found.append(one_round(problem, seed, args.data))
            print(f"{problem}, round {seed}: {found[-1]}", file=sys.stderr, flush=True)
    head = ["", *(f"{case}: steps/s" for case in ("1 process", "2 processes", "2 apart")), "2 : 1", "2 : apart"]
    head += [f"{case}: accuracy, %" for case in ("1 process", "2 processes")]
    lines = [row(problem, rounds) for problem, rounds in results.items()]
    title = f"Hogwild! on {os.cpu_count()} cores, {args.rounds} rounds"
    show(markdown(head, lines) if args.markdown else table(head, lines, title=title), width=140)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
