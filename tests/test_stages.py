"""A model cut into stages: in sequence they are the model, they are balanced, and an impossible cut is an error."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import paceline as pl
from paceline.pipeline.split import balanced
from tests.laws.tasks import numbers, same


class Residual(nn.Module):
    """A model with functions between its layers, its own parameter, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.first = nn.Linear(6, 6)
        self.inner = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        x = self.first(x.flatten(1)).relu() * self.scale
        x = x + self.second(self.inner(x).tanh())
        return self.last(x)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.head = nn.Sequential(nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


class Swapped(nn.Module):
    """Its layers are called in another order than that of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(6, 3)
        self.early = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.late(self.early(x))


class Masked(nn.Module):
    """Creates a tensor in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.ones(6, 6, dtype=x.dtype).tril()


MODELS = {
    "sequential": lambda: nn.Sequential(
        nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3)
    ),
    "nested": lambda: nn.Sequential(
        nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    ),
    "masked": lambda: nn.Sequential(nn.Linear(6, 6), Masked(), nn.Linear(6, 3)),
    "residual": Residual,
    "blocks": Blocks,
    "swapped": Swapped,
}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_stages_in_sequence_are_the_model(name: str, parts: int):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    x, target = numbers(5, 6), numbers(5, 3, seed=1)
    (model(x) - target).square().mean().backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    split = pl.split(model, parts)
    y, shapes = x, split.passed(x)
    for stage, shape in zip(split.stages, shapes, strict=True):
        y = stage(y)
        assert (y.shape, y.dtype) == (shape.shape, shape.dtype)
    (y - target).square().mean().backward()
    assert len(split.stages) == parts and same(y, model(x))
    assert all(same(p.grad, g) for p, g in zip(model.parameters(), wanted, strict=True))
    named = [(n, p) for stage in split.stages for n, p in stage.named_parameters()]
    assert sorted(n for n, _ in named) == sorted(n for n, _ in model.named_parameters())
    assert all(p is model.get_parameter(n) for n, p in named)


@given(
    st.integers(1, 9).flatmap(
        lambda n: st.tuples(
            *(
                st.lists(values, min_size=n, max_size=n)
                for values in (st.integers(0, 9), st.integers(0, 9), st.booleans())
            )
        )
    ),
    st.integers(1, 5),
)
def test_balanced_cuts_are_the_best_of_all_cuts(layers: tuple[list[int], list[int], list[bool]], parts: int):
    costs, cuts, trainable = layers
    if parts > sum(trainable):
        return
    n = len(costs)

    def worth(begins: tuple[int, ...]) -> tuple[int, int]:
        spans = list(pairwise([*begins, n]))
        return max(sum(costs[a:b]) for a, b in spans), sum(cuts[b] for b in begins[1:])

    every = [(0, *later) for later in combinations(range(1, n), parts - 1)]
    possible = [b for b in every if all(any(trainable[i:j]) for i, j in pairwise([*b, n]))]
    chosen = tuple(balanced(costs, cuts, parts, trainable))
    assert chosen in possible
    assert worth(chosen) == min(map(worth, possible))


def test_sample_balances_operations_instead_of_parameters():
    """Convolutions have few parameters and nearly all of the work."""
    model = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)), nn.Flatten(), nn.Linear(256, 10))
    assert pl.split(model, 2).begins == ("0", "4")
    measured = pl.split(model, 2, torch.zeros(3, 4, 8, 8))
    convolution, linear = 2 * 3 * 64 * 4 * 4 * 9, 2 * 3 * 256 * 10
    assert (measured.begins, measured.costs) == (("0", "2"), (2 * convolution, convolution + linear))


def test_cut_with_the_fewest_bytes_is_chosen_among_equal_costs():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(2, 8), nn.Linear(8, 8))
    assert pl.split(model, 2, torch.zeros(1, 8)).begins == ("0", "2")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x) if x.sum() > 0 else x


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.a(x) + self.b(y)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.c = nn.Linear(6, 6)
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


class Cast(nn.Module):
    """Does more than call layers: it enters another precision."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.b(self.a(x)).float()


def test_forward_that_does_more_than_call_layers_is_refused():
    with pytest.raises(ValueError, match=r"split\(Cast, 2\): its stages in sequence do not give its output"):
        pl.split(Cast(), 2, torch.ones(3, 6))


def test_sample_changes_neither_the_model_nor_the_random_state():
    model = MODELS["sequential"]()
    before, state = [b.clone() for b in model.buffers()], torch.get_rng_state()
    pl.split(nn.Sequential(*model, nn.Dropout(0.5)), 2, torch.ones(3, 6))
    assert all(same(a, b) for a, b in zip(before, model.buffers(), strict=True))
    assert torch.equal(state, torch.get_rng_state())


REFUSED = {
    "no such layer": (
        Residual,
        ["lasst"],
        r"split\(Residual, \['lasst'\]\): there is no layer 'lasst'; did you mean 'last'\?",
    ),
    "the first layer": (Residual, ["first"], "the first stage always starts at 'first'"),
    "inside a residual block": (
        Residual,
        ["second"],
        "no stage can start at 'second', because more than one tensor .* can start at 'inner', 'last'",
    ),
    "wrong order": (
        Blocks,
        ["blocks.2", "blocks.1"],
        "name the layers in the order in which the model calls them, 'blocks.0'",
    ),
    "the same twice": (Blocks, ["blocks.2", "blocks.2"], "name the layers in the order"),
    "more parts than layers": (
        Residual,
        5,
        r"split\(Residual, 5\): only 3 of the layers .* they are 'first', 'inner', 'last'",
    ),
    "no parts": (Residual, 0, r"split\(Residual, 0\): there must be at least 1 stage"),
    "nothing to train": (
        MODELS["sequential"],
        ["3", "4", "5"],
        "the stage that starts at '4' has no parameter to train",
    ),
    "no layers": (lambda: nn.Linear(6, 3), 2, r"split\(Linear, 2\): its forward calls no layers"),
    "control flow": (Recurrent, 1, r"split\(Recurrent, 1\): its forward cannot be read as a graph of layers"),
    "two inputs": (TwoInputs, 2, r"its forward takes \['x', 'y'\] and returns"),
    "tied": (
        Tied,
        3,
        "'a.weight' in the stage that starts at 'a' and 'c.weight' in the stage that starts at 'c' are one parameter",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_error_for_an_impossible_split_says_why(name: str):
    build, parts, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        pl.split(build(), parts)
