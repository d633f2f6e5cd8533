"""Partitioned reading on real processes: a run that stops and goes on with other workers, and what is refused."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

import paceline as pl
from paceline.session.loading import EmptyShard
from tests.dist import forked

pytestmark = pytest.mark.dist

SAMPLES = 44
BATCH = 8  # Six minibatches an epoch, the last of 4 samples.
WARM = 16  # The samples of the warm start: two minibatches.
STRATEGY = pl.Then(pl.Replicated(), pl.AllReduceSGD(), samples=WARM)
X = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", autouse=True)
def kernels_are_loaded():
    """Otherwise each forked rank loads those of a mean for itself."""
    task = pl.Task(
        lambda: nn.Linear(3, 1),
        lambda model, batch: model(batch[0]).square().mean(),
        [X],
        BATCH,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        steps=2,
    )
    pl.simulate(task, pl.AllReduceSGD(), pl.Cluster(workers=2))


def loader_of(kind: str) -> DataLoader[Any]:
    """A loader of whole minibatches: what shard reads, and where attach finds the length of the run."""
    data = TensorDataset(X, torch.arange(SAMPLES))
    processes = 2 if kind == "part" else 0
    return DataLoader(data, BATCH, shuffle=True, generator=torch.Generator(), num_workers=processes)


def run(rank: int, kind: str, folder: Path, *, begin: int, end: int, workers: int) -> list[Any]:
    """A part of two epochs: the samples of this worker's steps, and the last parameters."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    whole = loader_of(kind)
    read: list[list[int]] = []
    plan = pl.Partition(0, 1).loader(whole.dataset, BATCH, seed=3) if kind == "partition" else whole
    with pl.attach(model, optimizer, STRATEGY, loader=plan, epochs=2, ordered=True) as session:
        if kind == "partition":
            reader = pl.Partition(session.rank, session.workers, after=WARM).loader(whole.dataset, BATCH, seed=3)
        if begin:
            states = [torch.load(folder / f"{i}.pt") for i in range(workers)]
            session.load_state_dict(pl.resized([s["session"] for s in states], session.workers)[session.rank])
            if kind == "partition":
                reader.load_state_dict(states[0]["reading"])
        position = begin
        while position < end:
            whole.generator.manual_seed(position // 6)
            if kind == "partition":
                batches = session.shard(reader)
            else:
                batches = session.shard(whole, skip=position % 6, read=kind)
            for x, index in batches:
                session.optimizer.zero_grad()
                model(x).square().mean().backward()
                read.append(index.tolist() if session.loop.batch.samples else [])
                session.step()
                position += 1
                if position == end:
                    break
        state = {"session": session.state_dict()}
        if kind == "partition":
            state["reading"] = reader.state_dict()
        torch.save(state, folder / f"{rank}.pt")
    return [read, torch.cat([p.detach().view(-1) for p in model.parameters()]).tolist()]


@pytest.mark.parametrize("kind", ["part", "whole", "partition"])
def test_three_workers_stop_and_two_go_on_as_one_worker_that_never_stops(kind, tmp_path):
    """Each sample counts once in an epoch, whole minibatches come before the end of the warm start, parts after it."""
    [[alone, params]] = forked.run(1, partial(run, kind=kind, folder=tmp_path, begin=0, end=12, workers=1), tmp_path)
    three = forked.run(3, partial(run, kind=kind, folder=tmp_path, begin=0, end=5, workers=3), tmp_path / "three")
    two = forked.run(2, partial(run, kind=kind, folder=tmp_path, begin=5, end=12, workers=3), tmp_path / "two")
    for epoch in (alone[:6], alone[6:]):
        assert sorted(chain(*epoch)) == [*range(SAMPLES)]
    assert alone[:6] != alone[6:]
    for ranks, steps in ((three, alone[:5]), (two, alone[5:])):
        for number, minibatch in enumerate(steps):
            parts = [read[number] for read, _ in ranks]
            if ranks is three and number < WARM // BATCH:
                assert parts == [minibatch] * 3
            else:
                assert [*chain(*parts)] == minibatch
    for _, found in two:
        assert found == pytest.approx(params, rel=1e-4, abs=1e-6)


# What is refused, on one worker as on several.


class Stream(IterableDataset):
    def __init__(self, shares: bool) -> None:
        self.shares = shares

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if self.shares and info is not None else (0, 1)
        return (torch.full((1,), float(i)) for i in range(first, 16, step))


def session_on(model: nn.Module, strategy: pl.Strategy, **settings: Any) -> pl.Session:
    return pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, **settings)


def test_a_stream_that_every_loader_process_reads_whole_is_refused():
    with session_on(nn.Linear(1, 1), pl.AllReduceSGD()) as session, torch.no_grad():
        with pytest.raises(ValueError, match="its 2 loader workers begin with equal minibatches"):
            list(session.shard(DataLoader(Stream(shares=False), 4, num_workers=2)))
        found = list(session.shard(DataLoader(Stream(shares=True), 4, num_workers=2)))
    assert sorted(torch.cat(found).view(-1).tolist()) == [*range(16)]


