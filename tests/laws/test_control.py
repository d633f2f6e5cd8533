"""What a run decides between epochs: to go back to its best state (AutoAdjust), and to grow its minibatches
(AutoBatch)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf, nan
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline import (
    EASGD,
    AdaptiveAveraging,
    AllReduceSGD,
    AutoAdjust,
    AutoBatch,
    BlockMomentum,
    Cluster,
    DiLoCo,
    ParameterServer,
    PeriodicAveraging,
    Replicated,
    Run,
    Scaling,
    Schedule,
    Strategy,
    Task,
    Then,
    resized,
    simulate,
    train,
)
from paceline.codecs import OneBit
from paceline.optimizers import TwoStage
from paceline.task import Batch
from paceline.training.batch_sizes import ShortTrials
from paceline.worker.batch import NonFinite
from tests.laws.tasks import OPTIMIZERS, numbers, regression, squared_distance

SAMPLES = 48
BATCH = 12
EPOCH = SAMPLES // BATCH
METHODS = [
    AllReduceSGD(),
    AllReduceSGD(codec=OneBit()),
    PeriodicAveraging(period=3),
    PeriodicAveraging(period=3, delay=1, codec=OneBit()),
    EASGD(period=3),
    BlockMomentum(period=3, momentum=0.5),
    AdaptiveAveraging(period=2, warmup=2, sampling=7),
    DiLoCo(period=4, fragments=2),
    Then(Replicated(), AllReduceSGD(codec=OneBit()), steps=6),
]
WATCHING = AutoAdjust(load_best=False, reduce_below=-inf)  # It checks, and never does anything.


def job(**more: Any) -> Task:
    given: dict[str, Any] = {"steps": None, "batch": BATCH, "samples": SAMPLES, "epochs": 5} | more
    return regression(**given)


def on(workers: int) -> Cluster:
    return Cluster(workers=workers)


@pytest.mark.parametrize("strategy", METHODS, ids=repr)
def test_checks_that_change_nothing_leave_the_run_as_it_is(strategy: Strategy):
    plain = simulate(job(), strategy, on(3))
    watched = simulate(job(adjust=WATCHING), strategy, on(3))
    assert torch.equal(watched.params, plain.params)
    assert [d.step for d in watched.trace.decisions] == [EPOCH * i for i in range(1, 6)]


def bursts(epoch: int, factor: float) -> Any:
    """A schedule with one epoch at a rate that is much too high."""
    return lambda step: factor if step // EPOCH == epoch else 1.0


@pytest.mark.filterwarnings("ignore::paceline.families.elastic.UnstableElastic")
@pytest.mark.parametrize("strategy", METHODS, ids=repr)
def test_all_workers_go_back_to_the_best_state_with_everything_that_the_method_remembers(strategy: Strategy):
    adjust = AutoAdjust(rollbacks=30)

    def task(schedule: Callable[[int], float], adjust: AutoAdjust) -> Task:
        return job(schedule=schedule, adjust=adjust, optimizer=OPTIMIZERS["sgd"], epochs=3)

    run = simulate(task(bursts(2, 30.0), adjust), strategy, on(3))
    back = [d for d in run.trace.decisions if d.values["goes_back"]]
    assert back and {d.step for d in back} == {3 * EPOCH}
    factor = 0.618 ** len(back)
    stopped = simulate(task(lambda step: 1.0, adjust), strategy, on(3), stop_at=2 * EPOCH)
    slower = task(lambda step: factor * bursts(2, 30.0)(step), WATCHING)
    again = simulate(slower, strategy, on(3), resume=stopped.states)
    assert torch.allclose(run.params, again.params, rtol=1e-12, atol=1e-14)


def test_a_run_goes_back_to_the_first_of_two_optimizers():
    """To step 8, from Adam's second step."""

    def task(schedule: Callable[[int], float], adjust: AutoAdjust) -> Task:
        stages = {"first": partial(torch.optim.SGD, lr=0.05), "second": partial(torch.optim.Adam, lr=0.1)}
        optimizer = partial(TwoStage, **stages, steps=2 * EPOCH + 2)
        return job(schedule=schedule, adjust=adjust, optimizer=optimizer, epochs=3)

    adjust = AutoAdjust(rollbacks=30)
    run = simulate(task(bursts(2, 30.0), adjust), AllReduceSGD(), on(2))
    back = [d for d in run.trace.decisions if d.values["goes_back"]]
    assert back and {d.step for d in back} == {3 * EPOCH}
    stopped = simulate(task(lambda step: 1.0, adjust), AllReduceSGD(), on(2), stop_at=2 * EPOCH)
    slower = task(lambda step: 0.618 ** len(back) * bursts(2, 30.0)(step), WATCHING)
    again = simulate(slower, AllReduceSGD(), on(2), resume=stopped.states)
    assert torch.allclose(run.params, again.params, rtol=1e-12, atol=1e-14)


