"""Partitioned reading: every sample once per epoch over all workers, also when a run stops and the workers change."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset, get_worker_info

import paceline as pl
from paceline.session.agreement import ByStore
from paceline.session.batches import Cutter
from paceline.session.loading import EmptyShard, Parts
from paceline.session.reading import PartLoader
from tests.laws.tasks import OPTIMIZERS, Point

MOST_WORKERS = 7
Minibatches = list[list[int]]
# A run in legs: so many workers read so many minibatches; then another number of workers goes on.
LEGS = st.lists(st.tuples(st.integers(1, MOST_WORKERS), st.integers(0, 5)), max_size=4)
LEGS_OF_PROCESSES = [(workers, 1) for workers in (1, 2, 4, MOST_WORKERS)]


class Stream(IterableDataset):
    """Samples that are their own index.  `shares` says whether it shares them out to torch's loader workers."""

    def __init__(self, samples: int, *, shares: bool = False) -> None:
        self.samples = samples
        self.shares = shares

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if self.shares and info is not None else (0, 1)
        return (torch.tensor(i) for i in range(first, self.samples, step))


class Epochs(IterableDataset):
    """A stream that is in another order in every epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([i + 10 * self.epoch for i in range(5)])


def minibatches(order: list[int], batch: int, *, drop_last: bool = False) -> Minibatches:
    found = [order[i : i + batch] for i in range(0, len(order), batch)]
    return found[:-1] if drop_last and len(found[-1]) < batch else found


def of_task(samples: int, batch: int, seed: int, epochs: int) -> Minibatches:
    """The global minibatches of a task."""
    task = pl.Task(
        lambda: torch.nn.Linear(1, 1),
        lambda model, batch: model.weight.sum(),
        [torch.arange(samples)],
        batch,
        OPTIMIZERS["sgd"],
        epochs=epochs,
        seed=seed,
    )
    return [task.part(step, 0, 1)[0].tolist() for step in range(task.total_steps)]


def processes_of(index: int, workers: int) -> int:
    """Loader processes take long to start, so only the first and the last worker have some, which is no difference."""
    return 2 if index in (0, workers - 1) else 0


def check_parts(parts: list[list[int]], minibatch: list[int], *, whole: bool) -> None:
    """These are what the workers read of one global minibatch."""
    if whole:
        assert parts == [minibatch] * len(parts)
        return
    assert [sample for part in parts for sample in part] == minibatch
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


# The parts of minibatches.


@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 20),
    workers=st.integers(1, MOST_WORKERS),
    after=st.integers(0, 130),
    seed=st.integers(0, 5),
)
def test_the_parts_of_all_workers_are_the_minibatches_of_a_task_with_that_seed(samples, batch, workers, after, seed):
    """So the order does not depend on the number of workers.  This includes fewer samples than workers."""
    expected = of_task(samples, batch, seed, epochs=2)
    partitions = [pl.Partition(i, workers, after) for i in range(workers)]
    found = [
        list(steps)
        for epoch in range(2)
        for steps in zip(*(p.batches(samples, batch, seed=seed, epoch=epoch) for p in partitions), strict=True)
    ]
    seen = 0
    for parts, minibatch in zip(found, expected, strict=True):
        check_parts(parts, minibatch, whole=seen < after)
        seen += len(minibatch)


@given(samples=st.integers(1, 40), batch=st.integers(1, 12), skip=st.integers(0, 40), drop_last=st.booleans())
def test_batches_without_the_first_are_the_rest(samples, batch, skip, drop_last):
    partition = pl.Partition(1, 3, after=11)
    if drop_last and samples < batch:
        with pytest.raises(ValueError, match=f"the data set has {samples} samples, so every epoch would be empty"):
            partition.batches(samples, batch, shuffle=False, drop_last=True)
        return
    every = partition.batches(samples, batch, seed=3, epoch=1, drop_last=drop_last)
    assert len(every) == len(list(every)) == len(minibatches([*range(samples)], batch, drop_last=drop_last))
    if skip <= len(every):
        rest = partition.batches(samples, batch, seed=3, epoch=1, drop_last=drop_last, skip=skip)
        assert list(rest) == list(every)[skip:] and len(rest) == len(every) - skip


def test_the_whole_minibatches_end_at_the_step_at_which_a_warm_start_by_samples_ends():
    plan = pl.Plan(steps_per_epoch=5, samples=70, batch=16)
    for after in range(300):
        steps = 0
        for epoch in range(6):
            batches = pl.Partition(0, 70, after).batches(70, 16, epoch=epoch, shuffle=False)
            steps += sum(len(part) > 1 for part in batches)
        assert steps == plan.steps_for(samples=after)


# Tasks.


@settings(max_examples=15)
@given(
    samples=st.integers(1, 30),
    batch=st.integers(1, 9),
    rise=st.integers(0, 6),
    warm=st.integers(0, 3),
    legs=LEGS,
)
def test_a_task_reads_every_sample_once_when_workers_stop_and_others_go_on(samples, batch, rise, warm, legs):
    """In the simulator.  Minibatches grow by `rise`, and the warm start has `warm` of them."""
    read: list[list[int]] = []

    def loss(model: Any, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        read.append(parts[0].tolist())
        return model.w.square().sum()

    data, growing = [torch.arange(samples)], pl.GrowingBatch(batch, batch + rise, epochs=1)
    task = pl.Task(lambda: Point(1), loss, data, growing, OPTIMIZERS["sgd"], epochs=2, seed=4)
    expected = [task.part(step, 0, 1)[0].tolist() for step in range(task.total_steps)]
    second = task.timetable().start(1)
    assert sorted(chain(*expected[:second])) == sorted(chain(*expected[second:])) == [*range(samples)]
    warm = min(warm, len(expected))
    strategy = pl.Then(pl.Replicated(), pl.AllReduceSGD(), steps=warm)
    states: Any = None
    position = 0
    for workers, most in [*legs, (2, 10**6)]:
        end = min(position + most, len(expected))
        before = states and pl.resized(states, workers)
        run = pl.simulate(task, strategy, pl.Cluster(workers), resume=before, stop_at=end)
        for number in range(position, end):
            minibatch = expected[number]
            parts = workers if number < warm else min(workers, len(minibatch))  # Others have none.
            check_parts(read[:parts], minibatch, whole=number < warm)
            del read[:parts]
        assert not read
        states, position = run.states, end


# Loaders.


def legs_of_loaders(
    make: Callable[[pl.Partition], PartLoader], legs: list[tuple[int, int]], *, after: int, epochs: int
) -> list[tuple[list[list[int]], int]]:
    """What the workers read of each minibatch, and how many samples of all workers were read before it."""
    state: dict[str, Any] | None = None
    found: list[tuple[list[list[int]], int]] = []
    for number, (workers, most) in enumerate([*legs, (2, 10**6)]):
        read: list[list[tuple[list[int], int]]] = []
        states: list[dict[str, Any]] = []
        for index in range(workers):
            loader = make(pl.Partition(index, workers, after))
            if state is not None:
                loader.load_state_dict(state)
            read.append(list(islice(steps_of(loader, epochs), most)))
            states.append(json.loads(json.dumps(loader.state_dict())))
        assert all(other == states[0] for other in states), number
        state = states[0]
        found += [([part for part, _ in step], step[0][1]) for step in zip(*read, strict=True)]
    return found


def steps_of(loader: PartLoader, epochs: int) -> Iterator[tuple[list[int], int]]:
    while loader.epoch < epochs:
        seen = loader.seen
        for batch, samples in loader:
            assert len(batch) == max(samples, 1)
            yield batch[:samples].tolist(), seen
            seen = loader.seen


def check_legs(found: list[tuple[list[list[int]], int]], expected: Minibatches, after: int) -> None:
    before = 0
    for (parts, seen), minibatch in zip(found, expected, strict=True):
        assert seen == before
        check_parts(parts, minibatch, whole=seen < after)
        before += len(minibatch)


@pytest.mark.filterwarnings("ignore::paceline.session.loading.EmptyShard")
@given(
    samples=st.integers(1, 40),
    batch=st.integers(1, 12),
    after=st.integers(0, 60),
    legs=LEGS,
    is_stream=st.booleans(),
    drop_last=st.booleans(),
)
def test_a_loader_reads_every_sample_once_when_workers_stop_and_others_go_on(
    samples, batch, after, legs, is_stream, drop_last
):
    drop_last = drop_last and samples >= batch
    order = [*range(samples)]
    if is_stream:
        expected = minibatches(order, batch, drop_last=drop_last) * 2
    else:
        expected = of_task(samples, batch, seed=4, epochs=2)
        expected = [m for m in expected if len(m) == batch or not drop_last]

    def make(partition: pl.Partition) -> PartLoader:
        if is_stream:
            return partition.loader(Stream(samples), batch, drop_last=drop_last)
        return partition.loader(torch.arange(samples), batch, seed=4, drop_last=drop_last)

    check_legs(legs_of_loaders(make, legs, after=after, epochs=2), expected, after)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["map", "stream", "stream that shares"])
def test_loader_processes_read_no_sample_twice_and_do_not_move_the_position(kind):
    """They fetch ahead; what counts is what the loop has received.  1, 2, 4 and 7 workers follow each other."""

    def make(partition: pl.Partition) -> PartLoader:
        processes = processes_of(partition.index, partition.workers)
        if kind == "map":
            return partition.loader(torch.arange(50), 6, seed=4, num_workers=processes)
        return partition.loader(Stream(50, shares=kind != "stream"), 6, num_workers=processes)

    legs = LEGS_OF_PROCESSES if kind != "stream that shares" else [(2, 4)]
    expected = of_task(50, 6, seed=4, epochs=1) if kind == "map" else minibatches([*range(50)], 6)
    check_legs(legs_of_loaders(make, legs, after=15, epochs=1), expected, after=15)


def test_a_loader_continues_its_epoch_after_a_break_and_begins_the_next_one_at_the_end():
    loader = pl.Partition(0, 1).loader(range(5), 2, shuffle=False)
    for batch, _ in loader:
        assert batch.tolist() == [0, 1]
        break
    assert [batch.tolist() for batch, _ in loader] == [[2, 3], [4]]
    assert (loader.epoch, loader.minibatch, loader.seen, len(loader)) == (1, 0, 5, 3)
    assert loader.skip(2) == 0 and [batch.tolist() for batch, _ in loader] == [[4]]
    assert loader.skip(4) == 1 and loader.seen == 15


def test_a_stream_hears_which_epoch_it_is():
    loader = pl.Partition(0, 1).loader(Epochs(), 3)
    state = loader.state_dict() | {"epoch": 2, "minibatch": 1, "seen": 13}
    assert [batch.tolist() for batch, _ in loader] == [[0, 1, 2], [3, 4]]
    assert [batch.tolist() for batch, _ in loader] == [[10, 11, 12], [13, 14]]
    loader.load_state_dict(state)
    assert [batch.tolist() for batch, _ in loader] == [[23, 24]]


def test_settings_of_torchs_loader_are_passed_on():
    for data in (range(4), Stream(4)):
        found = pl.Partition(1, 2).loader(data, 4, **({"shuffle": False} if data == range(4) else {}), collate_fn=list)
        assert [batch for batch, _ in found] == [[2, 3]]
    with pytest.raises(TypeError, match="num_wrokers"):
        pl.Partition(1, 2).loader(range(4), 4, seed=0, num_wrokers=2)


def test_a_worker_without_a_sample_gets_one_of_another_worker_that_counts_as_none():
    with pytest.warns(EmptyShard, match="worker 6 gets no sample: minibatches have at most 5 samples for 7 workers"):
        loader = pl.Partition(6, 7).loader(range(5), 8, shuffle=False)
    assert [(batch.tolist(), samples) for batch, samples in loader] == [([0], 0)]
    assert list(pl.Partition(6, 7).batches(5, 8, shuffle=False)) == [[]]


class Disordered(IterableDataset):
    """Its order depends on the loader worker, as that of a stream that is shuffled without a seed."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(20).tolist())


