"""Settings of the wrong type get an error that quotes the call and says what would be right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import paceline as pl
from paceline.checked import checked_seconds
from paceline.codecs import CODECS
from paceline.server.gates import GATES
from paceline.server.rules import RULES
from paceline.strategies import STRATEGIES

WRONG: dict[str, Callable[[], object]] = {
    "AllReduceSGD(codec=OneBit): OneBit is a class; give an instance, OneBit()": lambda: pl.AllReduceSGD(
        codec=pl.codecs.OneBit
    ),
    "AllReduceSGD(codec='onebot'): there is no codec 'onebot'; did you mean 'one-bit'?": lambda: pl.AllReduceSGD(
        codec="onebot"
    ),
    "AllReduceSGD(codec=3): codec is a codec, such as": lambda: pl.AllReduceSGD(codec=3),
    "PeriodicAveraging(period='4'): period is an integer or None": lambda: pl.PeriodicAveraging("4"),
    "PeriodicAveraging(period=4.5): period is an integer or None": lambda: pl.PeriodicAveraging(4.5),
    "BlockMomentum(period=8.5): period is an integer or None": lambda: pl.BlockMomentum(period=8.5),
    "BlockMomentum(nesterov='yes'): nesterov is True or False": lambda: pl.BlockMomentum(period=8, nesterov="yes"),
    "BlockMomentum(form=3): form is one of 'paper', 'cntk'": lambda: pl.BlockMomentum(period=8, form=3),
    "ParameterServer(rule=Sgd): Sgd is a class; give an instance, Sgd()": lambda: pl.ParameterServer(rule=pl.rules.Sgd),
    "Sgd(lr='0.1'): lr is a number": lambda: pl.rules.Sgd(lr="0.1"),
    "Adam(betas=0.9): betas is a sequence of numbers": lambda: pl.rules.Adam(betas=0.9),
    "Bound(bound=2.0): bound is an integer": lambda: pl.gates.Bound(bound=2.0),
    "Gossip(topology=3): topology is a function": lambda: pl.Gossip(topology=3),
    "OneBit(bucket=64.0): bucket is an integer": lambda: pl.codecs.OneBit(bucket=64.0),
    "Then(first=AllReduceSGD): AllReduceSGD is a class": lambda: pl.Then(
        pl.AllReduceSGD, pl.PeriodicAveraging(4), steps=3
    ),
}


@pytest.mark.parametrize("expected", WRONG)
def test_a_setting_of_the_wrong_type_is_refused(expected):
    with pytest.raises(ValueError) as error:
        WRONG[expected]()
    assert str(error.value).startswith(expected)


@pytest.mark.parametrize("cls", [*STRATEGIES, *CODECS, *RULES, *GATES], ids=lambda cls: cls.__name__)
def test_every_number_of_every_class_is_checked(cls):
    for field in dataclasses.fields(cls):
        if field.init and field.repr and str(field.type).split(" ")[0] in ("int", "float", "bool"):
            required = [f for f in dataclasses.fields(cls) if f.init and f.default is f.default_factory]
            values = {"Strategy": pl.AllReduceSGD(), "Codec": None, "float": 0.5}
            needed = {f.name: next(v for k, v in values.items() if k in f.type) for f in required}
            with pytest.raises(ValueError, match=rf"^{cls.__name__}\({field.name}='much'\): {field.name} is "):
                cls(**needed | {field.name: "much"})


def test_codecs_rules_gates_and_strategies_can_be_given_by_name():
    assert pl.AllReduceSGD(codec="one-bit") == pl.AllReduceSGD(codec=pl.codecs.OneBit())
    assert pl.PeriodicAveraging(4, codec="TopK").codec == pl.codecs.TopK()
    assert pl.ParameterServer(rule="momentum", gate="bound") == pl.ParameterServer(
        rule=pl.rules.Momentum(), gate=pl.gates.Bound()
    )
    assert pl.Then("all-reduce-sgd", pl.PeriodicAveraging(4), steps=2).first == pl.AllReduceSGD()


def test_numbers_of_numpy_and_lists_become_plain_values():
    assert type(pl.PeriodicAveraging(np.int64(4)).period) is int
    assert type(pl.rules.Sgd(lr=np.float32(0.5)).lr) is float
    assert hash(pl.rules.Adam(betas=[0.9, 0.99])) == hash(pl.rules.Adam(betas=(0.9, 0.99)))


def test_settings_of_users_classes_are_checked_too():
    @dataclasses.dataclass(frozen=True)
    class Mine(pl.AllReduceSGD):
        often: int = 1
        unknown: Missing | None = None  # noqa: F821 (a name that only a type checker knows)

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.often < 1:
                raise ValueError(f"Mine(often={self.often}): at least 1")

    assert Mine(unknown="anything").unknown == "anything"
    with pytest.raises(ValueError, match=r"Mine\(often='2'\): often is an integer"):
        Mine(often="2")
    with pytest.raises(ValueError, match=r"Mine\(codec=OneBit\): OneBit is a class"):
        Mine(codec=pl.codecs.OneBit)
    with pytest.raises(ValueError, match="at least 1"):
        Mine(often=0)


def test_durations_have_units():
    assert [checked_seconds("f", "t", t) for t in ("5s", 2, "3min", "250ms")] == [5.0, 2.0, 180.0, 0.25]
    for wrong, expected in {
        "5 parsecs": "f(t='5 parsecs'): ",
        None: "f(t=None): t is a number or text",
        0: "f(t=0): ",
    }.items():
        with pytest.raises(ValueError) as error:
            checked_seconds("f", "t", wrong)
        assert str(error.value).startswith(expected)


def test_attach_with_wrong_types_is_refused_with_one_worker_too():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cases = {
        "attach(model=SGD, optimizer=Linear): the two are swapped": (optimizer, model, pl.AllReduceSGD(), {}),
        "attach(model=function, optimizer=SGD): the model must be": (lambda x: x, optimizer, pl.AllReduceSGD(), {}),
        "attach(model=Linear, optimizer=float): the optimizer must": (model, 0.1, pl.AllReduceSGD(), {}),
        "attach(strategy=AllReduceSGD): AllReduceSGD is a class": (model, optimizer, pl.AllReduceSGD, {}),
        "attach(strategy=OneBit(bucket=512)): strategy is a strategy": (model, optimizer, pl.codecs.OneBit(512), {}),
        "attach(accumulate=1.5): accumulate is an integer": (model, optimizer, "all-reduce-sgd", {"accumulate": 1.5}),
        "attach(timeout_s='5 parsecs'): ": (model, optimizer, "all-reduce-sgd", {"timeout_s": "5 parsecs"}),
    }
    for expected, (first, second, strategy, more) in cases.items():
        with pytest.raises(ValueError) as error:
            pl.attach(first, second, strategy, **more)
        assert str(error.value).startswith(expected)
    with pl.attach(model, optimizer, "all-reduce-sgd", timeout_s="5s"):
        pass


def test_a_long_value_is_quoted_by_its_type():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"AllReduceSGD\(codec=<Sequential>\): codec is a codec, such as"):
        pl.AllReduceSGD(codec=model)  # pyright: ignore[reportArgumentType]
