"""Models with parameters of several dtypes train as they do in torch, under every strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from paceline import ASGD, AllReduceSGD, Cluster, Hogwild, PeriodicAveraging, Replica, Run, Strom, Task, simulate
from paceline.codecs import Fp16, Fp32, OneBit
from paceline.strategy import Strategy
from paceline.worker.flat import FlatModel
from paceline.worker.learner import optimizer_vectors, set_optimizer_vectors
from tests.laws.every import ALONE, ORDERED, STRATEGIES, Case
from tests.laws.tasks import OPTIMIZERS, close, mixed_regression, params, same, trained_alone

STEPS_ALONE = {name: case for name, case in ALONE.items() if case.plain is None}
# Those whose rule is plain SGD at 0.05: on shards, or applied by every worker itself.
SGD = {name: case for name, case in ALONE.items() if case.plain is not None and "lr=0.05" in repr(case.strategy)}
SGD = {name: case for name, case in SGD.items() if name != "async-momentum"}
BY_SHARDS = {name: case for name, case in SGD.items() if case.strategy.servers}
BY_WORKERS = {name: case for name, case in SGD.items() if not case.strategy.servers}
# One case of every ordered strategy, and all that overlap with the next steps or hold a residual.
DISTINCT = {type(case.strategy): name for name, case in reversed(ORDERED.items())}
SAVED = {
    name: case
    for name, case in ORDERED.items()
    if name in DISTINCT.values() or any(word in name for word in ("delayed", "one-bit", "streaming"))
}
AGREEING = {name: case for name, case in STRATEGIES.items() if case.agrees}


@pytest.mark.parametrize("case", STEPS_ALONE.values(), ids=STEPS_ALONE)
def test_one_worker_equals_plain_training(case: Case):
    task = mixed_regression(steps=12, samples=22, batch=5)
    run = simulate(task, case.strategy, Cluster(workers=1))
    expected = trained_alone(task)
    # Hogwild adds the step's change to a copy of the vector, as it does for a model on a GPU, and that rounds.  A value
    # that differs by a rounding of float32 rarely rounds to another bfloat16: in these runs none does.
    is_exact = case.alone == "bits" and not isinstance(case.strategy, Hogwild)
    assert same(run.params, expected) if is_exact else close(run.params, expected, rtol=1e-6)
    assert not close(expected, trained_alone(mixed_regression(steps=0)), rtol=1e-2), "something was learnt"


def stepped_in_the_vector(task: Task, *, keeps: bool) -> Tensor:
    """SGD at 0.05 in float32.  It `keeps` what the narrower parameters round, or loses it at every step."""
    model = task.build()
    kept = [p.detach().float().clone() for p in model.parameters()]
    for k in range(task.total_steps):
        model.zero_grad()
        task.loss(model, task.part(k, 0, 1)).backward()
        with torch.no_grad():
            for p, value in zip(model.parameters(), kept, strict=True):
                assert p.grad is not None
                value.add_(p.grad.float(), alpha=-0.05)
                p.copy_(value)
                if not keeps:
                    value.copy_(p)
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize(
    ("case", "keeps"),
    [*((case, True) for case in BY_SHARDS.values()), *((case, False) for case in BY_WORKERS.values())],
    ids=[*BY_SHARDS, *BY_WORKERS],
)
def test_shards_keep_what_narrower_parameters_round(case: Case, keeps: bool):
    """They hold the vector, of which the parameters are rounded copies, as with master weights."""
    task = mixed_regression(steps=23, samples=22, batch=5)
    run = simulate(task, case.strategy, Cluster(workers=1))
    assert same(run.params, stepped_in_the_vector(task, keeps=keeps))
    assert not same(run.params, stepped_in_the_vector(task, keeps=not keeps))


class Dyadic(nn.Module):
    """Its loss is linear and its numbers are small multiples of powers of 2: all of its arithmetic is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.arange(-4.0, 4.0).to(torch.bfloat16))
        self.b = nn.Parameter(torch.arange(-2.0, 2.0))
        self.c = nn.Parameter(torch.arange(-3.0, 3.0).to(torch.float16))


