"""Trials: short runs of a task, on a part of its data, each with another learning rate and seed.

A trial is the training in miniature: its schedule goes through the same factors in fewer steps.  So a warm-up does not
fill it, and the rate is as low at its end as it will be at the end of the training.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.families.averaging import NonFiniteReplica
from paceline.families.elastic import UnstableElastic
from paceline.session.settings import Settings, described, described_task
from paceline.session.train import train
from paceline.sim import Cluster, simulate
from paceline.strategies.block_momentum import TooFewSamples
from paceline.strategy import Strategy
from paceline.stripes import stripe_of
from paceline.study.rates import multiplied, schedule_of
from paceline.task import Task, Trainee
from paceline.trace import Trace
from paceline.worker.batch import NonFiniteGradient

LAST = 0.25  # The share of a trial, at its end, whose losses count.
# A rate that is too high is a result, not a mistake; and a part of the data is small by design.
EXPECTED = (NonFiniteGradient, NonFiniteReplica, UnstableElastic, TooFewSamples)


class Key(NamedTuple):
    """What distinguishes a trial from the others of a search."""

    rate: float
    seed: int
    steps: int


class Outcome(NamedTuple):
    """What came out of a trial: its mean training loss at the end, and a metric if one was asked for.

    The loss is infinite if any loss of the trial was not finite.
    """

    loss: float
    metric: float | None


@dataclass(frozen=True)
class Trials:
    """How trials are run: on a simulated `cluster`, or on as many forked `workers`."""

    task: Task
    strategy: Strategy
    cluster: Cluster | None
    workers: int
    own: float  # The task's learning rate.
    part: float
    metric: str | None

    def run(self, key: Key) -> Outcome:
        task = self.task_of(key)
        try:
            trace, final = self._trained(task, key)
        except ValueError as error:  # Some methods need a certain number of steps.
            raise ValueError(f"tune: a trial of {key.steps} steps: {error}") from error
        return Outcome(last_loss(trace, key.steps), None if self.metric is None else final[self.metric])

    def _trained(self, task: Task, key: Key) -> tuple[Trace, dict[str, float]]:
        with warnings.catch_warnings():
            for expected in EXPECTED:
                warnings.simplefilter("ignore", expected)
            if self.cluster is None:
                run = train(task, self.strategy, self.workers)
            else:
                # The times of an asynchronous method are random too.
                cluster = replace(self.cluster, seed=self.cluster.seed + key.seed - self.task.seed)
                run = simulate(task, self.strategy, cluster, strict=False)
        return run.trace, run.final

    def task_of(self, key: Key) -> Task:
        """The task of a trial."""
        whole = schedule_of(self.task, self.strategy, self.workers)
        total = self.task.total_steps

        def schedule(step: int) -> float:
            assert whole is not None
            return whole(step * total // key.steps)

        short = replace(
            self.task,
            data=self._data(key.seed),
            steps=key.steps,
            epochs=None,
            schedule=None if whole is None else schedule,
            evaluate=self.task.evaluate if self.metric is not None else None,
            evaluate_every=key.steps,  # Only at the end.
            seed=key.seed,
        )
        return multiplied(short, self.strategy, self.workers, key.rate / self.own)

    def _data(self, seed: int) -> Sequence[Tensor] | Callable[[int, int], Sequence[Tensor]]:
        """The part of the data for a seed: the same for all rates."""
        if callable(self.task.data):
            return self._own_data(self.task.data, seed)
        data = self.task.data
        return data if self.part == 1 else drawn(data, self.samples(len(data[0])), seed)

    def _own_data(
        self, data_of: Callable[[int, int], Sequence[Tensor]], seed: int
    ) -> Callable[[int, int], Sequence[Tensor]]:
        """The same for data of each worker's own, which only that worker reads."""

        def part_of(rank: int, workers: int) -> Sequence[Tensor]:
            data = data_of(rank, workers)
            share = stripe_of(rank, self.task.first_batch, workers)
            samples = self.samples(len(data[0]))
            check_part(self.part, samples, share.stop - share.start, f"worker {rank}'s part of a minibatch")
            return drawn(data, samples, seed * 1_000_003 + rank)

        return part_of

    def samples(self, of: int) -> int:
        """How many samples the part of a data set has."""
        return round(self.part * of)

    def first_loss(self, seed: int) -> float:
        """The loss of the initial model on the first minibatch, with whatever rate."""
        task = self.task_of(Key(self.own, seed, 1))
        trainee = Trainee(task, task.build(), 0, self.workers if task.has_own_data else 1)
        batch = trainee.draw(0)
        assert batch is not None  # A part is at least a minibatch.
        trainee.backward(batch)
        assert trainee.loss is not None
        return trainee.loss

    def described(self) -> Settings:
        """What must be the same for the trials of two searches to have the same outcome."""
        model = self.task.build()
        optimizer = Trainee(self.task, self.task.build(), 0, self.workers).optimizer
        where = f"{self.workers} real workers" if self.cluster is None else repr(self.cluster)
        given = {"the workers": where, "part": self.part, "metric": self.metric}
        found = described(self.strategy, optimizer, given) + described_task(self.task, model)
        # Functions are compared by what they return, to four digits: processors round differently.
        found.append(("the loss of the initial model", f"{self.first_loss(self.task.seed):.4g}"))
        if self.metric is not None:
            found.append((f"the {self.metric} of the initial model", f"{self.task.evaluated(model)[self.metric]:.4g}"))
        return found


def check_part(part: float, samples: int, least: int, what: str) -> None:
    if samples < max(1, least):
        raise ValueError(
            f"tune(part={part:g}): a part of {samples} samples is smaller than {what}, which has {least}; give a "
            "larger part"
        )


def drawn(data: Sequence[Tensor], samples: int, seed: int) -> Sequence[Tensor]:
    """So many samples of a data set, by chance."""
    chosen = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(seed))[:samples]
    return [values[chosen.to(values.device)] for values in data]


def last_loss(trace: Trace, steps: int) -> float:
    """The mean training loss over the last quarter of a run; infinite if any loss was not finite.

    >>> trace = Trace()
    >>> for step, loss in enumerate([9.0, 5.0, 3.0, 1.0]): trace.point(1.0, 0, step, 8, loss)
    >>> last_loss(trace, 4)
    1.0
    """
    points = [(point.step, point.loss, point.samples) for point in trace.points if point.loss is not None]
    if not all(isfinite(loss) for _, loss, _ in points):
        return inf
    last = [(loss, samples) for step, loss, samples in points if step >= steps - ceil(LAST * steps)]
    return sum(loss * samples for loss, samples in last) / sum(samples for _, samples in last)