def test_a_stream_that_each_loader_process_reads_in_another_order_is_refused():
    with pytest.raises(
        ValueError, match=r"Partition.loader\(Disordered\): loader workers read the stream in different"
    ):
        list(pl.Partition(0, 2).loader(Disordered(), 4, num_workers=2))


def test_two_loops_over_one_loader_and_a_position_loaded_in_a_loop_are_refused():
    loader = pl.Partition(0, 1).loader(range(6), 2, shuffle=False)
    state = loader.state_dict()
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(RuntimeError, match="another pass has begun, or a position was loaded"):
        next(first)
    with pytest.raises(RuntimeError, match="another pass has begun, or a position was loaded"):
        for _ in loader:
            loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (
            lambda: pl.Partition(2, 2),
            "Partition(index=2, workers=2, after=0): the index of one of 2 parts is from 0 to 1",
        ),
        (lambda: pl.Partition(0, 0), "workers counts the parts of a minibatch and must be at least 1"),
        (lambda: pl.Partition(0, 2, after=-1), "after is the number of samples of a warm start"),
        (lambda: pl.Partition(0.5, 2), "Partition(index=0.5): index is an integer"),
        (lambda: pl.Partition(0, 2).batches(8, 0, seed=0), "Partition.batches(batch=0): a minibatch has at least 1"),
        (lambda: pl.Partition(0, 2).batches(0, 8, seed=0), "the data set has 0 samples, and needs at least 1"),
        (lambda: pl.Partition(0, 2).batches(8, 4), "Partition.batches(seed=None): to shuffle give seed=..."),
        (
            lambda: pl.Partition(0, 2).batches(8, 4, shuffle=False, seed=1),
            "Partition.batches(seed=1): nothing is shuffled",
        ),
        (lambda: pl.Partition(0, 2).batches(8, 4, seed=-1), "Partition.batches(seed=-1): a seed is a number from 0"),
        (lambda: pl.Partition(0, 2).batches(8, 4, seed=0, epoch=-1), "Partition.batches(epoch=-1)"),
        (lambda: pl.Partition(0, 2).batches(8, 4, seed="0"), "Partition.batches(seed='0'): seed is an integer or None"),
        (lambda: pl.Partition(0, 2).batches(8, 4, seed=0, skip=3), "an epoch has 2 minibatches of 4 samples"),
        (lambda: pl.Partition(0, 2).loader(range(8), 4), "Partition.loader(seed=None): to shuffle give seed=..."),
        (lambda: pl.Partition(0, 2).loader(range(8), "4", seed=0), "Partition.loader(batch='4'): batch is an integer"),
        (lambda: pl.Partition(0, 2).loader(Stream(8), 4, seed=0), "Partition.loader(seed=0): nothing is shuffled"),
        (
            lambda: pl.Partition(0, 2).loader(Stream(8), 4, shuffle=True),
            "(Stream, shuffle=True): a stream is read in its",
        ),
        (lambda: pl.Partition(0, 2).loader(3, 4), "Partition.loader(int): give a data set with a length and indices"),
        (
            lambda: pl.Partition(0, 2).loader(DataLoader(Stream(8)), 4),
            "Partition.loader(DataLoader): give the data set",
        ),
        (lambda: pl.Partition(0, 2).loader(range(8), 4, seed=0, batch_size=2), "Partition.loader(batch_size=...)"),
        (lambda: pl.Partition(0, 2).loader(range(8), 4, seed=0, in_order=False), "Partition.loader(in_order=False)"),
        (
            lambda: pl.Partition(0, 2).loader(range(8), 4, seed=0, num_workers=1, persistent_workers=True),
            "Partition.loader(persistent_workers=True): loader workers start anew",
        ),
        (lambda: list(pl.Partition(0, 2).loader(Stream(0), 4)), "(Stream): the stream yielded no minibatch"),
        (lambda: pl.Partition(0, 2).loader(Stream(8), 4).skip(3), "a stream has no length"),
        (
            lambda: pl.Partition(0, 2).loader(range(8), 4, seed=0).load_state_dict({"epoch": 1}),
            "load_state_dict: the state has no 'minibatch'",
        ),
        (
            lambda: (
                pl.Partition(0, 2)
                .loader(range(8), 4, seed=0)
                .load_state_dict(pl.Partition(0, 2).loader(range(8), 2, seed=0).state_dict())
            ),
            "the position was saved with batch=2, and this loader has batch=4",
        ),
        (
            lambda: (
                pl.Partition(0, 2)
                .loader(Stream(8), 4)
                .load_state_dict(pl.Partition(0, 2).loader(range(8), 4, shuffle=False).state_dict())
            ),
            "the position was saved with samples=8, and this loader has samples=None",
        ),
    ],
)
def test_what_cannot_be_read_in_parts_is_refused(call: Callable[[], object], error: str):
    with pytest.raises((ValueError, TypeError), match=re.escape(error)):
        call()


