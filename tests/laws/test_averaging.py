"""Laws of single averaging methods: the identities of their papers, their controllers, and the settings that they
refuse."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import (
    AdaComm,
    AdaptiveAveraging,
    AllReduceSGD,
    BlockMomentum,
    Cluster,
    DecreasingAveraging,
    DiLoCo,
    PeriodicAveraging,
    Run,
    SlowMo,
    SyncResult,
    Task,
    simulate,
)
from paceline.errors import ClusterError
from paceline.strategies.block_momentum import TooFewSamples
from paceline.strategy import Strategy
from paceline.stripes import stripe_of
from paceline.training.scaling import time_constant_of
from tests.laws.tasks import OPTIMIZERS, close, params, quadratic, regression, same, trained_alone, values, vector

FOUR = Cluster(workers=4)
every_linear_optimizer = pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov"])


def slope(model: nn.Module, batch: Any) -> Tensor:
    """A loss whose gradient is the data, and does not depend on the model."""
    return (model.w * batch[0]).sum(1).mean()


def slopes(*, steps: int, batch: int = 8, numel: int = 5, **more: Any) -> Task:
    return replace(quadratic(steps=steps, batch=batch, numel=numel, **more), loss=slope)


def noise(*, steps: int, numel: int, **more: Any) -> Task:
    """The gradients are standard normal, and differ between workers."""
    return replace(
        quadratic(steps=steps, batch=4, numel=numel, **more),
        loss=lambda model, _: (model.w * torch.randn_like(model.w)).sum(),
    )


def end(task: Task, strategy: Strategy, workers: int = 4) -> Tensor:
    return simulate(task, strategy, Cluster(workers=workers)).params


def periods(run: Run, rank: int = 0) -> list[int]:
    return [s.period for s in run.trace.syncs if s.rank == rank]


def meetings(run: Run) -> list[int]:
    """The steps after which the workers synchronised."""
    return [s.step for s in run.trace.syncs if s.rank == 0]


def met(divergence: float = 0.0, *, lr: float = 0.1, loss: float = 1.0) -> SyncResult:
    return SyncResult(step=9, steps=4, samples=8.0, workers=4, lr=lr, divergence=divergence, loss=loss, time=1.0)


def state_of(state: Any, name: str) -> Tensor:
    return torch.cat([s[name].reshape(-1) for s in values(state, "optimizer")["state"].values()])


# C1, C2: the spread of the replicas


def test_noise_spreads_replicas_in_proportion_to_the_period_and_the_square_of_the_rate():
    """The spread is Gamma^2 p sigma^2 d (N - 1) / N, within 4 standard errors. Without the last factor it would not
    be."""
    for period, lr in ((2, 0.05), (4, 0.05), (4, 0.2)):
        task = noise(steps=25 * period, numel=40, optimizer=lambda p, lr=lr: torch.optim.SGD(p, lr=lr))
        spreads = torch.tensor(
            [s.divergence for s in simulate(task, PeriodicAveraging(period=period), FOUR).trace.syncs if s.rank == 0]
        )
        error, expected = spreads.std() / math.sqrt(len(spreads)), lr**2 * period * 40 * 3 / 4
        assert abs(spreads.mean() - expected) < 4 * error < abs(expected * 4 / 3 - expected)


@pytest.mark.parametrize("batch", [8, 10, 3], ids=["equal", "3 3 2 2", "one has none"])
def test_the_spread_is_the_population_variance_of_the_replicas_weighted_by_samples(batch: int):
    task = regression(steps=8, batch=batch)
    apart = simulate(task, PeriodicAveraging(period=100), FOUR, stop_at=4)
    weights = torch.tensor([values(state, "position")["total"] for state in apart.states], dtype=torch.float64) / (
        4 * batch
    )
    points = torch.stack(params(apart))
    mean = (weights[:, None] * points).sum(0)
    by_hand = float((weights * (points - mean).square().sum(1)).sum())
    in_pairs = float((weights[:, None] * weights * torch.cdist(points, points).square()).sum() / 2)
    found = [s.divergence for s in simulate(task, PeriodicAveraging(period=4), FOUR).trace.syncs if s.step == 3]
    assert found == pytest.approx([by_hand] * 4, rel=1e-10) and by_hand == pytest.approx(in_pairs, rel=1e-8)
    assert len(set(found)) == 1, "the same bits on all ranks"


# C2: the controller


def test_after_a_tenfold_drop_of_the_rate_the_period_climbs_to_28_or_29():
    """S = gamma^2 p const, which is what noise alone gives."""
    method, period, seen = AdaptiveAveraging(), 4, [4]
    for _ in range(40):
        period = method.next_period(period, met(0.01**2 * period * 5.0, lr=0.01), ratio=0.1 * 4 * 5.0)
        seen.append(period)
    assert seen[:24] == list(range(4, 28)) and seen[-1] in (28, 29) and len(set(seen[26:])) == 1


def test_after_a_tenfold_drop_of_the_rate_the_period_climbs_in_a_run_too():
    """With this many dimensions the spread is within 0.8 percent of its expectation."""
    task = noise(steps=560, numel=10_000, schedule=lambda k: 1.0 if k < 40 else 0.1)
    seen = periods(simulate(task, AdaptiveAveraging(period=4, warmup=0, sampling=40), FOUR))
    assert seen[:10] == [4] * 10 and seen[10:35] == list(range(4, 29))
    assert seen[-1] in (28, 29) and seen[-2] == seen[-1]


def test_a_spread_within_the_band_does_not_change_the_period():
    """The band includes its ends. A spread of 0 is not below a band at 0."""
    method = AdaptiveAveraging(low=0.5, high=1.5)
    assert [method.next_period(6, met(s, lr=1.0), ratio=2.0) for s in (0.99, 1.0, 2.0, 3.0, 3.01)] == [7, 6, 6, 6, 5]
    assert method.next_period(6, met(0.0), ratio=0.0) == 6
    assert method.next_period(1, met(9.0), ratio=1.0) == 1


def test_the_period_changes_by_one_at_a_time_after_sampling_and_equally_on_all_ranks():
    task = regression(steps=120, batch=8, optimizer=OPTIMIZERS["sgd"], schedule=lambda k: 1.0 if 50 <= k < 80 else 0.05)
    run = simulate(task, AdaptiveAveraging(period=3, warmup=5, sampling=30), FOUR)
    seen = periods(run)
    assert all(periods(run, rank) == seen for rank in range(4))
    assert all(p in (1, 3) for p, k in zip(seen, meetings(run), strict=True) if k < 30)
    steps = [b - a for a, b in itertools.pairwise(seen[5:-1])]
    assert set(steps) == {-1, 0, 1} and min(seen) == 1


def test_without_a_band_adaptive_averaging_is_periodic_averaging_to_the_bit():
    task = regression(steps=21, batch=10)
    assert same(
        end(task, AdaptiveAveraging(period=4, warmup=0, low=0.0, high=math.inf)), end(task, PeriodicAveraging(period=4))
    )


@every_linear_optimizer
def test_a_warm_up_of_the_whole_run_is_all_reduce_sgd(optimizer: str):
    task = regression(steps=20, batch=10, optimizer=OPTIMIZERS[optimizer])
    assert close(end(task, AdaptiveAveraging(warmup=20, sampling=30)), end(task, AllReduceSGD()))


def test_the_first_synchronisation_after_the_warm_up_is_one_period_later():
    """The warm-up is one epoch by default: here 5 steps."""
    assert meetings(simulate(quadratic(steps=16, batch=8), AdaptiveAveraging(period=4, warmup=3, sampling=9), FOUR))[
        :5
    ] == [0, 1, 2, 6, 10]
    task = quadratic(steps=20, batch=8, samples=36)
    assert meetings(simulate(task, AdaptiveAveraging(period=4, sampling=9), FOUR))[:6] == [0, 1, 2, 3, 4, 8]


def test_the_reference_ratio_is_the_mean_of_the_samples():
    """It excludes the warm-up, and everything after the sampling."""
    run = simulate(
        regression(steps=40, batch=8, schedule=lambda k: 1 / (1 + k)),
        AdaptiveAveraging(period=3, warmup=4, sampling=20),
        FOUR,
    )
    ratios = [s.divergence / (0.05 / (1 + s.step)) for s in run.trace.syncs if s.rank == 0 and 4 <= s.step < 20]
    memory = values(run.states[0], "controller")
    assert memory["sampled"] == len(ratios) == 5 and memory["ratio"] == pytest.approx(sum(ratios) / 5)


def test_at_a_rate_of_0_the_spread_changes_nothing():
    run = simulate(
        regression(steps=32, batch=8, schedule=lambda k: float(k % 4 != 3)), AdaptiveAveraging(warmup=0), FOUR
    )
    assert periods(run) == [4] * 8


@pytest.mark.parametrize(
    "strategy",
    [SlowMo(period=2), AdaptiveAveraging(period=2, warmup=0, sampling=4), AdaComm(period=4, steps=2)],
    ids=str,
)
def test_workers_with_different_learning_rates_are_refused_by_name(strategy: Strategy):
    rates = itertools.count(1)
    task = regression(steps=24, batch=8, optimizer=lambda p: torch.optim.SGD(p, lr=0.05 * next(rates)))
    with pytest.raises(ClusterError, match=r"lr is 0\.05 on rank 0 and 0\.1 on rank 1, in the sync after step"):
        simulate(task, strategy, FOUR)


# C3


def test_ada_comm_follows_the_root_of_the_loss_and_of_the_rate():
    method = AdaComm(period=16)
    assert method.proposal(0.5, 0.1, 2.0, 0.1) == 8, "a quarter of the loss, half the period"
    assert method.proposal(2.0, 0.1, 2.0, 0.1) == 16, "nothing has changed"
    assert method.proposal(2.0, 0.025, 2.0, 0.1) == 32, "a quarter of the rate, twice the period"
    assert [method.proposal(loss, 0.1, 2.0, 0.1) for loss in (1.99, 1e-9, 0.0, -1.0)] == [16, 1, 0, 0]


def test_ada_comms_period_falls_at_a_constant_rate_and_stays_within_its_bounds():
    method = AdaComm(period=16, most=20)
    assert method.next_period(16, met(loss=2.0), 2.0, 0.1, is_same_rate=True) == 8
    assert method.next_period(9, met(loss=2.0), 2.0, 0.1, is_same_rate=True) == 5
    assert method.next_period(16, met(loss=2.0, lr=0.01), 2.0, 0.1, is_same_rate=False) == 20
    assert [
        AdaComm(period=16, most=most).next_period(1, met(loss=0.0), 2.0, 0.1, is_same_rate=True) for most in (None, 20)
    ] == [1, 1]


def test_ada_comm_averages_more_often_when_the_loss_is_lower():
    run = simulate(regression(steps=120, batch=8, samples=16), AdaComm(period=12, steps=12), FOUR)
    seen = periods(run)[:-1]
    assert seen == sorted(seen, reverse=True) and seen[0] == 12 and seen[-1] < 6 and min(seen) >= 1


def test_decreasing_averaging_divides_its_synchronisations_equally_over_parts_of_the_run():
    assert (
        periods(simulate(quadratic(steps=400, batch=2), DecreasingAveraging(periods=(20, 5)), Cluster(workers=2)))
        == [20] * 10 + [5] * 40
    )
    assert periods(
        simulate(quadratic(steps=10, batch=2), DecreasingAveraging(periods=(4, 3, 1)), Cluster(workers=2))
    ) == [4, 3, 1, 1, 1]


# C4


def cntk(*, period: int = 3, **settings: Any) -> BlockMomentum:
    return BlockMomentum(period=period, form="cntk", optimizer_state="keep", **settings)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.filterwarnings("ignore:BlockMomentum.form='cntk':UserWarning")
def test_cntks_block_momentum_0_is_averaging_at_rate_1_over_n_and_not_at_1(nesterov: bool):
    task = regression(steps=16, batch=10)
    averaged = end(task, PeriodicAveraging(period=3))
    assert close(end(task, cntk(momentum=0.0, rate=0.25, nesterov=nesterov)), averaged)
    assert not close(end(task, cntk(momentum=0.0, rate=1.0, nesterov=nesterov)), averaged, rtol=1e-2)


@pytest.mark.parametrize("settings", [{"momentum": 0.0, "rate": 0.25}, {"momentum": 0.5, "rate": 1.0}], ids=str)
def test_cntks_form_warns_where_it_overshoots(settings: Any):
    with pytest.warns(UserWarning, match=r"momentum 0.*4 workers adds [12] times"):
        simulate(regression(steps=3, batch=8), cntk(**settings), FOUR)


def test_cntks_classical_form_is_the_papers_with_another_rate():
    """The rate is N (1 - eta), which is 1 at the default momentum."""
    task = regression(steps=18, batch=8)
    for eta, rate, ours in ((None, 1.0, 1.0), (0.5, 0.7, 1.4)):
        paper = BlockMomentum(period=3, momentum=eta, rate=ours, nesterov=False, optimizer_state="keep")
        assert close(end(task, cntk(momentum=eta, rate=rate, nesterov=False)), end(task, paper), rtol=1e-9)


@pytest.mark.parametrize(("nesterov", "gain"), [(True, 1.75 / 0.25), (False, 1 / 0.25)])
def test_cntks_nesterov_has_nearly_twice_the_gain(nesterov: bool, gain: float):
    """One block has gradients of 1, and the next 80 have gradients of 0. The model moves by 2N - 1 = 7 times the block;
    the classical form moves it by N."""
    task = replace(slopes(steps=162), data=[torch.ones(32, 5, dtype=torch.float64)], schedule=lambda k: float(k < 2))
    moved = end(task, cntk(period=2, nesterov=nesterov)) - vector(task.build())
    assert torch.allclose(moved, torch.tensor(-0.05 * 2 * gain, dtype=torch.float64), rtol=1e-8)


@pytest.mark.parametrize(
    ("workers", "expected"),
    [(2, 173_123), (4, 417_127), (8, 898_665), (16, 1_859_355), (32, 3_779_683), (64, 7_619_843)],
)
def test_time_constants_are_those_of_cntks_manual_and_convert_both_ways(workers: int, expected: int):
    eta = BlockMomentum().momentum_of(workers, 120_000)
    assert (eta, round(time_constant_of(eta, 120_000))) == (1 - 1 / workers, expected)
    assert BlockMomentum(time_constant=time_constant_of(eta, 120_000)).momentum_of(workers, 120_000) == pytest.approx(
        eta
    )
    assert (time_constant_of(0.0, 120_000), BlockMomentum(time_constant=0).momentum_of(4, 120_000)) == (0.0, 0.0)


def test_block_momentum_by_time_constant_equals_that_momentum():
    task = regression(steps=16, batch=8)
    by_constant = BlockMomentum(period=4, time_constant=time_constant_of(0.6, 8))
    assert close(end(task, by_constant), end(task, BlockMomentum(period=4, momentum=0.6)), rtol=1e-9)


def test_one_worker_with_plain_sgd_may_reset_its_optimizer():
    task = regression(steps=19, batch=8, optimizer=OPTIMIZERS["sgd"])
    assert close(end(task, BlockMomentum(period=4), workers=1), trained_alone(task), rtol=1e-9)


@pytest.mark.parametrize(
    "strategy", [BlockMomentum(period=3), BlockMomentum(samples=6), BlockMomentum(period=3, momentum=0.75)], ids=str
)
def test_block_momentum_warns_if_there_are_fewer_samples_than_its_updates_need(strategy: Strategy):
    """Blocks of 6 samples, with momentum 0.75 on 4 workers, need 4 * 6 / log(4 / 3) = 83.4."""
    with pytest.warns(
        TooFewSamples,
        match=r"momentum 0\.75 and blocks of 6 samples on 4 workers .* over 83 samples, but there are only 83",
    ):
        simulate(regression(steps=3, batch=8, samples=83), strategy, FOUR)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        simulate(regression(steps=3, batch=8, samples=84), strategy, FOUR)


# C5


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("nesterov", [True, False])
def test_diloco_is_block_momentum_that_continues_from_its_look_ahead(optimizer: str, nesterov: bool):
    task = regression(steps=16, batch=10, optimizer=OPTIMIZERS[optimizer])
    blocks = simulate(
        task, BlockMomentum(period=4, momentum=0.6, rate=0.7, nesterov=nesterov, optimizer_state="keep"), FOUR
    )
    diloco = end(task, DiLoCo(period=4, momentum=0.6, rate=0.7, nesterov=nesterov))
    assert close(diloco, values(blocks.states[0], "sync")["anchor"], rtol=1e-9)
    assert close(diloco, blocks.params, rtol=1e-3) is not nesterov


def test_diloco_without_an_outer_optimizer_is_averaging_and_at_every_step_all_reduce_sgd():
    task = regression(steps=16, batch=10)
    assert close(end(task, DiLoCo(period=5, rate=1.0, momentum=0.0)), end(task, PeriodicAveraging(period=5)))
    assert close(end(task, DiLoCo(period=1, rate=1.0, momentum=0.0)), end(task, AllReduceSGD()))


def test_dilocos_inner_state_stays_on_each_worker():
    run = simulate(regression(steps=8, batch=8, optimizer=OPTIMIZERS["adam"]), DiLoCo(period=4), FOUR)
    for state in run.states[1:]:
        assert same(values(state, "model")["params"], run.params)
        assert not close(state_of(state, "exp_avg"), state_of(run.states[0], "exp_avg"), rtol=1e-3)


def test_every_fragment_is_synchronised_once_a_period_and_nothing_else_with_it():
    """The parameters that are equal on all ranks after each step. There are 93, in 3 fragments with a period of 6."""
    task, strategy = regression(steps=20, batch=8), DiLoCo(period=6, fragments=3)
    for step in range(1, 19):
        points = torch.stack(params(simulate(task, strategy, FOUR, stop_at=step)))
        alike = (points == points[0]).all(0).nonzero().flatten().tolist()
        due = stripe_of(step // 2 % 3 - 1 if step % 6 else 2, 93, 3)
        assert alike == (list(range(93)[due]) if step % 2 == 0 else [])


@pytest.mark.parametrize(
    "settings", [{"fragments": 1}, {"fragments": 3}, {"fragments": 2, "delay": 1}, {"delay": 4}], ids=str
)
@pytest.mark.parametrize("steps", [11, 12, 13, 15])
def test_fragments_and_delays_lose_nothing_of_what_was_learnt(settings: Any, steps: int):
    """On a slope the workers' mean must move as far as one machine moves."""
    task = slopes(steps=steps, numel=7)
    assert close(end(task, DiLoCo(period=6, rate=1.0, momentum=0.0, **settings)), trained_alone(task))