def test_a_criterion_that_falls_changes_nothing():
    calm = job(epochs=4)
    run = simulate(replace(calm, adjust=AutoAdjust()), AllReduceSGD(), on(2))
    assert not any(d.values["goes_back"] for d in run.trace.decisions)
    assert torch.equal(run.params, simulate(calm, AllReduceSGD(), on(2)).params)


@pytest.mark.parametrize(
    ("criterion", "goes_back", "factor"),
    [
        (2.5, True, 0.618),
        (nan, True, 0.618),
        (inf, True, 0.618),
        (2.0, False, 0.618),
        (1.9, False, 1.0),
        (1.0, False, 1.382),
    ],
)
def test_verdicts_are_those_of_cntk(criterion: float, goes_back: bool, factor: float):
    assert AutoAdjust(increase_above=0.4).judge(criterion, 2.0) == (goes_back, factor)


def test_a_run_that_only_gets_worse_ends_with_its_best_state():
    task = job(schedule=bursts(2, 1e6), adjust=AutoAdjust(rollbacks=2, decrease=0.9), evaluate=lambda model: {})
    run = simulate(task, PeriodicAveraging(period=3), on(3))
    assert run.trace.evaluations[-1].samples == 2 * SAMPLES, "those behind the best state"
    assert [d.kind for d in run.trace.decisions] == ["adjust"] * 5 + ["stop"]
    best = simulate(job(epochs=2, adjust=WATCHING), PeriodicAveraging(period=3), on(3))
    assert torch.equal(run.params, best.params)
    again = simulate(task, PeriodicAveraging(period=3), on(3), resume=run.states)
    assert not again.trace.points, "a run that was ended is not continued"
    assert torch.equal(again.params, best.params)


def test_training_ends_when_the_rate_is_below_the_minimum():
    task = job(schedule=bursts(1, 1e6), adjust=AutoAdjust(minimum=0.5))
    run = simulate(task, AllReduceSGD(), on(2))
    assert run.trace.decisions[-1].values["reason"] == "the learning rate is below the minimum"
    assert torch.equal(run.params, simulate(job(epochs=1), AllReduceSGD(), on(2)).params)


def test_a_loss_that_is_nan_from_the_start_is_an_error():
    def lost(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch[0]).sum() * nan

    task = replace(job(adjust=AutoAdjust()), loss=lost)
    with pytest.raises(FloatingPointError, match="there is no better model to go back to"):
        simulate(task, AllReduceSGD(), on(2), nonfinite="pass")
    with pytest.raises(FloatingPointError, match="there is no better"), pytest.warns(RuntimeWarning, match="NaN"):
        simulate(task, AllReduceSGD(), on(2))


@dataclass(frozen=True)
class Doubling(AutoBatch):
    """It tries two sizes, and takes the second one: first the smallest, then twice the current one."""

    def accepts(self, criterion: float, base: float) -> bool:
        return True

    def sizes(self, current: int | None, rate: float) -> list[int]:
        return [8, self.start if current is None else 2 * current]


# An epoch at too high a rate, after which the run goes back; and minibatches of 12, 24 and 48.
GOING_BACK = {"schedule": bursts(1, 8.0), "adjust": AutoAdjust()}
GROWING = {
    "batch": Doubling(BATCH, every=2, multiple=4, trial=0.5),
    "scaling": Scaling(base=BATCH, momentum="none"),
    "adjust": AutoAdjust(),
}


