"""Tuned: what a search over learning rates has found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from io import StringIO
from math import isfinite, nan
from statistics import fmean, stdev

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.strategy import Strategy
from paceline.study.rates import multiplied
from paceline.task import Task


@dataclass(frozen=True)
class Tried:
    """A rate in a rung: the criterion of each seed, infinite or NaN where the trial diverged."""

    rate: float
    values: tuple[float, ...]
    has_diverged: bool

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def spread(self) -> float:
        """The deviation over the seeds; NaN if a value is not finite."""
        return stdev(self.values) if all(map(isfinite, self.values)) else nan

    def differs_from(self, other: Tried) -> bool:
        """Whether the mean difference from another rate is more than its deviation, both taken seed by seed.

        >>> low, high = Tried(0.1, (2.0, 3.0), False), Tried(1.0, (2.1, 3.2), False)
        >>> high.differs_from(low), high.differs_from(Tried(1.0, (2.3, 3.1), False))
        (True, False)
        """
        gaps = [mine - theirs for mine, theirs in zip(self.values, other.values, strict=True)]
        return abs(fmean(gaps)) > stdev(gaps)


@dataclass(frozen=True)
class Rung:
    """The rates that were tried for so many steps, from the lowest to the highest."""

    steps: int
    tried: tuple[Tried, ...]

    def ranked(self, sign: float) -> list[Tried]:
        """Those that have not diverged, the best first; `sign` is -1 if high values are good."""
        sound = [one for one in self.tried if not one.has_diverged]
        return sorted(sound, key=lambda one: (sign * one.mean, one.rate))

    def equals_of_best(self, sign: float) -> tuple[Tried, ...]:
        """The best rate and those that do not differ from it by more than the spread over the seeds, the best first."""
        best, *others = self.ranked(sign)
        return (best, *(one for one in others if not one.differs_from(best)))


@dataclass(frozen=True)
class Tuned:
    """The `rate` that was chosen, and what was seen of each rate on the way.

    `is_at_edge` says that it is the lowest or highest of all that were tried: one beyond it may be better.
    `undecided` are the other rates of the last rung that may be as good.
    """

    rate: float
    own: float  # The task's rate.
    rungs: tuple[Rung, ...]
    criterion: str
    seeds: int
    where: str
    undecided: tuple[float, ...]
    task: Task = field(repr=False)
    strategy: Strategy = field(repr=False)
    workers: int = field(repr=False)

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(one.rate for one in self.rungs[0].tried)

    @property
    def is_at_edge(self) -> bool:
        return self.rate in (self.rates[0], self.rates[-1])

    @property
    def share(self) -> float:
        """What the search costs: its steps, by those of one training of the task."""
        return sum(rung.steps * len(rung.tried) for rung in self.rungs) * self.seeds / self.task.total_steps

    def task_with(self, rate: float | None = None) -> Task:
        """The task with this learning rate, by default the chosen one."""
        chosen = self.rate if rate is None else rate
        if not 0 < chosen < float("inf"):
            raise ValueError(f"task_with({rate}): a learning rate is positive and finite")
        return multiplied(self.task, self.strategy, self.workers, chosen / self.own)

    def verdict(self) -> str:
        """The choice in words."""
        text = (
            f"Rate {self.rate:g}, of {len(self.rates)} from {self.rates[0]:g} to {self.rates[-1]:g}; the search takes "
            f"{self.share:.2g} times the steps of the training."
        )
        if self.undecided:
            others = " and ".join(f"{rate:g}" for rate in self.undecided)
            text += (
                f"  Over {self.seeds} seeds it does not differ from {others} by more than the spread; it is the lowest."
            )
        if self.is_at_edge:
            end, beyond = ("lowest", "lower") if self.rate == self.rates[0] else ("highest", "higher")
            text += f"  It is the {end} that was tried: a {beyond} one may be better."
        return text

    def __str__(self) -> str:
        """The table and the verdict, as plain text."""
        console = Console(file=StringIO(), width=110, color_system=None)
        console.print(tune_table(self))
        console.print(self.verdict(), highlight=False)
        assert isinstance(console.file, StringIO)
        return console.file.getvalue().rstrip("\n")


def tune_table(tuned: Tuned) -> Table:
    """A line for each rate: the mean and the spread of its criterion in each rung.  The chosen rate is bold."""
    title = f"{type(tuned.strategy).__name__}, {tuned.where}: {tuned.criterion} over {tuned.seeds} seeds"
    out = Table(title=Text(title), title_justify="left", min_width=len(title))
    out.add_column("rate", justify="right")
    for rung in tuned.rungs:
        out.add_column(f"{rung.steps} steps", justify="right")
    for rate in tuned.rates:
        style = "bold" if rate == tuned.rate else ""
        cells = [_cell(rung.tried, rate) for rung in tuned.rungs]
        out.add_row(*(Text(cell, style=style) for cell in (f"{rate:g}", *cells)))
    return out


def _cell(tried: Sequence[Tried], rate: float) -> str:
    for one in tried:
        if one.rate == rate:
            return "diverged" if one.has_diverged else f"{one.mean:.4g} ± {one.spread:.2g}"
    return ""
