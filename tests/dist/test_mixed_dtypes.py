"""Models with parameters of several dtypes in the user's own loop, and on real processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from paceline.session.ending import DifferentRanks
from tests.dist import forked
from tests.laws.tasks import OPTIMIZERS, Mixed, close, mixed_regression, numbers, same, squared_error, trained_alone

pytestmark = pytest.mark.dist

ORDERED: dict[str, pl.Strategy] = {
    "all-reduce": pl.AllReduceSGD(),
    "one-bit": pl.AllReduceSGD(codec=pl.codecs.OneBit()),
    "fp16": pl.AllReduceSGD(codec=pl.codecs.Fp16()),
    "averaging, delayed": pl.PeriodicAveraging(period=4, delay=2, optimizer_state="average"),
    "block-momentum": pl.BlockMomentum(period=3),
    "diloco": pl.DiLoCo(period=4, fragments=2),
    "easgd": pl.EASGD(period=2),
    "one-bit-adam": pl.OneBitAdam(warmup=3, betas=(0.9, 0.99)),
}


def task(steps: int = 12, **more: Any) -> pl.Task:
    return mixed_regression(steps=steps, batch=8, samples=40, **more)


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def dtypes(model: nn.Module) -> list[torch.dtype]:
    return [p.dtype for p in model.parameters()]


Between = Callable[[int, nn.Module, pl.Session | None], object]


def looped(job: pl.Task, strategy: pl.Strategy | None, between: Between | None = None) -> nn.Module:
    """The loop that a user would write, with a strategy or without; `between` runs between backward and step."""
    model = job.build()
    optimizer = job.optimizer(model.parameters())
    batches = [job.part(step, 0, 1) for step in range(job.total_steps)]

    def train(shard: Any, session: pl.Session | None) -> None:
        for k, batch in enumerate(shard):
            optimizer.zero_grad()
            squared_error(model, batch).backward()
            if between is not None:
                between(k, model, session)
            optimizer.step() if session is None else session.step()
            if between is look:
                clamp(k, model, session)
                saved = vector(model) if session is None else session.state_dict()["slots"]["model"]["values"]["params"]
                assert same(saved, vector(model))

    if strategy is None:
        train(batches, None)
        return model
    with pl.attach(model, optimizer, strategy, bucket_bytes=100, ordered=True) as session:
        train(session.shard(batches), session)
    return model


def clip(k: int, model: nn.Module, session: pl.Session | None) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clamp(k: int, model: nn.Module, session: pl.Session | None) -> None:
    """The user's code changes parameters too, narrow ones and wide ones."""
    for p in model.parameters():
        p.data.clamp_(-0.25, 0.25)


def look(k: int, model: nn.Module, session: pl.Session | None) -> None:
    """Change the parameters, and evaluate in the middle of a step."""
    for p in model.parameters():
        p.data.mul_(0.5)
    before = vector(model)
    if session is not None:
        with session.published():
            assert dtypes(model) == dtypes(Mixed()) and same(vector(model), before)
    assert same(vector(model), before)


@pytest.mark.parametrize("between", [None, clip, clamp, look])
@pytest.mark.parametrize("strategy", [pl.AllReduceSGD(), pl.AllReduceSGD(clip=1e9), pl.PeriodicAveraging(period=2)])
def test_one_attached_worker_equals_the_plain_loop(strategy: pl.Strategy, between: Between | None):
    attached, plain = looped(task(), strategy, between), looped(task(), None, between)
    assert same(vector(attached), vector(plain))
    assert not close(vector(plain), vector(task().build()), rtol=1e-2)


def test_a_strategys_own_step_sees_what_the_user_clipped():
    """OneBitAdam steps by the vector; the user's clipping changes `.grad`, which for narrow parameters is a copy."""
    adam = pl.OneBitAdam(warmup=100)
    job = task(optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3))
    clipped = vector(looped(job, adam, clip))
    # torch rounds AdamW's moments to bfloat16, and OneBitAdam does not.
    assert close(clipped, vector(looped(job, None, clip)), rtol=0.02)
    assert not close(clipped, vector(looped(job, adam)), rtol=0.02)


def test_after_the_block_every_parameter_has_its_dtype_and_its_memory():
    for strategy in ORDERED.values():
        model = looped(task(steps=3), strategy)
        assert dtypes(model) == dtypes(Mixed())
        for p in model.parameters():
            assert p.untyped_storage().nbytes() == p.nbytes
            assert p.grad is None or (p.grad.dtype == p.dtype and p.grad.untyped_storage().nbytes() == p.nbytes)


def test_a_narrow_parameter_that_was_moved_is_refused_by_name():
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = pl.attach(model, optimizer, "all-reduce-sgd")
    model.body[0].weight.data = model.body[0].weight.data.clone()
    squared_error(model, task().part(0, 0, 1)).backward()
    with pytest.raises(RuntimeError, match=r"'body.0.weight' has other memory than at attach"), session:
        session.step()


@pytest.mark.parametrize("name", ["averaging, delayed", "easgd", "one-bit"])
def test_a_resumed_session_equals_an_unbroken_one(name: str):
    job = task()
    model = job.build()
    optimizer = job.optimizer(model.parameters())
    saved: dict[str, Any] = {}
    for first, last in ((0, 7), (7, 12)):
        model = job.build()
        optimizer = job.optimizer(model.parameters())
        with pl.attach(model, optimizer, ORDERED[name]) as session:
            if saved:
                session.load_state_dict(saved)
            for k in range(first, last):
                optimizer.zero_grad()
                squared_error(model, job.part(k, 0, 1)).backward()
                session.step()
            saved = session.state_dict()
    assert same(vector(model), vector(looped(job, ORDERED[name])))


