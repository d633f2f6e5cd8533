"""Functions of the user's, given in a settings file as "module:function"."""

from __future__ import annotations

import importlib
import inspect
import operator
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import reduce
from pathlib import Path
from typing import Any, get_type_hints

from torch import Tensor

from paceline.errors import shown_traceback
from paceline.settings.decode import SettingsError, check_type, dashed, inside, options_of, unknown


def function(
    name: Any, path: str, known: Mapping[str, Callable[..., Any]], what: str, folder: Path
) -> Callable[..., Any]:
    """A function by a built-in name or as "module:function"; modules are looked for in `folder` first."""
    if not isinstance(name, str):
        raise SettingsError(f"{path} = {name!r}: give the name of a {what}, as text")
    module, colon, attribute = name.partition(":")
    if not colon:
        if name in known:
            return known[name]
        if not known:
            raise SettingsError(f"{path} = {name!r}: give a function of your own, as 'module:function'")
        near = get_close_matches(name.lower(), known, n=1, cutoff=0.5)
        hint = f"; did you mean '{near[0]}'?" if near else "."
        raise SettingsError(
            f"{path} = {name!r}: there is no {what} of that name{hint} Known: {', '.join(known)}; for one of your "
            "own give 'module:function'"
        )
    found = _attribute(_module(module, path, name, folder), attribute, path, name)
    if not callable(found):
        raise SettingsError(f"{path} = {name!r}: it is of type {type(found).__name__}, and must be a function")
    return found


def _module(module: str, path: str, name: str, folder: Path) -> Any:
    if not all(part.isidentifier() for part in module.split(".")):
        raise SettingsError(f"{path} = {name!r}: write it as 'module:function', as in 'my_models:build'")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    said = f"{path} = {name!r}"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise SettingsError(
                f"{said}: there is no module '{module}' in {folder}, nor among the installed ones"
            ) from None
        raise _failed(f"{said}: the module '{module}' does not import; its error is above", error) from None
    except SystemExit as error:
        text = f"{said}: the module '{module}' ends the program when it is imported; put what it runs below"
        raise _failed(f"{text} if __name__ == '__main__':", error) from None
    except Exception as error:
        raise _failed(f"{said}: the module '{module}' does not import; its error is above", error) from None


def _failed(text: str, error: BaseException) -> SettingsError:
    """An error with the part of the traceback that lies in the user's code."""
    failed = SettingsError(text)
    failed.report = shown_traceback(error)
    return failed


@contextmanager
def calling(path: str, name: str) -> Generator[None]:
    """In this block a function of a settings file is called: an error in code of the user's shows its traceback."""
    try:
        yield
    except SettingsError:
        raise
    except Exception as error:
        failed = _failed(f"{path} = {name!r}: the function failed; its error is above", error)
        # Without a traceback, one of our own functions has refused its arguments.
        raise failed if failed.report else SettingsError(f"{path}: {error}") from None


def _attribute(module: Any, attribute: str, path: str, name: str) -> Any:
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError:
        public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        error = unknown(path, attribute, public, f"the module '{module.__name__}'")
        raise SettingsError(f"{error} (given: {name!r})") from None


def arguments(
    call: Callable[..., Any], table: Mapping[str, Any], path: str, *, name: str = "", given: Iterable[str] = ()
) -> dict[str, Any]:
    """The keys of a table as keyword arguments of a function, which errors call by its `name`.

    `given` are those that paceline gives itself.
    """
    parameters = inspect.signature(call).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [n for n, p in parameters.items() if p.kind in kinds and n not in given]
    found: dict[str, Any] = {}
    for key, value in table.items():
        argument = key if key in known else key.replace("-", "_")
        if argument not in known and not takes_all:
            raise unknown(inside(path, key), key, map(dashed, known), name or getattr(call, "__name__", "the function"))
        found[argument] = value
        if argument in known:
            _check_number(_kind_of(call, parameters[argument]), argument, value, inside(path, key))
    missing = [n for n in known if parameters[n].default is inspect.Parameter.empty and n not in found]
    if missing:
        raise SettingsError(f"{inside(path, dashed(missing[0]))} is missing: {call.__name__} has no default for it")
    return found


def _kind_of(call: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """The type of an argument: by its annotation, or else by its default."""
    annotated: Any = call.__init__ if isinstance(call, type) else call
    try:
        return get_type_hints(annotated)[parameter.name]
    except (NameError, TypeError, KeyError):
        default = parameter.default
        return float if isinstance(default, float | int) and not isinstance(default, bool) else type(default)


def _check_number(kind: Any, name: str, value: Any, path: str) -> None:
    """Refuse text and the like where a number is needed.  Other types are the function's own affair."""
    options = [option for option in options_of(kind) if option is not Tensor]
    if {int, float, bool} & set(options) and set(options) <= {int, float, bool, type(None)}:
        check_type(name, value, reduce(operator.or_, options), path, value)
