"""Checked: settings whose values have the types that their annotations say; and classes by their names.

Strategies, codecs, rules and gates are frozen dataclasses.  Each setting is checked once, before the class's own
`__post_init__`, so that a wrong type gets as clear an error as a wrong value.  A codec, rule, gate or strategy can be
given by its name: `AllReduceSGD(codec="one-bit")`.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from abc import ABC
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import get_annotations, isabstract
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, Self, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from paceline import aliases
from paceline.units import seconds

C = TypeVar("C")
K = TypeVar("K", bound="Checked")
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
    _checks: ClassVar[dict[str, Any] | None] = None  # By setting: its type; found when the first instance is made.

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        cls._checks = None
        own = cast("Callable[[Any], None]", cls.__post_init__)

        @wraps(own)
        def post_init(self: Checked) -> None:
            if type(self).__post_init__ is not post_init:  # Called by a subclass, which has checked the settings.
                return own(self)
            _check_settings(self)
            own(self)
            _check_choices(self)

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


def _check_settings(settings: Checked) -> None:
    """Check every setting's type; names become what they name, and lists become tuples, which can be hashed."""
    for name, kind in _types(type(settings)).items():
        value = getattr(settings, name)
        found = checked(type(settings).__name__, name, value, kind)
        if found is not value:
            object.__setattr__(settings, name, found)


def _check_choices(settings: Checked) -> None:
    """Check the settings with a few possible values, unless the class's own check has refused them in its words."""
    for name, kind in _types(type(settings)).items():
        choices = [c for option in _options(kind) if get_origin(option) is Literal for c in get_args(option)]
        value = getattr(settings, name)
        if choices and value is not None and isinstance(value, str) and value not in choices:
            raise _wrong(type(settings).__name__, name, value, kind)


def _types(cls: type[Checked]) -> dict[str, Any]:
    found = cls._checks  # pyright: ignore[reportPrivateUsage]
    if found is None:
        found = {f.name: _resolved(cls, f) for f in dataclasses.fields(cls) if f.init}  # pyright: ignore
        cls._checks = found  # pyright: ignore[reportPrivateUsage]
    return found


def _resolved(cls: type, field: dataclasses.Field[Any]) -> Any:
    """The type that a field's annotation means; Any if it cannot be found."""
    for owner in cls.__mro__:
        if field.name in get_annotations(owner):
            alone = type(
                "Alone", (), {"__annotations__": {field.name: field.type}}
            )  # One unknown name spoils no other.
            try:
                return get_type_hints(alone, vars(sys.modules[owner.__module__]))[field.name]
            except (NameError, KeyError, TypeError):
                return Any
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


def checked_seconds(call: str, name: str, value: float | str) -> float:
    """A duration in seconds, given as a number or as text with a unit.

    >>> checked_seconds("attach", "timeout_s", "2min")
    120.0
    """
    try:
        found = seconds(checked(call, name, value, float | str))
    except ValueError as error:
        raise error if str(error).startswith(call) else ValueError(f"{call}({name}={value!r}): {error}") from None
    if not found > 0:
        raise ValueError(f"{call}({name}={value!r}): a duration must be above 0")
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
    if origin in (tuple, Sequence):
        return _fit_items(value, [k for k in get_args(kind) if k is not Ellipsis])
    if isinstance(kind, type):
        return isinstance(value, kind), value
    return origin is not Callable or callable(value), value


def _fit_items(value: Any, kinds: Sequence[Any]) -> tuple[bool, Any]:
    if not isinstance(value, (list, tuple)):
        return False, value
    items = cast("Sequence[Any]", value)
    if not all(any(_fit(item, k)[0] for kind in kinds for k in _options(kind)) for item in items):
        return False, value
    return True, tuple(items)


def _wrong(call: str, name: str, value: Any, kind: Any) -> ValueError:
    given = value.__name__ if isinstance(value, type) else repr(value)
    return ValueError(f"{call}({name}={given}): {name} is {' or '.join(_word(option) for option in _options(kind))}")


def _word(kind: Any) -> str:
    origin = get_origin(kind)
    if kind is None or kind is type(None):
        return "None"
    if kind in _WORDS:
        return _WORDS[kind]
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(kind))
    if origin in (tuple, Sequence):
        words = dict.fromkeys(_word(k).split(" ", 1)[-1] for k in get_args(kind) if k is not Ellipsis)
        return "a sequence of " + " and ".join(f"{word}s" for word in words)
    if isinstance(kind, type) and issubclass(kind, Checked):
        return f"a {kind.KIND}, such as {_concrete(kind)[0].__name__}()"
    return "a function" if origin is Callable else f"a {getattr(kind, '__name__', kind)}"