@pytest.mark.parametrize(
    ("settings", "stop_at"),
    [
        *((GOING_BACK, step) for step in (1, EPOCH, 2 * EPOCH - 1, 2 * EPOCH, 4 * EPOCH + 3)),
        *((GROWING, step) for step in (1, 4, 5, 8, 9)),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "growing" if "batch" in value else "going back",
)
def test_a_run_with_decisions_stops_and_resumes_anywhere(settings: dict[str, Any], stop_at: int):
    """At step 8 the run stops when it has returned to step 4 twice and is there again."""
    strategy = PeriodicAveraging(period=3, codec=OneBit())
    whole = simulate(job(**settings), strategy, on(3))
    if settings is GOING_BACK:
        assert [d.step for d in whole.trace.decisions if d.values["goes_back"]] == [2 * EPOCH] * 2
    else:
        assert chosen(whole) == [12, 24, 48]
    stopped = simulate(job(**settings), strategy, on(3), stop_at=stop_at)
    assert all(state["step"] == stop_at for state in stopped.states)
    again = simulate(job(**settings), strategy, on(3), resume=stopped.states)
    assert torch.equal(again.params, whole.params)
    two = simulate(job(**settings), strategy, on(2), resume=resized(stopped.states, 2))
    assert two.params.isfinite().all()


def test_a_run_that_goes_back_at_its_end_chooses_the_size_of_minibatches_again():
    """As one that goes back before its end does: the rate is a lower one now."""
    task = job(
        **(GROWING | {"batch": AutoBatch(BATCH, largest=BATCH, multiple=4), "adjust": AutoAdjust(rollbacks=2)}),
        schedule=Schedule(decay="multistep", milestones=["2 epochs"], factor=1e4),
        epochs=3,
    )
    run = simulate(task, AllReduceSGD(), on(2))
    kinds = [(d.kind, d.values["epoch"]) for d in run.trace.decisions]
    again = [("adjust", 3), ("batch", 2)]
    assert kinds == [
        ("batch", 0),
        ("adjust", 1),
        ("batch", 1),
        ("adjust", 2),
        ("batch", 2),
        *again,
        *again,
        *again[:1],
        ("stop", 3),
    ]


# Minibatches that grow.


def auto(**more: Any) -> AutoBatch:
    given: dict[str, Any] = {"start": 8, "multiple": 8, "trial": 1.0, "margin": 0.01} | more
    return AutoBatch(**given)


def flat_task(batch: Any, *, lr: float, epochs: int = 4, samples: int = 256, scaling: Scaling | None = None) -> Task:
    from tests.laws.tasks import Point

    return Task(
        lambda: Point(5),
        squared_distance,
        [numbers(samples, 5, seed=1)],
        batch,
        partial(torch.optim.SGD, lr=lr),
        epochs=epochs,
        scaling=scaling or Scaling(base=8),
    )


def chosen(run: Run) -> list[int]:
    return [d.values["chosen"] for d in run.trace.decisions if d.kind == "batch"]


def test_a_criterion_that_does_not_depend_on_the_size_gives_the_largest_size():
    run = simulate(flat_task(auto(largest=128), lr=0.0, samples=640), AllReduceSGD(), on(2))
    assert chosen(run) == [128, 128, 128, 128]
    searched = run.trace.decisions[0].values["sizes"]
    assert searched == [8, 16, 24, 32, 48, 64, 88, 128] and all(size % 8 == 0 for size in searched)


def test_a_criterion_that_rises_at_once_keeps_the_smallest_size():
    run = simulate(flat_task(auto(), lr=0.9), AllReduceSGD(), on(2))
    assert chosen(run)[0] == 8


def test_a_size_is_at_most_twice_the_one_before_and_every_third_epoch_searches():
    """Every half of an epoch allows minibatches that are eight times as large."""
    most = [10]

    def loss(model: Any, batch: Batch) -> Tensor:
        return squared_distance(model, batch) * (nan if len(batch[0]) > most[0] else 1.0)

    def evaluate(model: nn.Module) -> dict[str, float]:
        most[0] *= 8
        return {}

    task = flat_task(auto(every=3, margin=1e9), lr=1e-6, epochs=12, samples=1280)
    task = replace(task, loss=loss, evaluate=evaluate, evaluate_every="0.5 epochs")
    run = simulate(task, AllReduceSGD(), on(1), nonfinite="pass")
    assert [d.values["epoch"] + 1 for d in run.trace.decisions] == [1, 2, 3, 6, 9, 12]
    assert chosen(run) == [8, 16, 32, 64, 128, 256]


def test_a_size_is_a_multiple_also_if_a_step_is_a_whole_epoch():
    run = simulate(flat_task(auto(start=52, largest=60), lr=1e-6, epochs=2, samples=50), AllReduceSGD(), on(2))
    assert chosen(run) == [56, 56] and [p.samples for p in run.trace.points] == [25] * 4


def test_a_lower_rate_starts_the_search_at_larger_sizes_and_larger_minibatches_do_not_count_as_a_higher_rate():
    task = flat_task(auto(every=2, margin=1e9, largest=128), lr=1e-6, epochs=5, samples=1024)
    falling = replace(task, schedule=Schedule(decay="multistep", milestones=["3 epochs"], factor=0.01))
    plain, fallen = (simulate(t, AllReduceSGD(), on(2)) for t in (task, falling))
    first, lower = ([d.values["sizes"][0] for d in run.trace.decisions] for run in (plain, fallen))
    assert first[:2] == lower[:2] == [8, max(8, chosen(plain)[0] // 2)]
    few = replace(falling, batch=auto(margin=1e9, largest=32), schedule=replace(falling.schedule, factor=0.2))
    tried = [d.values["sizes"] for d in simulate(few, AllReduceSGD(), on(2)).trace.decisions]
    assert tried == [[8, 16, 24, 32], *[[16, 24, 32]] * 2, [16, 24], [16, 24]], "at 32 samples the rate is 0.2, not 0.8"
    assert AutoBatch(start=64, multiple=8).sizes(None, 0.01)[0] == 640


@given(current=st.integers(1, 5000) | st.none(), rate=st.floats(1e-3, 4.0), start=st.integers(64, 600))
def test_sizes_to_try_are_multiples_that_grow(current: int | None, rate: float, start: int):
    sizes = AutoBatch(start=start, largest=4096).sizes(current, rate)
    assert sizes == sorted(set(sizes)) and sizes
    assert all(size % 64 == 0 and size <= 4096 for size in sizes)
    if current is not None:
        assert sizes[-1] <= max(64, 2 * current + 32)


@dataclass(frozen=True)
class Fussy(AutoBatch):
    """It tries three sizes, and takes the last."""

    def accepts(self, criterion: float, base: float) -> bool:
        return True

    def sizes(self, current: int | None, rate: float) -> list[int]:
        return [24, 40, 16]


@pytest.mark.parametrize("strategy", [*METHODS[:5], METHODS[-1]], ids=repr)
def test_a_search_changes_nothing_but_the_size(strategy: Strategy):
    """The last of the sizes that it tries is that of the plain run."""
    searched = simulate(flat_task(Fussy(start=16, multiple=8, trial=0.3), lr=0.05, epochs=2), strategy, on(3))
    assert [len(d.values["losses"]) for d in searched.trace.decisions] == [3, 3]
    assert torch.equal(searched.params, simulate(flat_task(16, lr=0.05, epochs=2), strategy, on(3)).params)


def test_any_number_of_workers_chooses_the_same():
    runs = [simulate(flat_task(auto(trial=0.5), lr=0.02), AllReduceSGD(), on(n)) for n in (1, 2, 3, 5)]
    assert len({tuple(chosen(run)) for run in runs}) == 1
    assert chosen(runs[0])[-1] > 8


def test_a_size_with_less_than_five_steps_in_a_trial_is_not_tried():
    """A trial of one step has the loss before that step, so any size would look good."""
    task = flat_task(auto(trial=0.5, margin=1e9), lr=1e-6, samples=400)
    run = simulate(task, AllReduceSGD(), on(2))
    assert chosen(run) == [32, 32, 32, 32]
    assert {size for d in run.trace.decisions for size in d.values["sizes"]} == {8, 16, 24, 32}


def test_a_warning_says_that_trials_are_too_short_for_larger_minibatches():
    task = flat_task(auto(trial=0.1), lr=0.01, samples=400)
    with pytest.warns(ShortTrials, match=r"AutoBatch\(start=8, trial=0.1\) with 400 samples: .*; give trial=0.2$"):
        assert chosen(simulate(task, AllReduceSGD(), on(2))) == [8, 8, 8, 8]
    assert chosen(simulate(replace(task, batch=auto(trial=0.2)), AllReduceSGD(), on(2)))[-1] == 16


def test_a_size_stays_if_all_that_are_tried_later_give_nan():
    most = [16]

    def loss(model: Any, batch: Batch) -> Tensor:
        return squared_distance(model, batch) * (nan if len(batch[0]) > most[0] else 1.0)

    def evaluate(model: nn.Module) -> dict[str, float]:
        most[0] = 0
        return {}

    task = flat_task(auto(margin=1e9), lr=1e-6, epochs=2, samples=128)
    run = simulate(
        replace(task, loss=loss, evaluate=evaluate, evaluate_every=2), AllReduceSGD(), on(1), nonfinite="pass"
    )
    assert chosen(run) == [16, 16] and run.trace.decisions[1].values["sizes"] == [8]


@pytest.mark.parametrize("nonfinite", ["pass", "stop"])
def test_nan_is_never_chosen(nonfinite: NonFinite):
    """And where NaN stops a run, one in a trial does not."""

    class Lost(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def loss(model: Any, batch: Batch) -> Tensor:
        return model.w.square().sum() * (nan if len(batch[0]) > 10 else 1.0)

    task = Task(
        Lost, loss, [numbers(128, 1)], auto(), partial(torch.optim.SGD, lr=0.01), epochs=2, scaling=Scaling(base=8)
    )
    run = simulate(task, AllReduceSGD(), on(1), nonfinite=nonfinite)
    assert chosen(run) == [8, 8]
    assert run.trace.decisions[0].values["losses"][-1] != run.trace.decisions[0].values["losses"][-1]

    never = replace(task, loss=lambda model, batch: model.w.sum() * nan)
    with pytest.raises(FloatingPointError, match="the trial with 8 samples a step had a training loss of nan"):
        simulate(never, AllReduceSGD(), on(1), nonfinite=nonfinite)


# What does not go together.


def test_decisions_need_a_method_whose_workers_stand_at_one_step():
    for more in ({"adjust": AutoAdjust()}, {"batch": auto(), "scaling": Scaling(base=8, momentum="none")}):
        with pytest.raises(
            ValueError, match="a Task with AutoAdjust or AutoBatch does not offer; use a synchronous method"
        ):
            simulate(job(**more), ParameterServer(), Cluster(workers=2))
        with pytest.raises(ValueError, match=r"train\(ParameterServer\): .* in which nothing is decided"):
            train(job(**more), ParameterServer(), 2)


def test_what_cannot_follow_is_refused():
    with pytest.raises(ValueError, match=r"give scaling=Scaling\(base=8\)"):
        job(batch=auto())
    with pytest.raises(ValueError, match="give a Schedule"):
        job(batch=auto(), scaling=Scaling(base=8), schedule=lambda step: 1.0)
    with pytest.raises(ValueError, match="has no common epochs"):
        Task(
            nn.Linear, squared_distance, lambda r, n: [numbers(4, 5)], 4, torch.optim.SGD, steps=3, adjust=AutoAdjust()
        )
    with pytest.raises(ValueError, match="minibatches of one size"):
        simulate(job(batch=auto(), scaling=Scaling(base=8), samples=96), AdaptiveAveraging(), on(2))
