"""tune: a short search for a learning rate, by successive halving (Jamieson & Talwalkar, 2016).

Every rate trains for a few steps on a small part of the data, with several seeds.  The best ones train again for more
steps, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal

from paceline.checked import check_arguments, instance_of
from paceline.engines.place import detect
from paceline.needs import Offers, check
from paceline.report.metric import Better, Metric
from paceline.sim import Cluster
from paceline.strategy import Strategy
from paceline.study.outcome_file import OutcomeFile
from paceline.study.rates import RateRange, checked_rates, own_rate
from paceline.study.trials import LAST, Key, Trials, check_part
from paceline.study.tuned import Rung, Tried, Tuned
from paceline.task import Task
from paceline.training.length import Length

LEAST = round(1 / LAST)  # Steps of a trial: the last quarter of fewer would be less than one.


def tune(
    task: Task,
    strategy: Strategy | str,
    cluster: Cluster | None = None,
    *,
    workers: int | None = None,
    rates: int | Sequence[float] | RateRange = 7,
    budget: str | Length = "0.25 epochs",
    part: float = 0.25,
    seeds: int = 2,
    eta: int = 2,
    finalists: int = 1,
    metric: str | None = None,
    better: Better | None = None,
    results: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Tuned:
    """Find a learning rate for `task` by `strategy`, on a simulated `cluster` or on that many real `workers`.

    Each of the `rates` trains for `budget`, with `seeds` seeds, on a `part` of the data that is drawn for each seed.
    The best 1/`eta` of them train again, `eta` times as long, until at most `finalists` are left.  `rates` may be a
    number: so many over three decades around the task's own.

    The criterion is the mean training loss of the last quarter of a trial, or a `metric` of the task's evaluation at
    its end, of which high values are `better`, or low ones.  A rate has diverged, and cannot be chosen, if any of its
    losses is not finite, or if its mean loss is above that of the initial model by more than the latter's deviation.

    With a file for `results`, a search that was interrupted goes on where it was.  `progress` is called after each
    trial with the number of trials so far, and how many there are at most.
    """
    check_arguments(tune, locals(), {"cluster": (int, "cluster is a Cluster; give workers=... for real workers")})
    strategy = instance_of("tune", "strategy", strategy, Strategy)
    count = _workers(cluster, workers)
    _check_task(task, strategy)
    own = own_rate(task, strategy, count)
    rungs = Rungs(checked_rates(rates, own), _steps(task, budget), seeds, eta, finalists)
    rungs.check(task, budget)
    trials = Trials(task, strategy, cluster, count, own, part, metric)
    _check_data(trials)
    sign = _sign(task, metric, better)
    file = OutcomeFile(None, []) if results is None else OutcomeFile(Path(results), trials.described())
    found = Search(trials, rungs, file, sign, progress).run()
    chosen, *others = sorted(found[-1].equals_of_best(sign), key=lambda one: one.rate)
    return Tuned(
        chosen.rate,
        own,
        found,
        criterion="training loss" if metric is None else metric,
        seeds=seeds,
        where=f"{count} {'real' if cluster is None else 'simulated'} workers",
        undecided=tuple(one.rate for one in others),
        task=task,
        strategy=strategy,
        workers=count,
    )


@dataclass(frozen=True)
class Rungs:
    """The plan of a search: how many rates train for how many steps."""

    rates: tuple[float, ...]
    steps: int  # Of the first rung.
    seeds: int
    eta: int
    finalists: int

    def __post_init__(self) -> None:
        if self.seeds < 2:
            raise ValueError(f"tune(seeds={self.seeds}): one seed does not show what is chance; give at least 2")
        if self.eta < 2:
            raise ValueError(f"tune(eta={self.eta}): every rung keeps one rate of eta, so give at least 2")
        if not 1 <= self.finalists < len(self.rates):
            raise ValueError(
                f"tune(finalists={self.finalists}) with {len(self.rates)} rates: give at least 1, and fewer than there "
                "are rates"
            )

    @property
    def plan(self) -> list[tuple[int, int]]:
        """The steps and the number of rates of each rung.

        >>> Rungs((0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0), steps=30, seeds=2, eta=2, finalists=1).plan
        [(30, 7), (60, 4), (120, 2)]
        """
        found = [(self.steps, len(self.rates))]
        while (left := max(self.finalists, ceil(found[-1][1] / self.eta))) > self.finalists:
            found.append((found[-1][0] * self.eta, left))
        return found

    def check(self, task: Task, budget: object) -> None:
        if self.steps < LEAST:
            raise ValueError(
                f"tune(budget='{budget}'): these are {self.steps} steps, and the criterion is a mean over the last "
                f"quarter of them; give '{LEAST} steps' or, better, some dozens"
            )
        longest = self.plan[-1][0]
        if longest > task.total_steps:
            raise ValueError(
                f"tune(budget='{budget}'): the longest trials would take {longest} steps, and the whole training takes "
                f"{task.total_steps}; give a smaller budget, fewer rates or more finalists"
            )


class Search:
    """A search in progress."""

    def __init__(
        self, trials: Trials, rungs: Rungs, file: OutcomeFile, sign: float, progress: Callable[[int, int], None] | None
    ) -> None:
        self._trials = trials
        self._rungs = rungs
        self._file = file
        self._sign = sign
        self._progress = progress
        self._done = 0
        first = trials.task.seed
        self._seeds = range(first, first + rungs.seeds)
        losses = [trials.first_loss(seed) for seed in self._seeds]
        self._limit = fmean(losses) + stdev(losses) if all(map(isfinite, losses)) else float("inf")

    def run(self) -> tuple[Rung, ...]:
        found: list[Rung] = []
        ranked = list(self._rungs.rates)
        for number, (steps, keep) in enumerate(self._rungs.plan):
            rung = self._rung(number, steps, ranked, keep)
            found.append(rung)
            ranked = [one.rate for one in rung.ranked(self._sign)]
            if not ranked:
                raise self._nothing_learns(rung)
            if number == 0:
                self._check_effect(rung)
            if len(ranked) <= self._rungs.finalists:
                break
        return tuple(found)

    def _rung(self, number: int, steps: int, ranked: Sequence[float], keep: int) -> Rung:
        """Try the best rates so far; if all of them diverge now, the next ones in turn."""
        tried: list[Tried] = []
        for place, rate in enumerate(ranked):
            if place >= keep and not all(one.has_diverged for one in tried):
                break
            tried.append(self._tried(number, rate, steps))
        return Rung(steps, tuple(sorted(tried, key=lambda one: one.rate)))

    def _tried(self, number: int, rate: float, steps: int) -> Tried:
        keys = [Key(rate, seed, steps) for seed in self._seeds]
        for key in keys:
            if key not in self._file.outcomes:
                self._file.add(key, self._trials.run(key), number)
            self._done += 1
            if self._progress is not None:
                total = sum(rates for _, rates in self._rungs.plan) * self._rungs.seeds
                self._progress(self._done, max(total, self._done))
        outcomes = [self._file.outcomes[key] for key in keys]
        values = tuple(one.loss if one.metric is None else one.metric for one in outcomes)
        mean_loss = fmean(one.loss for one in outcomes)
        return Tried(rate, values, mean_loss > self._limit or not all(map(isfinite, (mean_loss, *values))))

    def _nothing_learns(self, rung: Rung) -> ValueError:
        low = rung.tried[0].rate
        return ValueError(
            f"tune(rates={[one.rate for one in rung.tried]}): all of these diverge within {rung.steps} steps, from an "
            f"initial loss of about {self._limit:.4g}; try lower ones, such as RateRange({low / 1000:.3g}, "
            f"{low / 3:.3g}), and look for NaN in the data"
        )

    def _check_effect(self, rung: Rung) -> None:
        sound = [one.values for one in rung.tried if not one.has_diverged]
        if len(sound) > 1 and len(set(sound)) == 1:
            raise ValueError(
                f"tune(rates={list(self._rungs.rates)}): all rates give the same {sound[0][0]:.6g}, so the rate has no "
                f"effect under {type(self._trials.strategy).__name__}; its rule must follow the schedule, and the "
                "schedule must not be 0"
            )


def _workers(cluster: Cluster | None, workers: int | None) -> int:
    if (cluster is None) == (workers is None):
        raise ValueError(
            f"tune(cluster={cluster}, workers={workers}): give a Cluster for the simulator, or workers=... for real "
            "processes"
        )
    if cluster is not None:
        return cluster.workers
    assert workers is not None
    if workers < 1:
        raise ValueError(f"tune(workers={workers}): there must be at least 1 worker")
    place = detect()
    if place is not None and place.world > 1:
        raise ValueError(
            f"tune(workers={workers}) under a launcher that started {place.world}: tune starts its own workers; call "
            "it without a launcher"
        )
    return workers


def _check_task(task: Task, strategy: Strategy) -> None:
    check(strategy, Offers.of_task("tune", task))
    if task.adjust is not None:
        raise ValueError(
            f"tune(Task(adjust={task.adjust})): it changes the rate that is being tried; tune "
            "dataclasses.replace(task, adjust=None)"
        )
    if not isinstance(task.batch, int):
        raise ValueError(
            f"tune(Task(batch={task.batch})): a learning rate belongs to one size of minibatches; tune the task with "
            f"batch={task.first_batch}, and let the rate follow the size by Scaling(base={task.first_batch})"
        )


def _check_data(trials: Trials) -> None:
    if not 0 < trials.part <= 1:
        raise ValueError(f"tune(part={trials.part}): it is a share of the data, above 0 and at most 1")
    if trials.task.samples is not None:
        check_part(trials.part, trials.samples(trials.task.samples), trials.task.first_batch, "a minibatch")


def _steps(task: Task, budget: str | Length) -> int:
    """A budget in steps; epochs are those of all the data."""
    length = Length.of("tune(budget)", budget)
    if length.unit == "steps":
        return ceil(length.value)
    if length.unit == "samples":
        return ceil(length.value / task.first_batch)
    if task.steps_per_epoch is None:
        raise ValueError(f"tune(budget='{length}') with data of each worker's own: epochs differ; give it in steps")
    return ceil(length.value * task.steps_per_epoch)


def _sign(task: Task, metric: str | None, better: Literal["higher", "lower"] | None) -> float:
    """-1 if high values of the criterion are good, otherwise 1."""
    if metric is None:
        if better is not None:
            raise ValueError(f"tune(better={better!r}): it has no effect without a metric, as a low loss is good")
        return 1.0
    known = {} if task.evaluate is None else task.evaluated(task.build())
    if metric not in known:
        raise ValueError(
            f"tune(metric={metric!r}): the task's evaluation returns {', '.join(map(repr, known)) or 'nothing'}"
        )
    direction = better or Metric(metric).better
    if direction is None:
        raise ValueError(f"tune(metric={metric!r}): its name does not say which values are good; give better='higher'")
    return -1.0 if direction == "higher" else 1.0
