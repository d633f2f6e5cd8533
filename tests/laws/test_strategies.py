"""The laws of every strategy, in the simulator with real gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import (
    AllReduceSGD,
    BlockMomentum,
    Cluster,
    Link,
    LogNormal,
    PeriodicAveraging,
    Replicated,
    Run,
    simulate,
    strategies,
)
from paceline.codecs import Fp16, OneBit
from paceline.strategy import Strategy
from paceline.task import Task
from tests.in_turn import in_turn
from tests.laws.every import ALONE, ORDERED, STRATEGIES, Case
from tests.laws.pairs import pairwise
from tests.laws.tasks import OPTIMIZERS, close, params, quadratic, regression, same, trained_alone, values

every_case = pytest.mark.parametrize("case", STRATEGIES.values(), ids=STRATEGIES)
every_ordered_case = pytest.mark.parametrize("case", ORDERED.values(), ids=ORDERED)

AGREEING = {name: case for name, case in STRATEGIES.items() if case.agrees}
LONE = {name: case for name, case in STRATEGIES.items() if case.group == 1}
EXEMPT = {name: case for name, case in STRATEGIES.items() if case.alone is None and case.group == 1}
SIZED = {name: case for name, case in STRATEGIES.items() if case.nbytes is not None}


ENCODED = STRATEGIES["all-reduce-sgd by one-bit"].strategy


def tensors(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All values in a state, keyed by their path."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from tensors(value, f"{path}/{key}")
    elif isinstance(state, (list, tuple)):
        for i, value in enumerate(state):
            yield from tensors(value, f"{path}/{i}")
    else:
        yield path, state


def assert_same_states(a: list[Any], b: list[Any]) -> None:
    for (place, mine), (other, theirs) in zip(tensors(a), tensors(b), strict=True):
        assert place == other
        assert same(mine, theirs) if isinstance(mine, Tensor) else mine == theirs, place


def restless() -> nn.Module:
    """A network with everything that a checkpoint easily misses: random numbers in the forward pass, and buffers."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)).double()


def test_every_strategy_is_in_the_list():
    assert {type(case.strategy) for case in STRATEGIES.values()} >= set(strategies.STRATEGIES)


@pytest.mark.parametrize("case", ALONE.values(), ids=ALONE)
@in_turn(optimizer=list(OPTIMIZERS))
def test_one_worker_equals_plain_training(case: Case, optimizer: str):
    task = regression(steps=23, batch=5, samples=22, optimizer=OPTIMIZERS[optimizer], bucket_bytes=200)
    run = simulate(task, case.strategy, Cluster(workers=1))
    expected = trained_alone(task, optimizer=case.plain)
    assert same(run.params, expected) if case.alone == "bits" else close(run.params, expected)
    assert not close(expected, trained_alone(regression(steps=0, batch=5)), rtol=1e-2), "something was learnt"


@pytest.mark.parametrize("case", EXEMPT.values(), ids=EXEMPT)
def test_an_exempt_method_differs_from_plain_training(case: Case):
    task = regression(steps=23, batch=5, samples=22, bucket_bytes=200)
    run = simulate(task, case.strategy, Cluster(workers=1))
    assert not close(run.params, trained_alone(task, optimizer=case.plain))


@every_case
def test_the_same_seed_gives_the_same_trace_and_another_seed_another(case: Case):
    def digest(seed: int) -> str:
        task = regression(steps=9, batch=8)
        return simulate(
            task, case.strategy, Cluster(workers=3 * case.group, compute=LogNormal("5ms", 0.5), seed=seed)
        ).trace.dumps()

    first = digest(0)
    assert first == digest(0)
    assert first != digest(1)


@every_ordered_case
def test_timing_does_not_change_the_result_of_an_ordered_strategy(case: Case):
    task = regression(steps=9, batch=8)
    quick = simulate(task, case.strategy, Cluster(workers=3))
    rough = simulate(
        task, case.strategy, Cluster(workers=3, compute=LogNormal("5ms", 0.8), bandwidth="1kB/s", collective="star")
    )
    assert_same_states(quick.states, rough.states)


def interrupted() -> Task:
    return regression(steps=14, batch=9, samples=33, model=restless, bucket_bytes=100)


@every_ordered_case
def test_a_stopped_and_resumed_run_equals_the_unbroken_one(case: Case):
    """The run stops at the first and the last step, at synchronisations and between two. Each part starts from the
    state that the part before it saved."""
    whole, parts = simulate(interrupted(), case.strategy, Cluster(workers=3)), list[Run]()
    for stop_at in (1, 3, 4, 6, 8, 13, None):
        resume = parts[-1].states if parts else None
        parts.append(simulate(interrupted(), case.strategy, Cluster(workers=3), resume=resume, stop_at=stop_at))
        if stop_at is not None:
            assert all(state["step"] == stop_at for state in parts[-1].states)
    assert_same_states(parts[-1].states, whole.states)
    assert same(parts[-1].params, whole.params)
    losses = sorted((p.rank, p.step, p.samples, p.loss) for part in parts for p in part.trace.points)
    assert losses == sorted((p.rank, p.step, p.samples, p.loss) for p in whole.trace.points)