# C6


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_slow_mo_at_a_constant_rate_is_classical_block_momentum(optimizer: str):
    task = regression(steps=18, batch=10, optimizer=OPTIMIZERS[optimizer])
    classical = BlockMomentum(period=4, momentum=0.6, rate=0.8, nesterov=False)
    assert close(end(task, SlowMo(period=4, momentum=0.6, rate=0.8)), end(task, classical), rtol=1e-9)


@pytest.mark.parametrize("last", [0.5, 0.0])
def test_slow_mo_without_momentum_is_averaging(last: float):
    """This also holds if the learning rate is 0 at the end."""
    task = regression(steps=12, batch=10, schedule=lambda k: 1 + (last - 1) * k / 11)
    assert close(
        end(task, SlowMo(period=4, momentum=0.0, optimizer_state="keep")),
        end(task, PeriodicAveraging(period=4)),
        rtol=1e-9,
    )


@pytest.mark.parametrize(
    ("strategy", "carried"),
    [(SlowMo(period=2, momentum=0.5), 0.1), (BlockMomentum(period=2, momentum=0.5, nesterov=False), 1.0)],
)
def test_the_momentum_of_slow_mo_shrinks_with_the_rate(strategy: Strategy, carried: float):
    """One block at rate 1, then one at a tenth of it. The second adds its own displacement and half of the first one's,
    shrunk or not."""
    task = replace(
        slopes(steps=4, schedule=lambda k: 1.0 if k < 2 else 0.1), data=[torch.ones(32, 5, dtype=torch.float64)]
    )
    block = -0.05 * 2
    assert torch.allclose(
        end(task, strategy) - vector(task.build()), torch.tensor(block * (1 + 0.1 + 0.5 * carried), dtype=torch.float64)
    )


