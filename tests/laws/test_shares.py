"""Error feedback if the shares of a mean change: what is delivered and what is remembered add up to what was given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline import AllReduceSGD, Cluster, PeriodicAveraging, Task, resized, simulate
from paceline.codecs import DGC, Codec, ErrorFeedback, OneBit, PowerSGD, shares
from paceline.codecs.dgc import MomentumCorrection
from paceline.codecs.shares import Shares
from paceline.collectives import SyncVote, groups_of, mean_by_gather, mean_by_groups, mean_by_stripes, mean_encoded
from paceline.state import resized_for
from tests.laws.every import CODECS
from tests.laws.ranks import Ranks, on_simulator
from tests.laws.slots import Slots, in_units, owed, remembered
from tests.laws.tasks import close, numbers, quadratic, same, trained_alone, values

SIMULATOR = Ranks(on_simulator, is_ordered=True, is_real=False)
FEEDBACK = {name: codec for name, codec in CODECS.items() if codec.feedback}
NUMEL = 600
ROUNDS = 5

every_feedback = pytest.mark.parametrize("codec", FEEDBACK.values(), ids=FEEDBACK)
weights = st.sampled_from([0.0, 0.0, 1.0, 2.0, 7.0, 32.0, 32.0])


@st.composite
def rounds(draw: st.DrawFn) -> list[list[float]]:
    """The weights of 2 to 5 ranks in each mean."""
    ranks = draw(st.integers(2, 5))
    return draw(st.lists(st.lists(weights, min_size=ranks, max_size=ranks), min_size=ROUNDS, max_size=ROUNDS))


def vector(rank: int, t: int, numel: int = NUMEL, dtype: torch.dtype = torch.float64) -> Tensor:
    return numbers(numel, seed=100 * t + rank).to(dtype)


async def exchanged(
    endpoint: Any, slots: Slots, state: Any, every: Sequence[Sequence[float]], mean: Any = mean_encoded
) -> Any:
    """The sum of the means that this rank has got, its vectors, and the momentum in its messages, round by round.

    The momentum is that of earlier gradients, in units of the mean.
    """
    delivered = torch.zeros(NUMEL, dtype=torch.float64)
    given: list[Tensor] = []
    momentum = torch.zeros(NUMEL, dtype=torch.float64)
    for t, weight in enumerate(every):
        x = vector(endpoint.rank, t)
        given.append(x.clone())
        if isinstance(state, MomentumCorrection) and weight[endpoint.rank]:
            momentum += 0.9 * in_units(vars(slots.slots["residuals"]), "velocity")
        total = await mean(endpoint, x, SyncVote(weight[endpoint.rank], rank=endpoint.rank), state)
        if total.weight:
            delivered += x
    return delivered, given, momentum


def meant(every: Sequence[Sequence[float]], given: Sequence[Sequence[Tensor]]) -> Tensor:
    """The sum of the exact weighted means, of the rounds that have one."""
    return sum(
        (
            sum((w * given[rank][t] for rank, w in enumerate(weight)), torch.zeros(NUMEL)) / sum(weight)
            for t, weight in enumerate(every)
            if sum(weight)
        ),
        torch.zeros(NUMEL, dtype=torch.float64),
    )


def by_groups(endpoint: Any, x: Tensor, vote: SyncVote, state: Any) -> Any:
    return mean_by_groups(endpoint, x, vote, state, groups_of(endpoint.ranks, 2))


def conserves(path: Path, codec: Codec, every: Sequence[Sequence[float]], mean: Any) -> bool:
    ranks = len(every[0])
    slots = [Slots() for _ in range(ranks)]
    like = torch.zeros(NUMEL, dtype=torch.float64)

    async def law(endpoint: Any) -> Any:
        state = codec.fitted([torch.Size([20, 25]), torch.Size([100])]).codec_state(slots[endpoint.rank], like)
        return await exchanged(endpoint, slots[endpoint.rank], state, every, mean)

    results = SIMULATOR(path, ranks, law)
    kept = sum(remembered(vars(s.slots["residuals"])) for s in slots)
    total = meant(every, [given for _, given, _ in results]) + sum(momentum for _, _, momentum in results)
    # Each value in a message is a float32, but it is known exactly, and all sums are in double precision.
    size = max(float(t.abs().max()) for _, given, _ in results for t in given)
    return bool(((results[0][0] + kept - total).abs() <= 1e-12 * size).all())


@every_feedback
@settings(max_examples=3)
@given(every=rounds())
def test_means_and_residuals_add_up_to_the_exact_means(codec: Codec, every: list[list[float]], tmp_path_factory: Any):
    """By the codec's own reduction, for weights that change from mean to mean, with zeros and with empty means."""
    assert conserves(tmp_path_factory.getbasetemp(), codec, every, mean_encoded)