def test_only_reading_whole_minibatches_collates_them_whole(tmp_path):
    def work(rank, read):
        collated = []

        def collate(samples):
            collated.append(len(samples))
            return torch.stack(samples)

        with session_on(nn.Linear(3, 1), pl.AllReduceSGD(), initial="broadcast") as session, torch.no_grad():
            parts = [len(x) for x in session.shard(DataLoader(X, 8, collate_fn=collate), read=read)]
        return [collated, parts]

    parts = [4, 4, 4, 4, 4, 2]
    assert forked.run(2, partial(work, read=None), tmp_path / "part") == [[parts, parts]] * 2
    assert forked.run(2, partial(work, read="whole"), tmp_path / "whole") == [[[8, 8, 8, 8, 8, 4], parts]] * 2


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"read": "parts"}, "session.shard(read='parts'): give 'part' to read only this worker's part"),
        ({"read": "part"}, "session.shard(list, read='part'): only a DataLoader of a data set with indices"),
        ({"read": "part", "split": print}, "session.shard(read='part', split=...): split cuts whole minibatches"),
    ],
)
def test_a_way_of_reading_that_has_no_effect_is_refused(settings, error):
    with session_on(nn.Linear(1, 1), pl.AllReduceSGD()) as session, pytest.raises(ValueError, match=re.escape(error)):
        session.shard([torch.ones(4, 1)], **settings)


def test_skipping_in_an_order_that_is_new_in_every_pass_is_refused():
    loader = DataLoader(TensorDataset(torch.ones(8, 1)), 4, shuffle=True)
    with session_on(nn.Linear(1, 1), pl.AllReduceSGD()) as session:
        with pytest.raises(ValueError, match="is shuffled by a new seed in every pass"):
            session.shard(loader, skip=1)
        session.shard(loader)


ONES = torch.ones(8, 1)


@pytest.mark.parametrize(
    ("strategy", "partition", "settings", "error"),
    [
        (
            pl.AllReduceSGD(),
            pl.Partition(1, 3),
            {},
            "this is worker 0 of 1; give the loader of pl.Partition(session.rank",
        ),
        (
            pl.AllReduceSGD(),
            pl.Partition(0, 1, after=4),
            {},
            "after 0 samples every worker reads whole minibatches, and",
        ),
        (
            pl.Then(pl.Replicated(), pl.AllReduceSGD(), steps=2),
            pl.Partition(0, 1, after=4),
            {},
            "after 4 samples every worker reads its part, and in the warm start of Then all workers train on whole",
        ),
        (pl.AllReduceSGD(), pl.Partition(0, 1), {"skip": 1}, "so skip, read, dim and split have no effect"),
        (pl.AllReduceSGD(), pl.Partition(0, 1), {"read": "part"}, "so skip, read, dim and split have no effect"),
    ],
)
def test_a_partition_that_does_not_fit_its_session_is_refused(strategy, partition, settings, error):
    model = nn.Linear(1, 1)
    loader = partition.loader(ONES, 4, seed=0)
    with pytest.raises(ValueError, match=re.escape(error)), session_on(model, strategy) as session:
        for x in session.shard(loader, **settings):
            model(x).sum().backward()
            session.step()


def test_workers_whose_partitions_read_other_minibatches_are_refused(tmp_path):
    def work(rank, streams):
        with session_on(nn.Linear(3, 1), pl.AllReduceSGD(), initial="broadcast") as session:
            partition = pl.Partition(session.rank, session.workers)
            if streams:
                loader = partition.loader(iter(torch.randn(8, 3, generator=torch.Generator().manual_seed(rank))), 4)
            else:
                loader = partition.loader(X, 8, seed=rank)
            next(iter(session.shard(loader)))

    for streams in (False, True):
        for result in forked.run(2, partial(work, streams=streams), tmp_path / str(streams)):
            assert "the first minibatch of rank 1 differs from that of rank 0" in result["error"]


def test_parts_are_not_trained_on_in_a_warm_start_by_a_model_in_eval_mode(tmp_path):
    def work(rank, trains, after):
        torch.manual_seed(0)
        model = nn.Linear(1, 1).eval()
        with session_on(model, pl.Then(pl.Replicated(), pl.AllReduceSGD(), steps=1)) as session:
            partition = pl.Partition(rank, 2, after=after or 0)
            batches = [ONES] * 2 if after is None else partition.loader(ONES, 4, shuffle=False)
            for x in session.shard(batches):
                if trains:
                    model(x).sum().backward()
                    session.step()
        return len(x)

    for after in (None, 0):
        for result in forked.run(2, partial(work, trains=True, after=after), tmp_path / f"trains {after}"):
            assert "since the model was in eval mode, and it was trained on it" in result["error"]
    assert forked.run(2, partial(work, trains=True, after=4), tmp_path / "whole") == [2, 2]
    assert forked.run(2, partial(work, trains=False, after=None), tmp_path / "evaluates") == [4, 4]


def test_a_minibatch_without_a_part_for_each_worker_is_refused_under_accumulation(tmp_path):
    def work(rank):
        warnings.simplefilter("ignore", EmptyShard)
        with session_on(nn.Linear(3, 1), pl.AllReduceSGD(), initial="broadcast", accumulate=2) as session:
            next(iter(session.shard(pl.Partition(rank, 2).loader(X[:1], 4, shuffle=False))))

    for result in forked.run(2, work, tmp_path):
        assert "a minibatch has 1 samples for 2 workers, and 2 minibatches make a step" in result["error"]
