"""Minibatches that grow: what a step reads, and what is counted in samples or epochs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import AllReduceSGD, GrowingBatch, PeriodicAveraging, Replicated, Then, simulate
from paceline.task import Trainee
from paceline.training.timetable import Timetable
from tests.laws.test_control import auto, flat_task, on


def test_minibatches_grow_evenly_to_the_last_size():
    sizes = [GrowingBatch(start=16, end=128, epochs=5, multiple=8).size(epoch) for epoch in range(8)]
    assert sizes == [16, 32, 56, 80, 104, 128, 128, 128]


@given(start=st.integers(1, 40), rise=st.integers(0, 60), epochs=st.integers(1, 9), multiple=st.integers(1, 9))
def test_sizes_never_fall_are_multiples_and_reach_the_last_one_after_so_many_epochs(start, rise, epochs, multiple):
    growing = GrowingBatch(start * multiple, (start + rise) * multiple, epochs, multiple)
    sizes = [growing.size(epoch) for epoch in range(epochs + 2)]
    assert sizes == sorted(sizes) and not any(size % multiple for size in sizes)
    assert sizes[0] == growing.start and sizes[epochs:] == [growing.end] * 2


def test_every_epoch_reads_each_sample_once_whatever_the_sizes():
    for batch in (GrowingBatch(start=4, end=12, epochs=3, multiple=2), auto(start=8, margin=1e9)):
        task = flat_task(batch, lr=0.0, epochs=5, samples=93)
        run = simulate(task, PeriodicAveraging(period=3), on(3))
        assert sum(p.samples for p in run.trace.points) == 5 * 93
        trainees = [Trainee(task, task.build(), rank, 3) for rank in range(3)]
        seen = [
            tuple(row.tolist())
            for step in range(trainees[0].timetable.start(1))
            for t in trainees
            if (part := t.draw(step)) is not None
            for row in part[0]
        ]
        assert sorted(seen) == sorted(tuple(row.tolist()) for row in task.data[0])  # pyright: ignore


@pytest.mark.parametrize("length", [{"epochs": 1}, {"samples": 80}], ids=str)
@pytest.mark.parametrize("steps", [None, 12])
@pytest.mark.parametrize(
    "batch",
    [GrowingBatch(start=8, end=32, epochs=2), auto(margin=10.0, largest=16)],
    ids=lambda batch: type(batch).__name__,
)
def test_a_warm_start_ends_after_its_samples_also_if_minibatches_grow(batch: Any, steps: int | None, length: Any):
    task = flat_task(batch, lr=0.01, epochs=4, samples=80)
    task = task if steps is None else replace(task, epochs=None, steps=steps)
    run = simulate(task, Then(Replicated(), PeriodicAveraging(period=2), **length), on(2))
    own = [p.samples for p in run.trace.points if p.rank == 0]
    timetable = Timetable(80, [8, 20, 32, 32].__getitem__ if isinstance(batch, GrowingBatch) else lambda epoch: 16)
    end = timetable.start(1)
    whole = [timetable.samples_in(step) for step in range(len(own))]
    assert own == whole[:end] + [samples // 2 for samples in whole[end:]]


def test_evaluations_come_after_equal_numbers_of_samples_if_minibatches_grow():
    """A period in steps is another one in every epoch."""
    growing = GrowingBatch(start=4, end=32, epochs=3, multiple=4)
    for every, expected in {
        "1 epoch": [64, 128, 192, 256, 320],
        "2 epochs": [128, 256, 320],
        "0.5 epochs": [32, 64, 100, 128, 168, 192, 224, 256, 288, 320],
        "100 samples": [100, 224, 320],
        "20 steps": [112, 320],
        None: [64, 128, 192, 256, 320],
    }.items():
        task = replace(
            flat_task(growing, lr=0.01, epochs=5, samples=64), evaluate=lambda model: {}, evaluate_every=every
        )
        assert [e.samples for e in simulate(task, AllReduceSGD(), on(2)).trace.evaluations] == expected, every
    searching = replace(flat_task(auto(margin=1e9), lr=0.0), evaluate=lambda model: {}, evaluate_every="2 epochs")
    assert [e.samples for e in simulate(searching, AllReduceSGD(), on(2)).trace.evaluations] == [512, 1024]