@pytest.mark.parametrize("mean", [mean_by_gather, mean_by_stripes, by_groups])
@settings(max_examples=8)
@given(every=rounds())
def test_every_reduction_conserves_the_mean(mean: Any, every: list[list[float]], tmp_path_factory: Any):
    assert conserves(tmp_path_factory.getbasetemp(), OneBit(bucket=64), every, mean)


@pytest.mark.parametrize("nesterov", [False, True])
@settings(max_examples=5)
@given(every=rounds())
def test_in_the_end_the_momentum_of_dgc_delivers_every_gradient_ten_times(
    nesterov: bool, every: list[list[float]], tmp_path_factory: Any
):
    """With momentum 0.9, and without masking, which drops momentum on purpose.  A velocity v still delivers 9 v."""
    codec = DGC(ratio=0.05, nesterov=nesterov, masking=False)
    slots = [Slots() for _ in every[0]]

    async def law(endpoint: Any) -> Any:
        own = slots[endpoint.rank]
        return await exchanged(endpoint, own, codec.codec_state(own, torch.zeros(NUMEL, dtype=torch.float64)), every)

    results = SIMULATOR(tmp_path_factory.getbasetemp(), len(every[0]), law)
    kept = sum(
        in_units(vars(s.slots["residuals"])) + 9 * in_units(vars(s.slots["residuals"]), "velocity") for s in slots
    )
    total = 10 * meant(every, [given for _, given, _ in results])
    assert ((results[0][0] + kept - total).abs() <= 1e-12 * 10 * 4).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("codec", [OneBit(), PowerSGD(rank=2)], ids=str)
def test_the_kernels_residual_is_conserved_up_to_the_rounding_of_the_mean(
    codec: Codec, dtype: torch.dtype, tmp_path: Path
):
    """A mean by stripes of 16-bit values is rounded where it is put; factors remember that rounding."""
    every = [[32.0, 32.0, 32.0], [32.0, 1.0, 0.0], [8.0, 8.0, 8.0], [1.0, 32.0, 32.0]] * 5
    slots = [Slots() for _ in range(3)]

    async def law(endpoint: Any) -> Any:
        state = codec.fitted([torch.Size([20, 25]), torch.Size([100])])
        state = state.codec_state(slots[endpoint.rank], torch.zeros(NUMEL, dtype=dtype))
        delivered = torch.zeros(NUMEL, dtype=torch.float64)
        for t, weight in enumerate(every):
            x = vector(endpoint.rank, t, dtype=dtype)
            await mean_encoded(endpoint, x, SyncVote(weight[endpoint.rank], rank=endpoint.rank), state)
            delivered += x.double()
        return delivered, [vector(endpoint.rank, t, dtype=dtype).double() for t in range(len(every))]

    results = SIMULATOR(tmp_path, 3, law)
    kept = sum(remembered(vars(s.slots["residuals"])) for s in slots)
    rounding = 2**-8 if dtype == torch.bfloat16 and isinstance(codec, OneBit) else 2**-22
    # 20 means, each with an error of a rounding of values below 8.
    error = results[0][0] + kept - meant(every, [given for _, given in results])
    assert error.abs().max() <= 20 * 8 * rounding