@every_ordered_case
def test_resuming_does_not_change_the_saved_states(case: Case):
    task = regression(steps=8, batch=8)
    first = simulate(task, case.strategy, Cluster(workers=2), stop_at=5)
    once = simulate(task, case.strategy, Cluster(workers=2), resume=first.states)
    again = simulate(task, case.strategy, Cluster(workers=2), resume=first.states)
    assert_same_states(once.states, again.states)


def test_a_stopped_run_does_not_claim_a_final_evaluation():
    task = quadratic(
        steps=12, batch=4, samples=16, evaluate=lambda model: {"first": model.w[0].item()}, evaluate_every=5
    )
    run = simulate(task, PeriodicAveraging(period=4), Cluster(workers=2), stop_at=6)
    assert [e.samples for e in run.trace.evaluations] in ([20], [20, 24])


def test_the_state_of_another_strategy_is_refused_by_name():
    task = quadratic(steps=8, batch=4)
    first = simulate(task, STRATEGIES["all-reduce-sgd by one-bit"].strategy, Cluster(workers=2), stop_at=5)
    with pytest.raises(ValueError, match="saved under AllReduceSGD, and this run uses BlockMomentum"):
        simulate(task, BlockMomentum(period=2), Cluster(workers=2), resume=first.states)


def test_the_state_of_other_settings_is_refused_with_the_slot_name():
    """One slot is missing; or there is one that the strategy does not declare."""
    task = quadratic(steps=8, batch=4)
    encoded, plain = (simulate(task, s, Cluster(workers=2), stop_at=5) for s in (ENCODED, AllReduceSGD()))
    with pytest.raises(ValueError, match=r"no slot 'codec.residuals', only \[\]"):
        simulate(task, ENCODED, Cluster(workers=2), resume=plain.states)
    with pytest.raises(ValueError, match=r"has the slots \['codec.residuals'\], which the strategy does not declare"):
        simulate(task, AllReduceSGD(), Cluster(workers=2), resume=encoded.states)


def test_a_slot_of_another_version_and_a_state_of_another_format_are_refused_by_name():
    task = quadratic(steps=8, batch=4)
    states = simulate(task, ENCODED, Cluster(workers=2), stop_at=5).states
    states[1]["slots"]["codec.residuals"]["version"] = 7
    with pytest.raises(ValueError, match=r"'codec.residuals' was saved in version 7, and .* reads version 2"):
        simulate(task, ENCODED, Cluster(workers=2), resume=states)
    states = simulate(task, ENCODED, Cluster(workers=2), stop_at=5).states
    states[1]["slots"]["model"]["version"] = 7
    with pytest.raises(ValueError, match=r"'model' was saved in version 7, and .* reads version 1"):
        simulate(task, ENCODED, Cluster(workers=2), resume=states)
    with pytest.raises(ValueError, match=r"saved in format 9, and .* reads format 1"):
        simulate(task, ENCODED, Cluster(workers=2), resume=[state | {"format": 9} for state in states])


def test_a_residual_of_another_size_is_refused_by_name():
    task, strategy = quadratic(steps=8, batch=4), STRATEGIES["all-reduce-sgd by one-bit"].strategy
    states = simulate(task, strategy, Cluster(workers=2), stop_at=5).states
    slot = values(states[1], "codec.residuals")
    numel = slot["residual"].numel()
    slot["residual"] = torch.zeros(numel + 1)
    with pytest.raises(
        ValueError,
        match=rf"'residual' in .* 'codec.residuals' has the shape \({numel + 1},\), .* \({numel},\): .* another model",
    ):
        simulate(task, strategy, Cluster(workers=2), resume=states)


@pytest.mark.parametrize("case", AGREEING.values(), ids=AGREEING)
@pytest.mark.parametrize("steps", [1, 8, 11])
def test_all_ranks_agree_after_the_last_synchronisation(case: Case, steps: int):
    task = regression(steps=max(steps, case.least), batch=9, samples=33, model=restless)
    run = simulate(task, case.strategy, Cluster(workers=3, compute=[0.01, 0.02, 0.04]))
    for state in run.states[1:]:
        assert same(values(state, "model")["params"], values(run.states[0], "model")["params"])
    assert same(run.params, values(run.states[0], "model")["params"])
    assert run.params.isfinite().all()


UNEQUAL = pairwise(list(STRATEGIES), [(5, 13), (9, 20), (2, 8), (1, 3)], [1, 6, 7])


