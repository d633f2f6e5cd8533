"""A replica in stages in the simulator: the numbers of the whole model, the time of the pipeline."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from torch import nn

import paceline as pl
from paceline.costs import Link
from paceline.pipeline.timing import Pipeline
from tests.laws.tasks import instant, regression, same

FREE = Link(inf, 0.0)


def task(width: int = 8, layers: int = 4, **more) -> pl.Task:
    """A model with `layers` equal layers between the first and the last."""

    def model() -> nn.Module:
        inner = [nn.Linear(width, width) for _ in range(layers)]
        return nn.Sequential(nn.Linear(6, width), *inner, nn.Linear(width, 3)).double()

    return regression(**{"steps": 5, "batch": 12, "model": model} | more)


@pytest.mark.parametrize("stages", [1, 2, 3, 8])
@pytest.mark.parametrize("microbatches", [1, 4, 16])
def test_equal_stages_take_the_time_of_gpipe(stages: int, microbatches: int):
    pipeline = Pipeline([1 / stages] * stages, [0] * (stages - 1), microbatches, FREE, forward_share=1 / 3)
    assert pipeline.seconds(6.0, samples=64) == pytest.approx(6.0 / stages * (microbatches + stages - 1) / microbatches)


def schedule(pipeline: Pipeline, whole: float, samples: int) -> float:
    """The same time by simulation: a microbatch leaves a stage or a link after the microbatch before it."""
    passes = min(pipeline.microbatches, samples)
    now = 0.0
    for share in (pipeline.forward_share, 1 - pipeline.forward_share):
        links = [pipeline.link.latency + n * samples / passes / pipeline.link.bandwidth for n in pipeline.cuts]
        work = [whole * share * s / passes for s in pipeline.shares]
        stations = [seconds for pair in zip(work, [*links, 0.0], strict=True) for seconds in pair]
        free = [now] * len(stations)
        for _ in range(passes):
            at = now
            for i, seconds in enumerate(stations):
                at = free[i] = max(at, free[i]) + seconds
        now = max(free)
    return now


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.1, 0.7, 0.2), (0.25, 0.25, 0.4, 0.1)])
@pytest.mark.parametrize("link", [FREE, Link(1e4, 0.01), Link(1e2, 0.3)])
def test_time_is_that_of_simulating_every_microbatch(shares: tuple[float, ...], link: Link):
    pipeline = Pipeline(shares, [40 * (i + 1) for i in range(len(shares) - 1)], 5, link, forward_share=0.3)
    assert pipeline.seconds(2.0, samples=20) == pytest.approx(schedule(pipeline, 2.0, 20))
    assert pipeline.seconds(2.0, samples=3) == pytest.approx(schedule(pipeline, 2.0, 3))


@pytest.mark.parametrize(
    "strategy",
    [pl.AllReduceSGD(), pl.PeriodicAveraging(period=2), pl.Downpour(servers=1)],
    ids=lambda s: type(s).__name__,
)
def test_stages_change_the_time_and_not_the_numbers(strategy: pl.Strategy):
    whole = pl.simulate(task(), strategy, instant(2))
    split = pl.simulate(task(), strategy, replace(instant(2), stages=["3"], microbatches=3))
    assert same(split.params, whole.params)
    flops = [6 * 8 + 2 * 64, 2 * 64 + 8 * 3]
    slowest = max(flops) / sum(flops)
    assert whole.seconds == 5.0
    assert split.seconds == pytest.approx(5 * (1.0 + 2 * slowest) / 3)


def test_bytes_of_a_worker_are_the_activations_at_its_cuts():
    run = pl.simulate(task(), pl.PeriodicAveraging(period=2), replace(instant(2), stages=["2", "4"]))
    passed = [s.nbytes for s in run.trace.spans if s.rank == 1 and s.kind == "stages"]
    assert passed == [2 * 6 * (8 + 8) * 8] * 5, "6 samples, two cuts of 8 values of 8 bytes, forward and backward"


def test_stages_communicate_at_the_same_time():
    """A ring of two sends twice half of the vector: of the whole one, or of that of the larger stage."""
    slow = replace(instant(2), compute=0.0, bandwidth=1e3, stage_link=FREE)
    job = task(layers=2)
    sizes = [6 * 8 + 8 + 72, 72 + 8 * 3 + 3]
    whole = pl.simulate(job, pl.PeriodicAveraging(period=5), slow).seconds
    split = pl.simulate(job, pl.PeriodicAveraging(period=5), replace(slow, stages=["2"])).seconds
    assert split / whole == pytest.approx(max(sizes) / sum(sizes))


def test_impossible_stages_are_refused():
    with pytest.raises(
        ValueError, match=r"simulate\(Hogwild\): it needs the whole model .*, which stages=2 does not offer"
    ):
        pl.simulate(task(), pl.Hogwild(), replace(instant(2), stages=2))
    with pytest.raises(ValueError, match=r"stages=0, microbatches=None"):
        pl.simulate(task(), pl.AllReduceSGD(), replace(instant(2), stages=0))
