"""Settings of the wrong type get an error that quotes the call and says what would be right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.checked import checked, checked_seconds
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


class Measure(Protocol):
    def __call__(self, x: float) -> float: ...


def test_settings_of_users_classes_are_checked_too():
    @dataclasses.dataclass(frozen=True)
    class Mine(pl.AllReduceSGD):
        often: int = 1
        unknown: Missing | None = None  # noqa: F821 (a name that only a type checker knows)
        measure: Measure = abs

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


def test_a_list_of_choices_is_named_by_them():
    with pytest.raises(ValueError, match=r"^f\(metrics='loss'\): metrics is a sequence of 'accuracy' and 'loss'$"):
        checked("f", "metrics", "loss", Sequence[Literal["accuracy", "loss"]])


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


def test_seconds_are_quoted_once():
    with pytest.raises(ValueError, match=r"^attach\(timeout_s='5 parsecs'\): '5 parsecs' is not a duration"):
        checked_seconds("attach", "timeout_s", "5 parsecs")


NET = nn.Linear(2, 1)
SGD = torch.optim.SGD(NET.parameters(), lr=0.1)
SCHEDULER = torch.optim.lr_scheduler.StepLR(SGD, 1)
X = torch.zeros(4, 2)


def task(**more: Any) -> pl.Task:
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(2, 1),
        "loss": lambda model, batch: model(batch[0]).sum(),
        "data": [X],
        "batch": 2,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "steps": 2,
    }
    return pl.Task(**settings | more)


def attach(*given: Any, **more: Any) -> object:
    return pl.attach(*given, **more)


def simulate(*given: Any, **more: Any) -> object:
    return pl.simulate(*given, **more)


def train(*given: Any, **more: Any) -> object:
    return pl.train(*given, **more)


LINEAR = "Linear(in_features=2, out_features=1, bias=True)"
AVERAGING = pl.PeriodicAveraging(4)
FOUR = pl.Cluster(workers=4)

CALLS: dict[str, Callable[[], object]] = {
    # The task.
    f"Task(model={LINEAR}): model is a function that builds": lambda: task(model=NET),
    "Task(model=3): model is a function": lambda: task(model=3),
    "Task(model=...): the function must return Module, and it returned None": lambda: task(model=lambda: None).build(),
    "Task(loss=0.5): loss is a function": lambda: task(loss=0.5),
    "Task(loss=MSELoss()): loss is a function of the model and a minibatch": lambda: task(loss=nn.MSELoss()),
    "Task(loss=MSELoss): loss is a function of the model and a minibatch": lambda: task(loss=nn.MSELoss),
    "Task(loss=...): the function must return Tensor, and it returned 1.5": lambda: simulate(
        task(loss=lambda model, batch: 1.5), AVERAGING, FOUR
    ),
    "Task(optimizer=<SGD>): optimizer is a function that makes": lambda: task(optimizer=SGD),
    "Task(scaling=Scaling(base=8, rate='linear', momentum='time-constant')) with an optimizer of momentum=1.5: a m": (
        lambda: simulate(
            task(scaling=pl.Scaling(8), optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=1.5)), AVERAGING, FOUR
        )
    ),
    "Task(optimizer=0.1): optimizer is a function": lambda: task(optimizer=0.1),
    "Task(optimizer=...): the function must return Optimizer, and it returned (": lambda: simulate(
        task(optimizer=lambda parameters: (1, 2)), AVERAGING, FOUR
    ),
    "Task(schedule=<StepLR>): schedule is a Schedule, or a": lambda: task(schedule=SCHEDULER),
    "Task(schedule=StepLR): schedule is a Schedule, or a": lambda: task(schedule=torch.optim.lr_scheduler.StepLR),
    "Task(data=<Tensor>): data is a sequence of equally long tensors": lambda: task(data=X),
    "Task(data=<TensorDataset>): data is a sequence of equally long": lambda: task(data=TensorDataset(X)),
    "Task(data=<DataLoader>): data is a sequence of equally long": lambda: task(data=DataLoader(TensorDataset(X))),
    "Task(data=[[1, 2], [3, 4]]): data is a sequence of Tensors or a function; item 0 is [1, 2]": lambda: task(
        data=[[1, 2], [3, 4]]
    ),
    "Task(data=<list>): data is a sequence of Tensors or a function; item 1 is <ndarray>": lambda: task(
        data=[X, np.zeros((4, 40))]
    ),
    "Task(batch=2): the data is []; it needs at least one tensor": lambda: task(data=()),
    "Task(batch=2): the data is [Tensor of shape [4, 2], Tensor of shape []]; it needs": lambda: task(
        data=[X, torch.tensor(1.0)]
    ),
    "Task(data of worker 0 of 1): the data is [list of shape []]; it needs": lambda: task(
        data=lambda rank, workers: [[1]]
    ).part(0, 0, 1),
    "Task(batch=2): the data has the lengths [4, 3]": lambda: task(data=[X, X[:3]]),
    "Task(batch='64'): batch is an integer": lambda: task(batch="64"),
    "Task(epochs='3'): epochs is a number or None": lambda: task(steps=None, epochs="3"),
    "Task(steps=2.5): steps is an integer or None": lambda: task(steps=2.5),
    "Task(seed=1.5): seed is an integer": lambda: task(seed=1.5),
    "Task(evaluate={'loss': 1}): evaluate is a function or None": lambda: task(evaluate={"loss": 1}),
    "Task(evaluate_every=0): it counts steps": lambda: task(evaluate_every=0),
    "Task(accumulate=True): accumulate is an integer": lambda: task(accumulate=True),
    # The cluster.
    "Cluster(workers='8'): workers is an integer": lambda: pl.Cluster(workers="8"),
    "Cluster(workers=8.0): workers is an integer": lambda: pl.Cluster(workers=8.0),
    "Cluster(bandwidth=10): a number counts bytes a second; write a unit, as in '10Gbit/s' or": lambda: pl.Cluster(
        workers=2, bandwidth=10
    ),
    "Cluster(bandwidth='10'): '10' is not a bandwidth": lambda: pl.Cluster(workers=2, bandwidth="10"),
    "Cluster(bandwidth=None): bandwidth is a number or text": lambda: pl.Cluster(workers=2, bandwidth=None),
    "Cluster(bus=0): it must be positive": lambda: pl.Cluster(workers=2, bus=0),
    "Cluster(latency='1'): '1' is not a duration": lambda: pl.Cluster(workers=2, latency="1"),
    "Cluster(compute='fast'): 'fast' is not a duration": lambda: pl.Cluster(workers=2, compute="fast"),
    "Cluster(compute=LogNormal): compute is": lambda: pl.Cluster(workers=2, compute=pl.LogNormal),
    "Cluster(links=[(0, 1)]): links is a Mapping": lambda: pl.Cluster(workers=2, links=[(0, 1)]),
    "Cluster(stages='2'): stages is an integer or a sequence of texts": lambda: pl.Cluster(workers=2, stages="2"),
    "Cluster(stage_link='1Gbit/s'): stage_link is a Link or None": lambda: pl.Cluster(workers=2, stage_link="1Gbit/s"),
    # The drivers.
    "simulate(task=AllReduceSGD(codec=None, group=None, clip=None), strategy=<Task>): these are in another order; give "
    "simulate(task, strategy)": lambda: simulate(pl.AllReduceSGD(), task(), FOUR),
    "simulate(strategy=PeriodicAveraging): PeriodicAveraging is a class; give an instance": lambda: simulate(
        task(), pl.PeriodicAveraging, FOUR
    ),
    "simulate(strategy='averag'): there is no strategy 'averag'": lambda: simulate(task(), "averag", FOUR),
    "simulate(cluster=4): cluster is a Cluster; give Cluster(workers=...)": lambda: simulate(task(), AVERAGING, 4),
    "simulate(task=<function>): task is a Task": lambda: simulate(task, AVERAGING, FOUR),
    "simulate(strict='no'): strict is True or False": lambda: simulate(task(), AVERAGING, FOUR, strict="no"),
    "simulate(stop_at='2'): stop_at is an integer or None": lambda: simulate(task(), AVERAGING, FOUR, stop_at="2"),
    "simulate(resume={'step': 1}): resume is a sequence of dicts": lambda: simulate(
        task(), AVERAGING, FOUR, resume={"step": 1}
    ),
    "simulate(faults=0.5): faults is a Faults": lambda: simulate(task(), AVERAGING, FOUR, faults=0.5),
    "simulate(nonfinite=None): nonfinite is one of 'skip', 'stop', 'pass'": lambda: simulate(
        task(), AVERAGING, FOUR, nonfinite=None
    ),
    "train(task=PeriodicAveraging(": lambda: train(AVERAGING, task(), 2),
    "train(strategy=PeriodicAveraging): PeriodicAveraging is a class": lambda: train(task(), pl.PeriodicAveraging, 2),
    "train(workers='2'): workers is an integer or None": lambda: train(task(), AVERAGING, "2"),
    "train(workers=<Cluster>): workers is an integer or None": lambda: train(task(), AVERAGING, FOUR),
    "train(ordered=1): ordered is True or False": lambda: train(task(), AVERAGING, 2, ordered=1),
    "train(replacements=1.5): replacements is an integer": lambda: train(task(), AVERAGING, 2, replacements=1.5),
    "train(replacements=-1): it counts workers started again, from 0": lambda: train(
        task(), AVERAGING, 2, replacements=-1
    ),
    "LogNormal(sigma='a'): sigma is a number": lambda: pl.LogNormal(sigma="a"),
    "train(silent_s='5'): '5' is not a duration": lambda: train(task(), AVERAGING, 2, silent_s="5"),
    "train(stages='head'): stages is an integer or a sequence of texts": lambda: train(
        task(), AVERAGING, 2, stages="head"
    ),
    f"attach(model=<SGD>, optimizer={LINEAR}): these are in another order; give attach(model, optimizer)": lambda: (
        attach(SGD, NET, AVERAGING)
    ),
    "attach(optimizer=PeriodicAveraging(": lambda: attach(NET, AVERAGING, SGD),
    "attach(model=<function>): model is a Module": lambda: attach(lambda x: x, SGD, AVERAGING),
    "attach(model=Linear): model is a torch.nn.Module; give an instance": lambda: attach(nn.Linear, SGD, AVERAGING),
    "attach(optimizer=0.1): optimizer is an Optimizer or None": lambda: attach(NET, 0.1, AVERAGING),
    "attach(optimizer=SGD): optimizer is an instance, or None": lambda: attach(NET, torch.optim.SGD, AVERAGING),
    "attach(strategy=AllReduceSGD): AllReduceSGD is a class": lambda: attach(NET, SGD, pl.AllReduceSGD),
    "attach(strategy=OneBit(bucket=512, threshold='mean')): strategy is a strategy": lambda: attach(
        NET, SGD, pl.codecs.OneBit(512)
    ),
    "attach(accumulate=1.5): accumulate is an integer": lambda: attach(NET, SGD, AVERAGING, accumulate=1.5),
    "attach(bucket_bytes='8MB'): bucket_bytes is an integer": lambda: attach(NET, SGD, AVERAGING, bucket_bytes="8MB"),
    "attach(timeout_s='5 parsecs'): ": lambda: attach(NET, SGD, AVERAGING, timeout_s="5 parsecs"),
    "attach(epochs='3'): epochs is a number or None": lambda: attach(NET, SGD, AVERAGING, loader=[X], epochs="3"),
    "attach(loader=100): loader is the loader": lambda: attach(NET, SGD, AVERAGING, loader=100),
    "attach(initial=True): give 'equal' if": lambda: attach(NET, SGD, AVERAGING, initial=True),
    "attach(nonfinite='ignore'): nonfinite is one of 'skip', 'stop', 'pass'": lambda: attach(
        NET, SGD, AVERAGING, nonfinite="ignore"
    ),
    "ddp_hook(codec=OneBit): OneBit is a class": lambda: pl.ddp_hook(pl.codecs.OneBit),
    "ddp_hook(codec=None): codec is a codec": lambda: pl.ddp_hook(None),
    f"ddp_hook(model={LINEAR}): model is the DistributedDataParallel; without": lambda: pl.ddp_hook("one-bit", NET),
    "ddp_hook(start='1'): start is an integer": lambda: pl.ddp_hook("one-bit", start="1"),
}


@pytest.mark.parametrize("expected", CALLS)
def test_a_wrong_argument_is_refused_with_the_call_quoted(expected: str):
    with pytest.raises(ValueError) as error:
        CALLS[expected]()
    assert str(error.value).startswith(expected)


def test_right_arguments_of_all_kinds_are_taken():
    assert task(data=(X, X), batch=np.int64(2), epochs=0.5, steps=None).batch == 2
    assert task(data=lambda rank, workers: [X]).has_own_data
    cluster = pl.Cluster(workers=2, compute=[0.1, "5ms"], bandwidth="10B/s", bus=1e6, stages=["2"])
    assert cluster.link(0, 1).bandwidth == 10
    model = nn.Linear(2, 1)
    with pl.attach(model, torch.optim.SGD(model.parameters()), "all-reduce-sgd", timeout_s="5s", loader=[X], epochs=1):
        pass


def test_a_long_value_is_quoted_by_its_type():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"AllReduceSGD\(codec=<Sequential>\): codec is a codec, such as"):
        pl.AllReduceSGD(codec=model)  # pyright: ignore[reportArgumentType]
