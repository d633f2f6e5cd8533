"""torture: a strategy under random faults by seed, its invariants checked in every run, and the smallest failing plan.

A run is decided by the strategy, the kinds of faults and one integer, so a failing seed fails again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from multiprocessing import get_context
from typing import Any

import torch

from paceline import registry
from paceline.checked import spelled
from paceline.sim.faults import Faults
from paceline.strategies import STRATEGIES
from paceline.strategy import Strategy
from paceline.study.elastic_plans import is_possible
from paceline.study.fault_plans import KINDS, as_python, drawn_faults, kinds_of
from paceline.study.ordeal import Ordeal
from paceline.study.smaller_plans import smallest
from paceline.task import Task

ROOMS = ("", ".codecs", ".server.rules", ".server.gates", ".families.topology")  # Where the repr of a strategy is from.
# Settings with which a method does all that it does in 8 steps.
SHORT: dict[str, dict[str, Any]] = {
    "adaptive-averaging": {"period": 2, "warmup": 2, "sampling": 6},
    "one-bit-adam": {"warmup": 3, "betas": (0.9, 0.99)},
}
PART = 50  # Seeds that a process runs before it reports.


@dataclass(frozen=True)
class Failure:
    """A seed that breaks an invariant, and the smallest plan found that breaks the same one."""

    seed: int
    invariant: str
    seen: str
    time: float  # Virtual seconds.
    faults: Faults
    smaller: Faults | None = None

    def __str__(self) -> str:
        return f"seed {self.seed} breaks '{self.invariant}' at virtual time {self.time:.4f} s: {self.seen}"

    def replay(self, strategy: str, kinds: Sequence[str] = ()) -> str:
        """The command that repeats the run."""
        faults = f" --faults {','.join(kinds)}" if kinds else ""
        return f"paceline torture --strategy {strategy} --seed {self.seed}{faults}"

    def program(self, strategy: Strategy) -> str:
        """A Python program that breaks the invariant with the smallest plan."""
        imports = "import paceline as pl"
        plain = f'"{spelled(type(strategy))}"'
        if strategy not in every().values():
            plain = repr(strategy)
            imports = "\n".join([*(f"from paceline{room} import *" for room in ROOMS), imports])
        plan = as_python(self.smaller or self.faults)
        return f"{imports}\n\nprint(pl.torture({plain}, [{self.seed}], plan={plan}))"


@dataclass(frozen=True)
class Tortured:
    """What came out for one strategy: how many seeds, faults and virtual seconds, and which seeds fail."""

    strategy: Strategy | None
    seeds: int = 0
    faults: Counter[str] = field(default_factory=Counter[str])
    virtual_s: float = 0.0
    seconds: float = 0.0  # Of one process.
    failures: tuple[Failure, ...] = ()

    def __add__(self, other: Tortured) -> Tortured:
        return Tortured(
            self.strategy,
            self.seeds + other.seeds,
            self.faults + other.faults,
            self.virtual_s + other.virtual_s,
            self.seconds + other.seconds,
            tuple(sorted((*self.failures, *other.failures), key=lambda failure: failure.seed)),
        )

    @property
    def seconds_per_thousand(self) -> float:
        return 1000 * self.seconds / self.seeds if self.seeds else 0.0

    def __str__(self) -> str:
        found = "\n".join(map(str, self.failures)) or "no invariant was broken"
        return f"{self.strategy}: {self.seeds} seeds with {self.faults.total()} faults: {found}"


@dataclass(frozen=True)
class Campaign:
    """The runs of one strategy: everything but the seeds."""

    strategy: Strategy
    kinds: Sequence[str] = ()
    task: Task | None = None
    plan: Faults | None = None
    is_shrinking: bool = True

    @cached_property
    def ordeal(self) -> Ordeal:
        return Ordeal(self.strategy, self.task)

    def run(self, seeds: Sequence[int]) -> Tortured:
        """Run these seeds, one after the other."""
        began = time.process_time()
        injected: Counter[str] = Counter()
        virtual = 0.0
        failures: list[Failure] = []
        for seed in seeds:
            faults = self._faults(seed)
            injected += _by_kind(faults)
            found = self.ordeal.violation(seed, faults)
            virtual += self.ordeal.virtual_s
            if found is not None:
                failures.append(Failure(seed, found.invariant, found.seen, found.time, faults))
        seconds = time.process_time() - began
        return Tortured(None, len(seeds), injected, virtual, seconds, tuple(failures))

    def shrunk(self, failure: Failure) -> Failure:
        """The failure with its smallest plan."""

        def fails(faults: Faults) -> bool:
            if not is_possible(faults, self.strategy, self.ordeal.workers):
                return False
            found = self.ordeal.violation(failure.seed, faults)
            return found is not None and found.invariant == failure.invariant

        smaller = smallest(failure.faults, fails)
        return Failure(failure.seed, failure.invariant, failure.seen, failure.time, failure.faults, smaller)

    def _faults(self, seed: int) -> Faults:
        if self.plan is not None:
            return self.plan
        kinds = tuple(kind for kind in kinds_of(self.strategy) if not self.kinds or kind in self.kinds)
        return drawn_faults(seed, self.strategy, self.ordeal.workers, self.ordeal.promise.seconds, kinds)


def torture(
    strategy: Strategy | str,
    seeds: int | Sequence[int] = 1000,
    *,
    faults: Sequence[str] = (),
    task: Task | None = None,
    plan: Faults | None = None,
    processes: int = 1,
    progress: Callable[[int], None] | None = None,
) -> Tortured:
    """Run a strategy under the random faults of each seed, and check its invariants in every run.

    `seeds` is a number of seeds, from 0 on, or the seeds themselves.  `faults` are the kinds of faults; by default all
    that the strategy can take.  `plan` gives the faults themselves, in place of random ones.  `task` is what is
    trained: by default a model that counts how often each sample was used.  Several `processes` share the seeds.
    `progress` is called with the number of seeds that are done.
    """
    chosen = named(strategy) if isinstance(strategy, str) else strategy
    _check(chosen, faults)
    all_seeds = range(seeds) if isinstance(seeds, int) else list(seeds)
    campaign = Campaign(chosen, tuple(faults), task, plan)
    parts = [all_seeds[i : i + PART] for i in range(0, len(all_seeds), PART)]
    total = Tortured(chosen)
    done = 0
    for part in _results(campaign, parts, processes):
        total += part
        done += part.seeds
        if progress is not None:
            progress(done)
    first = {failure.invariant: failure for failure in reversed(total.failures)}.values()
    shrunk = {id(failure): campaign.shrunk(failure) for failure in first}
    failures = tuple(shrunk.get(id(failure), failure) for failure in total.failures)
    return Tortured(chosen, total.seeds, total.faults, total.virtual_s, total.seconds, failures)


def named(name: str) -> Strategy:
    """The strategy of that name, with a period that fits the few steps of the task, no codec where one is required, and
    shards that come back when they are killed.

    >>> named("block-momentum").period, named("strom").codec
    (4, None)
    """
    cls: Any = registry.find("strategy", STRATEGIES, name)
    defaults: dict[str, Any] = {f.name: f.default for f in fields(cls) if f.init}
    settings: dict[str, Any] = {}
    if "period" in defaults and (defaults["period"] is None or defaults["period"] > 4):
        settings["period"] = 4
    if defaults.get("codec") is MISSING:
        settings["codec"] = None
    if registry.strategy(name, **{**settings, **SHORT.get(spelled(cls), {})}).servers:
        settings["durability"] = "process"
    return registry.strategy(name, **{**settings, **SHORT.get(spelled(cls), {})})


def every() -> dict[str, Strategy]:
    """All strategies by name but `Then`, which is made of others."""
    return {name: named(name) for cls in STRATEGIES if (name := spelled(cls)) != "then"}


def _check(strategy: Strategy, kinds: Sequence[str]) -> None:
    """Refuse kinds of faults that do not exist, or that would have no effect."""
    wrong = [kind for kind in kinds if kind not in KINDS]
    if wrong:
        raise ValueError(
            f"torture(faults={list(kinds)}): there is no kind {wrong[0]!r}; the kinds are {', '.join(KINDS)}"
        )
    possible = kinds_of(strategy)
    if refused := [kind for kind in kinds if kind not in possible]:
        raise ValueError(
            f"torture({type(strategy).__name__}, faults={list(kinds)}): its workers wait for each other, or have no "
            f"server, so it cannot take {', '.join(refused)}; it can take {', '.join(possible)}"
        )


def _results(campaign: Campaign, parts: Sequence[Sequence[int]], processes: int) -> Iterator[Tortured]:
    if processes == 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # The vectors are small.
        try:
            yield from map(campaign.run, parts)
        finally:
            torch.set_num_threads(threads)
        return
    with ProcessPoolExecutor(
        processes, mp_context=get_context("fork"), initializer=_start, initargs=(campaign,)
    ) as pool:
        yield from pool.map(_run_part, parts)


_started: list[Campaign] = []


def _start(campaign: Campaign) -> None:
    torch.set_num_threads(1)
    _started[:] = [campaign]


def _run_part(seeds: Sequence[int]) -> Tortured:
    return _started[0].run(seeds)


def _by_kind(faults: Faults) -> Counter[str]:
    """How many faults of each kind a plan has."""
    counts: dict[str, Any] = {
        "crash": len(faults.deaths),
        "join": len(faults.joins),
        "suspicion": len(faults.suspicions),
        "pause": len(faults.pauses),
        "drop": bool(faults.lost),
        "duplicate": bool(faults.doubled),
        "delay": bool(faults.delayed),
        "partition": len(faults.cuts),
        "slow": len(faults.slow_links),
        "clock": len(faults.clock_jumps),
        "shard-crash": len(faults.server_deaths),
    }
    return Counter({kind: int(n) for kind, n in counts.items() if n})
