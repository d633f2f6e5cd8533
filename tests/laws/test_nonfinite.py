"""NaN gradients: the run names rank, step and parameter, and then skips, stops or passes the value on, by policy."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import (
    AllReduceSGD,
    Cluster,
    NonFiniteGradient,
    ParameterServer,
    PeriodicAveraging,
    Task,
    simulate,
)
from paceline.codecs import Fp16, Fp32, OneBit
from paceline.codecs.entropy import Entropy
from paceline.codecs.power_sgd import PowerSGD
from paceline.server.rules import Sgd
from paceline.strategy import Strategy
from tests.laws.tasks import OPTIMIZERS, close, numbers, params, same, trained_alone, values

STEPS, BATCH, WORKERS = 8, 6, 3

STRATEGIES: dict[str, Strategy] = {
    "all-reduce-sgd": AllReduceSGD(),
    "all-reduce-sgd by one-bit": AllReduceSGD(codec=OneBit()),
    "all-reduce-sgd by fp32": AllReduceSGD(codec=Fp32()),
    "all-reduce-sgd by power-sgd": AllReduceSGD(codec=PowerSGD()),
    "all-reduce-sgd by entropy": AllReduceSGD(codec=Entropy(OneBit())),
    "periodic-averaging": PeriodicAveraging(period=3),
    "parameter-server": ParameterServer(rule=Sgd(lr=0.05)),
}
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
every_culprit = pytest.mark.parametrize(
    "culprit", [(2, 0), (4, 1), (7, 2)], ids=["rank 0", "rank 1", "rank 2, last step"]
)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quiet = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        self.loud = nn.Parameter(torch.zeros(4, dtype=torch.float64))


def distances(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return (model.quiet - x).square().sum(1).mean() + (model.loud - y).square().sum(1).mean()


def task_with_bad_samples(
    *culprits: tuple[int, int], bad: float = math.nan, bucket_bytes: int = 1, parameter: str = "loud"
) -> Task:
    """One epoch in which the gradient of one parameter is bad at the given steps on the given ranks, and only there."""
    samples = STEPS * BATCH
    x, y = numbers(samples, 4, seed=1), numbers(samples, 4, seed=2)
    order = Task(Pair, distances, [torch.arange(samples)], BATCH, OPTIMIZERS["sgd"], steps=STEPS)
    for step, rank in culprits:
        (y if parameter == "loud" else x)[order.part(step, rank, WORKERS)[0][0], 1] = bad
    return Task(Pair, distances, [x, y], BATCH, OPTIMIZERS["sgd"], steps=STEPS, bucket_bytes=bucket_bytes)


def assert_finite(run: Any) -> None:
    for state in run.states:
        assert values(state, "model")["params"].isfinite().all()
        for slot in state["slots"].values():
            assert all(value.isfinite().all() for value in slot["values"].values() if isinstance(value, Tensor))


@every_strategy
@every_culprit
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_is_skipped_and_named(strategy: Strategy, culprit: tuple[int, int], bad: float):
    step, rank = culprit
    named = f"rank {rank} has NaN or infinity in the gradient of 'loud' at step {step}; the step was skipped"
    with pytest.warns(NonFiniteGradient) as caught:
        run = simulate(task_with_bad_samples(culprit, bad=bad), strategy, Cluster(workers=WORKERS))
    assert [str(w.message) for w in caught] == [named]
    assert_finite(run)
    if strategy.needs.ordered:
        assert all(same(p, run.params) for p in params(run))


def test_a_gradient_beyond_its_codec_is_skipped_with_a_warning():
    """The gradient is finite, so the warning names no parameter. But a step must not be skipped silently."""
    with pytest.warns(NonFiniteGradient) as caught:
        run = simulate(task_with_bad_samples((4, 1), bad=1e7), AllReduceSGD(codec=Fp16()), Cluster(workers=WORKERS))
    (told,) = (str(w.message) for w in caught)
    assert re.fullmatch(
        r"rank 1 has a gradient beyond its codec: Fp16\(\) cannot encode .*65504 at step 4; the step was skipped", told
    )
    assert_finite(run)


@every_culprit
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_all_reduce_sgd_skips_the_whole_step(culprit: tuple[int, int], bucket_bytes: int):
    task = task_with_bad_samples(culprit, bucket_bytes=bucket_bytes)
    with pytest.warns(NonFiniteGradient):
        run = simulate(task, AllReduceSGD(), Cluster(workers=WORKERS))
    assert close(run.params, trained_alone(task, left_out=[culprit[0]]))


@every_culprit
def test_a_bad_minibatch_has_no_weight_in_an_average(culprit: tuple[int, int]):
    """The run stops within a period, before the sample counts are reset. The bad worker has one minibatch less; the
    others have all."""
    step, rank = culprit
    if step == STEPS - 1:
        pytest.skip("the run ends with that step")
    with pytest.warns(NonFiniteGradient):
        run = simulate(
            task_with_bad_samples(culprit), PeriodicAveraging(period=100), Cluster(workers=WORKERS), stop_at=step + 1
        )
    each = BATCH // WORKERS
    assert [values(s, "position")["since_mean"] for s in run.states] == [
        each * (step + 1 - (r == rank)) for r in range(WORKERS)
    ]


def test_a_bad_gradient_makes_no_new_version_of_a_shard():
    with pytest.warns(NonFiniteGradient):
        run = simulate(task_with_bad_samples((4, 1)), ParameterServer(rule=Sgd(lr=0.05)), Cluster(workers=WORKERS))
    for server in (WORKERS, WORKERS + 1):
        assert sum(p.rank == server for p in run.trace.points) == STEPS * WORKERS - 1


@every_strategy
@every_culprit
def test_a_bad_gradient_stops_the_run_by_name(strategy: Strategy, culprit: tuple[int, int]):
    """In a synchronous method all ranks stop. The first error may be that of another rank; it still names the bad rank
    and the step."""
    step, rank = culprit
    with pytest.raises(FloatingPointError) as caught:
        simulate(task_with_bad_samples(culprit), strategy, Cluster(workers=WORKERS), nonfinite="stop")
    knows_parameter = rank == 0 or not isinstance(strategy, AllReduceSGD)
    what = (
        "has NaN or infinity in the gradient of 'loud'"
        if knows_parameter
        else "had a gradient with NaN or infinity, or beyond its codec"
    )
    assert re.fullmatch(
        rf"rank {rank} {what} at step {step}; the step was not taken \(nonfinite='stop'\)", str(caught.value)
    )


@every_strategy
@every_culprit
def test_a_bad_gradient_is_passed_on_under_that_policy(strategy: Strategy, culprit: tuple[int, int]):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = simulate(task_with_bad_samples(culprit), strategy, Cluster(workers=WORKERS), nonfinite="pass")
    assert any(not p.isfinite().all() for p in params(run))


EVERYONE = [(4, rank) for rank in range(WORKERS)]


@every_strategy
def test_bad_gradients_of_all_workers_are_skipped_and_named(strategy: Strategy):
    with pytest.warns(NonFiniteGradient) as caught:
        run = simulate(task_with_bad_samples(*EVERYONE), strategy, Cluster(workers=WORKERS))
    assert sorted(str(w.message)[:6] for w in caught) == ["rank 0", "rank 1", "rank 2"]
    assert all("at step 4" in str(w.message) for w in caught)
    assert_finite(run)


@every_strategy
def test_bad_gradients_of_all_workers_stop_the_run(strategy: Strategy):
    with pytest.raises(FloatingPointError, match="at step 4"):
        simulate(task_with_bad_samples(*EVERYONE), strategy, Cluster(workers=WORKERS), nonfinite="stop")


@every_strategy
def test_bad_gradients_of_all_workers_are_passed_on_under_that_policy(strategy: Strategy):
    run = simulate(task_with_bad_samples(*EVERYONE), strategy, Cluster(workers=WORKERS), nonfinite="pass")
    assert any(not p.isfinite().all() for p in params(run))


@every_strategy
@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
def test_one_worker_follows_the_policy_as_several_do(strategy: Strategy, nonfinite: Any):
    task = task_with_bad_samples((4, 1))
    if nonfinite == "stop":
        with pytest.raises(FloatingPointError, match="rank 0 has NaN or infinity in the gradient of 'loud' at step 4"):
            simulate(task, strategy, Cluster(workers=1), nonfinite="stop")
    else:
        with pytest.warns(NonFiniteGradient, match="rank 0 .* 'loud' at step 4"):
            run = simulate(task, strategy, Cluster(workers=1))
        assert same(run.params, trained_alone(task, left_out=[4]))


def test_a_skipped_step_does_not_lose_the_residual():
    """Error feedback across a skipped step: the step did not apply the residuals that one-bit SGD had before it. They
    must not be lost, from the bucket with the NaN on. The buckets before it were already exchanged when the NaN was
    found."""
    task = task_with_bad_samples((4, 1), parameter="loud")
    with pytest.warns(NonFiniteGradient, match="'loud'"):
        after = simulate(task, AllReduceSGD(codec=OneBit()), Cluster(workers=WORKERS), stop_at=5)
    before = simulate(task, AllReduceSGD(codec=OneBit()), Cluster(workers=WORKERS), stop_at=4)
    assert same(after.params, before.params), "the step was skipped"
    for a, b in zip(after.states, before.states, strict=True):
        for name in ("residual", "owner_residual"):
            assert close(values(a, "codec.residuals")[name], values(b, "codec.residuals")[name])


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"nonfinite='ignore'.*'skip', 'stop', 'pass'"):
        simulate(task_with_bad_samples(), AllReduceSGD(), Cluster(workers=2), nonfinite="ignore")  # pyright: ignore