# What session.shard reads.


def parts_of_session(
    make: Callable[[int], Any], legs: list[tuple[int, int]], *, whole: int, **settings: Any
) -> list[list[list[int]]]:
    """What the workers read of each minibatch of one pass, in legs; the warm start has `whole` minibatches.

    `make` is given the number of loader processes."""
    found: list[list[list[int]]] = []
    for workers, most in [*legs, (2, 10**6)]:
        skip = len(found)
        store = HashStore()
        read = [
            list(islice(parts_of_worker(loader, pl.Partition(i, workers), store, skip, whole, settings), most))
            for i, loader in enumerate(make(processes_of(i, workers)) for i in range(workers))
        ]
        found += [list(step) for step in zip(*read, strict=True)]
    return found


def parts_of_worker(
    loader: Any, partition: pl.Partition, store: HashStore, skip: int, whole: int, settings: dict[str, Any]
) -> Iterator[list[int]]:
    received = skip
    parts = Parts(
        loader,
        partition,
        ByStore(store, partition.index, 1),
        reads_full_batches=lambda: received < whole,
        **settings,
    )
    parts.skipped = skip
    for (x,), samples in parts:
        received += 1  # The step of the last minibatch of a warm start ends it.
        assert len(x) == max(samples, 1)
        yield x[:samples].tolist()