def test_slow_mo_of_one_worker_without_momentum_is_lookahead():
    task = regression(steps=12, batch=8)
    model = task.build()
    optimizer, slow = task.optimizer(model.parameters()), vector(model)
    for k in range(12):
        optimizer.zero_grad()
        task.loss(model, task.part(k, 0, 1)).backward()
        optimizer.step()
        if k % 4 == 3:
            slow += 0.3 * (vector(model) - slow)
            nn.utils.vector_to_parameters(slow.clone(), model.parameters())
    assert close(end(task, SlowMo(period=4, momentum=0.0, rate=0.3, optimizer_state="keep"), workers=1), slow)


# Refused settings

REFUSED: list[tuple[type[Strategy], dict[str, Any], str]] = [
    (PeriodicAveraging, {"period": 0}, r"PeriodicAveraging\(period=0\).*steps between syncs.*at least 1"),
    (BlockMomentum, {"samples": -1}, r"BlockMomentum\(samples=-1\).*a worker's samples.*at least 1"),
    (PeriodicAveraging, {"period": 4, "samples": 9}, r"period=4, samples=9.*in steps or in samples, not in both"),
    (PeriodicAveraging, {"optimizer_state": "drop"}, r"optimizer_state='drop'.*one of 'keep', 'average' and 'reset'"),
    (SlowMo, {"delay": -1}, r"SlowMo\(delay=-1\).*from 0"),
    (AdaComm, {"period": 4, "delay": 4}, r"AdaComm\(period=4, delay=4\).*merged before the next one begins"),
    (DecreasingAveraging, {"periods": (4, 0)}, r"DecreasingAveraging\(period=0\).*at least 1"),
    (DecreasingAveraging, {"periods": ()}, "give at least one period"),
    (AdaComm, {"seconds": 9.0, "steps": 9}, r"seconds=9.0, steps=9.*in seconds or in steps, not in both"),
    (AdaComm, {"most": 0}, r"most=0\).*positive"),
    (AdaptiveAveraging, {"low": 2.0}, r"low=2.0, high=1.3.*high at least low"),
    (AdaptiveAveraging, {"sampling": 0}, r"sampling=0\).*sampling must be positive"),
    (
        AdaptiveAveraging,
        {"warmup": 3, "sampling": 6},
        r"sampled from step 3 to step 6.*shorter than one period.*give sampling=11 .a step., or warmup=2 or less",
    ),
    (AdaptiveAveraging, {"warmup": 3, "sampling": 6, "low": 1.0, "high": 1.0}, "shorter than one period"),
    (AdaptiveAveraging, {"warmup": 3, "sampling": 6, "high": math.inf}, "shorter than one period"),
    *(
        (kind, {"momentum": 1.0}, rf"{kind.__name__}\(momentum=1.0\).*in \[0, 1\)")
        for kind in (BlockMomentum, SlowMo, DiLoCo)
    ),
    *(
        (kind, {"rate": 0.0}, rf"{kind.__name__}\(rate=0.0\).*must be positive")
        for kind in (BlockMomentum, SlowMo, DiLoCo)
    ),
    (BlockMomentum, {"momentum": 0.5, "time_constant": 9.0}, r"momentum=0.5, time_constant=9.0.*give only one"),
    (BlockMomentum, {"time_constant": -1.0}, r"time_constant=-1.0.*at least 0"),
    (BlockMomentum, {"form": "bmuf"}, r"form='bmuf'.*'paper' or 'cntk'"),
    (DiLoCo, {"period": 6, "fragments": 4}, r"period=6, fragments=4.*must divide the period"),
    (
        DiLoCo,
        {"period": 6, "fragments": 3, "delay": 2},
        r"fragments=3, delay=2.*before the next one starts, 2 steps later",
    ),
    (
        DiLoCo,
        {"period": 6, "fragments": 2, "optimizer_state": "reset"},
        r"fragments=2, optimizer_state='reset'.*use 'keep' or 'average'",
    ),
    (DiLoCo, {"period": 6, "fragments": 6}, r"DiLoCo\(fragments=6\): the model has only 5 parameters"),
    (AllReduceSGD, {"group": 0}, r"AllReduceSGD\(group=0\).*at least 1 worker"),
    (AllReduceSGD, {"clip": 0.0}, r"AllReduceSGD\(clip=0.0\).*must be positive"),
]


@pytest.mark.parametrize(
    ("kind", "settings", "named"), REFUSED, ids=[f"{kind.__name__} {settings}" for kind, settings, _ in REFUSED]
)
def test_impossible_settings_are_refused_with_what_would_be_right(
    kind: type[Strategy], settings: dict[str, Any], named: str
):
    with pytest.raises(ValueError, match=named):
        simulate(quadratic(steps=8, batch=4), kind(**settings), Cluster(workers=2))


@pytest.mark.parametrize("epochs", [1, 2, 3, 4, 5, 10])
def test_defaults_of_adaptive_averaging_work_in_short_runs(epochs: int):
    """An epoch has 40 steps. The warm-up, of a sync at every step, is an epoch if a quarter of the run is longer."""
    task = regression(steps=40 * epochs, batch=8, samples=320)
    run = simulate(task, AdaptiveAveraging(), Cluster(workers=2))
    periods = [sync.period for sync in run.trace.syncs if sync.rank == 0]
    warmup = 40 if epochs > 4 else 5 * epochs
    assert periods[:warmup] == [1] * warmup and periods[warmup] == 4