@pytest.mark.parametrize(
    ("case", "batch", "samples", "steps"),
    [
        pytest.param(STRATEGIES[name], batch, samples, steps, id=f"{name}-{samples} by {batch}-{steps}")
        for name, (batch, samples), steps in UNEQUAL
    ],
)
def test_a_run_with_unequal_data_ends_cleanly(case: Case, batch: int, samples: int, steps: int):
    """On 4 workers: last minibatches of 3 and 2 samples, and minibatches so small that some workers never get data."""
    task = regression(steps=max(steps, case.least), batch=batch, samples=samples)
    run = simulate(task, case.strategy, Cluster(workers=4, compute=[0.01, 0.02, 0.03, 0.05]))
    seen = sum(p.samples for p in run.trace.points if p.loss is not None)
    times = 4 if isinstance(case.strategy, Replicated) else 1
    worked = task.total_steps // task.steps_per_epoch * task.steps_per_epoch if case.whole else task.total_steps
    due = times * sum(len(task.part(k, 0, 1)[0]) for k in range(worked))
    assert seen == due or (case.doubles and seen > due), "every sample of every minibatch was seen once"
    assert all(p.isfinite().all() for p in params(run))
    if case.agrees:
        assert all(same(p, run.params) for p in params(run))


@pytest.mark.parametrize("case", SIZED.values(), ids=SIZED)
@in_turn(numel=[40, 2047], workers=[2, 3], steps=[4, 7])
def test_every_element_is_exchanged_exactly_once(case: Case, steps: int, workers: int, numel: int):
    """The bytes in the trace equal those of the formulas. Each mean carries a vote of 32 bytes."""
    assert case.nbytes is not None
    task = quadratic(steps=steps, batch=2 * workers, numel=numel, dtype=torch.float32)
    trace = simulate(task, case.strategy, Cluster(workers=workers)).trace
    assert [trace.bytes_sent(rank) for rank in range(workers)] == [
        case.nbytes(numel, workers, steps, rank) for rank in range(workers)
    ]
    if case.strategy.servers:
        # A worker receives the value at the start, after every push and at the end, and a ticket of two numbers for
        # every step.
        told = 4 * numel * workers * (steps + 2) + 16 * workers * steps
        assert sum(trace.bytes_sent(workers + j) for j in range(case.strategy.servers)) == told


@pytest.mark.parametrize("case", LONE.values(), ids=LONE)
def test_one_worker_sends_nothing_to_other_workers(case: Case):
    """It sends messages to its servers, of the formula's size where there is a formula. It takes part in no
    collective."""
    task = quadratic(steps=5, batch=4, dtype=torch.float32)
    trace = simulate(task, case.strategy, Cluster(workers=1)).trace
    by_kind = {span.kind for span in trace.spans if span.nbytes}
    assert by_kind == ({"send"} if case.strategy.servers else set())
    if case.nbytes is not None:
        assert trace.bytes_sent(0) == case.nbytes(5, 1, 5, 0)


def test_buckets_carry_the_same_values_as_one_vector():
    """The values are equal to the bit, because sums are elementwise. Every bucket carries a vote."""
    whole, cut = (
        simulate(regression(steps=5, batch=8, bucket_bytes=b), ORDERED["all-reduce-sgd"].strategy, Cluster(workers=4))
        for b in (1 << 20, 1)
    )
    assert same(whole.params, cut.params)
    assert len(cut.trace.starts("all_reduce")) == 4 * len(whole.trace.starts("all_reduce"))


@pytest.mark.parametrize("kind", [PeriodicAveraging, BlockMomentum])
@pytest.mark.parametrize("steps", [1, 3, 4, 5, 8, 11])
def test_a_run_that_is_not_a_multiple_of_the_period_still_ends_with_a_synchronisation(kind: type[Strategy], steps: int):
    """There are floor(K/p) synchronisations, and one more at the end if p does not divide K."""
    run = simulate(quadratic(steps=steps, batch=6), kind(period=4), Cluster(workers=3))  # pyright: ignore
    for rank in range(3):
        assert sum(s.kind == "all_reduce" and s.rank == rank for s in run.trace.spans) == steps // 4 + (steps % 4 > 0)
    assert all(same(p, run.params) for p in params(run))
    assert sum(p.rank == 0 for p in run.trace.points) == steps


def test_workers_of_unequal_speed_exchange_buckets_in_one_order():
    """A fast worker may encode its second bucket before a slow one starts its first. Their collectives must still
    match."""
    task = regression(steps=12, batch=20, bucket_bytes=100)
    uneven = Cluster(
        workers=4, compute=LogNormal("10ms", 1.0), links={(1, 2): Link("1Mbit/s", "5ms")}, codec_bandwidth="10kB/s"
    )
    for codec in (OneBit(), Fp16()):
        assert same(
            simulate(task, AllReduceSGD(codec=codec), uneven).params,
            simulate(task, AllReduceSGD(codec=codec), Cluster(workers=4)).params,
        )


# Gossip and Strom bring their messages to rest first: see test_quiet.py.
RESTLESS = {name: case for name, case in STRATEGIES.items() if not case.strategy.needs.resumable}


@pytest.mark.parametrize("case", RESTLESS.values(), ids=RESTLESS)
def test_asynchronous_methods_refuse_to_stop_and_resume(case: Case):
    """Otherwise the messages in flight between workers would be lost."""
    with pytest.raises(ValueError, match=r"it needs a run without a stop \(messages in flight are in no saved state\)"):
        simulate(quadratic(steps=9, batch=4), case.strategy, Cluster(workers=2), stop_at=5)
