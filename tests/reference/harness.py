"""The harness of all comparisons: the problems, the simulator, and the difference.

It is the only file of this folder that imports the package; the references share nothing with it but the minibatches.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import nn

import paceline as pl
from tests.laws.tasks import instant, numbers
from tests.reference import sync_problem

Rate = Callable[[int], float]
LEAST = 0.05  # How far the model must move at least, so that a comparison means something.


class Logistic(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-0.5, 0.5, numel, dtype=torch.float64))


def logistic(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.softplus(-y * (x @ model.w)).mean()


def squared(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return 0.5 * (model(x) - y).square().sum(1).mean()


def sgd(**settings: Any) -> Callable[..., torch.optim.Optimizer]:
    return partial(torch.optim.SGD, **settings)


def vector_of(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()


def simulated(task: pl.Task, strategy: pl.Strategy, workers: int, **more: Any) -> pl.Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Some settings of the papers warn about a short run.
        return pl.simulate(task, strategy, instant(workers, **more))


def relative(found: Any, expected: Any) -> float:
    """The largest difference, relative to the largest value."""
    found = np.asarray(found, dtype=np.float64)
    expected = np.asarray(expected, dtype=np.float64)
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def moved(found: Any, expected: np.ndarray, first: np.ndarray) -> float:
    """The largest difference, relative to how far the model has moved."""
    gone = expected - first
    assert np.abs(gone).max() > LEAST, "the model has hardly moved"
    return relative(np.asarray(found) - first, gone)


class Together:
    """A task on minibatches that all workers share, in float64.  `batches[k][i]` is worker i's part of step k."""

    def __init__(self, task: pl.Task, workers: int, gradient: Callable[..., Any]) -> None:
        self.task = task
        self.workers = workers
        self.gradient = gradient
        self.start = vector_of(task.build())
        self.batches = [self.parts(k, workers) for k in range(task.total_steps)]

    def parts(self, step: int, workers: int) -> list[Any]:
        return [tuple(t.numpy() for t in self.task.part(step, i, workers)) for i in range(workers)]

    def run(self, strategy: pl.Strategy, **cluster: Any) -> pl.Run:
        return simulated(self.task, strategy, self.workers, **cluster)

    def of(self, reference: Callable[..., Any], *given: Any, **settings: Any) -> Any:
        return reference(self.start, self.batches, self.gradient, *given, **settings)

    def difference(self, run: pl.Run, expected: np.ndarray) -> float:
        return moved(run.params, expected, self.start)

    def compare(self, strategy: pl.Strategy, reference: Callable[..., Any], *given: Any, **settings: Any) -> float:
        return self.difference(self.run(strategy), self.of(reference, *given, **settings))


def sync_steps(run: pl.Run, task: pl.Task) -> list[int]:
    """The steps after which workers met.  The last one is after the data has ended: it belongs to the last step."""
    return [min(sync.step, task.total_steps - 1) for sync in run.trace.syncs if sync.rank == 0]


def classes(
    optimizer: Callable[..., torch.optim.Optimizer],
    workers: int,
    *,
    steps: int,
    batch: int = 12,
    numel: int = 20,
    samples: int = 0,
    scale: float = 1.0,
    **more: Any,
) -> Together:
    """Logistic regression with two classes, +1 and -1, whose loss is multiplied by `scale`."""
    samples = samples or 5 * batch
    x = numbers(samples, numel, seed=2)
    y = (x @ numbers(numel, seed=3) + numbers(samples, seed=4)).sign()
    loss = lambda model, batch: scale * logistic(model, batch)  # noqa: E731
    task = pl.Task(lambda: Logistic(numel), loss, [x, y], batch, optimizer, steps=steps, **more)
    return Together(task, workers, lambda w, x, y: scale * sync_problem.logistic_gradient(w, x, y))


def linear(
    optimizer: Callable[..., torch.optim.Optimizer], workers: int, *, steps: int, inputs: int = 12, outputs: int = 10
) -> Together:
    """Linear regression: the model is a matrix of `outputs` x `inputs` and a bias."""
    x = numbers(60, inputs, seed=2)
    y = x @ numbers(inputs, outputs, seed=3) + numbers(60, outputs, seed=4)

    task = pl.Task(lambda: nn.Linear(inputs, outputs).double(), squared, [x, y], 12, optimizer, steps=steps)
    return Together(task, workers, sync_problem.linear_gradient)


class Apart:
    """Logistic regression on workers of different speed, each with its own data, and messages that take no time.

    `gradient(w, j, k)` is the mean gradient of worker j's minibatch k.
    """

    NUMEL = 20
    SAMPLES = 8  # Of a worker's minibatch.
    LR = 0.3

    def __init__(self, steps: int, seconds: tuple[float, ...], *, mu: float = 0.0, rate: Rate | None = None) -> None:
        self.steps = steps
        self.seconds = seconds
        self.rate = rate
        self.first = np.linspace(-0.5, 0.5, self.NUMEL)
        self.task = pl.Task(
            self.model,
            lambda model, batch: nn.functional.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), batch[1]),
            self.data,
            self.SAMPLES * len(seconds),
            sgd(lr=self.LR, momentum=mu),
            steps=steps,
            schedule=rate,
        )
        parts = [[self.task.part(k, j, len(seconds)) for k in range(steps)] for j in range(len(seconds))]
        self.parts = [[tuple(t.numpy() for t in part) for part in own] for own in parts]

    def model(self) -> nn.Module:
        model = nn.Linear(self.NUMEL, 1, bias=False).double()
        with torch.no_grad():
            model.weight.copy_(torch.from_numpy(self.first))
        return model

    def data(self, rank: int, workers: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(7 * self.SAMPLES, self.NUMEL, generator=generator, dtype=torch.float64)
        y = (x.sum(1) + torch.randn(len(x), generator=generator, dtype=torch.float64) > 0).double()
        return [x, y]

    def gradient(self, w: Any, j: int, k: int) -> Any:
        x, y = self.parts[j][k]
        return x.T @ (1 / (1 + np.exp(-x @ w)) - y) / len(y)

    def difference(self, strategy: pl.Strategy, expected: np.ndarray) -> float:
        run = simulated(self.task, strategy, len(self.seconds), compute=self.seconds)
        return moved(run.params, expected, self.first)

    def compare(self, strategy: pl.Strategy, reference: Callable[..., Any], **settings: Any) -> float:
        scheduled = {} if self.rate is None else {"rate": self.rate}
        expected = reference(self.first, self.gradient, self.seconds, self.steps, **settings, **scheduled)
        return self.difference(strategy, expected)


@lru_cache
def apart(steps: int, seconds: tuple[float, ...], mu: float = 0.0, rate: Rate | None = None) -> Apart:
    """The same problem for all rows that want it."""
    return Apart(steps, seconds, mu=mu, rate=rate)
