"""Synchronous training outlives deaths at any moment, by seed: the workers that are left end with one model."""

from __future__ import annotations

import torch
from torch import nn

import paceline as pl
from paceline.codecs import OneBit, PowerSGD, TopK
from tests.laws.mortal import World, trained

STEPS = 16
METHODS: list[pl.Strategy] = [
    pl.AllReduceSGD(),
    pl.AllReduceSGD(clip=1.0, group=2),
    pl.AllReduceSGD(codec=OneBit()),
    pl.AllReduceSGD(codec=TopK(ratio=0.3)),
    pl.AllReduceSGD(codec=PowerSGD(rank=1)),
    pl.PeriodicAveraging(period=3),
    pl.PeriodicAveraging(period=3, codec=OneBit(), optimizer_state="average"),
    pl.AdaptiveAveraging(period=2, warmup=2, sampling=6),
    pl.BlockMomentum(period=3, codec=OneBit()),
    pl.SlowMo(period=3),
    pl.DiLoCo(period=4, delay=1, fragments=2),
    pl.DiLoCo(period=4, delay=2, codec=OneBit()),
    pl.EASGD(period=3),
    pl.OneBitAdam(warmup=4, betas=(0.9, 0.999)),
    pl.Then(pl.AllReduceSGD(), pl.PeriodicAveraging(period=3), steps=6),
    pl.Then(pl.Replicated(), pl.BlockMomentum(period=3), steps=3),
]


def regression() -> pl.Task:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(96, 4, generator=generator)
    targets = inputs @ torch.randn(4, 2, generator=generator)
    return pl.Task(
        model=lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)),
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        data=[inputs, targets],
        batch=24,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.5),
        steps=STEPS,
        bucket_bytes=64,
    )


def finished(world: World) -> list[torch.Tensor]:
    """The models, with their buffers, of the workers that took part in the end."""
    runs = [w.run for w in world.everyone if w.has_ended and not w.run.missed_end]
    return [torch.cat([r.replica.params, r.replica.learner.flat.buffers().float()]) for r in runs]


def counting() -> pl.Task:
    """Every sample has its own parameter.  A step adds 1 in all, in equal parts to the samples that count."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total = nn.Parameter(torch.zeros(STEPS * 12, dtype=torch.float64))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        assert isinstance(model, Sum)
        return -(batch[0] @ model.total).mean()

    return pl.Task(
        model=Sum,
        loss=loss,
        data=[torch.eye(STEPS * 12, dtype=torch.float64)],
        batch=12,
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        steps=STEPS,
    )


def test_workers_end_with_one_model_whichever_of_them_die_stop_or_join_and_when():
    task = regression()
    for strategy in METHODS:
        for seed in range(2):
            name = f"{strategy} {seed}"
            world = trained(task, strategy, name, deaths=1 + seed, stops=1 - seed, joins=1 + seed, moments=700)
            models = finished(world)
            assert models, name
            for model in models[1:]:
                assert torch.equal(model, models[0]), name
            assert models[0].isfinite().all(), name


def test_samples_of_the_workers_that_are_left_count_once_and_equally():
    """Whoever dies, each step's samples make up one mean: of some workers nothing, of the others equal parts."""
    task = counting()
    for strategy in (pl.AllReduceSGD(), pl.PeriodicAveraging(period=3)):
        redone = 0
        for seed in range(12):
            world = trained(task, strategy, f"{strategy} {seed}", deaths=1 + seed % 3, stops=0, joins=2, moments=400)
            [params] = {tuple(model.tolist()) for model in finished(world)}
            redone += sum(d.kind == "lost" for d in world.trace.decisions)
            for step in range(STEPS):
                part = task.part(step, 0, 1)[0].argmax(1)
                shares = torch.tensor(params, dtype=torch.float64)[part]
                torch.testing.assert_close(float(shares.sum()), 1.0, rtol=1e-9, atol=0)
                counted = shares[shares > 0]
                if isinstance(strategy, pl.AllReduceSGD):
                    torch.testing.assert_close(counted, torch.full_like(counted, 1 / len(counted)))
        assert redone > 6, "the workers died at other moments than in exchanges"
