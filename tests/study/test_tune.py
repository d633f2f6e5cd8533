"""The search for a learning rate: what it chooses, what it keeps in its file, and what it refuses."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import paceline as pl
from paceline import AllReduceSGD, Needs, ParameterServer, RateRange, Schedule, Task, Tuned, simulate, tune
from paceline.server.rules import Sgd
from paceline.study.outcome_file import TornLine
from paceline.study.rates import multiplied
from paceline.study.trials import Key, Trials
from paceline.study.tuned import Rung, Tried
from tests.in_turn import in_turn
from tests.laws.tasks import Point, close, instant, numbers, quadratic, same

RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
TWO = instant(2)


def job(**more: Any) -> Task:
    return quadratic(**{"steps": 100, "batch": 8, "samples": 64} | more)


def search(task: Task | None = None, **more: Any) -> Tuned:
    given = {"strategy": AllReduceSGD(), "cluster": TWO, "rates": RATES, "budget": "8 steps", "part": 0.5} | more
    return tune(job() if task is None else task, given.pop("strategy"), given.pop("cluster"), **given)


@cache
def found() -> Tuned:
    """One search for all tests that only look at its result."""
    return search()


def means(tuned: Tuned) -> list[dict[float, float]]:
    return [{one.rate: one.mean for one in rung.tried} for rung in tuned.rungs]


# The choice.


def test_the_choice_is_the_rate_with_the_lowest_loss_of_a_plain_loop():
    task = job()

    def plain(rate: float, seed: int, steps: int) -> float:
        seeded = replace(task, seed=seed)
        model = seeded.build()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        losses: list[float] = []
        for k in range(steps):
            optimizer.zero_grad()
            loss = task.loss(model, seeded.part(k, 0, 1))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return fmean(losses[-steps // 4 :])

    tuned = search(task, part=1.0)
    for rung in tuned.rungs:
        for one in rung.tried:
            assert one.values == pytest.approx([plain(one.rate, seed, rung.steps) for seed in (0, 1)], rel=1e-9)
    single = search(task, part=1.0, finalists=3)  # A single rung: all rates train for as long.
    assert len(single.rungs) == 1 and not single.undecided
    assert single.rate == min(RATES, key=lambda rate: plain(rate, 0, 8) + plain(rate, 1, 8)) == 0.3
    assert tuned.rate == min((0.1, 0.3), key=lambda rate: plain(rate, 0, 32) + plain(rate, 1, 32)) == 0.1


def test_every_rung_keeps_the_best_half_and_trains_it_twice_as_long():
    tuned = found()
    assert [rung.steps for rung in tuned.rungs] == [8, 16, 32]
    for before, after in zip(means(tuned), means(tuned)[1:], strict=False):
        assert list(after) == sorted(sorted(before, key=before.__getitem__)[: math.ceil(len(before) / 2)])
    assert [rung.steps for rung in search(finalists=2).rungs] == [8, 16]
    assert [len(rung.tried) for rung in search(eta=4).rungs] == [5, 2]
    assert tuned.share == 2 * (5 * 8 + 3 * 16 + 2 * 32) / 100


def test_the_order_of_the_rates_makes_no_difference():
    forward, backward = found(), search(rates=RATES[::-1])
    assert (forward.rate, forward.rungs) == (backward.rate, backward.rungs)


def test_nan_and_divergence_lose():
    tuned = search(rates=(0.1, 2.5, 1e200))
    assert tuned.rate == 0.1 and tuned.is_at_edge
    assert [one.has_diverged for one in tuned.rungs[0].tried] == [False, True, True]
    assert len(tuned.rungs) == 1 and "diverged" in str(tuned)


class Counter(nn.Module):
    """A model whose loss falls by its learning rate at every step, and is NaN once it has fallen by 10."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))


def counted(model: nn.Module, batch: pl.task.Batch) -> torch.Tensor:
    return -model.w.sum() * (1.0 if model.w.item() < 10 else math.nan)


def test_a_rate_that_diverges_late_makes_place_for_the_next_one():
    task = Task(Counter, counted, [torch.zeros(64, 1)], 8, lambda p: torch.optim.SGD(p, lr=0.1), steps=100)
    tuned = search(task, rates=(0.1, 0.2, 0.9, 1.0))
    assert list(means(tuned)[1]) == [0.2, 0.9, 1.0]
    assert tuned.rate == 0.2
    with pytest.raises(ValueError, match=r"all of these diverge within 16 steps"):
        search(task, rates=(0.9, 1.0, 1.1), eta=2)


def test_if_all_rates_diverge_the_error_says_which_to_try():
    with pytest.raises(ValueError, match=r"all of these diverge within 8 steps, .* try lower ones, such as RateRange"):
        search(rates=(3.0, 1e200))


