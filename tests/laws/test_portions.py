"""Data in portions: each is counted exactly once in every pass, whoever dies, is slow or not heard, and whatever is said twice."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import Cluster, Faults, Run, Sandblaster, Task, simulate

WORKERS, STEPS, BATCH, PASSES = 4, 5, 8, 4
SAMPLES = STEPS * BATCH


def counting() -> Task:
    """Every sample has a parameter of its own, of which the loss is a linear function: a direction says how often each was counted."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        assert isinstance(model, Sum)
        return -(batch[0] @ model.total).mean()

    data = [torch.eye(SAMPLES, dtype=torch.float64)]
    return Task(Sum, loss, data, BATCH, lambda params: torch.optim.SGD(params, lr=1.0), epochs=PASSES)


def assert_each_was_counted_once(run: Run) -> None:
    """Without curvature every pass but the first takes a step of length 1 along the mean gradient."""
    expected = torch.full((SAMPLES,), (PASSES - 1) / SAMPLES**0.5, dtype=torch.float64)
    assert torch.allclose(run.params, expected, rtol=1e-12)


def cluster(seed: int) -> Cluster:
    chance = Random(seed)
    return Cluster(workers=WORKERS, compute=[f"{chance.uniform(2, 20):.2f}ms" for _ in range(WORKERS)], seed=seed)


def method(seed: int) -> Sandblaster:
    chance = Random(seed)
    return Sandblaster(shards=chance.choice([1, 2, 3]), push=chance.choice([1, 2, 8]), backups=chance.choice([0, 1, 2]))


def random_faults(seed: int, servers: int, **more: Any) -> Faults:
    """Up to all but one die, and others come."""
    chance = Random(seed)
    joins = [chance.uniform(0, 0.4) for _ in range(chance.randrange(1, 4))]
    ranks = [*range(WORKERS), *range(WORKERS + servers, WORKERS + servers + len(joins))]
    mortal = chance.sample(ranks, chance.randrange(1, len(ranks)))
    return Faults({rank: chance.uniform(0, 0.5) for rank in mortal}, joins, notice=chance.choice([0.0, 0.001, 0.05]), **more)


def suspicions(seed: int) -> list[tuple[int, float]]:
    chance = Random(seed)
    return [(chance.randrange(WORKERS), chance.uniform(0, 0.3)) for _ in range(chance.randrange(1, 6))]


FAULTS: dict[str, Callable[[int, int], Faults]] = {
    "deaths": lambda seed, servers: random_faults(seed, servers),
    "losses": lambda seed, servers: Faults(lost=0.15, doubled=0.15, patience=0.05),
    "deaths and losses": lambda seed, servers: random_faults(seed, servers, lost=0.1, doubled=0.1, patience=0.05),
    "suspicions": lambda seed, servers: Faults(suspicions=suspicions(seed)),
    "suspicions and losses": lambda seed, servers: Faults(suspicions=suspicions(seed), lost=0.1, doubled=0.1, patience=0.05),
}


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("seed", range(40))
def test_each_portion_is_counted_once(kind: str, seed: int):
    strategy = method(seed)
    run = simulate(counting(), strategy, cluster(seed), faults=FAULTS[kind](seed, strategy.servers))
    assert_each_was_counted_once(run)
