"""Settings on the way to another process: every rule, gate, codec, strategy and topology, with every field set."""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest

import paceline as pl
from paceline import registry
from paceline.codecs import CODECS, AdaptiveThreshold, Codec, NBit, OneBit, Threshold, TopK
from paceline.families.topology import Exponential, RandomPairs, Ring, Topology
from paceline.server.gates import GATES, Bound, Gate
from paceline.server.rules import RULES, Adam, Compensated, Every, Rule
from paceline.strategies import STRATEGIES
from paceline.strategy import Strategy

CLASSES: list[type] = [*RULES, *GATES, *CODECS, *STRATEGIES, Ring, Exponential, RandomPairs]

# Values to try for a field of a type, the rarest first.  At least one must be accepted and differ from the default.
VALUES: dict[Any, list[Any]] = {
    bool: [True, False],
    int: [3, 2, 16, 64],
    float: [0.3, 0.7, 1.7, 3.5],
    type(None): [None],
    Rule: [Every(Compensated(Adam(betas=(0.8, 0.99)), adaptive=True), 3)],
    Gate: [Bound(2)],
    Codec: [NBit(bits=2, bucket=64), OneBit(bucket=64), TopK(ratio=0.3), Threshold(tau=0.5, limit=math.inf)],
    Strategy: [pl.DecreasingAveraging(periods=(7, 3)), pl.DiLoCo(period=6, fragments=2, codec=OneBit(bucket=64))],
    Topology: [RandomPairs(seed=5)],
    Sequence[int]: [(9, 4)],
}
# Settings that a field needs beside it.
BESIDE: dict[tuple[type, str], dict[str, Any]] = {
    (pl.EAWild, "durability"): {"servers": 1},
    (pl.EAWild, "regroup"): {"groups": "random"},
    (pl.Gossip, "rounds"): {"overlap": False},
    (pl.StaleSynchronous, "visible"): {"bound": 0},
    (pl.Strom, "few"): {"few_steps": 3},
    (pl.Strom, "few_steps"): {"few": 2},
    (pl.OneBitAdam, "eps"): {"betas": (0.9, 0.99)},
    (pl.OneBitAdam, "weight_decay"): {"betas": (0.9, 0.99)},
    (AdaptiveThreshold, "low"): {"high": 0.5},
    (AdaptiveThreshold, "high"): {"low": 1e-9},
}

# Fields of a base class that a method refuses to change.
FIXED = {
    (cls, "sparse")
    for cls in (
        pl.ASGD,
        pl.Downpour,
        pl.AsyncDiLoCo,
        pl.DelayCompensated,
        pl.AsyncEASGD,
        pl.RoundRobinEASGD,
        pl.EAMSGD,
        pl.SoftSync,
    )
}


def values_of(annotation: Any) -> list[Any]:
    if annotation in VALUES:
        return VALUES[annotation]
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) is tuple:
        inner = [a for a in get_args(annotation) if a is not Ellipsis]
        return [tuple(values_of(a)[0] for a in (inner if len(inner) > 1 else inner * 2))]
    return [value for part in get_args(annotation) for value in values_of(part)]


def settings_of(cls: type) -> dict[str, list[Any]]:
    """For each field, the values to try that are not its default."""
    hints = typing.get_type_hints(cls)
    fields = [f for f in dataclasses.fields(cls) if f.init]
    return {f.name: [v for v in values_of(hints[f.name]) if v != f.default] for f in fields}


def built(cls: type, settings: dict[str, Any]) -> Any:
    """An instance, or None if the class refuses these settings together."""
    try:
        return cls(**settings)
    except ValueError:
        return None


def required(cls: type) -> dict[str, Any]:
    given = settings_of(cls)
    fields = dataclasses.fields(cls)
    settings = {f.name: given[f.name][0] for f in fields if f.default is f.default_factory is dataclasses.MISSING}
    return settings | ({"steps": 5} if cls is pl.Then else {})


def with_one_field(cls: type, name: str) -> Any:
    """An instance with that field set, and nothing else if the class accepts that."""
    start = required(cls) | BESIDE.get((cls, name), {})
    if cls is pl.Then and name in ("samples", "epochs"):
        del start["steps"]
    for value in settings_of(cls)[name]:
        if (instance := built(cls, start | {name: value})) is not None:
            return instance
    raise AssertionError(f"no value for {cls.__name__}.{name} was accepted")


def with_most_fields(cls: type) -> Any:
    """An instance with as many fields set together as the class accepts."""
    settings = required(cls)
    for name, values in settings_of(cls).items():
        for value in values:
            if built(cls, settings | {name: value}) is not None:
                settings[name] = value
                break
    return cls(**settings)


def check_survives(value: Any) -> None:
    plain = registry.to_plain(value)
    text = json.dumps(plain, allow_nan=False)
    for came in (json.loads(text), msgspec.json.decode(text), msgspec.msgpack.decode(msgspec.msgpack.encode(plain))):
        again = registry.from_plain(came)
        assert type(again) is type(value) and again == value and hash(again) == hash(value)
        assert repr(again) == repr(value)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_field_survives_the_way_to_another_process(cls: type):
    for name in settings_of(cls):
        if (cls, name) in FIXED:
            with pytest.raises(ValueError, match=f"{cls.__name__}\\({name}="):
                cls(**{name: settings_of(cls)[name][0]})
            continue
        instance = with_one_field(cls, name)
        default = next(f.default for f in dataclasses.fields(cls) if f.name == name)
        assert getattr(instance, name) != default
        check_survives(instance)
    check_survives(with_most_fields(cls))


def test_list_of_periods_can_be_hashed_like_a_tuple():
    assert hash(pl.DecreasingAveraging(periods=[8, 4])) == hash(pl.DecreasingAveraging(periods=(8, 4)))
    check_survives(pl.DecreasingAveraging(periods=[8, 4]))


@pytest.mark.parametrize("number", [math.inf, -math.inf])
def test_infinite_setting_survives(number: float):
    check_survives(Threshold(tau=1.0, limit=math.inf))
    assert registry.from_plain(json.loads(json.dumps(registry.to_plain(number), allow_nan=False))) == number


class Outer:
    @dataclasses.dataclass(frozen=True)
    class Inner:
        period: int = 2


def test_class_inside_a_class_is_found_and_one_inside_a_function_is_refused():
    check_survives(Outer.Inner(period=5))

    @dataclasses.dataclass(frozen=True)
    class Local:
        period: int = 2

    with pytest.raises(TypeError, match=r"cannot find .*Local, which is defined inside a function"):
        registry.to_plain(Local())


def test_class_of_an_interactive_session_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Outer.Inner, "__module__", "__main__")
    monkeypatch.delattr("__main__.__file__", raising=False)
    with pytest.raises(TypeError, match=r"Outer.Inner, which is defined in an interactive session"):
        registry.to_plain(Outer.Inner())