def test_a_difference_within_the_spread_is_none_and_the_result_says_so():
    low, high, worst = (
        Tried(0.1, (1.0, 1.2, 1.1), False),
        Tried(0.3, (1.1, 1.0, 1.1), False),
        Tried(1.0, (1.3, 1.5, 1.4), False),
    )
    assert Rung(8, (low, high, worst)).equals_of_best(1.0) == (high, low)
    assert Rung(8, (low, worst)).equals_of_best(1.0) == (low,)
    assert Rung(8, (low, worst)).equals_of_best(-1.0) == (worst,)


# How a task gets a rate.


def grouped(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    given = list(parameters)
    return torch.optim.SGD([{"params": given[:1]}, {"params": given[1:], "lr": 0.01}], lr=0.1)


def test_parameter_groups_keep_their_ratio():
    task = Task(
        lambda: nn.Linear(3, 1).double(),
        lambda model, batch: model(batch[0]).square().mean(),
        [numbers(64, 3)],
        8,
        grouped,
        steps=64,
    )
    tuned = search(task, rates=(0.02, 0.2))
    groups = tuned.task_with(0.2).optimizer(task.build().parameters()).param_groups
    assert [group["lr"] for group in groups] == [0.2, 0.02]


@in_turn(schedule=[None, lambda step: 1 / (1 + step), Schedule(warmup="10 steps", decay="cosine")])
def test_the_rate_of_a_rule_on_servers_is_that_of_the_rule(schedule: Any):
    task = job(schedule=schedule)
    strategy = ParameterServer(rule=Sgd(lr=0.1))
    tuned = search(task, strategy=strategy, rates=(0.05, 0.2))
    assert tuned.own == 0.1
    by_task = simulate(tuned.task_with(0.2), strategy, TWO)
    by_rule = simulate(task, ParameterServer(rule=Sgd(lr=0.2)), TWO)
    assert close(by_task.params, by_rule.params)


def test_the_task_with_its_own_rate_is_the_task():
    task = found().task
    with_own = simulate(found().task_with(0.05), AllReduceSGD(), TWO)
    assert same(with_own.params, simulate(task, AllReduceSGD(), TWO).params)


def test_a_trial_goes_through_the_whole_schedule():
    whole = Schedule(warmup="2 epochs", decay="cosine")
    task = job(schedule=whole, steps=80)
    trials = Trials(task, AllReduceSGD(), TWO, 2, own=0.05, part=0.5, metric=None)
    trial = trials.task_of(Key(0.05, 0, 20))
    timetable = task.timetable()
    assert callable(trial.schedule)
    assert [trial.schedule(k) for k in range(20)] == [whole.at(task.position(4 * k, timetable)) for k in range(20)]
    assert trial.total_steps == 20 and trial.samples == 32


def test_all_rates_of_a_seed_see_the_same_part_and_seeds_see_different_ones():
    trials = Trials(job(), AllReduceSGD(), TWO, 2, own=0.05, part=0.5, metric=None)
    parts = [trials.task_of(Key(rate, seed, 20)).data[0] for rate in (0.1, 0.2) for seed in (0, 1)]  # type: ignore[index]
    assert same(parts[0], parts[2]) and same(parts[1], parts[3]) and not torch.equal(parts[0], parts[1])


def test_workers_with_data_of_their_own_use_a_part_of_it_each():
    task = job(samples=None)
    own = replace(task, data=lambda rank, workers: [numbers(40, 5, seed=rank)])
    assert search(own).rate in RATES
    with pytest.raises(ValueError, match=r"a part of 2 samples is smaller than worker 0's part of a minibatch"):
        search(own, part=0.05)


def test_a_metric_of_the_evaluation_can_be_the_criterion():
    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"w": model.w.square().sum().item(), "loss": -1.0}  # type: ignore[union-attr, operator]

    task = job(evaluate=evaluate)
    low, high = (search(task, metric="w", better=better) for better in ("lower", "higher"))
    assert low.rate != high.rate and low.criterion == "w"
    # The model starts far from the data's mean, which is near 0: the lowest rate leaves it there.
    assert high.rate == RATES[0] and high.is_at_edge
    assert "It is the lowest that was tried" in high.verdict()


# The file.


