"""Checked: settings whose values have the types that their annotations say; and classes by their names.

Strategies, codecs, rules and gates are frozen dataclasses.  Each setting is checked once, before the class's own
`__post_init__`, so that a wrong type gets as clear an error as a wrong value.  A codec, rule, gate or strategy can be
given by its name: `AllReduceSGD(codec="one-bit")`.  Other dataclasses and functions call `check_settings` and
`check_arguments` themselves.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from abc import ABC
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache, wraps
from inspect import get_annotations, isabstract
from itertools import permutations
from math import inf
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from paceline import aliases
from paceline.units import seconds

C = TypeVar("C")
K = TypeVar("K", bound="Checked")
Instead = Mapping[str, tuple[type | tuple[type, ...], str]]
"""By setting: what is often given for it, and what to give instead."""
_WORDS: dict[object, str] = {int: "an integer", float: "a number", bool: "True or False", str: "text"}


def spelled(cls: type) -> str:
    """A class's name as files and flags spell it.

    >>> from paceline.strategies import AllReduceSGD, BlockMomentum
    >>> spelled(AllReduceSGD), spelled(BlockMomentum)
    ('all-reduce-sgd', 'block-momentum')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", cls.__name__).lower()


def find(kind: str, classes: Iterable[type[C]], name: str) -> type[C]:
    """The class with that name, or with a name that papers or other libraries have for it.

    If there is none, a ValueError says what it is called here, or names the most similar one.
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"registry.{kind}({name!r}): give the name of a {kind}, as text")
    known = {spelled(c): c for c in classes}
    # Hyphens are optional: in bfloat16 or terngrad their place is not obvious.
    by_letters = {_letters(spelling): cls for spelling, cls in known.items()}
    letters = _letters(name)
    alias = aliases.ALIASES.get(kind, {}).get(letters, letters)
    if alias in by_letters:
        return by_letters[alias]
    raise ValueError(f"there is no {kind} '{name}'{_hint(kind, name, known)} Known: {', '.join(known)}")


def _letters(name: str) -> str:
    return "".join(ch for ch in name.lower() if ch.isalnum())


def _hint(kind: str, name: str, known: Iterable[str]) -> str:
    letters = _letters(name)
    if (said := aliases.NOT_ONE.get(kind, {}).get(letters)) is not None:
        return f": {said}."
    for cls in _concrete(Checked):
        alias = aliases.ALIASES.get(cls.KIND, {}).get(letters, letters)
        if kind != cls.KIND and _letters(cls.__name__) == alias:
            return f": {cls.__name__} is a {cls.KIND}; {aliases.USE[cls.KIND].format(cls.__name__)}."
    near = get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else "."


class Checked(ABC):
    """A base class of frozen dataclasses: it checks the types of their settings."""

    KIND: ClassVar[str]  # What an instance is, in errors: "codec".

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        own = cast("Callable[[Any], None]", cls.__post_init__)

        @wraps(own)
        def post_init(self: Checked) -> None:
            if type(self).__post_init__ is not post_init:  # Called by a subclass, which has checked the settings.
                return own(self)
            check_settings(self)
            own(self)
            _check_choices(type(self).__name__, vars(self), _types(type(self)))

        cls.__post_init__ = post_init

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        """Refuse settings that the class does not have, before its `__init__` does so in fewer words."""
        if dataclasses.is_dataclass(cls):
            known = [f.name for f in dataclasses.fields(cls) if f.init]
            for name, value in settings.items():
                if name not in known:
                    raise TypeError(f"{cls.__name__}({name}={value!r}): {cls.refused_setting(name)}")
        return super().__new__(cls)

    @classmethod
    def refused_setting(cls, name: str) -> str:
        """Why the class has no such setting, and which ones it has."""
        shown = [f.name for f in dataclasses.fields(cls) if f.init and f.repr]  # pyright: ignore[reportArgumentType]
        near = get_close_matches(name, shown, n=1, cutoff=0.0)
        hint = f"; did you mean '{near[0]}'? It has: {', '.join(shown)}" if near else "; it has no settings"
        return f"{cls.__name__} has no setting '{name}'{hint}"

    def __post_init__(self) -> None:  # noqa: B027 (most classes have nothing to add)
        """For the checks of values; the types are right here."""


def check_settings(settings: object, instead: Instead = MappingProxyType({})) -> None:
    """Check the type of every setting of a dataclass.

    Names become what they name, and lists become tuples, which can be hashed.
    """
    call = type(settings).__name__
    for name, kind in _types(type(settings)).items():
        value = getattr(settings, name)
        _refuse(call, name, value, instead)
        found = checked(call, name, value, kind)
        if found is not value:
            object.__setattr__(settings, name, found)


def check_arguments(
    function: Callable[..., Any], given: Mapping[str, Any], instead: Instead = MappingProxyType({})
) -> None:
    """Check the types of a function's arguments, which are its `locals()` at its start."""
    call = function.__name__
    kinds = {name: _type_of(function, name, get_annotations(function)[name]) for name in given}
    wrong = [name for name, kind in kinds.items() if not _fits(given[name], kind)]
    for order in permutations(wrong):
        if len(wrong) > 1 and all(_fits(given[theirs], kinds[name]) for name, theirs in zip(wrong, order, strict=True)):
            said = ", ".join(f"{name}={_quoted(given[name])}" for name in wrong)
            right = list(kinds)[: 1 + max(map(list(kinds).index, wrong))]
            raise ValueError(f"{call}({said}): these are in another order; give {call}({', '.join(right)})")
    for name in wrong:
        _refuse(call, name, given[name], instead)
        checked(call, name, given[name], kinds[name])
    _check_choices(call, given, kinds)


