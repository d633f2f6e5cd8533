"""session.shard on real processes, and what a session finds wrong in the loop around it."""

from __future__ import annotations

import warnings
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.session.minibatch import UnsharedLoader
from tests.dist import forked
from tests.dist.test_attach import minibatches, task, vector

pytestmark = pytest.mark.dist

AVERAGING = pl.PeriodicAveraging(period=2)


@pytest.fixture(scope="module", autouse=True)
def kernels_are_loaded():
    """Otherwise each forked rank loads those of a mean for itself."""
    pl.simulate(task(steps=2), AVERAGING, pl.Cluster(workers=2))


def session_on(model: nn.Module, strategy: pl.Strategy, *, lr: float = 0.1, **settings: object) -> pl.Session:
    return pl.attach(model, torch.optim.SGD(model.parameters(), lr=lr), strategy, initial="broadcast", **settings)


def time_first(samples: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    return torch.stack([x for (x,) in samples], dim=1)


def columns(batch: torch.Tensor, index: int, workers: int) -> tuple[torch.Tensor, int]:
    part = batch[:, index::workers]
    return part, part.shape[1]


# What a worker gets.


@pytest.mark.parametrize("kind", ["numpy", "dim", "split"])
@pytest.mark.parametrize("loader", ["list", "DataLoader"])
def test_the_parts_of_two_workers_are_the_minibatch_also_after_a_warm_start(kind, loader, tmp_path):
    """Each sample is a column of three equal values under `dim` and `split`, and a row under numpy."""
    values = torch.arange(48.0).unsqueeze(1).expand(48, 3).contiguous()

    def as_numpy(samples):
        return np.stack([x.numpy() for (x,) in samples]), np.array([x[0].item() for (x,) in samples])

    def work(rank):
        collate = as_numpy if kind == "numpy" else time_first
        # A process prefetches, so that minibatches are fetched whole before the switch and cut after it.
        prefetching = {"num_workers": 1, "prefetch_factor": 3} if loader == "DataLoader" else {}
        batches = DataLoader(TensorDataset(values), batch_size=8, collate_fn=collate, **prefetching)
        settings = {"numpy": {}, "dim": {"dim": 1}, "split": {"split": columns}}[kind]
        model = nn.Linear(3, 1)
        strategy = pl.Then(pl.Replicated(), pl.PeriodicAveraging(period=2), steps=2)
        seen, counted = [], []
        with session_on(model, strategy, lr=0.0) as session:
            for part in session.shard(list(batches) if loader == "list" else batches, **settings):
                x = torch.from_numpy(part[0]) if kind == "numpy" else part.T
                assert (x == x[:, :1]).all() and (kind != "numpy" or (part[1] == part[0][:, 0]).all())
                counted.append(session.loop.batch.samples == len(x))
                seen.append(x[:, 0].tolist())
                model(x).sum().backward()
                session.step()
        return [seen, all(counted)]

    (first, right), (second, also) = forked.run(2, work, tmp_path)
    assert right and also
    assert first[:2] == second[:2] == [list(map(float, range(8))), list(map(float, range(8, 16)))]
    assert [len(part) for part in first[2:] + second[2:]] == [4] * 8
    assert sorted(chain(*first[2:], *second[2:])) == list(map(float, range(16, 48)))


def test_what_cannot_be_cut_is_refused_at_the_first_minibatch_on_every_rank(tmp_path):
    def work(rank, batches, settings):
        with session_on(nn.Linear(3, 1), AVERAGING) as session:
            next(iter(session.shard(batches, **settings)))

    time_first = [(torch.zeros(5, 8, 3), torch.zeros(8))]
    cases = [
        (time_first, {}, "minibatch[0] has shape [5, 8, 3], minibatch[1] has shape [8]"),
        (["text"], {}, "minibatch is a str without an array"),
        (time_first, {"split": lambda batch, index, workers: batch}, "the function returned a tuple"),
        (3, {}, "session.shard(int): give an iterable of minibatches"),
    ]
    for i, (batches, settings, error) in enumerate(cases):
        for result in forked.run(2, partial(work, batches=batches, settings=settings), tmp_path / str(i)):
            assert error in result["error"]


def test_a_collate_function_that_moves_the_samples_is_refused_at_the_first_minibatch_of_a_warm_start(tmp_path):
    def work(rank):
        data = DataLoader(TensorDataset(torch.zeros(48, 3)), batch_size=8, collate_fn=time_first, num_workers=1)
        with session_on(nn.Linear(3, 1), pl.Then(pl.Replicated(), AVERAGING, steps=2)) as session:
            next(iter(session.shard(data)))

    for result in forked.run(2, work, tmp_path):
        assert "collate_fn made a minibatch of length 3 along dimension 0 of 8 samples" in result["error"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_sharded_loader_is_read_anew_in_every_epoch(workers, tmp_path):
    def work(rank):
        model = nn.Linear(1, 1)
        seen = []
        with session_on(model, AVERAGING) as session:
            batches = session.shard([torch.arange(4.0).unsqueeze(1) + 4 * i for i in range(3)])
            for _ in range(2):
                for x in batches:
                    model(x).sum().backward()
                    session.step()
                    seen.append(len(x))
            with pytest.raises(ValueError, match="is sharded already"):
                session.shard(batches)
            with pytest.raises(TypeError):
                len(session.shard(iter([])))
            return [len(batches), seen]

    assert forked.run(workers, work, tmp_path) == [[3, [4 // workers] * 6]] * workers


def test_a_generator_is_refused_in_its_second_epoch():
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="or generator can be read only once"), session_on(model, AVERAGING) as session:
        batches = session.shard(torch.ones(4, 1) for _ in range(2))
        for _ in range(2):
            for x in batches:
                model(x).sum().backward()
                session.step()


@pytest.mark.parametrize("how", ["skip", "continue"])
@pytest.mark.parametrize(
    "strategy", [pl.AllReduceSGD(), pl.PeriodicAveraging(samples=60)], ids=["all-reduce", "samples"]
)
def test_a_resumed_run_finds_its_place_in_the_data(strategy, how, tmp_path):
    """It equals the unbroken run to the last bit; skipped samples count neither for weights nor for periods."""

    def work(rank):
        job = task(steps=12)
        loader = DataLoader(TensorDataset(*job.data), batch_size=30, shuffle=True)

        def train(state, begin):
            loader.generator.manual_seed(5)
            model = job.build()
            saved = None
            with pl.attach(model, job.optimizer(model.parameters()), strategy) as session:
                if state is not None:
                    session.load_state_dict(state)
                batches = session.shard(loader, skip=begin if how == "skip" else 0)
                for i, (x, y) in enumerate(batches, start=begin if how == "skip" else 0):
                    if i < begin:
                        continue
                    session.optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    session.step()
                    if i == 3:
                        saved = session.state_dict()
            return vector(model), saved

        loader = DataLoader(TensorDataset(*job.data), batch_size=30, shuffle=True, generator=torch.Generator())
        unbroken, state = train(None, 0)
        resumed, _ = train(state, 4)
        return torch.equal(unbroken, resumed)

    assert forked.run(2, work, tmp_path) == [True, True]


def test_a_minibatch_that_the_loop_skips_does_not_count_in_the_next_step(tmp_path):
    def work(rank):
        model = nn.Linear(1, 1)
        counted = []
        with session_on(model, AVERAGING, accumulate=2) as session:
            for i, x in enumerate(session.shard([torch.ones(2 * n, 1) for n in (3, 4, 5, 6, 7, 8)])):
                if i in (1, 4):
                    continue
                model(x).sum().backward()
                if i in (2, 5):
                    counted.append(session.loop.batch.samples)
                    session.step()
        return counted

    assert forked.run(2, work, tmp_path) == [[8, 14]] * 2


def test_more_minibatches_to_skip_than_the_loader_has_are_refused():
    with session_on(nn.Linear(1, 1), AVERAGING) as session:
        with pytest.raises(ValueError, match=r"session.shard\(list, skip=3\): the loader has 2 minibatches"):
            list(session.shard([torch.ones(4, 1)] * 2, skip=3))
        with pytest.raises(ValueError, match=r"session.shard\(skip='3'\)"):
            session.shard([], skip="3")
        assert list(session.shard([torch.ones(4, 1)] * 2, skip=2)) == []


# What is wrong in the loop.


@pytest.mark.parametrize(
    ("workers", "strategy"),
    [(1, pl.AllReduceSGD()), (2, pl.AllReduceSGD()), (2, AVERAGING), (2, pl.Gossip())],
    ids=["alone", "all-reduce", "averaging", "gossip"],
)
@pytest.mark.parametrize("minibatches", [1, 3])
def test_a_forgotten_step_is_found(workers, strategy, minibatches, tmp_path):
    def work(rank):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if strategy.needs.optimizer else None
        torch.nn.init.ones_(model.weight)
        torch.nn.init.ones_(model.bias)
        with pl.attach(model, optimizer, strategy) as session:
            for x in session.shard([torch.ones(4, 1)] * minibatches):
                model(x).sum().backward()
                session.optimizer.zero_grad()

    errors = [result["error"] for result in forked.run(workers, work, tmp_path)]
    # Peers of an asynchronous method may hear of the other's failure first.
    assert any(
        "backward() ran on 1 minibatches of session.shard, and session.step() was never called" in e for e in errors
    )
    assert any("attach(accumulate=...)" in e for e in errors)


@pytest.mark.parametrize("strategy", [pl.AllReduceSGD(), AVERAGING], ids=["all-reduce", "averaging"])
@pytest.mark.parametrize("how", ["accumulate", "no_sync"])
def test_announced_minibatches_without_a_step_are_no_mistake(strategy, how, tmp_path):
    def work(rank):
        model = nn.Linear(1, 1)
        with session_on(model, strategy, accumulate=2 if how == "accumulate" else 1) as session:
            for i, x in enumerate(session.shard([torch.ones(4, 1)] * 4)):
                if how == "no_sync" and not i % 2:
                    with session.no_sync():
                        model(x).sum().backward()
                else:
                    model(x).sum().backward()
                if i % 2:
                    session.step()
            return session.loop.replica.cursor.step

    assert forked.run(2, work, tmp_path) == [2, 2]


@pytest.mark.parametrize("strategy", [pl.AllReduceSGD(), AVERAGING], ids=["all-reduce", "averaging"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_of_nan_alone_ends_with_an_error(workers, strategy, tmp_path):
    def work(rank):
        model = nn.Linear(1, 1)
        warnings.simplefilter("ignore", pl.NonFiniteGradient)
        with session_on(model, strategy) as session:
            for x in session.shard([torch.full((4, 1), torch.nan)] * 3):
                model(x).sum().backward()
                session.step()

    for rank, result in enumerate(forked.run(workers, work, tmp_path)):
        assert f"FloatingPointError: rank {rank} has trained nothing" in result["error"]
        assert "in all of its 3 steps" in result["error"]


def test_a_short_run_whose_gradient_scaler_only_overflows_gets_a_warning():
    model = nn.Linear(1, 1)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.warns(pl.NonFiniteGradient, match="lower init_scale"), session_on(model, AVERAGING) as session:
        for x in session.shard([torch.full((4, 1), 1e38)]):
            scaler.scale(model(x).sum()).backward()
            scaler.step(session.optimizer)


@pytest.mark.parametrize("strategy", [pl.AllReduceSGD(), AVERAGING], ids=["all-reduce", "averaging"])
@pytest.mark.parametrize("how", ["shard", "count", "neither"])
def test_workers_that_may_read_the_same_data_get_a_warning(strategy, how, tmp_path):
    def work(rank):
        model = nn.Linear(1, 1)
        batches = [torch.ones(4, 1)] * 3
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with session_on(model, strategy) as session:
                for x in session.shard(batches) if how == "shard" else batches:
                    if how == "count":
                        session.count(len(x))
                    model(x).sum().backward()
                    session.step()
        return [str(w.message) for w in caught if w.category is UnsharedLoader]

    first, second = forked.run(2, work, tmp_path)
    assert second == []
    if how == "neither":
        assert len(first) == 1 and "session.shard(loader)" in first[0] and "session.count(samples)" in first[0]
    else:
        assert first == []


class Checkpointed(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.stem, self.one, self.two, self.head = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        run = partial(checkpoint, use_reentrant=True)
        if self.where == "all":
            return run(lambda v: self.head(self.two(self.one(self.stem(v)))), x)
        if self.where == "blocks":
            return run(nn.Sequential(self.two, self.head), run(nn.Sequential(self.stem, self.one), x))
        return self.head(run(self.two, run(self.one, self.stem(x))))


@pytest.mark.parametrize("where", ["all", "blocks", "between"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_reentrant_checkpointing_works_or_is_named(where, accumulate, tmp_path):
    def work(rank):
        torch.manual_seed(0)
        model = Checkpointed(where)
        with session_on(model, pl.AllReduceSGD(), bucket_bytes=16, accumulate=accumulate) as session:
            for i, x in enumerate(session.shard([torch.ones(4, 3)] * 4)):
                model(x.requires_grad_()).sum().backward()
                if i % accumulate == accumulate - 1:
                    session.step()
            return session.loop.replica.cursor.step

    for result in forked.run(2, work, tmp_path):
        if where == "all":
            assert result == 4 // accumulate
        else:
            assert "give use_reentrant=False to checkpoint" in result["error"]


@pytest.mark.parametrize("strategy", [pl.AllReduceSGD(), AVERAGING], ids=["all-reduce", "averaging"])
def test_the_rest_of_an_epoch_under_accumulate_is_a_step_or_is_refused(strategy, tmp_path):
    job = task(steps=5)
    batches = minibatches(job)

    def train(model, optimizer, shard, step):
        for _ in range(2):
            for i, (x, y) in enumerate(shard(batches)):
                F.cross_entropy(model(x), y).backward()
                if i % 2 or (step.takes_rest and i == 4):
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    step()
                    optimizer.zero_grad()
        return vector(model)

    def work(rank, takes_rest):
        model = job.build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        with pl.attach(model, optimizer, strategy, accumulate=2) as session:
            step = partial(session.step)
            step.takes_rest = takes_rest
            return train(model, optimizer, session.shard, step).tolist()

    model = job.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    alone = partial(optimizer.step)
    alone.takes_rest = True
    alone = train(model, optimizer, iter, alone)
    for result in forked.run(2, partial(work, takes_rest=True), tmp_path / "step"):
        if strategy is not AVERAGING:  # Its clipping saw the mean gradient, also in the last step of an epoch.
            assert torch.allclose(torch.tensor(result), alone, rtol=1e-5, atol=1e-6)
    for result in forked.run(2, partial(work, takes_rest=False), tmp_path / "none"):
        assert "the epoch ended 1 minibatches after the last session.step()" in result["error"]
        assert "or give the loader a multiple of 2 minibatches" in result["error"]
