"""Tables of a settings file, decoded into the frozen dataclasses that Python uses.

Every error names the path of the key (`strategy.period`), quotes what was given, and says what would be right.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from math import isnan
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

from paceline.checked import Checked, checked, find, settings_of, spelled
from paceline.families.topology import Exponential, RandomPairs, Ring
from paceline.registry import KINDS
from paceline.settings.sections import Settings
from paceline.strategy import Strategy
from paceline.training.length import Length

T = TypeVar("T")
FUNCTIONS: dict[str, Sequence[type]] = {"topology": [Ring, Exponential, RandomPairs]}
"""Settings that are functions, and the dataclasses of ours that can be called."""
SECTIONS = "paceline.settings.sections"
Table = dict[str, Any]


class SettingsError(ValueError):
    """Something in a settings file is wrong: the text says where, and what would be right."""

    report = ""  # The traceback of a module of the user's that failed.


def record(cls: type[T], table: Any, path: str, **more: Any) -> T:
    """A dataclass from a table; `more` are fields that the table does not hold."""
    kinds = {name: kind for name, kind in settings_of(cls).items() if name not in more}
    what = f"[{path}]" if cls.__module__ == SECTIONS else cls.__name__
    if issubclass(cls, Checked) and "codec" in table and "codec" not in kinds:
        raise SettingsError(f"{inside(path, 'codec')} = {table['codec']!r}: {cls.refused_setting('codec')}")
    given = fields(table, path, kinds, what)
    values = {name: _field(name, kinds[name], value, inside(path, key)) for name, (key, value) in given.items()}
    if cls.__module__ == SECTIONS:  # Others check their settings themselves.
        for name, (key, value) in given.items():
            check_type(name, values[name], kinds[name], inside(path, key), value)
    needed = [f.name for f in dataclasses.fields(cls) if f.name in kinds and f.default is f.default_factory]  # pyright: ignore
    missing = [dashed(name) for name in needed if name not in values]
    if missing:
        raise SettingsError(f"{inside(path, missing[0])} is missing: {what} has no default for it")
    with located(path):
        return cls(**values, **more)


def _field(name: str, kind: Any, value: Any, path: str) -> Any:
    if name in FUNCTIONS and isinstance(value, (str, dict)):
        return named(name, FUNCTIONS[name], value, path)
    return decoded(kind, value, path)


def check_type(name: str, value: Any, kind: Any, path: str, given: Any) -> None:
    """Refuse a value of the wrong type in the words of a file, in which a key that is None is left out."""
    try:
        checked("", name, value, kind)
    except ValueError as error:
        right = str(error).partition("): ")[2].replace(" or None", "")
        for python, toml in (("True or False", "true or false"), ("a sequence of", "a list of")):
            right = right.replace(python, toml)
        raise SettingsError(f"{path} = {given!r}: {right}") from None
    inner = [o for option in options_of(kind) for o in (option, *get_args(option)) if get_origin(o) is Literal]
    choices = [choice for option in inner for choice in get_args(option)]
    for one in value if isinstance(value, tuple) else (value,):
        if choices and isinstance(one, str) and one not in choices:
            raise SettingsError(f"{path} = {given!r}: {one!r} is not one of {', '.join(map(repr, choices))}")


def options_of(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def fields(table: Any, path: str, known: Iterable[str], what: str) -> dict[str, tuple[str, Any]]:
    """The keys of a table by field name, with their spelling there; an unknown one is refused by its path."""
    if not isinstance(table, dict):
        raise SettingsError(f"{path} = {table!r}: it is a table, as in [{path}], with the keys {_listed(known)}")
    found: dict[str, tuple[str, Any]] = {}
    for key, value in cast("Table", table).items():
        name = key.replace("-", "_")
        if name not in known:
            raise unknown(inside(path, key), key, map(dashed, known), what)
        if name in found:
            raise SettingsError(f"{inside(path, key)}: the file also gives {inside(path, found[name][0])}; give one")
        found[name] = (key, value)
    return found


def unknown(path: str, key: str, known: Iterable[str], what: str) -> SettingsError:
    names = list(known)
    near = get_close_matches(key.lower().replace("_", "-"), names, n=1, cutoff=0.5)
    hint = _elsewhere(path, key) or (f"; did you mean '{near[0]}'?" if near else ".")
    return SettingsError(f"{path}: {what} has no '{key}'{hint} Known: {_listed(names)}")


def _elsewhere(path: str, key: str) -> str:
    """Where the file can have that key, if it can have it at all."""
    name = dashed(key)
    if "." in path and name in _places()[""]:
        return f"; '{name}' stands above the first table of the file."
    if "." in path and name in map(dashed, settings_of(Settings)):
        return f"; [{name}] is a table of its own."
    found = _places().get(name, ())
    if dashed(path) in found:
        return "; other strategies have it, and --strategy NAME replaces the whole table."
    return f"; did you mean {' or '.join(found)}?" if found and "." not in path else ""


@cache
def _places() -> dict[str, tuple[str, ...]]:
    """For each key in a table its paths, and for "" the keys above the tables."""
    found: dict[str, tuple[str, ...]] = {"": (), "lr": ("optimizer.lr",), "momentum": ("optimizer.momentum",)}
    for field, kind in settings_of(Settings).items():
        tables: list[Any] = [option for option in options_of(kind) if dataclasses.is_dataclass(option)]
        classes = KINDS[Strategy.KIND] if kind is Strategy else tables
        if not classes:
            found[""] += (field,)
        for name in dict.fromkeys(dashed(name) for cls in classes for name in settings_of(cls)):
            found[name] = (*found.get(name, ()), f"{dashed(field)}.{name}")
    return found


def inside(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def dashed(name: str) -> str:
    """A field's name as files spell it.

    >>> dashed("time_constant")
    'time-constant'
    """
    return name.replace("_", "-")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(dashed, names)) or "none"


class located:
    """Errors of the caller's values in this block begin with the path of the table."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (ValueError, TypeError)) and not isinstance(error, SettingsError):
            raise SettingsError(f"{self._path}: {error}" if self._path else str(error)) from None