def _refuse(call: str, name: str, value: object, instead: Instead) -> None:
    of, text = instead.get(name, ((), ""))
    if isinstance(value, of):
        raise ValueError(f"{call}({name}={_quoted(value)}): {text}")


def _check_choices(call: str, given: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Check what has a few possible values, unless the caller's own check has refused it in its words."""
    for name, kind in kinds.items():
        choices = [c for option in _options(kind) if get_origin(option) is Literal for c in get_args(option)]
        if choices and isinstance(given[name], str) and given[name] not in choices:
            raise _wrong(call, name, given[name], kind)


def settings_of(cls: type) -> dict[str, Any]:
    """The settings of a dataclass, with their types."""
    return dict(_types(cls))


@cache
def _types(cls: type) -> dict[str, Any]:
    """The type of every setting of a dataclass; found when its first instance is made."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        owner = next((owner for owner in cls.__mro__ if field.name in get_annotations(owner)), cls)
        if field.init:
            found[field.name] = _type_of(owner, field.name, field.type)
    return found


def _type_of(owner: Any, name: str, annotation: Any) -> Any:
    """The type that an annotation in a class or function means; Any if it cannot be found."""
    alone = type("Alone", (), {"__annotations__": {name: annotation}})  # One unknown name spoils no other.
    try:
        return get_type_hints(alone, vars(sys.modules[owner.__module__]))[name]
    except (NameError, KeyError, TypeError):
        return Any


def checked(call: str, name: str, value: Any, kind: Any) -> Any:
    """The value of an argument, if it is of this kind; ValueError otherwise, which quotes the call.

    >>> checked("attach", "accumulate", 2.5, int)
    Traceback (most recent call last):
    ValueError: attach(accumulate=2.5): accumulate is an integer
    """
    for option in _options(kind):
        is_right, found = _fit(value, option)
        if is_right:
            return found
    for option in _options(kind):
        if isinstance(option, type) and issubclass(option, Checked):
            if isinstance(value, type) and issubclass(value, option):
                raise ValueError(
                    f"{call}({name}={value.__name__}): {value.__name__} is a class; give an instance, "
                    f"{value.__name__}()"
                )
            if isinstance(value, str):
                try:
                    return instance_by_name(option, value)
                except ValueError as error:
                    raise ValueError(f"{call}({name}={value!r}): {error}") from None
    raise _wrong(call, name, value, kind)


def instance_of(call: str, name: str, value: K | str, base: type[K]) -> K:
    """An argument that is an instance of a checked class, or its name."""
    return checked(call, name, value, base)


@contextmanager
def quoting(call: str, name: str, value: object) -> Generator[None]:
    """A ValueError in this block quotes the call."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(call):
            raise
        raise ValueError(f"{call}({name}={_quoted(value)}): {error}") from None


def checked_seconds(call: str, name: str, value: float | str) -> float:
    """A duration in seconds, given as a number or as text with a unit.

    >>> checked_seconds("attach", "timeout_s", "2min")
    120.0
    """
    with quoting(call, name, value):
        found = seconds(checked(call, name, value, float | str))
    if not 0 < found < inf:
        raise ValueError(f"{call}({name}={value!r}): a duration must be above 0 and finite")
    return found


def instance_by_name(base: type[K], name: str) -> K:
    """The codec, strategy, rule or gate of that name, with its defaults."""
    cls = find(base.KIND, _concrete(base), name)
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    needed = [f.name for f in fields if f.init and f.default is f.default_factory is dataclasses.MISSING]
    if needed:
        raise ValueError(f"{cls.__name__} needs {', '.join(needed)}: there is no default")
    return cls()


def _concrete(base: type[K]) -> list[type[K]]:
    found: list[type[K]] = []
    for cls in base.__subclasses__():
        if not isabstract(cls) and dataclasses.is_dataclass(cls):
            found.append(cls)
        found += _concrete(cls)
    return found


def _options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _fits(value: Any, kind: Any) -> bool:
    return any(_fit(value, option)[0] for option in _options(kind))


def _fit(value: Any, kind: Any) -> tuple[bool, Any]:
    """Whether a value is of a kind, and the value as the settings hold it."""
    origin = get_origin(kind)
    if kind is Any:
        return True, value
    if kind is None or kind is type(None):
        return value is None, None
    if kind is bool:
        return isinstance(value, bool), value
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, Integral if kind is int else Real):
            return False, value
        # numpy's numbers become Python's, which every file format knows.
        return True, value if isinstance(value, (int, float)) else kind(cast("Any", value))
    if origin is Literal:
        return any(isinstance(value, type(choice)) for choice in get_args(kind)), value
    if origin is list and isinstance(value, list):
        return _fit_items(value, get_args(kind))[0], value  # The list itself: the caller may add to it.
    if origin in (tuple, list, Sequence):
        return _fit_items(value, [k for k in get_args(kind) if k is not Ellipsis])
    if origin is Callable:
        return callable(value), value
    of: Any = origin or kind  # Of Mapping[K, V] and the like only the class is checked.
    try:
        return not isinstance(of, type) or isinstance(value, of), value
    except TypeError:  # A Protocol that is not to be checked.
        return True, value