def test_a_search_that_was_stopped_goes_on_and_ends_as_if_it_had_not(tmp_path: Path):
    calls = 0

    def loss(model: nn.Module, batch: pl.task.Batch) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return 0.5 * (model.w - batch[0]).square().sum(1).mean()

    def stop(done: int, total: int) -> None:
        assert total == 20
        if done == 7:
            raise KeyboardInterrupt

    task = Task(lambda: Point(5), loss, [numbers(64, 5, seed=1)], 8, lambda p: torch.optim.SGD(p, lr=0.05), steps=100)
    whole, stopped = tmp_path / "whole.jsonl", tmp_path / "stopped.jsonl"
    unbroken = search(task, results=whole)
    assert len(whole.read_text().splitlines()) == 1 + 20
    with pytest.raises(KeyboardInterrupt):
        search(task, results=stopped, progress=stop)
    assert whole.read_text().startswith(stopped.read_text())
    assert len(stopped.read_text().splitlines()) == 1 + 7
    resumed = search(task, results=stopped)
    assert stopped.read_text() == whole.read_text()
    assert (resumed.rate, resumed.rungs) == (unbroken.rate, unbroken.rungs)

    calls = 0
    again = search(task, results=str(stopped))
    assert calls == 3  # The initial loss of each seed, and once more for the description.
    assert again.rungs == unbroken.rungs and stopped.read_text() == whole.read_text()
    more = search(task, results=stopped, seeds=3)  # Only the new seed is run.
    assert len(stopped.read_text().splitlines()) == 1 + 30 and len(more.rungs[0].tried[0].values) == 3


def test_a_torn_line_is_removed_with_a_warning(tmp_path: Path):
    path = tmp_path / "tune.jsonl"
    unbroken = search(results=path, rates=(0.1, 1e200))
    whole = path.read_text()
    for torn in (whole[:-20], whole[: whole.index("\n") - 5]):
        path.write_text(torn)
        with pytest.warns(TornLine, match="its last line was written only in part"):
            resumed = search(results=path, rates=(0.1, 1e200))
        assert resumed.rungs[0].tried[0] == unbroken.rungs[0].tried[0] and path.read_text() == whole


def test_a_file_of_other_settings_is_refused_by_name(tmp_path: Path):
    path = tmp_path / "tune.jsonl"
    search(results=path)
    other: list[tuple[dict[str, Any], str]] = [
        (
            {"task": job(optimizer=lambda p: torch.optim.SGD(p, lr=0.2))},
            "the optimizer's lr is 0.05 there and 0.2 here",
        ),
        ({"task": job(steps=90)}, "Task's steps is 100 there and 90 here"),
        ({"task": job(samples=72)}, "shape [64, 5] there and a tensor of shape [72, 5] here"),
        ({"strategy": pl.PeriodicAveraging(period=2)}, "strategy is AllReduceSGD there and PeriodicAveraging here"),
        ({"cluster": instant(3)}, "the workers is "),
        ({"part": 0.25}, "part is 0.5 there and 0.25 here"),
        (
            {"task": replace(job(), loss=lambda model, batch: 0 * model.w.sum())},
            "Task's loss is squared_distance there",
        ),
    ]
    for given, said in other:
        with pytest.raises(ValueError, match="the trials in this file are of other settings.*" + re.escape(said)):
            search(results=path, **given)


def test_a_file_that_is_not_one_of_tune_is_left_as_it_is(tmp_path: Path):
    path = tmp_path / "notes.txt"
    for content in ("my notes", "my\nnotes", "{}\n"):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"notes.txt'\): this file is not one of tune"):
            search(results=path)
        assert path.read_text() == content
    with pytest.raises(ValueError, match="give the name of a file, in a folder that exists"):
        search(results=tmp_path / "nowhere" / "tune.jsonl")
    search(results=(path := tmp_path / "tune.jsonl"), rates=(0.1, 0.3))
    lines = path.read_text().splitlines()
    assert json.loads(lines[1])["rung"] == 0
    path.write_text("\n".join([lines[0], "{}", *lines[1:], ""]))
    with pytest.raises(ValueError, match=r"line 2 is no outcome of a trial"):
        search(results=path, rates=(0.1, 0.3))


# Refusals.


@dataclass(frozen=True)
class Stubborn(pl.Strategy):
    """A method with a rate of its own that no schedule changes."""

    lr: float = 0.1
    needs: ClassVar[Needs] = Needs(optimizer=False)

    async def worker(self, w: pl.Replica) -> None:
        for _ in w.steps_alone():
            w.params.sub_(await w.gradient(), alpha=self.lr)