def check_session(found: list[list[list[int]]], expected: Minibatches, whole: int) -> None:
    for number, (parts, minibatch) in enumerate(zip(found, expected, strict=True)):
        check_parts(parts, minibatch, whole=number < whole)


def shuffled_loader(samples: int, batch: int, **settings: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    return DataLoader(TensorDataset(torch.arange(samples)), batch, shuffle=True, generator=generator, **settings)


def pairs(samples: list[torch.Tensor]) -> tuple[torch.Tensor]:
    return (torch.stack(samples),)


@pytest.mark.filterwarnings("ignore::paceline.session.loading.EmptyShard")
@given(
    samples=st.integers(1, 40),
    batch=st.integers(1, 12),
    whole=st.integers(0, 4),
    legs=LEGS,
    kind=st.sampled_from(["part", "whole", "list", "stream"]),
)
def test_shard_reads_every_sample_once_when_workers_stop_and_others_go_on(samples, batch, whole, legs, kind):
    def make(_: int) -> Any:
        if kind == "stream":
            return DataLoader(Stream(samples), batch, collate_fn=pairs)
        return shuffled_loader(samples, batch)

    expected = [x.tolist() for (x,) in make(0)]
    assert sorted(chain(*expected)) == [*range(samples)]
    assert kind != "stream" or expected == minibatches([*range(samples)], batch)
    data = (lambda _: [*make(0)]) if kind == "list" else make
    found = parts_of_session(data, legs, whole=whole, reads_whole=kind == "whole")
    check_session(found, expected, whole)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["map", "map, whole", "stream that shares"])
