"""Users' own loops outlive deaths at any moment, by seed: those that are left end with one model, a newcomer joins at
the place of the others, and each minibatch is used once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.codecs import OneBit
from tests.laws.loops import LoopWorker, attached, looped
from tests.laws.mortal import World

EPOCHS, BATCHES, BATCH = 3, 5, 12
METHODS: list[pl.Strategy] = [
    pl.AllReduceSGD(),
    pl.AllReduceSGD(codec=OneBit()),
    pl.PeriodicAveraging(period=3),
    pl.BlockMomentum(period=3, codec=OneBit()),
    pl.DiLoCo(period=4, delay=1, fragments=2),
    pl.EASGD(period=3),
    pl.OneBitAdam(warmup=4, betas=(0.9, 0.999)),
    pl.Then(pl.AllReduceSGD(), pl.PeriodicAveraging(period=3), steps=6),
]
LOADERS = ("whole minibatches", "shuffled by torch", "shuffled by a generator", "a partition")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def data_of(inputs: torch.Tensor, targets: torch.Tensor, kind: str, session: pl.Session) -> Any:
    pairs = TensorDataset(inputs, targets)
    if kind == "whole minibatches":
        return list(zip(inputs.split(BATCH), targets.split(BATCH), strict=True))
    if kind == "a partition":
        return pl.Partition(session.rank, session.workers).loader(pairs, BATCH, seed=1)
    return DataLoader(pairs, BATCH, shuffle=True, generator=generator(5) if kind == LOADERS[2] else None)


def training(strategy: pl.Strategy, kind: str) -> Any:
    """A script with a scheduler, and an evaluation at the beginning of each epoch."""

    def script(worker: LoopWorker) -> None:
        inputs = torch.randn(BATCHES * BATCH, 4, generator=generator(0))
        targets = inputs @ torch.randn(4, 2, generator=generator(1))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        plan = DataLoader(TensorDataset(inputs, targets), BATCH)
        given = {"schedule": schedule}
        with pl.attach(model, optimizer, strategy, elastic=True, also=given, loader=plan, epochs=EPOCHS) as session:
            loader = data_of(inputs, targets, kind, session)
            for _ in session.epochs(EPOCHS):
                model.eval()
                with torch.no_grad():
                    for x, _ in session.shard([(inputs[:8], targets[:8])]):
                        model(x)
                model.train()
                for x, y in session.shard(loader):
                    optimizer.zero_grad()
                    nn.functional.mse_loss(model(x), y).backward()
                    session.step()
                    schedule.step()
        worker.result = torch.cat([t.reshape(-1).double() for t in model.state_dict().values()]), schedule.last_epoch
        worker.has_ended = True

    return script


def results(world: World) -> list[Any]:
    return [w.result for w in world.everyone if isinstance(w, LoopWorker) and w.result is not None]


def test_loops_end_with_one_model_whichever_workers_die_stop_or_join_and_when(monkeypatch: pytest.MonkeyPatch):
    with attached(monkeypatch):
        for i, strategy in enumerate(METHODS):
            for seed in range(2):
                kind = LOADERS[(i + seed) % len(LOADERS)]
                name = f"{strategy} {kind} {seed}"
                script = training(strategy, kind)
                world = looped(script, strategy, name, deaths=1 + seed, stops=1 - seed, joins=1 + seed, moments=700)
                found = results(world)
                assert found, name
                for model, steps in found:
                    assert torch.equal(model, found[0][0]), name
                    assert model.isfinite().all(), name
                    assert steps == EPOCHS * BATCHES, name  # Of the scheduler, also a newcomer's.


def counting(strategy: pl.Strategy) -> Any:
    """A script in which every sample has a parameter, to which its step adds its share."""

    def script(worker: LoopWorker) -> None:
        class Sum(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.total = nn.Parameter(torch.zeros(BATCHES * BATCH, dtype=torch.float64))

        model = Sum()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loader = DataLoader(torch.eye(BATCHES * BATCH, dtype=torch.float64).unbind(), BATCH)  # pyright: ignore
        with pl.attach(model, optimizer, strategy, elastic=True) as session:
            for _ in session.epochs(EPOCHS):
                for x in session.shard(loader):
                    optimizer.zero_grad()
                    (-(x @ model.total).mean()).backward()
                    session.step()
        worker.result = model.total.detach().clone(), 0
        worker.has_ended = True

    return script


def test_each_minibatch_of_a_loop_counts_once_in_every_epoch(monkeypatch: pytest.MonkeyPatch):
    joined = 0
    with attached(monkeypatch):
        for strategy in (pl.AllReduceSGD(), pl.PeriodicAveraging(period=3)):
            for seed in range(12):
                name = f"{strategy} {seed}"
                world = looped(counting(strategy), strategy, name, deaths=1 + seed % 3, stops=0, joins=2, moments=400)
                [shares] = {tuple(total.tolist()) for total, _ in results(world)}
                for batch in torch.tensor(shares, dtype=torch.float64).split(BATCH):
                    torch.testing.assert_close(float(batch.sum()), float(EPOCHS), rtol=1e-9, atol=0)
                joined += sum(
                    d.kind == "workers" and d.values["workers"] > d.values["before"] for d in world.trace.decisions
                )
    assert joined > 6, "workers joined when the run was over"


def test_an_order_that_cannot_be_repeated_is_refused_when_a_worker_joins(monkeypatch: pytest.MonkeyPatch):
    passes = iter(range(10**6))

    class Other(torch.utils.data.Sampler[int]):
        """It begins with another sample each time."""

        def __len__(self) -> int:
            return BATCHES * BATCH

        def __iter__(self) -> Any:
            first = next(passes) // 8
            return iter([(first + i) % len(self) for i in range(len(self))])

    def script(worker: LoopWorker) -> None:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(torch.arange(BATCHES * BATCH).float()[:, None].unbind(), BATCH, sampler=Other())  # pyright: ignore
        with pl.attach(model, optimizer, pl.AllReduceSGD(), elastic=True) as session:
            for _ in session.epochs(1):
                for x in session.shard(loader):
                    model(x).mean().backward()
                    session.step()

    with attached(monkeypatch), pytest.raises(ValueError, match="order cannot be repeated"):
        for seed in range(20):
            passes = iter([*4 * [0], *100 * [8]])
            looped(script, pl.AllReduceSGD(), f"order {seed}", deaths=0, stops=0, joins=1, moments=40)


def alone(**given: Any) -> pl.Session:
    model = nn.Linear(2, 1)
    return pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), pl.AllReduceSGD(), elastic=True, **given)


def step(session: pl.Session, x: torch.Tensor) -> None:
    session.loop.learner.flat.model(x).sum().backward()
    session.step()


def test_what_a_newcomer_could_not_follow_is_refused_by_name(tmp_path: Any):
    batches = [torch.ones(4, 2)]
    with alone() as session, pytest.raises(ValueError, match=r"write `for epoch in session.epochs\(count\):`"):
        next(iter(session.shard(batches)))
    with pytest.raises(ValueError, match=r"read the data by session.shard\(loader\)"), alone() as session:
        step(session, batches[0])
    with alone() as session, pytest.raises(ValueError, match=r"read the data by session.shard\(loader\)"):
        session.count(3)
    with alone() as session, pytest.raises(ValueError, match=r"give attach\(checkpoint=pl.Checkpoints\(folder\)\)"):
        session.save(tmp_path)
    with alone() as session, pytest.raises(ValueError, match="gets its state from the others"):
        session.load_state_dict(session.state_dict())
    with pytest.raises(ValueError, match="initial='equal'"):
        alone(initial="broadcast")
    with pytest.raises(ValueError, match=r"also=\{'lr': float\}"):
        alone(also={"lr": 0.1})
    with alone() as session:
        session.epochs(1)
        torch.optim.lr_scheduler.StepLR(session.loop.learner.optimizer, 1)
        with pytest.raises(ValueError, match="whose state a worker that joins later would not have"):
            next(iter(session.shard(batches)))
    with alone() as session:
        session.epochs(1)
        first = iter(session.shard(batches))
        next(first)
        with pytest.raises(ValueError, match="before the last one has ended"):
            next(iter(session.shard(batches)))
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"it is for elastic=True"):
        pl.attach(nn.Linear(2, 1), None, pl.ParameterServer(), also={"x": torch.optim.SGD(model.parameters())})
    with pytest.raises(ValueError, match="so the others go on anyway"):
        pl.attach(nn.Linear(2, 1), None, pl.ParameterServer(), elastic=True)