@pytest.mark.parametrize(
    "strategy", [pl.EASGD(period=2, beta=0.5), pl.PeriodicAveraging(period=2)], ids=["exchanged", "local"]
)
def test_a_scale_beyond_float16_scales_float16_gradients_back(strategy: pl.Strategy):
    """65536, with which torch's scaler starts, is infinite in float16."""

    def trained(scale: float | None) -> Tensor:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).half())
        for p in model.parameters():
            nn.init.zeros_(p)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        with pl.attach(model, optimizer, strategy) as session:
            for _ in range(4):
                session.optimizer.zero_grad()
                y = model[1](model[0](torch.ones(2, 4)).half() + 1).float()
                scaler.scale((y - 1).square().mean() * 2**-4).backward()
                scaler.step(session.optimizer)
                scaler.update()
        return vector(model)

    assert trained(None)[-4:].abs().min() > 0.02
    assert close(trained(65536.0), trained(None), rtol=1e-3)


def test_a_strategy_that_reads_parameters_during_backward_sees_what_the_user_wrote():
    seen: list[Tensor] = []

    @dataclass(frozen=True)
    class Reading(pl.Strategy):
        async def worker(self, w: pl.Replica) -> None:
            for _ in w.steps_alone():
                await w.step(await w.gradient(each=lambda bucket: seen.append(w.params.clone())))

    model = Mixed()
    with pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), Reading()) as session:
        for k in range(2):
            loss = squared_error(model, task().part(k, 0, 1))
            clamp(k, model, session)
            loss.backward()
            assert same(seen[-1], vector(model))
            session.step()


# On two processes.


def by_ddp(rank: int) -> Tensor:
    job = task(optimizer=OPTIMIZERS["sgd"])
    model = job.build()
    wrapped = DistributedDataParallel(model)
    optimizer = job.optimizer(model.parameters())
    for k in range(job.total_steps):
        optimizer.zero_grad()
        squared_error(wrapped, job.part(k, rank, 2)).backward()
        optimizer.step()
    return vector(model)


def test_two_attached_workers_equal_the_simulated_ones_to_the_bit_and_ddp(tmp_path: Path):
    def work(rank: int) -> list[Any]:
        found = [vector(looped(task(), strategy)).tolist() for strategy in ORDERED.values()]
        plain = looped(task(optimizer=OPTIMIZERS["sgd"]), pl.AllReduceSGD())
        return [found, vector(plain).tolist(), by_ddp(rank).tolist()]

    first, second = forked.run(2, work, tmp_path)
    assert isinstance(first, list), first
    assert first[0] == second[0], "both workers end with the same model"
    for (name, strategy), found in zip(ORDERED.items(), first[0], strict=True):
        simulated = pl.simulate(task(), strategy, pl.Cluster(workers=2)).params
        assert same(simulated, torch.tensor(found)), name
    # DDP adds bfloat16 gradients in bfloat16, and paceline in float32.  See the law on the union of minibatches.
    eps = torch.finfo(torch.bfloat16).eps
    _, attached, ddp = first
    assert close(torch.tensor(attached), torch.tensor(ddp), rtol=4 * eps)
    assert close(torch.tensor(attached), trained_alone(task(optimizer=OPTIMIZERS["sgd"])), rtol=4 * eps)


def test_the_first_ranks_values_are_broadcast_to_narrow_parameters_too(tmp_path: Path):
    def work(rank: int) -> list[Any]:
        torch.manual_seed(rank)
        model = Mixed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with pl.attach(model, optimizer, pl.PeriodicAveraging(period=1), initial="broadcast") as session:
            squared_error(model, task().part(0, rank, 2)).backward()
            session.step()
        return vector(model).tolist()

    first, second = forked.run(2, work, tmp_path)
    torch.manual_seed(0)
    assert first == second == vector(Mixed()).tolist()


def test_models_that_differ_by_rounding_become_equal_at_the_end(tmp_path: Path):
    """Processors of different kinds round differently; here a rank changes a float32 parameter beside float64 ones."""

    def work(rank: int) -> list[Any]:
        job = mixed_regression(steps=2, narrow=torch.float32, wide=torch.float64)
        model = job.build()
        optimizer = job.optimizer(model.parameters())
        warnings.simplefilter("ignore", DifferentRanks)
        with pl.attach(model, optimizer, pl.AllReduceSGD()) as session:
            for batch in session.shard([job.part(k, 0, 1) for k in range(2)]):
                squared_error(model, batch).backward()
                session.step()
            model.body[0].weight.data.mul_(1 + rank * 2**-22)
        return vector(model).tolist()

    first, second = forked.run(2, work, tmp_path)
    assert isinstance(first, list), first
    assert first == second


@pytest.mark.parametrize(
    "strategy",
    [pl.PeriodicAveraging(period=3), pl.ParameterServer(rule=pl.rules.Sgd(lr=0.3)), pl.Gossip(), pl.Hogwild()],
    ids=lambda strategy: type(strategy).__name__,
)
def test_trained_processes_end_with_a_good_model(strategy: pl.Strategy):
    x = numbers(40, 6, dtype=torch.float32)
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.3)  # noqa: E731
    job = replace(task(steps=60, optimizer=optimizer), data=[x, x[:, :3]])
    run = pl.train(job, strategy, 2, ordered=True)
    assert dtypes(run.model) == dtypes(Mixed())
    if strategy.needs.ordered and isinstance(strategy, pl.PeriodicAveraging):
        assert same(run.params, pl.simulate(job, strategy, pl.Cluster(workers=2)).params)

    def loss(model: nn.Module) -> float:
        return sum(job.loss(model, job.part(k, 0, 1)).item() for k in range(5))

    assert loss(run.model) < 0.5 * loss(job.build())