def test_shard_reads_every_sample_once_through_loader_processes(kind):
    """1, 2, 4 and 7 workers follow each other in one epoch; all read a stream by the same processes."""

    def make(processes: int) -> Any:
        if kind != "stream that shares":
            return shuffled_loader(50, 6, num_workers=processes)
        return DataLoader(Stream(50, shares=True), 6, collate_fn=pairs, num_workers=2)

    expected = [x.tolist() for (x,) in make(0)]
    assert sorted(chain(*expected)) == [*range(50)]
    legs = LEGS_OF_PROCESSES if kind == "map" else [(1, 3), (3, 3)]
    found = parts_of_session(make, legs, whole=3, reads_whole=kind == "map, whole")
    check_session(found, expected, whole=3)


@pytest.mark.parametrize("sampler", ["random", "subset", "weighted"])
def test_workers_whose_random_numbers_differ_shuffle_in_the_same_order(sampler):
    def make(rank: int) -> DataLoader[Any]:
        torch.manual_seed(rank)
        data = TensorDataset(torch.arange(12))
        samplers = {
            "random": RandomSampler(data),
            "subset": torch.utils.data.SubsetRandomSampler(range(12)),
            "weighted": torch.utils.data.WeightedRandomSampler([1.0] * 12, 12, replacement=False),
        }
        return DataLoader(data, 5, sampler=samplers[sampler])

    store = HashStore()
    with torch.random.fork_rng():
        read = [list(parts_of_worker(make(rank), pl.Partition(rank, 3), store, 0, 0, {})) for rank in range(3)]
    assert sorted(sample for parts in read for part in parts for sample in part) == [*range(12)]


