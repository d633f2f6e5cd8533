"""The demo: six settings of four strategies on handwritten digits.

All run on eight simulated workers behind a slow link; one of them also runs on real processes.  It shows in a minute
what the library is for: the same accuracy with far fewer bytes and far less waiting.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from paceline.codecs import Fp16, OneBit
from paceline.data import digits
from paceline.report.row import Row
from paceline.run import Run
from paceline.server import Sgd
from paceline.sim import Cluster, LogNormal, simulate
from paceline.strategies import AllReduceSGD, BlockMomentum, ParameterServer, PeriodicAveraging
from paceline.strategies.block_momentum import TooFewSamples
from paceline.strategy import Strategy
from paceline.task import Task

STRATEGIES: dict[str, Strategy] = {
    "AllReduceSGD": AllReduceSGD(),
    "AllReduceSGD, fp16": AllReduceSGD(codec=Fp16()),
    "AllReduceSGD, 1-bit": AllReduceSGD(codec=OneBit()),
    "PeriodicAveraging": PeriodicAveraging(period=8),
    "BlockMomentum": BlockMomentum(period=8),
    "ParameterServer": ParameterServer(rule=Sgd(lr=0.1), servers=2),
}
CLUSTER = Cluster(workers=8, compute=LogNormal("20ms", 0.2), bandwidth="10Mbit/s", latency="5ms")
REAL = "BlockMomentum"
REAL_WORKERS = 2


@dataclass(frozen=True)
class Demo:
    """The task, for a number of epochs."""

    epochs: int = 20

    def task(self) -> Task:
        x, y, test_x, test_y = digits()
        return Task(
            model=lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)),
            loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            data=(x, y),
            batch=128,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.5),
            epochs=self.epochs,
            evaluate=lambda model: {"accuracy": (model(test_x).argmax(1) == test_y).float().mean().item()},
        )

    @property
    def total_steps(self) -> int:
        """The steps of all runs together, for a progress bar."""
        return (len(STRATEGIES) + 1) * self.task().total_steps

    def rows(self, starts: Callable[[str], None], progress: Callable[[int], None]) -> list[Row]:
        """Run everything.  `starts` gets the name of each run, `progress` its steps."""
        from paceline.session.train import train

        warnings.simplefilter("ignore", TooFewSamples)  # The warning is right, but the demo must be short.
        task = self.task()
        runs: dict[str, Run] = {}
        for name, strategy in STRATEGIES.items():
            starts(name)
            runs[name] = simulate(task, strategy, CLUSTER, progress=progress)
        reference = runs["AllReduceSGD"].seconds
        rows = [
            row(name, STRATEGIES[name], run, CLUSTER.workers, reference / run.seconds) for name, run in runs.items()
        ]
        starts(f"{REAL} on {REAL_WORKERS} real processes")
        real = train(task, STRATEGIES[REAL], REAL_WORKERS, progress=progress)
        return [*rows, row(REAL, STRATEGIES[REAL], real, REAL_WORKERS, None, real=True)]


def row(name: str, strategy: Strategy, run: Run, workers: int, speedup: float | None, *, real: bool = False) -> Row:
    """A run as a row of the report."""
    sent = [(span.stop, span.nbytes) for span in run.trace.spans if span.rank < workers]
    curve = [
        (e.time, sum(nbytes for stop, nbytes in sent if stop <= e.time) / workers, e.values)
        for e in run.trace.evaluations
    ]
    return Row(
        name,
        repr(strategy),
        run.final,
        run.seconds,
        sum(n for _, n in sent) / workers,
        speedup,
        curve,
        real,
        run.trace.staleness_counts,
    )