def test_equal_shares_keep_what_encode_left(tmp_path: Path):
    """The residual has the bits of the codec alone: nothing is computed for a share that does not change."""
    slots = [Slots() for _ in range(3)]

    async def law(endpoint: Any) -> Any:
        state = OneBit().codec_state(slots[endpoint.rank], torch.zeros(NUMEL))
        alone = ErrorFeedback(OneBit(), torch.zeros(NUMEL))
        for t in range(4):
            x = vector(endpoint.rank, t, dtype=torch.float32)
            alone.encode(x)
            await mean_by_gather(endpoint, x, SyncVote(32.0 / (1 + t % 2)), state)
        return state.residual, alone.residual

    for own, alone in SIMULATOR(tmp_path, 3, law):
        assert same(own, alone)
    assert slots[0].slots["residuals"].shares == [[0, NUMEL, 1 / 3]]


def test_a_worker_without_values_keeps_its_residual_and_unit(tmp_path: Path):
    slots = [Slots(), Slots()]

    async def law(endpoint: Any) -> Any:
        state = OneBit().codec_state(slots[endpoint.rank], torch.zeros(NUMEL))
        await mean_encoded(endpoint, vector(endpoint.rank, 0, dtype=torch.float32), SyncVote(1.0), state)
        before = state.residual.clone()
        empty = SyncVote(1.0 - endpoint.rank)
        await mean_encoded(endpoint, vector(endpoint.rank, 1, dtype=torch.float32), empty, state)
        return before, state.residual

    results = SIMULATOR(tmp_path, 2, law)
    assert same(*results[1]) and not same(*results[0])
    assert [s.slots["residuals"].shares for s in slots] == [[[0, NUMEL, 1.0]], [[0, NUMEL, 0.5]]]


def deviations(path: Path) -> list[float]:
    """How far each mean is from the exact one, if the last of 4 workers has a single sample in the mean 20."""
    every = [[32.0, 32.0, 32.0, 1.0 if t == 20 else 32.0] for t in range(30)]

    async def law(endpoint: Any) -> Any:
        state = OneBit().codec_state(Slots(), torch.zeros(NUMEL))
        means: list[Tensor] = []
        for t, weight in enumerate(every):
            x = vector(endpoint.rank, t, dtype=torch.float32)
            await mean_by_gather(endpoint, x, SyncVote(weight[endpoint.rank]), state)
            means.append(x)
        return means

    means = SIMULATOR(path, 4, law)[0]
    exact = [sum(w * vector(r, t) for r, w in enumerate(weight)) / sum(weight) for t, weight in enumerate(every)]
    return [float((m - e).norm()) for m, e in zip(means, exact, strict=True)]


def test_a_single_sample_does_not_upset_the_next_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """If the unit followed the small share at once, the next mean would deliver the residual many times over."""
    errors = deviations(tmp_path)
    usual = max(errors[5:20])
    assert max(errors[20:]) < 1.3 * usual
    monkeypatch.setattr(shares, "FALL", 0.0)
    assert max(deviations(tmp_path)[20:]) > 3 * usual


# Whole runs.


def small_last(**more: Any) -> Task:
    """Epochs of minibatches of 8, 8, 8 and 3 samples, and gradients that depend on the data alone."""

    def slope(model: Any, batch: Any) -> Tensor:
        return (model.w * batch[0]).sum(1).mean()

    task = quadratic(batch=8, numel=1200, samples=27, **more)
    return replace(task, loss=slope)


@pytest.mark.parametrize(
    ("codec", "workers"),
    [(OneBit(), 2), (OneBit(), 3), (OneBit(), 4), (DGC(ratio=0.05, momentum=0.0), 3)],
    ids=str,
)
def test_synchronous_sgd_loses_nothing_in_a_small_last_minibatch(codec: Codec, workers: int):
    """The model has moved by lr times all gradients, except for what is remembered."""
    task = small_last(steps=13, bucket_bytes=5000)
    run = simulate(task, AllReduceSGD(codec=codec), Cluster(workers=workers))
    assert close(run.params - 0.05 * owed(run.states), trained_alone(task), rtol=1e-9)
    assert not close(run.params, trained_alone(task), rtol=1e-3)