def decoded(kind: Any, value: Any, path: str) -> Any:
    """A value of a file as the setting with this type takes it."""
    if isinstance(value, float) and isnan(value):
        raise SettingsError(f"{path} = nan: it is not a number")
    options = options_of(kind)
    # No length is spelled "none", though a length may be given as text.
    if value == "none" and type(None) in options and (str not in options or Length in options):
        return None
    for option in options:
        if isinstance(option, type) and issubclass(option, Checked) and isinstance(value, (str, dict)):
            return named(option.KIND, KINDS[option.KIND], value, path)
    given = [option for option in options if option is not type(None)]
    if len(given) == 1 and _is_table(given[0]):
        return record(given[0], value, path)
    for option in options:
        found = _structured(option, value, path)
        if found is not None:
            return found
    return tuple(value) if isinstance(value, list) else value


def _is_table(option: Any) -> bool:
    return isinstance(option, type) and option is not Length and dataclasses.is_dataclass(option)


def _structured(option: Any, value: Any, path: str) -> Any:
    """A value of several parts; None if this option does not take it."""
    if isinstance(value, list) and get_origin(option) in (tuple, list, Sequence):
        items = [k for k in get_args(option) if k is not Ellipsis] or [Any]
        kind = items[0] if len(items) == 1 else None
        return tuple(decoded(kind or Any, v, f"{path}[{i}]") for i, v in enumerate(cast("list[Any]", value)))
    if isinstance(value, dict) and _is_table(option):
        return record(option, value, path)
    if isinstance(value, dict) and get_origin(option) is Mapping:
        return _mapping(get_args(option)[0], cast("Table", value), path)
    is_base = isinstance(value, dict) and isinstance(option, type) and not issubclass(option, (Length, Mapping, str))
    if is_base and (classes := _concrete(option)):
        return named(option.__name__.lower(), classes, value, path)
    return None


def _mapping(kind: Any, table: Table, path: str) -> dict[Any, Any]:
    """A table by numbers: TOML has only keys of text."""
    wrong = [key for key in table if kind is int and not key.isdecimal()]
    if wrong:
        raise SettingsError(f"{inside(path, wrong[0])}: its keys are numbers, as in {{ 0 = ..., 1 = ... }}")
    return {int(key) if kind is int else key: value for key, value in table.items()}


def _concrete(base: type) -> list[type]:
    found = [cls for sub in base.__subclasses__() for cls in (sub, *_concrete(sub))]
    return [cls for cls in found if dataclasses.is_dataclass(cls) and not inspect.isabstract(cls)]


def named(kind: str, classes: Sequence[type], value: Any, path: str) -> Any:
    """An instance of one of these classes: its name, or a table with its name and its settings."""
    table = {"name": value} if isinstance(value, str) else dict(value)
    if "name" not in table:
        names = ", ".join(spelled(cls) for cls in classes)
        raise SettingsError(f"{path}.name is missing: give the name of a {kind}, one of {names}")
    with located(f"{path}.name"):
        cls = find(kind, classes, table.pop("name"))
    return record(cls, table, path)
