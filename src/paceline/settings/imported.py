"""Functions of the user's, given in a settings file as "module:function"."""

from __future__ import annotations

import importlib
import inspect
import operator
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from paceline.settings.decode import SettingsError, dashed, inside, unknown


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
        raise SettingsError(f"{path} = {name!r}: it is a {type(found).__name__}, and must be a function")
    return found


def _module(module: str, path: str, name: str, folder: Path) -> Any:
    if not all(part.isidentifier() for part in module.split(".")):
        raise SettingsError(f"{path} = {name!r}: write it as 'module:function', as in 'my_models:build'")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _failed(module, path, name, error) from None  # The module is there, and imports what is not.
        raise SettingsError(
            f"{path} = {name!r}: there is no module '{module}' in {folder}, nor among the installed ones"
        ) from None
    except Exception as error:
        raise _failed(module, path, name, error) from None


def _failed(module: str, path: str, name: str, error: BaseException) -> SettingsError:
    """The error with the part of the traceback that lies in the user's module."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if not _is_ours(f.filename)]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(own)] if own else []
    report = "".join([*lines, *traceback.format_exception_only(error)])
    failed = SettingsError(f"{path} = {name!r}: the module '{module}' does not import; its error is above")
    failed.report = report
    return failed


def _is_ours(file: str) -> bool:
    return file == __file__ or file.startswith("<frozen importlib") or file == importlib.__file__


def _attribute(module: Any, attribute: str, path: str, name: str) -> Any:
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError:
        public = [n for n in vars(module) if not n.startswith("_")]
        error = unknown(path, attribute, public, f"the module '{module.__name__}'")
        raise SettingsError(f"{error} (given: {name!r})") from None


def arguments(
    call: Callable[..., Any], table: Mapping[str, Any], path: str, given: Iterable[str] = ()
) -> dict[str, Any]:
    """The keys of a table as keyword arguments of a function; `given` are those that paceline gives itself."""
    parameters = inspect.signature(call).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [n for n, p in parameters.items() if p.kind in kinds and n not in given]
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = key if key in known else key.replace("-", "_")
        if name not in known and not takes_all:
            raise unknown(inside(path, key), key, map(dashed, known), getattr(call, "__name__", "the function"))
        found[name] = value
    missing = [n for n in known if parameters[n].default is inspect.Parameter.empty and n not in found]
    if missing:
        raise SettingsError(f"{inside(path, dashed(missing[0]))} is missing: {call.__name__} has no default for it")
    return found