def no_rate(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "no rates": (lambda: {"rates": []}, r"tune\(rates=\[\]\): a search compares at least 2 rates"),
    "one rate": (lambda: {"rates": [0.1]}, r"tune\(rates=\[0.1\]\): a search compares at least 2"),
    "one around": (lambda: {"rates": 1}, r"tune\(rates=1\): .* compares 2 or more"),
    "negative": (lambda: {"rates": [0.1, -1.0]}, r"rates=\[0.1, -1.0\]\): .* and -1.0 is not"),
    "infinite": (lambda: {"rates": [0.1, math.inf]}, "and inf is not"),
    "NaN": (lambda: {"rates": [math.nan, 0.1]}, "and nan is not"),
    "twice": (lambda: {"rates": [0.1, 0.2, 0.1]}, "give each rate once"),
    "range": (lambda: {"rates": RateRange(1.0, 0.1)}, r"RateRange\(1.0, 0.1, number=7\): .*the second is the higher"),
    "close range": (lambda: {"rates": RateRange(1.0, 1.1, 50)}, "closer together than 2 %"),
    "rate 0": (lambda: {"task": job(optimizer=no_rate)}, r"its learning rate is 0, and the search multiplies it"),
    "line search": (lambda: {"strategy": pl.Sandblaster()}, r"tune\(Sandblaster\): it has no learning rate"),
    "two rates": (
        lambda: {"strategy": pl.Then(AllReduceSGD(), ParameterServer(), steps=2)},
        "ParameterServer steps by a rule with a learning rate of its own, so there are two",
    ),
    "no effect": (lambda: {"strategy": Stubborn()}, "all rates give the same .* has no effect under Stubborn"),
    "small part": (lambda: {"part": 0.1}, r"tune\(part=0.1\): a part of 6 samples is smaller than a minibatch"),
    "part": (lambda: {"part": 1.5}, r"tune\(part=1.5\): it is a share"),
    "one seed": (lambda: {"seeds": 1}, r"tune\(seeds=1\): one seed does not show"),
    "eta": (lambda: {"eta": 1}, r"tune\(eta=1\)"),
    "finalists": (lambda: {"finalists": 5}, r"tune\(finalists=5\) with 5 rates"),
    "short budget": (lambda: {"budget": "0.25 epochs"}, r"tune\(budget='0.25 epochs'\): these are 2 steps"),
    "long budget": (lambda: {"budget": "40 steps"}, "the longest trials would take 160 steps, and the whole .* 100"),
    "budget": (lambda: {"budget": "soon"}, "write a number and a unit"),
    "metric": (lambda: {"metric": "accuracy"}, r"tune\(metric='accuracy'\): the task's evaluation returns nothing"),
    "other metric": (
        lambda: {"task": job(evaluate=lambda model: {"radius": 1.0}), "metric": "accuracy"},
        "evaluation returns 'radius'",
    ),
    "direction": (
        lambda: {"task": job(evaluate=lambda model: {"radius": 1.0}), "metric": "radius"},
        r"its name does not say which values are good; give better='higher'",
    ),
    "better": (lambda: {"better": "lower"}, r"tune\(better='lower'\): it has no effect without a metric"),
    "adjust": (
        lambda: {"task": job(adjust=pl.AutoAdjust())},
        r"tune\(Task\(adjust=AutoAdjust\(.*\): it changes the rate",
    ),
    "batch": (lambda: {"task": job(batch=pl.GrowingBatch(8, 16, 2))}, r"belongs to one size of minibatches"),
    "neither": (lambda: {"cluster": None}, r"give a Cluster for the simulator, or workers="),
    "both": (lambda: {"workers": 2}, r"give a Cluster for the simulator, or workers="),
    "number": (lambda: {"cluster": 2}, r"tune\(cluster=2\): cluster is a Cluster; give workers=..."),
    "no workers": (lambda: {"cluster": None, "workers": 0}, r"tune\(workers=0\): there must be at least 1"),
    "short for it": (lambda: {"strategy": pl.AdaptiveAveraging()}, "tune: a trial of 8 steps: AdaptiveAveraging"),
    "of own data": (
        lambda: {"task": replace(job(), data=lambda rank, workers: [numbers(40, 5)]), "budget": "1 epochs"},
        r"tune\(budget='1 epoch'\) with data of each worker's own",
    ),
}


@in_turn(case=list(REFUSED))
def test_refusals_quote_the_call(case: str):
    given, said = REFUSED[case]
    with pytest.raises(ValueError, match=said):
        search(**given())


def test_real_workers_are_not_started_under_a_launcher(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"tune\(workers=2\) under a launcher that started 2"):
        search(cluster=None, workers=2)


def test_a_factor_of_a_rule_multiplies_the_schedule_of_the_task():
    doubled = multiplied(job(schedule=lambda step: 0.5), ParameterServer(), 2, 2.0)
    assert callable(doubled.schedule) and doubled.schedule(3) == 1.0


def test_the_rates_by_default_are_three_decades_around_the_tasks_own():
    tuned = search(rates=4)
    assert tuned.rates == (0.00158, 0.0158, 0.158, 1.58)
    assert tuned.rate == 0.158
    assert "Rate 0.158, of 4 from 0.00158 to 1.58" in str(tuned)