def _fit_items(value: Any, kinds: Sequence[Any]) -> tuple[bool, Any]:
    if not isinstance(value, (list, tuple)):
        return False, value
    items = cast("Sequence[Any]", value)
    if not all(any(_fits(item, kind) for kind in kinds) for item in items):
        return False, value
    return True, tuple(items)


def _wrong(call: str, name: str, value: Any, kind: Any) -> ValueError:
    text = f"{call}({name}={_quoted(value)}): {name} is {' or '.join(_word(option) for option in _options(kind))}"
    for option in _options(kind):
        if get_origin(option) in (tuple, list, Sequence) and isinstance(value, (list, tuple)):
            items = cast("Sequence[Any]", value)
            bad = next(i for i, item in enumerate(items) if not _fit_items([item], get_args(option))[0])
            text += f"; item {bad} is {_quoted(items[bad])}"
    return ValueError(text)


def _quoted(value: object) -> str:
    """A value as the user wrote it, as far as that is short."""
    if isinstance(value, type):
        return value.__name__
    text = repr(value)
    is_short = len(text) <= 100 and "\n" not in text and not text.startswith("<")
    return text if is_short else f"<{type(value).__name__}>"


def _word(kind: Any) -> str:
    origin = get_origin(kind)
    if kind is None or kind is type(None):
        return "None"
    if kind in _WORDS:
        return _WORDS[kind]
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(kind))
    if origin in (tuple, list, Sequence):
        words = dict.fromkeys(_words(k) for k in get_args(kind) if k is not Ellipsis)
        return "a sequence of " + " and ".join(words)
    if isinstance(kind, type) and issubclass(kind, Checked):
        return f"a {kind.KIND}, such as {_concrete(kind)[0].__name__}()"
    if origin is Callable:
        return "a function"
    name = getattr(origin or kind, "__name__", str(kind))
    return f"an {name}" if name[0] in "AEIO" else f"a {name}"


def _words(kind: Any) -> str:
    """Several of a kind."""
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    return " and ".join(map(repr, choices)) or f"{_word(kind).split(' ', 1)[-1]}s"
