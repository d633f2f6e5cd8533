"""Rows: only the touched rows of an embedding are sent, with the same result as sending all rows."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline import (
    Cluster,
    Downpour,
    ParameterServer,
    Run,
    SoftSync,
    Task,
    simulate,
)
from paceline.codecs import OneBit
from paceline.server.rules import (
    Adagrad,
    Adam,
    Every,
    Momentum,
    Rule,
    Scaled,
    Sgd,
)
from paceline.worker.rows import positions, refusal, rows, union, within
from tests.laws.tasks import close

WORDS, WIDTH = 300, 8


class Bag(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=sparse, dtype=torch.float64)
        self.head = nn.Linear(WIDTH, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(x).mean(1))


def bags(sparse: bool, steps: int = 20) -> Task:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(WORDS, (120, 4), generator=generator)
    return Task(
        model=lambda: Bag(sparse),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        data=[words, (words % 3).mode(1).values],
        batch=6,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        steps=steps,
    )


def run(rule: Rule, sparse: bool, **more: Any) -> Run:
    strategy = ParameterServer(rule=rule, servers=3, sparse=sparse)
    return simulate(bags(sparse), strategy, Cluster(workers=3, compute=["10ms", "13ms", "29ms"]), **more)


@pytest.mark.parametrize("rule", [Sgd(lr=0.3), Adagrad(lr=0.1), Scaled(Adagrad(lr=0.1))], ids=str)
def test_touched_rows_give_the_same_result_as_all_rows(rule: Rule):
    """For rules with which a gradient of zero changes nothing."""
    whole, sparse = run(rule, False), run(rule, True)
    assert close(sparse.params, whole.params, rtol=1e-12)


@pytest.mark.parametrize("rule", [Momentum(lr=0.1), Adam(lr=0.02)], ids=str)
def test_the_state_of_a_row_changes_only_when_it_is_touched(rule: Rule):
    """This is as with torch's SparseAdam. So the run differs, but learns as well."""
    trained = simulate(bags(True, steps=120), ParameterServer(rule=rule, sparse=True), Cluster(workers=3))
    losses = [p.loss for p in trained.trace.points if p.loss is not None]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


def test_only_touched_rows_are_sent():
    whole, sparse = run(Sgd(lr=0.3), False), run(Sgd(lr=0.3), True)
    for rank in (1, 4):  # A worker that did not send the initial model, and a shard.
        assert sparse.trace.bytes_sent(rank) < whole.trace.bytes_sent(rank) / 3


def test_a_sparse_gradient_raises_where_it_cannot_be_sent():
    with pytest.raises(ValueError, match=r"'words.weight' has a sparse gradient"):
        simulate(bags(True), ParameterServer(), Cluster(workers=2))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ParameterServer(sparse=True, codec=OneBit()), "without a codec"),
        (lambda: ParameterServer(sparse=True, rule=Every(Sgd(), 2)), "needs all rows"),
        (lambda: SoftSync(sparse=True), "needs all rows"),
    ],
)
def test_unsupported_uses_of_rows_raise(make: Any, named: str):
    with pytest.raises(ValueError, match=named):
        make()


# Runs.


def random_runs(chance: Random, numel: int) -> torch.Tensor:
    found, at = [], 0
    while at < numel:
        at += chance.randrange(4)
        length = min(chance.randrange(1, 6), numel - at)
        if length > 0:
            found.append((at, length))
        at += length
    chance.shuffle(found)
    return torch.tensor(found, dtype=torch.int64).view(-1, 2)


@pytest.mark.parametrize("seed", range(50))
def test_the_parts_in_slices_make_up_the_whole(seed: int):
    chance = Random(seed)
    numel = chance.randrange(1, 60)
    runs = random_runs(chance, numel)
    assert refusal(runs, numel) is None
    cuts = sorted({0, numel, *(chance.randrange(numel) for _ in range(3))})
    parts = [within(runs, slice(a, b)) for a, b in pairwise(cuts)]
    found = [int(p) + start for start, part in zip(cuts, parts, strict=False) for p in positions(part)]
    assert sorted(found) == sorted(positions(runs).tolist()) and len(set(found)) == len(found)


def test_the_union_of_rows_has_each_row_once():
    a, b = rows(10, 4, torch.tensor([5, 1, 3])), rows(10, 4, torch.tensor([3, 2]))
    assert union([a, b]).tolist() == rows(10, 4, torch.tensor([1, 2, 3, 5])).tolist()


@pytest.mark.parametrize(
    ("runs", "named"),
    [
        ([[0, 5], [3, 2]], "overlap"),
        ([[8, 3]], "end after the last"),
        ([[-1, 2]], "runs from -1"),
        ([[0, 0]], "of lengths from 0"),
        ([[2**62, 2**62]], "runs from"),
        ([0, 1], "pairs of int64"),
    ],
)
def test_invalid_runs_raise_an_error_with_their_values(runs: Any, named: str):
    assert named in (refusal(torch.tensor(runs, dtype=torch.int64), 10) or "")
    assert "pairs of int64" in (refusal(torch.tensor(runs, dtype=torch.float32), 10) or "")
    assert Downpour().sparse is False
