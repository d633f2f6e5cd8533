"""Strategies and codecs by name, and settings to and from plain data.

A class is spelled `BlockMomentum` in Python and `block-momentum` in files and flags; both spellings work.
So do names of papers and other libraries that mean exactly one of ours (`bmuf`; see `aliases`).
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import operator
import runpy
import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from paceline.checked import Checked, find, spelled
from paceline.codecs import CODECS, Codec
from paceline.server.gates import GATES, Gate
from paceline.server.rules import RULES, Rule
from paceline.strategies import STRATEGIES
from paceline.strategy import Strategy

C = TypeVar("C", bound=Checked)
KINDS: dict[str, Sequence[type]] = {"strategy": STRATEGIES, "codec": CODECS, "rule": RULES, "gate": GATES}


def strategy(name: str, **settings: Any) -> Strategy:
    """A strategy by its name.

    >>> strategy("block-momentum", period=16).period
    16
    """
    return _named("strategy", STRATEGIES, name, settings)


def codec(name: str, **settings: Any) -> Codec:
    """A codec by its name.

    >>> codec("one-bit")
    OneBit(bucket=None, threshold='mean')
    """
    return _named("codec", CODECS, name, settings)


def rule(name: str, **settings: Any) -> Rule:
    """A parameter server's rule by its name."""
    return _named("rule", RULES, name, settings)


def gate(name: str, **settings: Any) -> Gate:
    """A parameter server's gate by its name."""
    return _named("gate", GATES, name, settings)


def _named(kind: str, classes: Iterable[type[C]], name: str, settings: dict[str, Any]) -> C:
    cls = find(kind, classes, name)
    known = [f.name for f in dataclasses.fields(cls) if f.init and f.repr]  # pyright: ignore[reportArgumentType]
    for key in settings:
        if key not in known:
            raise ValueError(cls.refused_setting(key))
    needed = [f.name for f in dataclasses.fields(cls) if f.init and _is_required(f) and f.name not in settings]  # pyright: ignore
    if needed:
        raise ValueError(f"{cls.__name__} needs {', '.join(needed)}: there is no default")
    return cls(**settings)


def describe(cls: type) -> dict[str, Any]:
    """The name, the summary line and the settings of a strategy or codec, as plain data."""
    settings = [
        {"name": f.name, "type": str(f.type), "default": _plain_default(f), "required": _is_required(f)}
        for f in dataclasses.fields(cls)
        if f.init and f.repr
    ]
    doc = (cls.__doc__ or "").strip().splitlines()[0]
    return {"name": spelled(cls), "class": cls.__name__, "summary": doc, "settings": settings}


def _is_required(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _plain_default(f: dataclasses.Field[Any]) -> Any:
    if f.default is dataclasses.MISSING:
        return None
    return f.default if f.default is None or isinstance(f.default, (bool, int, float, str)) else repr(f.default)


def to_plain(value: Any) -> Any:
    """Settings as data that JSON can hold; `from_plain` makes the same object again, in another process too.

    >>> to_plain([1, (2, 3)])
    [1, {'tuple': [2, 3]}]
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        settings = {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {"class": _address(type(value)), "settings": settings}
    if isinstance(value, float) and not math.isfinite(value):  # JSON has no infinity, and no NaN.
        return {"float": str(float(value))}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):  # JSON has no tuples.  A dataclass with a list in it cannot be hashed.
        return {"tuple": [to_plain(v) for v in value]}
    if isinstance(value, list):
        return [to_plain(v) for v in value]
    raise TypeError(
        f"the setting {value!r} of type {type(value).__name__} cannot be serialised for another process: "
        "use numbers, strings, lists, tuples, or dataclasses of these"
    )


def from_plain(value: Any) -> Any:
    """What `to_plain` was given.  Only for data from this job's own processes: it imports the modules named there."""
    if isinstance(value, list):
        return [from_plain(v) for v in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(from_plain(v) for v in value["tuple"])
    if "float" in value:
        return float(value["float"])
    where, _, name = value["class"].rpartition(":")
    found: Any = (
        types.SimpleNamespace(**runpy.run_path(where, run_name="__paceline__"))
        if where.endswith(".py")
        else importlib.import_module(where)
    )
    return operator.attrgetter(name)(found)(**{k: from_plain(v) for k, v in value["settings"].items()})


def _address(cls: type) -> str:
    """Where another process finds a class."""
    if "<locals>" in cls.__qualname__:
        raise TypeError(
            f"another process cannot find {cls.__qualname__}, which is defined inside a function: "
            "define it at the top level of its module"
        )
    where = cls.__module__
    if where == "__main__":  # The class is defined in the user's script: another process finds it by its file.
        where = getattr(sys.modules["__main__"], "__file__", None)
        if where is None or not where.endswith(".py"):
            raise TypeError(
                f"another process cannot find {cls.__qualname__}, which is defined in an interactive session: "
                "put it into a .py file and import it"
            )
    return f"{where}:{cls.__qualname__}"
