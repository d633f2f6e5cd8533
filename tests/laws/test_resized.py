"""Each worker's own state: what a synchronisation does to it, and what more or fewer workers do to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import (
    AllReduceSGD,
    BlockMomentum,
    Cluster,
    DiLoCo,
    NonFiniteReplica,
    OneBitAdam,
    PeriodicAveraging,
    Replicated,
    Run,
    SlowMo,
    Task,
    resized,
    simulate,
)
from paceline.codecs import Fp32, OneBit
from paceline.state import resized_for
from tests.laws.every import ORDERED, Case
from tests.laws.slots import owed
from tests.laws.tasks import OPTIMIZERS, Point, close, params, quadratic, regression, same, trained_alone, values
from tests.laws.test_strategies import assert_same_states, restless
from tests.laws.test_then import scaled

FOUR = Cluster(workers=4)
every_ordered_case = pytest.mark.parametrize("case", ORDERED.values(), ids=ORDERED)


def slopes(*, steps: int, batch: int = 8, numel: int = 7) -> Task:
    """The gradients are the data, and do not depend on the model."""
    return replace(
        quadratic(steps=steps, batch=batch, numel=numel), loss=lambda model, batch: (model.w * batch[0]).sum(1).mean()
    )


def momenta(run: Run, name: str = "momentum_buffer") -> list[Tensor]:
    return [
        torch.cat([s[name].reshape(-1) for s in values(state, "optimizer")["state"].values()]) for state in run.states
    ]


def weights(run: Run) -> list[float]:
    return [values(state, "position")["total"] for state in run.states]


def mean(vectors: list[Any], weights: list[float]) -> Any:
    return sum(w * v for w, v in zip(weights, vectors, strict=True)) / sum(weights)


# At a synchronisation: delays and codecs


@pytest.mark.parametrize("delay", [1, 2, 3])
@pytest.mark.parametrize("steps", [9, 12, 14])
def test_what_workers_learn_during_a_delayed_mean_is_kept(delay: int, steps: int):
    """On a slope all of it arrives. With curvature, a delayed mean is another method than one without delay."""
    task = slopes(steps=steps)
    assert close(simulate(task, PeriodicAveraging(period=4, delay=delay), FOUR).params, trained_alone(task))
    task = regression(steps=steps, batch=8)
    ends = [simulate(task, PeriodicAveraging(period=4, delay=d), FOUR).params for d in (0, delay)]
    assert not close(*ends, rtol=1e-6) and close(*ends, rtol=0.05)


def test_a_delayed_mean_is_merged_on_time_without_waiting():
    """A ring of 4 takes 6 latencies, which is less than two steps. With a delay of 2 no worker waits."""
    cluster = Cluster(workers=4, compute=1.0, latency=0.2)
    task = regression(steps=16, batch=8)
    plain, delayed = (simulate(task, PeriodicAveraging(period=4, delay=d), cluster).trace for d in (0, 2))
    assert plain.points[-1].time > 16 + 3 * 1.2 and delayed.points[-1].time == pytest.approx(16)
    after = [
        max(p.step for p in delayed.points if p.rank == 0 and p.time <= s.time) for s in delayed.syncs if s.rank == 0
    ]
    assert [s.step for s in delayed.syncs if s.rank == 0] == [3, 7, 11, 15] and after == [5, 9, 13, 15]


@pytest.mark.parametrize(
    "strategy",
    [PeriodicAveraging(period=4), SlowMo(period=4), DiLoCo(period=4, fragments=2), BlockMomentum(period=4)],
    ids=str,
)
def test_displacements_in_fp32_equal_those_without_a_codec(strategy: Any):
    """Up to the rounding of float32."""
    task = regression(steps=14, batch=10)
    plain, encoded = (simulate(task, replace(strategy, codec=codec), FOUR).params for codec in (None, Fp32()))
    assert close(encoded, plain, rtol=1e-5) and not same(encoded, plain)


@pytest.mark.parametrize(
    "strategy",
    [PeriodicAveraging(period=3), PeriodicAveraging(period=3, delay=2), DiLoCo(3, 1.0, 0.0, fragments=3)],
    ids=str,
)
def test_one_bit_delays_displacements_and_loses_none(strategy: Any):
    task = slopes(steps=14, numel=1200)
    run = simulate(task, replace(strategy, codec=OneBit()), FOUR)
    assert close(run.params + owed(run.states), trained_alone(task), rtol=1e-6)
    assert not close(run.params, trained_alone(task), rtol=1e-3)


# At a synchronisation: optimizers and buffers


@pytest.mark.parametrize("batch", [8, 10], ids=["equal", "3 3 2 2"])
def test_momentum_is_kept_averaged_or_reset(batch: int):
    """The average is weighted by samples, as it is for parameters."""
    task = regression(steps=9, batch=batch)
    before = simulate(task, PeriodicAveraging(period=100), FOUR, stop_at=4)
    keep, average, reset = (
        simulate(task, PeriodicAveraging(period=4, optimizer_state=policy), FOUR, stop_at=4)
        for policy in ("keep", "average", "reset")
    )
    assert all(same(a, b) for a, b in zip(momenta(keep), momenta(before), strict=True))
    assert not close(momenta(keep)[0], momenta(keep)[1], rtol=1e-3)
    assert all(close(m, mean(momenta(before), weights(before))) for m in momenta(average))
    assert all(same(m, momenta(average)[0]) for m in momenta(average))
    assert all(not values(state, "optimizer")["state"] for state in reset.states)
    assert close(keep.params, average.params) and close(keep.params, reset.params)


def test_averaged_adam_keeps_counting_steps():
    run = simulate(
        regression(steps=8, batch=8, optimizer=OPTIMIZERS["adam"]),
        PeriodicAveraging(period=4, optimizer_state="average"),
        FOUR,
    )
    for name in ("exp_avg", "exp_avg_sq"):
        assert all(same(m, momenta(run, name)[0]) for m in momenta(run, name)) and momenta(run, name)[0].count_nonzero()
    assert all(same(m, torch.full((4,), 8.0)) for m in momenta(run, "step"))


@pytest.mark.parametrize("delay", [0, 2])
def test_a_worker_without_data_adds_nothing_to_averaged_momentum(delay: int):
    """There are three samples for four workers. The last worker has neither weight nor momentum, but it receives the
    mean."""
    task = regression(steps=12, batch=3)
    run = simulate(task, PeriodicAveraging(period=4, optimizer_state="average", delay=delay), FOUR)
    three = simulate(task, PeriodicAveraging(period=4, optimizer_state="average", delay=delay), Cluster(workers=3))
    assert close(run.params, three.params) and same(params(run)[3], run.params)
    assert not values(run.states[3], "optimizer")["state"]


@pytest.mark.parametrize("optimizer", ["momentum", "nesterov"])
def test_the_momentum_of_a_single_number_is_averaged_too(optimizer: str):
    """Averaging at every step is then synchronous SGD, for every setting of the momentum."""
    task = replace(scaled(steps=9), optimizer=OPTIMIZERS[optimizer])
    averaged = simulate(task, PeriodicAveraging(period=1, optimizer_state="average"), FOUR)
    assert close(averaged.params, simulate(task, AllReduceSGD(), FOUR).params)


class Watching(Point):
    """A layer that counts its batches and stores the mean of the last one."""

    def __init__(self) -> None:
        super().__init__(5)
        self.register_buffer("batches", torch.tensor(0))
        self.register_buffer("last", torch.zeros(5, dtype=torch.float64))


def watched_distance(model: Any, batch: Any) -> Tensor:
    model.batches += 1
    model.last.copy_(batch[0].mean(0))
    return (model.w - batch[0]).square().sum(1).mean()


@pytest.mark.parametrize("batch", [8, 10, 3], ids=["equal", "3 3 2 2", "one has none"])
def test_buffers_are_averaged_by_samples_and_counters_take_the_largest(batch: int):
    task = replace(quadratic(steps=8, batch=batch), model=Watching, loss=watched_distance)
    before = simulate(task, PeriodicAveraging(period=100), FOUR, stop_at=4)
    after = simulate(task, PeriodicAveraging(period=4), FOUR, stop_at=4)
    expected = mean([values(state, "model")["buffers"][1] for state in before.states], weights(before))
    for state in after.states:
        batches, last = values(state, "model")["buffers"]
        assert int(batches) == 4 and close(last, expected)
    assert [int(values(state, "model")["buffers"][0]) for state in before.states] == [4, 4, 4, 0 if batch == 3 else 4]


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_batches_seen_during_a_delayed_mean_are_counted(delay: int):
    task = replace(quadratic(steps=16, batch=8), model=Watching, loss=watched_distance)
    run = simulate(task, PeriodicAveraging(period=4, delay=delay), FOUR)
    assert [int(values(state, "model")["buffers"][0]) for state in run.states] == [16] * 4


@pytest.mark.parametrize(
    ("samples", "batch", "expected"),
    [
        (6, 8, [2, 5, 8, 11]),  # 2 samples of each worker a step
        (7, 8, [3, 7, 11]),
        (1, 8, list(range(12))),
        (6, 10, [2, 5, 8, 11]),  # 3, 3, 2 and 2: two and a half on average
        (5, 10, [1, 3, 5, 7, 9, 11]),
        (2, 3, [2, 5, 8, 11]),  # 1, 1, 1 and 0
    ],
)
def test_a_period_in_samples_ends_at_the_first_step_that_reaches_it(samples: int, batch: int, expected: list[int]):
    run = simulate(regression(steps=12, batch=batch), PeriodicAveraging(samples=samples), FOUR)
    for rank in range(4):
        assert [s.step for s in run.trace.syncs if s.rank == rank] == expected


# At a synchronisation: replicas that are no longer finite


def task_with_an_overflow() -> Task:
    """The second step of worker 1 makes its parameters infinite, although its gradient is finite."""
    task = replace(slopes(steps=9, batch=4), optimizer=lambda p: torch.optim.SGD(p, lr=10.0, momentum=0.0))
    places = replace(task, data=[torch.arange(16)])
    data = task.data[0].clone()
    data[places.part(1, 1, 4)[0]] = 1e308
    return replace(task, data=[data], steps=3)


@pytest.mark.parametrize(
    "strategy",
    [PeriodicAveraging(period=2), PeriodicAveraging(period=2, codec=OneBit()), BlockMomentum(period=2)],
    ids=str,
)
@pytest.mark.parametrize("delay", [0, 1])
def test_a_replica_that_is_not_finite_takes_the_mean_of_the_others(strategy: Any, delay: int):
    with pytest.warns(NonFiniteReplica, match="rank 1 has NaN or infinity in its parameters after step 1"):
        run = simulate(task_with_an_overflow(), replace(strategy, delay=delay), FOUR)
    assert run.params.isfinite().all() and all(same(p, run.params) for p in params(run))


def test_a_replica_that_is_not_finite_has_no_weight_in_the_mean():
    others = mean(
        [
            p
            for i, p in enumerate(
                params(simulate(task_with_an_overflow(), PeriodicAveraging(period=9), FOUR, stop_at=2))
            )
            if i != 1
        ],
        [1.0] * 3,
    )
    with pytest.warns(NonFiniteReplica):
        run = simulate(task_with_an_overflow(), PeriodicAveraging(period=2), FOUR, stop_at=2)
    assert all(close(p, others) for p in params(run))


@pytest.mark.filterwarnings("ignore::paceline.NonFiniteReplica")
def test_a_replica_that_is_not_finite_stops_the_run_under_that_policy():
    with pytest.raises(
        FloatingPointError, match=r"rank 1 had parameters with NaN or infinity.*after step 1.*nonfinite='stop'"
    ):
        simulate(task_with_an_overflow(), PeriodicAveraging(period=2), FOUR, nonfinite="stop")
    passed = simulate(task_with_an_overflow(), PeriodicAveraging(period=2), FOUR, nonfinite="pass", stop_at=2)
    assert not passed.params.isfinite().all()


# More workers, or fewer


@every_ordered_case
def test_a_run_continues_with_more_or_fewer_workers(case: Case):
    """The workers agree at the end. Every sample of every minibatch was seen once, or once by each worker if the method
    does so."""
    task, points, states = regression(steps=14, batch=14, samples=51, model=restless), [], None
    for workers, stop in ((4, 5), (2, 8), (3, 10), (1, 12), (2, None)):
        run = simulate(
            task, case.strategy, Cluster(workers=workers), resume=states and resized(states, workers), stop_at=stop
        )
        states = run.states
        points += [
            (p.step, p.samples / (workers if isinstance(case.strategy, Replicated) else 1)) for p in run.trace.points
        ]
    seen = [sum(n for step, n in points if step == k) for k in range(14)]
    assert seen == pytest.approx([len(task.part(k, 0, 1)[0]) for k in range(14)])
    assert run.params.isfinite().all() and all(same(p, run.params) for p in params(run))


@every_ordered_case
def test_the_same_number_of_workers_continues_to_the_bit(case: Case):
    states = simulate(regression(steps=9, batch=8), case.strategy, FOUR, stop_at=5).states
    again = resized(states, 4)
    assert_same_states(again, states)
    values(again[0], "model")["params"].zero_()
    assert values(states[0], "model")["params"].count_nonzero(), "they are copies"


@every_ordered_case
def test_what_was_equal_on_all_workers_stays_equal(case: Case):
    """To the bit, although the mean of three equal numbers is not always that number. This holds for shared state,
    settings and agreed parameters."""
    states = simulate(regression(steps=9, batch=9), case.strategy, Cluster(workers=3), stop_at=5).states
    for state in [*states, *resized(states, 2), *resized(states, 5)]:
        first = values(states[0], "model")
        mine = values(state, "model")
        assert state["step"] == 5 and state["slots"].keys() == states[0]["slots"].keys()
        for name, slot in states[0]["slots"].items():
            assert state["slots"][name]["rule"] == slot["rule"]
            if slot["rule"] == "same":
                assert_same_states([values(state, name)], [slot["values"]])
        assert values(state, "optimizer")["param_groups"] == values(states[0], "optimizer")["param_groups"]
        assert same(mine["params"], first["params"]) or not all(
            same(values(s, "model")["params"], first["params"]) for s in states
        )


@every_ordered_case
def test_all_workers_start_with_the_mean_of_what_each_had(case: Case):
    old = simulate(regression(steps=9, batch=9, model=restless), case.strategy, Cluster(workers=3), stop_at=5)
    for workers in (2, 5):
        new = replace(old, states=resized(old.states, workers))
        assert len(params(new)) == workers and all(close(p, mean(params(old), [1.0] * 3)) for p in params(new))
        if not isinstance(case.strategy, OneBitAdam):  # It leaves the optimizer without a state.
            assert all(close(m, mean(momenta(old), [1.0] * 3)) for m in momenta(new))
        buffers = [values(state, "model")["buffers"] for state in old.states]
        for buffer, *theirs in zip(values(new.states[0], "model")["buffers"], *buffers, strict=True):
            assert close(
                buffer, torch.stack(theirs).mean(0) if buffer.is_floating_point() else torch.stack(theirs).amax(0)
            )
        marks = zip(*(values(state, "position")["marks"] for state in old.states), strict=True)
        assert values(new.states[0], "position")["marks"] == pytest.approx([sum(column) / 3 for column in marks])


def test_the_momentum_of_a_single_number_is_averaged_and_a_step_count_takes_the_largest():
    task = replace(scaled(steps=9), optimizer=lambda p: torch.optim.Adam(p, lr=0.1))
    old = simulate(replace(task, batch=3), PeriodicAveraging(period=9), FOUR, stop_at=5).states[:3]
    values(old[1], "optimizer")["state"][1]["step"] -= 2
    scale = values(resized_for(old, 2, 0), "optimizer")["state"][1]
    assert (
        close(scale["exp_avg"], mean([values(s, "optimizer")["state"][1]["exp_avg"] for s in old], [1.0] * 3))
        and scale["step"] == 5
    )


def test_random_numbers_continue_on_old_workers_and_are_new_on_joined_ones():
    states = simulate(
        regression(steps=9, batch=9, model=restless), PeriodicAveraging(period=4), Cluster(workers=3), stop_at=5
    ).states
    fewer, more = ([values(s, "random numbers")["own"] for s in resized(states, n)] for n in (2, 5))
    assert all(
        same(a, values(s, "random numbers")["own"])
        for kept in (fewer, more)
        for a, s in zip(kept, states, strict=False)
    )
    assert not any(same(more[i], more[j]) for i in range(5) for j in range(i))


def test_a_period_in_samples_counts_the_samples_of_the_new_workers():
    """12 samples are 4 steps of each of 4 workers, and 2 steps of each of 2."""
    task, strategy = regression(steps=16, batch=12), PeriodicAveraging(samples=12)
    states = simulate(task, strategy, FOUR, stop_at=8).states
    run = simulate(task, strategy, Cluster(workers=2), resume=resized(states, 2))
    assert [s.step for s in run.trace.syncs if s.rank == 0] == [9, 11, 13, 15]


def test_a_replica_that_is_not_finite_does_not_spread_when_workers_leave():
    """The next synchronisation would have given it no weight."""
    old = simulate(task_with_an_overflow(), PeriodicAveraging(period=3), FOUR, stop_at=2)
    run = simulate(
        task_with_an_overflow(), PeriodicAveraging(period=3), Cluster(workers=2), resume=resized(old.states, 2)
    )
    assert not params(old)[1].isfinite().all() and all(p.isfinite().all() for p in params(run))


def test_workers_that_never_had_data_may_leave_during_a_delayed_mean():
    """The optimizers of some workers have a state to average, and one has none."""
    task, strategy = regression(steps=12, batch=3), PeriodicAveraging(period=4, optimizer_state="average", delay=3)
    for at in (5, 6, 9):
        states = resized(simulate(task, strategy, FOUR, stop_at=at).states, 3)
        run = simulate(task, strategy, Cluster(workers=3), resume=states)
        assert all(same(p, run.params) for p in params(run))


CODED = {name: case for name, case in ORDERED.items() if "one-bit" in name}


@pytest.mark.parametrize("case", CODED.values(), ids=CODED)
def test_residuals_are_shared_out_among_the_new_workers(case: Case):
    states = simulate(regression(steps=14, batch=8), case.strategy, FOUR, stop_at=9).states
    assert owed(states).count_nonzero() and all(close(owed(resized(states, n)), owed(states)) for n in (2, 3, 6))


@pytest.mark.parametrize("at", [4, 5, 6, 8])
@pytest.mark.parametrize(
    "strategy",
    [AllReduceSGD(codec=OneBit()), PeriodicAveraging(period=4), PeriodicAveraging(period=4, codec=OneBit(), delay=2)],
    ids=str,
)
def test_no_displacement_is_lost_when_workers_leave(strategy: Any, at: int):
    """On a slope, everything arrives in the end: what was learnt between synchronisations, what is in flight and what
    is in a residual."""
    task, states = slopes(steps=14, batch=12), None
    for workers, stop in ((4, at), (2, at + 3), (3, None)):
        states = simulate(
            task, strategy, Cluster(workers=workers), resume=states and resized(states, workers), stop_at=stop
        ).states
    still = owed(states) if strategy.codec else torch.zeros(7)
    per_owed = -0.05 if isinstance(strategy, AllReduceSGD) else 1.0  # Residuals of gradients, or of displacements.
    assert close(values(states[0], "model")["params"] + per_owed * still, trained_alone(task), rtol=1e-6)


def test_workers_are_weighted_by_samples_when_others_join():
    """3, 3, 2 and 2 samples a step, within a period: the mean of all displacements is that of all ten samples."""
    task, strategy = slopes(steps=6, batch=10), PeriodicAveraging(period=6)
    states = simulate(task, strategy, FOUR, stop_at=4).states
    grown = simulate(task, strategy, Cluster(workers=5), resume=resized(states, 5), stop_at=4)
    assert close(params(grown)[0], trained_alone(replace(task, steps=4)))
    plain = torch.stack([values(state, "model")["params"] for state in states]).mean(0)
    assert not close(plain, params(grown)[0], rtol=1e-4)


def test_states_that_do_not_belong_together_are_refused():
    task, strategy = regression(steps=9, batch=8), PeriodicAveraging(period=4)
    early, late = (simulate(task, strategy, FOUR, stop_at=at).states for at in (3, 5))
    other = simulate(task, BlockMomentum(period=4), FOUR, stop_at=3).states
    with pytest.raises(ValueError, match=r"4 states, workers=0\): there must be at least one of each"):
        resized(early, 0)
    with pytest.raises(ValueError, match=r"0 states, workers=2\): there must be at least one of each"):
        resized([], 2)
    with pytest.raises(ValueError, match=r"saved at different steps, \[3, 3, 5, 5\]"):
        resized([*early[:2], *late[2:]], 3)
    with pytest.raises(ValueError, match="saved under BlockMomentum, and this run uses PeriodicAveraging"):
        resized([*early[:2], *other[2:]], 3)
    with pytest.raises(ValueError, match=r"4 workers' states for 3 workers; give resized\(states, 3\)"):
        simulate(task, strategy, Cluster(workers=3), resume=early)
