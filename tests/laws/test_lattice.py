"""The lattice of equivalences: one test for each row whose methods exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import (
    AllReduceSGD,
    BlockMomentum,
    Cluster,
    ParameterServer,
    PeriodicAveraging,
    Slot,
    Task,
    simulate,
)
from paceline.codecs import Fp32, OneBit
from paceline.server.rules import Push, Rule, Sgd
from paceline.strategy import Strategy
from tests.laws.every import RULES
from tests.laws.tasks import (
    OPTIMIZERS,
    close,
    instant,
    numbers,
    params,
    quadratic,
    regression,
    same,
    trained_alone,
    values,
    vector,
)

every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
LINEAR = {name: optimizer for name, optimizer in OPTIMIZERS.items() if name != "adam"}
every_linear_optimizer = pytest.mark.parametrize("optimizer", LINEAR.values(), ids=LINEAR)


def trained_together(task: Task, workers: int, weigh: Callable[[int], float]) -> Tensor:
    """One machine that computes the gradients of all workers in turn, and averages them with given weights."""
    model = task.build()
    optimizer = task.optimizer(model.parameters())
    for k in range(task.total_steps):
        parts = [task.part(k, rank, workers) for rank in range(workers)]
        total = sum(weigh(len(part[0])) for part in parts)
        optimizer.zero_grad()
        for part in parts:
            if len(part[0]):
                (weigh(len(part[0])) / total * task.loss(model, part)).backward()
        optimizer.step()
    return vector(model)


# A1


@every_optimizer
@pytest.mark.parametrize(
    ("batch", "samples"),
    [(8, 32), (10, 32), (5, 17), (3, 12)],
    ids=["equal", "3 3 2 2", "2 1 1 1 and 2 samples", "one has none"],
)
def test_all_reduce_sgd_equals_one_machine_on_the_union_of_the_minibatches(optimizer: Any, batch: int, samples: int):
    """Adam divides small gradients by their roots, so rounding errors grow."""
    task = regression(steps=20, batch=batch, samples=samples, optimizer=optimizer, bucket_bytes=200)
    run = simulate(task, AllReduceSGD(), Cluster(workers=4))
    assert close(run.params, trained_alone(task), rtol=1e-9)


@every_optimizer
def test_an_average_without_sample_weights_is_not_all_reduce_sgd(optimizer: Any):
    """3, 3, 2 and 2 samples: an average with equal weights ends elsewhere; one weighted by samples ends at the same
    place."""
    task = regression(steps=20, batch=10, optimizer=optimizer)
    run = simulate(task, AllReduceSGD(), Cluster(workers=4))
    assert close(run.params, trained_together(task, 4, weigh=float), rtol=1e-9)
    assert not close(run.params, trained_together(task, 4, weigh=lambda samples: 1.0), rtol=1e-4)


@pytest.mark.parametrize("step", range(1, 6))
def test_all_replicas_of_all_reduce_sgd_are_equal_after_every_step(step: int):
    run = simulate(regression(steps=6, batch=7), AllReduceSGD(), Cluster(workers=3), stop_at=step)
    assert all(same(p, run.params) for p in params(run))


# B2


@pytest.mark.parametrize("batch", [8, 10, 3])
def test_all_reduce_sgd_at_32_bits_equals_all_reduce_sgd(batch: int):
    """Up to the rounding of float32 in the messages of a float64 task: 20 steps of a relative 2**-24, twice."""
    task = regression(steps=20, batch=batch)
    plain, striped = (simulate(task, AllReduceSGD(codec=codec), Cluster(workers=4)) for codec in (None, Fp32()))
    assert close(striped.params, plain.params, rtol=1e-5)
    assert all(same(p, striped.params) for p in params(striped))


def test_fp32_keeps_no_residual_of_a_float32_model():
    """In a whole run."""
    run = simulate(quadratic(steps=9, batch=8, dtype=torch.float32), AllReduceSGD(codec=Fp32()), Cluster(workers=4))
    for state in run.states:
        slot = values(state, "codec.residuals")
        assert not slot["residual"].count_nonzero() and not slot["owner_residual"].count_nonzero()


def test_one_bit_sgd_delays_gradients_and_loses_none():
    """In a whole run with plain SGD on a slope (the gradients depend on the data alone), the model has moved by lr
    times all gradients, except for the residuals."""

    def slope(model: nn.Module, batch: Any) -> Tensor:
        return (model.w * batch[0]).sum(1).mean()

    numel, lr = 1200, 0.05
    task = quadratic(steps=25, batch=8, numel=numel)
    task = Task(task.model, slope, task.data, task.batch, OPTIMIZERS["sgd"], steps=25)
    run = simulate(task, AllReduceSGD(codec=OneBit()), Cluster(workers=4))
    residuals, owners = (
        sum(values(state, "codec.residuals")[name] for state in run.states) for name in ("residual", "owner_residual")
    )
    meant = trained_alone(task)
    # Residuals may be of means (over 2 samples each, then over 4 workers) or of sums over 8 samples. Both are
    # conserved.
    assert close(run.params - lr * (residuals / 4 + owners), meant) or close(
        run.params - lr * (residuals + owners) / 8, meant
    )
    assert not close(run.params, meant, rtol=1e-3)


# C1


@every_linear_optimizer
@pytest.mark.parametrize("batch", [8, 10, 3], ids=["equal", "3 3 2 2", "one has none"])
def test_averaging_every_step_equals_all_reduce_sgd(optimizer: Any, batch: int):
    """The update is linear in gradients and buffers."""
    task = regression(steps=20, batch=batch, optimizer=optimizer)
    averaged = simulate(task, PeriodicAveraging(period=1), Cluster(workers=4))
    assert close(averaged.params, simulate(task, AllReduceSGD(), Cluster(workers=4)).params)


def test_averaging_every_step_does_not_equal_all_reduce_sgd_with_adam():
    """Adam is not linear."""
    task = regression(steps=20, batch=8, optimizer=OPTIMIZERS["adam"])
    averaged = simulate(task, PeriodicAveraging(period=1), Cluster(workers=4))
    assert not close(averaged.params, simulate(task, AllReduceSGD(), Cluster(workers=4)).params, rtol=1e-4)


def test_replicas_are_equal_right_after_an_average_and_only_then():
    for step in range(1, 10):
        run = simulate(regression(steps=10, batch=8), PeriodicAveraging(period=3), Cluster(workers=4), stop_at=step)
        assert all(same(p, run.params) for p in params(run)[1:]) == (step % 3 == 0)


@every_linear_optimizer
def test_with_equal_curvature_the_mean_of_replicas_does_not_depend_on_the_period(optimizer: Any):
    task = quadratic(steps=12, batch=8, optimizer=optimizer)
    ends = [simulate(task, PeriodicAveraging(period=p), Cluster(workers=4)).params for p in (1, 2, 3, 4, 5, 12)]
    assert all(close(end, ends[0]) for end in ends[1:])


@pytest.mark.parametrize("batch", [8, 10, 3], ids=["equal", "3 3 2 2", "one has none"])
def test_an_average_does_not_change_the_weighted_mean_of_parameters(batch: int):
    """The weights are the samples since the last average. A worker without samples receives the mean too."""
    task = regression(steps=8, batch=batch)
    before = simulate(task, PeriodicAveraging(period=100), Cluster(workers=4), stop_at=4)
    after = simulate(task, PeriodicAveraging(period=4), Cluster(workers=4), stop_at=4)
    weights = [values(state, "position")["since_mean"] for state in before.states]
    assert sum(weights) == 4 * batch
    mean = sum(w * p for w, p in zip(weights, params(before), strict=True)) / sum(weights)
    assert all(close(p, mean) for p in params(after))
    assert not close(params(before)[0], mean, rtol=1e-4)


@every_optimizer
def test_averaging_replicas_that_saw_the_same_data_changes_nothing(optimizer: Any):
    """All samples are equal, so all workers see the same data."""
    task = quadratic(steps=11, batch=6, optimizer=optimizer)
    task = Task(task.model, task.loss, [task.data[0][:1].repeat(24, 1)], 6, optimizer, steps=11)
    assert close(simulate(task, PeriodicAveraging(period=3), Cluster(workers=3)).params, trained_alone(task))


# C4


@every_optimizer
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("batch", [8, 10, 3], ids=["equal", "3 3 2 2", "one has none"])
def test_block_momentum_0_at_rate_1_equals_averaging(optimizer: Any, nesterov: bool, batch: int):
    """Period 3 does not divide 16."""
    task = regression(steps=16, batch=batch, optimizer=optimizer)
    blocks = simulate(
        task,
        BlockMomentum(period=3, momentum=0.0, rate=1.0, nesterov=nesterov, optimizer_state="keep"),
        Cluster(workers=4),
    )
    assert close(blocks.params, simulate(task, PeriodicAveraging(period=3), Cluster(workers=4)).params, rtol=1e-9)


def outer_loop(
    task: Task, workers: int, period: int, outer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
) -> Tensor:
    """Blocks of local training, written by hand. A torch optimizer steps by the outer gradient: the block's start minus
    the mean of the replicas."""
    centre = nn.Parameter(vector(task.build()))
    stepper = outer([centre])
    replicas = [task.build() for _ in range(workers)]
    optimizers = [task.optimizer(replica.parameters()) for replica in replicas]
    for k in range(task.total_steps):
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            optimizer.zero_grad()
            task.loss(replica, task.part(k, rank, workers)).backward()
            optimizer.step()
        if (k + 1) % period == 0:
            centre.grad = centre.detach() - sum(vector(replica) for replica in replicas) / workers
            stepper.step()
            for replica in replicas:
                nn.utils.vector_to_parameters(centre.detach().clone(), replica.parameters())
    return centre.detach()


@every_optimizer
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("eta", "rate"), [(0.75, 1.0), (0.5, 0.7), (0.9, 1.3)])
def test_block_momentum_is_torchs_momentum_on_the_outer_gradient(
    optimizer: Any, nesterov: bool, eta: float, rate: float
):
    """In Nesterov's form torch holds the look-ahead point, where blocks begin. The deployed model is the point behind
    it."""
    task = regression(steps=16, batch=8, optimizer=optimizer)
    expected = outer_loop(task, 4, 4, lambda p: torch.optim.SGD(p, lr=rate, momentum=eta, nesterov=nesterov))
    run = simulate(
        task,
        BlockMomentum(period=4, momentum=eta, rate=rate, nesterov=nesterov, optimizer_state="keep"),
        Cluster(workers=4),
    )
    anchor = values(run.states[0], "sync")["anchor"]
    delta = values(run.states[0], "outer")["delta"]
    assert close(anchor, expected, rtol=1e-9)
    assert close(run.params, expected - eta * delta if nesterov else expected, rtol=1e-9)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("eta", "rate"), [(0.75, 1.0), (0.5, 0.6)])
def test_one_block_moves_the_model_by_rate_over_1_minus_eta_in_the_end(nesterov: bool, eta: float, rate: float):
    """One block has gradients of 1, and the next 80 have gradients of 0; 0.75**80 is 1e-10."""
    steps, period, batch, lr = 2 * 81, 2, 4, 0.05
    optimizer = OPTIMIZERS["sgd"]

    def slope(model: nn.Module, batch: Any) -> Tensor:
        return (model.w.sum() * batch[0]).mean()

    start = quadratic(steps=1, batch=1)
    order = Task(start.model, slope, [torch.arange(steps * batch)], batch, optimizer, steps=steps)
    first = torch.cat([order.part(k, 0, 1)[0] for k in range(period)])
    data = torch.zeros(steps * batch, dtype=torch.float64)
    data[first] = 1.0
    run = simulate(
        Task(start.model, slope, [data], batch, optimizer, steps=steps),
        BlockMomentum(period=period, momentum=eta, rate=rate, nesterov=nesterov, optimizer_state="keep"),
        Cluster(workers=4),
    )
    displacement = -lr * period
    assert torch.allclose(
        run.params - vector(start.build()),
        torch.tensor(rate * displacement / (1 - eta), dtype=torch.float64),
        rtol=1e-8,
    )


@every_optimizer
def test_block_momentum_of_one_worker_equals_its_optimizer(optimizer: Any):
    """The default momentum of one worker is 0."""
    task = regression(steps=19, batch=8, optimizer=optimizer)
    assert close(
        simulate(task, BlockMomentum(period=4, optimizer_state="keep"), Cluster(workers=1)).params,
        trained_alone(task),
        rtol=1e-9,
    )


@pytest.mark.parametrize("reset", [True, False])
def test_a_block_starts_with_a_reset_optimizer_under_that_setting(reset: bool):
    """The run ends with a block, so the remaining optimizer state is what the next block would start with."""
    run = simulate(
        regression(steps=8, batch=8, optimizer=OPTIMIZERS["momentum"]),
        BlockMomentum(period=4, optimizer_state="reset" if reset else "keep"),
        Cluster(workers=2),
    )
    for state in run.states:
        assert bool(values(state, "optimizer")["state"]) is not reset


def test_default_block_momentum_is_1_minus_1_over_workers():
    task = regression(steps=12, batch=8)
    default, explicit = (
        simulate(task, BlockMomentum(period=3, momentum=m, optimizer_state="keep"), Cluster(workers=4))
        for m in (None, 0.75)
    )
    assert same(default.params, explicit.params)


# D0


@pytest.mark.parametrize("servers", [2, 3, 5])
def test_any_number_of_shards_equals_one_shard(servers: int):
    """In one order of events, to the bit."""
    task = regression(steps=12, batch=9)
    one, several = (
        simulate(task, ParameterServer(rule=Sgd(lr=0.03), servers=s), instant(3, compute=[1.0, 1.0, 1.0]))
        for s in (1, servers)
    )
    for a, b in zip(params(one), params(several), strict=True):
        assert same(a, b)
    unequal = [
        simulate(task, ParameterServer(rule=Sgd(lr=0.03), servers=s), instant(3, compute=[1.0, 1.4, 2.3]))
        for s in (1, servers)
    ]
    assert same(unequal[0].params, unequal[1].params)
    assert not same(unequal[0].params, one.params), "another order of events is another run"


@pytest.mark.parametrize("servers", [1, 2])
def test_a_parameter_server_with_one_worker_equals_torchs_sgd(servers: int):
    """To the bit."""
    task = regression(steps=17, batch=5)
    run = simulate(task, ParameterServer(rule=Sgd(lr=0.07), servers=servers), Cluster(workers=1))
    assert same(run.params, trained_alone(task, optimizer=lambda p: torch.optim.SGD(p, lr=0.07)))


@dataclass(frozen=True)
class Recording(Rule):
    """Wraps a rule, and records every update that it receives."""

    rule: Rule
    updates: list[Tensor]

    def apply(self, value: Tensor, update: Tensor, m: Slot, push: Push) -> bool:
        self.updates.append(update.clone())
        return self.rule.apply(value, update, m, push)

    def __hash__(self) -> int:
        return id(self)


def test_the_server_holds_its_first_value_minus_all_pushes():
    """In any order; every push counts once. The slowest worker leaves last, with the final value of the shard."""
    task, recording = regression(steps=11, batch=9), Recording(Sgd(lr=0.03), [])
    run = simulate(task, ParameterServer(rule=recording, servers=1), instant(3, compute=[1.0, 1.4, 2.3]))
    assert len(recording.updates) == 3 * 11
    assert close(params(run)[2], vector(task.build()) - 0.03 * sum(recording.updates))


@pytest.mark.parametrize("servers", [1, 3])
def test_a_shards_version_counts_the_applied_pushes(servers: int):
    run = simulate(regression(steps=11, batch=9), ParameterServer(servers=servers), Cluster(workers=3))
    for j in range(servers):
        assert [p.step for p in run.trace.points if p.rank == 3 + j] == list(range(33))


@pytest.mark.parametrize("compute", [[1.0, 1.0, 1.0, 1.0], [1.0, 1.3, 2.1, 3.7]], ids=["equal", "unequal"])
def test_mean_staleness_is_the_number_of_other_workers(compute: list[float]):
    """Algorithms 0.5: at every update the other N - 1 gradients in flight age by one, at any speeds.

    Ages add up to (N - 1) E over E updates, except for gradients in flight when the window ends. None of those N - 1 is
    older than the stalest. The window ends when the first worker finishes.
    """
    run = simulate(quadratic(steps=400, batch=4), ParameterServer(servers=1), instant(4, compute=compute))
    window = [p.staleness for p in run.trace.points if p.rank == 4 and p.time <= 399.5]
    assert len(window) > 1000
    mean = sum(s for s in window if s is not None) / len(window)
    assert abs(mean - 3) <= 3 * (max(run.trace.staleness()) + 1) / len(window) < 0.05


# Rules, and one worker.


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("staleness", [0, 3])
def test_a_rule_applied_to_slices_equals_the_rule_applied_to_the_whole(rule: Rule, staleness: int):
    whole, parts, update = numbers(100), numbers(100), numbers(100, seed=1)
    stripes, push = (slice(0, 33), slice(33, 90), slice(90, 100)), Push(staleness=staleness)
    m, each = Slot(**rule.memory(whole)), [Slot(**rule.memory(parts[where])) for where in stripes]
    rule.pulled(whole, m, 0)
    for where, own in zip(stripes, each, strict=True):
        rule.pulled(parts[where], own, 0)
    for _ in range(6):
        rule.apply(whole, update.clone(), m, push)
        for where, own in zip(stripes, each, strict=True):
            rule.apply(parts[where], update[where].clone(), own, push)
    assert same(whole, parts) and not same(whole, numbers(100))


@every_optimizer
@pytest.mark.parametrize(
    "strategy",
    [AllReduceSGD(), AllReduceSGD(codec=OneBit()), PeriodicAveraging(period=3), PeriodicAveraging(period=50)],
    ids=str,
)
def test_one_worker_of_a_synchronous_method_equals_its_optimizer_to_the_bit(strategy: Strategy, optimizer: Any):
    task = regression(steps=13, batch=7, samples=20, optimizer=optimizer)
    assert same(simulate(task, strategy, Cluster(workers=1)).params, trained_alone(task))