@pytest.mark.parametrize("strategy", [PeriodicAveraging(period=3), PeriodicAveraging(period=2, delay=1)], ids=str)
def test_averaging_loses_nothing_in_a_small_last_minibatch(strategy: Any):
    """A worker's delta counts for its samples since the last sync, so shares differ from sync to sync."""
    task = small_last(steps=24)
    plain, coded = (simulate(task, replace(strategy, codec=codec), Cluster(workers=4)) for codec in (None, OneBit()))
    assert close(coded.params + owed(coded.states), plain.params, rtol=1e-9)
    assert not close(coded.params, plain.params, rtol=1e-3)


def test_the_momentum_of_dgc_loses_nothing_with_4_then_2_then_3_workers():
    """Without masking, momentum 0.9 moves the model by 10 times all gradients."""
    task, states = small_last(steps=22), None
    for workers, stop in ((4, 8), (2, 15), (3, None)):
        resume = None if states is None else resized(states, workers)
        strategy = AllReduceSGD(codec=DGC(ratio=0.05, masking=False))
        run = simulate(task, strategy, Cluster(workers=workers), resume=resume, stop_at=stop)
        states = run.states
    velocity = sum(in_units(values(state, "codec.residuals"), "velocity") for state in run.states)
    start = task.build().w.detach()
    meant = start + 10 * (trained_alone(task) - start)
    assert close(run.params - 0.05 * (owed(run.states) + 9 * velocity), meant, rtol=1e-9)


@pytest.mark.parametrize("group", [None, 2])
def test_nothing_is_lost_with_4_then_2_then_3_workers(group: int | None):
    """In minibatches of changing shares, also if only the first workers of groups send."""
    task, states = small_last(steps=22), None
    strategy = AllReduceSGD(codec=OneBit(), group=group)
    for workers, stop in ((4, 8), (2, 15), (3, None)):
        run = simulate(
            task,
            strategy,
            Cluster(workers=workers),
            resume=None if states is None else resized(states, workers),
            stop_at=stop,
        )
        if states is not None:
            assert close(owed(resized(states, workers)), owed(states))
        states = run.states
    assert close(run.params - 0.05 * owed(run.states), trained_alone(task), rtol=1e-9)


def test_what_a_dead_worker_remembered_is_missing_and_nothing_else():
    """Three of four states are resized to two workers, which go on."""
    task = small_last(steps=22)
    four = simulate(task, AllReduceSGD(codec=OneBit()), Cluster(workers=4), stop_at=12)
    survivors = [state for state in four.states if state["rank"] != 1]
    two = simulate(
        task,
        AllReduceSGD(codec=OneBit()),
        Cluster(workers=2),
        resume=[resized_for(survivors, 2, rank) for rank in range(2)],
    )
    missing = owed([four.states[1]])
    assert missing.norm() > 0.1 * owed(four.states).norm()
    assert close(two.params - 0.05 * (owed(two.states) + missing), trained_alone(task), rtol=1e-9)


# Units.


@given(
    puts=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.sampled_from([0.25, 0.5, 1.0])), max_size=8),
    start=st.integers(0, 12),
    stop=st.integers(0, 12),
)
def test_units_are_those_of_a_table_with_one_for_each_value(puts: list[tuple[int, int, float]], start: int, stop: int):
    table: list[float | None] = [None] * 12
    units = Shares([])
    for a, b, unit in puts:
        units.put(a, b, unit)
        table[a:b] = [unit] * len(table[a:b])
    parts = units.over(start, stop)
    assert [unit for a, b, unit in parts for _ in range(b - a)] == table[start:stop]
    assert all(p[1] == q[0] for p, q in pairwise(parts))
    assert all(p[1] < q[0] or p[2] != q[2] for p, q in pairwise(units.pieces))


def test_a_state_without_shares_is_refused_by_its_version():
    task = quadratic(steps=6, batch=8)
    states = simulate(task, AllReduceSGD(codec=OneBit()), Cluster(workers=2), stop_at=3).states
    for state in states:
        slot = state["slots"]["codec.residuals"]
        slot["version"] = 1
        del slot["values"]["shares"]
    with pytest.raises(ValueError, match=r"'codec.residuals' was saved in version 1, .* reads version 2"):
        simulate(task, AllReduceSGD(codec=OneBit()), Cluster(workers=2), resume=states)