def linear(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    x, y, z = (t.mean(0) for t in batch)
    return (model.a * x.to(model.a.dtype)).sum().float() + (model.b * y).sum() + (model.c * z.to(model.c.dtype)).sum()


def dyadic(steps: int = 6) -> Task:
    generator = torch.Generator().manual_seed(0)
    data = [torch.randint(-4, 5, (32, n), generator=generator).float() for n in (8, 4, 6)]
    return Task(Dyadic, linear, data, 8, lambda p: torch.optim.SGD(p, lr=0.25), steps=steps, bucket_bytes=16)


@pytest.mark.parametrize(
    "strategy",
    [
        AllReduceSGD(),
        AllReduceSGD(codec=Fp32()),
        AllReduceSGD(codec=Fp16()),
        AllReduceSGD(group=2),
        PeriodicAveraging(period=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("workers", [2, 4])
def test_synchronous_workers_equal_one_process_with_their_union_to_the_bit(strategy: Strategy, workers: int):
    alone = trained_alone(dyadic())
    run = simulate(dyadic(), strategy, Cluster(workers=workers))
    assert same(run.params, alone) and all(same(p, alone) for p in params(run))
    assert not same(alone, trained_alone(dyadic(steps=0)))


@pytest.mark.parametrize(
    ("narrow", "wide", "rtol"),
    [
        # Each worker's gradient is rounded to the narrower dtype, and so is that of one process: by a half of eps each.
        # Over 12 steps at a rate of 0.05 that moves a parameter by less than 4 eps.
        (torch.bfloat16, torch.float32, 4 * torch.finfo(torch.bfloat16).eps),
        (torch.float16, torch.float32, 4 * torch.finfo(torch.float16).eps),
        (torch.float32, torch.float64, 4 * torch.finfo(torch.float32).eps),
        (torch.float16, torch.bfloat16, 4 * torch.finfo(torch.bfloat16).eps),
    ],
    ids=str,
)
@pytest.mark.parametrize("workers", [2, 4])
def test_synchronous_workers_equal_one_process_with_their_union(narrow, wide, rtol, workers: int):
    task = mixed_regression(steps=12, narrow=narrow, wide=wide, optimizer=OPTIMIZERS["sgd"])
    run = simulate(task, AllReduceSGD(), Cluster(workers=workers))
    assert run.params.dtype == torch.promote_types(narrow, wide)
    assert close(run.params, trained_alone(task), rtol=rtol)
    assert [p.dtype for p in run.model.parameters()] == [p.dtype for p in task.build().parameters()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", [AllReduceSGD(), AllReduceSGD(clip=1e9), PeriodicAveraging(period=4)], ids=str)
def test_one_worker_equals_plain_training_with_every_optimizer(strategy: Strategy, optimizer: str):
    task = mixed_regression(steps=23, samples=22, batch=5, optimizer=OPTIMIZERS[optimizer])
    assert same(simulate(task, strategy, Cluster(workers=1)).params, trained_alone(task))


@pytest.mark.parametrize("case", AGREEING.values(), ids=AGREEING)
def test_all_ranks_agree_after_the_last_synchronisation(case: Case):
    run = simulate(mixed_regression(steps=6), case.strategy, Cluster(workers=3, compute=[0.01, 0.02, 0.04]))
    assert all(same(p, run.params) for p in params(run))
    assert run.params.isfinite().all()
    assert same(run.params, torch.cat([p.detach().float().reshape(-1) for p in run.model.parameters()]))


@pytest.mark.parametrize("case", SAVED.values(), ids=SAVED)
def test_a_stopped_and_resumed_run_equals_the_unbroken_one(case: Case):
    """It stops between two synchronisations, and right after one."""
    parts = list[Run]()
    for stop_at in (3, 4, None):
        resume = parts[-1].states if parts else None
        parts.append(
            simulate(mixed_regression(steps=7), case.strategy, Cluster(workers=2), resume=resume, stop_at=stop_at)
        )
        model = parts[-1].model
        assert same(parts[-1].params, torch.cat([p.detach().float().reshape(-1) for p in model.parameters()]))
    whole = simulate(mixed_regression(steps=7), case.strategy, Cluster(workers=2))
    assert all(same(a, b) for a, b in zip(params(parts[-1]), params(whole), strict=True))
    assert same(parts[-1].params, whole.params)


@pytest.mark.parametrize("case", SAVED.values(), ids=SAVED)
def test_evaluations_show_rounded_parameters_and_change_nothing(case: Case):
    shown: list[Tensor] = []

    def look(model: nn.Module) -> dict[str, float]:
        shown.append(torch.cat([p.float().reshape(-1) for p in model.parameters()]))
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}
        return {}

    watched = simulate(mixed_regression(steps=6, evaluate=look, evaluate_every=1), case.strategy, Cluster(workers=2))
    alone = simulate(mixed_regression(steps=6), case.strategy, Cluster(workers=2))
    assert all(same(a, b) for a, b in zip(params(watched), params(alone), strict=True))
    assert same(shown[-1], watched.params)
    assert len(shown) == 6


@pytest.mark.parametrize("codec", [OneBit(), Fp16()], ids=str)
def test_codecs_train_as_well_as_none(codec):
    def loss(strategy: Strategy) -> float:
        model = simulate(mixed_regression(steps=40, samples=18), strategy, Cluster(workers=2)).model
        task = mixed_regression(steps=40, samples=18)
        return task.loss(model, task.part(0, 0, 1)).item()

    assert loss(AllReduceSGD(codec=codec)) == pytest.approx(loss(AllReduceSGD()), rel=0.1)


class Tug(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        self.b = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    "strategy", [ASGD(period=1, servers=1), Strom(None), Hogwild()], ids=lambda strategy: type(strategy).__name__
)
def test_what_a_parameter_rounds_is_no_step_that_workers_exchange(strategy: Strategy):
    """In the first step one worker moves a parameter of 1 by 2**-7, and the other by -2**-8; after that, none.

    Their sum is 1 + 2**-8, between two values of bfloat16.  If each worker sent the difference to its rounded
    parameter, they would move what they share by twice that.
    """
    task = Task(
        Tug,
        lambda model, batch: (model.a.float() * batch[0].mean()).sum() + model.b.sum(),
        [torch.tensor([-(2.0**-7), 2.0**-8])],
        batch=2,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        steps=5,
        schedule=lambda step: float(step == 0),
    )
    run = simulate(task, strategy, Cluster(workers=2, compute=[1.0, 1.3]))
    # Strom's receivers add one update after the other, and round twice.
    assert run.model.a.item() in ([1.0, 1.0078125] if isinstance(strategy, Strom) else [1.0])


@dataclass(frozen=True)
class Halving(Strategy):
    """Changes the parameters between a gradient and the step."""

    async def worker(self, w: Replica) -> None:
        for _ in w.steps_alone():
            g = await w.gradient()
            w.params.mul_(0.5)
            await w.step(g)


def test_a_step_starts_from_what_the_strategy_has_written():
    task = mixed_regression(steps=5, optimizer=OPTIMIZERS["sgd"])
    model = task.build()
    optimizer = task.optimizer(model.parameters())
    for k in range(task.total_steps):
        optimizer.zero_grad()
        task.loss(model, task.part(k, 0, 1)).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        optimizer.step()
    expected = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert same(simulate(task, Halving(), Cluster(workers=1)).params, expected)


# The vector and its parameters.


def mixed(*tensors: Tensor) -> tuple[nn.ParameterList, FlatModel]:
    model = nn.ParameterList([nn.Parameter(t) for t in tensors])
    return model, FlatModel(model)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_every_narrow_value_comes_back_bit_for_bit(narrow: torch.dtype):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(narrow)
    every = every[~every.isnan()]
    model, flat = mixed(every.clone(), torch.zeros(3))
    assert flat.params.dtype == torch.float32
    for copy in (flat.publish, flat.refresh, flat.publish, lambda: flat.round(flat.params)):
        copy()
        assert same(model[0].detach(), every)
        assert same(flat.params[: len(every)], every.float())


def test_wide_parameters_are_views_and_narrow_ones_have_memory_of_their_own():
    model, flat = mixed(torch.ones(3), torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2))
    flat.params.fill_(1 + 2**-12)
    assert model[0][0] == model[2][0] == 1 + 2**-12
    assert model[1].dtype == torch.bfloat16 and model[1].untyped_storage().nbytes() == 8
    version = model[1]._version
    with flat.in_vector():
        flat.params.fill_(3 + 2**-12)
    assert model[1].tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert model[1]._version == version, "for autograd this is no change in place"
    with torch.no_grad():
        model[1].fill_(5.0)
    with flat.in_vector():
        assert flat.params.tolist() == pytest.approx([3, 3, 3, 5, 5, 5, 5, 3, 3], rel=1e-3)
    with flat.showing(torch.arange(9.0)):
        assert model[1].tolist() == [[3, 4], [5, 6]]
    assert model[1].tolist() == [[5, 5], [5, 5]]


def test_gradients_are_widened_for_the_strategy_and_rounded_for_the_optimizer():
    model, flat = mixed(torch.ones(2), torch.ones(2, dtype=torch.bfloat16))
    (model[0].sum() + 3 * model[1].float().sum()).backward()
    flat.collect_all()
    assert flat.grads.tolist() == [1, 1, 3, 3]
    flat.expose_all(flat.grads.add_(2**-12))
    assert model[1].grad is not None and model[1].grad.dtype == torch.bfloat16
    assert model[0].grad.tolist() == [1 + 2**-12] * 2 and model[1].grad.tolist() == [3, 3]
    flat.take_changed()
    assert flat.grads.tolist() == [1 + 2**-12] * 2 + [3 + 2**-12] * 2, "the user has changed nothing"
    model[1].grad[0] = 0.5
    flat.take_changed()
    assert flat.grads.tolist() == [1 + 2**-12] * 2 + [0.5, 3 + 2**-12]


def test_rows_of_a_narrow_embedding_are_widened():
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True, dtype=torch.bfloat16), nn.Linear(2, 1))
    flat = FlatModel(model)
    flat.sparse_rows = True
    model[0](torch.tensor([1, 1])).float().sum().backward()
    flat.collect_all()
    assert flat.grads[:8].tolist() == [0, 0, 2, 2, 0, 0, 0, 0]
    flat.expose_all(flat.grads)
    assert model[0].weight.grad.layout == torch.strided and model[0].weight.grad.dtype == torch.bfloat16


REFUSED: dict[str, Callable[[], list[Tensor]]] = {
    r"'1' is on the device 'meta', so it has no values": lambda: [torch.zeros(2), torch.zeros(2, device="meta")],
    r"'1' is torch.complex64: only real floating-point": lambda: [
        torch.zeros(2),
        torch.zeros(2, dtype=torch.complex64),
    ],
    r"'1' is torch.float8_e4m3fn, but '0' is torch.bfloat16: torch has no dtype that holds both": lambda: [
        torch.zeros(2, dtype=torch.bfloat16),
        torch.zeros(2).to(torch.float8_e4m3fn),
    ],
}


@pytest.mark.parametrize("expected", REFUSED)
def test_what_cannot_be_one_vector_is_refused_by_name(expected: str):
    with pytest.raises(ValueError, match=expected):
        mixed(*REFUSED[expected]())


def test_the_optimizer_state_has_one_dtype_whichever_parameters_had_a_gradient():
    """Otherwise the workers of a sync would send vectors of different types."""
    for reached in (0, 1):
        model, flat = mixed(torch.ones(2), torch.ones(3, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model[reached].sum().backward()
        optimizer.step()
        vectors = optimizer_vectors(flat, optimizer)
        assert vectors["momentum_buffer"].dtype == torch.float32
        assert vectors["momentum_buffer"].tolist() == [[1, 1, 0, 0, 0], [0, 0, 1, 1, 1]][reached]
        set_optimizer_vectors(flat, optimizer, {"momentum_buffer": torch.full((5,), 3.0)})
        assert optimizer.state[model[reached]]["momentum_buffer"].dtype == model[reached].dtype