class Doubling(DataLoader[Any]):
    """A loader with a way of reading of its own."""

    def __iter__(self) -> Iterator[Any]:
        return ((2 * x,) for (x,) in super().__iter__())


def test_a_loader_with_a_way_of_reading_of_its_own_is_read_whole():
    found = parts_of_session(lambda _: Doubling(TensorDataset(torch.arange(6)), 4), [(3, 1)], whole=0)
    assert found == [[[0, 2], [4], [6]], [[8], [10]]]


def test_minibatches_that_loader_processes_deliver_in_any_order_are_refused():
    loader = DataLoader(Stream(8, shares=True), 2, collate_fn=pairs, in_order=False)
    with pytest.raises(ValueError, match=r"session.shard\(DataLoader\(Stream\), in_order=False\)"):
        list(Parts(loader, pl.Partition(0, 2), ByStore(HashStore(), 0, 1)))


def test_a_stream_that_every_loader_process_reads_whole_is_refused():
    loader = DataLoader(Stream(8), 2, collate_fn=pairs, num_workers=2)
    with pytest.raises(ValueError, match="its 2 loader workers begin with equal minibatches") as caught:
        list(Parts(loader, pl.Partition(0, 2), ByStore(HashStore(), 0, 1)))
    assert "let Stream.__iter__ share its samples out by torch.utils.data.get_worker_info()" in str(caught.value)
    assert "pl.Partition(session.rank, session.workers).loader(Stream(...)" in str(caught.value)


class Opaque:
    """A sample whose content no digest shows."""


def test_minibatches_that_only_look_equal_are_not_refused():
    samples = [Opaque() for _ in range(8)]
    loader = DataLoader(Listed(samples), 2, collate_fn=list, num_workers=2)
    parts = Parts(loader, pl.Partition(0, 2), ByStore(HashStore(), 0, 1), cutter=Cutter(split=halves))
    assert [(len(part), count) for part, count in parts] == [(1, 1)] * 4


class Listed(IterableDataset):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return iter(self.samples if info is None else self.samples[info.id :: info.num_workers])


def halves(batch: list[Any], index: int, workers: int) -> tuple[list[Any], int]:
    return batch[index::workers], len(batch[index::workers])


def test_whole_minibatches_that_cannot_be_cut_are_refused_at_the_first_one_of_a_warm_start():
    def time_first(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples, dim=1)

    loader = DataLoader(torch.zeros(8, 3), 4, collate_fn=time_first)
    parts = Parts(
        loader,
        pl.Partition(0, 2),
        ByStore(HashStore(), 0, 1),
        reads_whole=True,
        reads_full_batches=lambda: True,
    )
    with pytest.raises(ValueError, match="collate_fn made a minibatch of length 3 along dimension 0 of 4 samples"):
        next(iter(parts))


def test_more_minibatches_to_skip_than_a_stream_has_are_refused():
    parts = Parts(DataLoader(Stream(8), 2, collate_fn=pairs), pl.Partition(0, 2), ByStore(HashStore(), 0, 1))
    parts.skipped = 5
    with pytest.raises(ValueError, match=r"session.shard\(DataLoader, skip=5\): the loader has 4 minibatches"):
        list(parts)
