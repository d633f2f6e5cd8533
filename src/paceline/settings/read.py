"""Settings files: read, changed by flags, and decoded."""

from __future__ import annotations

import re
import tomllib
from codecs import BOM_UTF8
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from paceline.settings.decode import SettingsError, Table, fields, record
from paceline.settings.sections import Data, Function, Optimizer, Settings

OPEN = {"model": Function, "loss": Function, "data": Data, "optimizer": Optimizer}
"""Tables with a name, some keys of ours, and arguments of what the name means."""


def load(path: str | Path, flags: Sequence[str] = ()) -> Settings:
    """The settings in a TOML file, with `flags` such as "--strategy.period", "16" in place of its keys."""
    table = read(Path(path))
    with naming(path):
        override(table, flags)
        return settings_of(table)


@contextmanager
def naming(path: str | Path) -> Generator[None]:
    """Errors in this block name the file."""
    try:
        yield
    except ValueError as error:
        named = SettingsError(f"{path}: {error}")
        named.report = getattr(error, "report", "")
        raise named from None


def read(path: Path) -> Table:
    """The tables of a TOML file."""
    if path.is_dir():
        raise SettingsError(f"{path}: it is a folder; give a settings file, such as {path / 'settings.toml'}")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise SettingsError(
            f"{path}: there is no such file; `paceline init {path}` writes a settings file to start from"
        ) from None
    except OSError as error:
        raise SettingsError(f"{path}: it cannot be read: {error.strerror or error}") from None
    data = data.removeprefix(BOM_UTF8)  # Some editors on Windows write it.
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise SettingsError(
            f"{path}: line {line} is not UTF-8 text (byte {error.start}); save the file as UTF-8"
        ) from None
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path}: it is not TOML: {error}{_quoted_line(text, str(error))}") from None
    except RecursionError:
        raise SettingsError(f"{path}: its lists or tables are nested too deeply") from None
    if not table:
        raise SettingsError(f"{path}: it is empty; `paceline init` writes a settings file to start from")
    return table


def _quoted_line(text: str, error: str) -> str:
    """The line of a file that an error of tomllib is about."""
    found = re.search(r"\(at line (\d+), column \d+\)", error)
    line = "" if found is None else text.splitlines()[int(found[1]) - 1].strip()
    hint = "; text stands in quotes" if re.fullmatch(r"[\w-]+\s*=\s*[a-z][\w:.-]*\s*(#.*)?", line) else ""
    return f": {line}{hint}" if line else ""


def override(table: Table, flags: Sequence[str]) -> None:
    """Set keys by flags: "--a.b", "value", or "--a.b=value".  A value is written as in TOML; quotes may be left out.

    "none" leaves a table out, or an argument of a function.
    """
    rest = list(flags)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--") or flag == "--":
            raise SettingsError(f"{flag}: give flags as --key value, such as --workers 8 or --strategy.period 16")
        key, equals, text = flag.removeprefix("--").partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise SettingsError(f"{flag}: its value is missing; give {flag} VALUE")
            text = rest.pop(0)
        _set(table, key, text)


def _set(table: Table, key: str, text: str) -> None:
    *outer, last = key.split(".")
    if not all([*outer, last]):
        raise SettingsError(f"--{key}: write the key as in the file, with dots between tables, as in --strategy.period")
    for i, part in enumerate(outer):
        name = _spelled(table, part)
        inner = table.setdefault(name, {})
        if isinstance(inner, str):  # A name alone, as in strategy = "asgd", stands for a table with that name.
            inner = table[name] = {"name": inner}
        if not isinstance(inner, dict):
            raise SettingsError(f"--{key}: {'.'.join(outer[: i + 1])} = {inner!r} is no table, so it has no keys")
        table = cast("Table", inner)
    name = _spelled(table, last)
    is_argument = len(outer) == 1 and outer[0] in OPEN and name in table
    if text == "none" and (is_argument or isinstance(table.get(name), dict)):
        del table[name]
    else:
        table[name] = _value(text)


def _spelled(table: Table, key: str) -> str:
    """The key as the table spells it: hyphens and underscores are the same."""
    return next((k for k in table if k.replace("_", "-") == key.replace("_", "-")), key)


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def settings_of(table: Table) -> Settings:
    """The settings that the tables of a file mean."""
    known = list(Settings.__dataclass_fields__)
    given = fields(table, "", known, "a settings file")
    opened = {name: _open(cls, table[given[name][0]], given[name][0]) for name, cls in OPEN.items() if name in given}
    for name in ("model", "data"):
        if name not in opened:
            raise SettingsError(f"[{name}] is missing: give a table with a name, as in {name}.name = 'module:function'")
    rest = {key: value for name, (key, value) in given.items() if name not in opened}
    return record(Settings, rest, "", **opened)


def _open(cls: type[Any], value: Any, path: str) -> Any:
    """A table with arguments of a function beside our own keys."""
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, dict):
        raise SettingsError(f"{path} = {value!r}: it is a table, as in [{path}], or a name")
    own = [name for name in cls.__dataclass_fields__ if name != "arguments"]
    mine: Table = {}
    others: Table = {}
    for key, v in cast("Table", value).items():
        (mine if key.replace("-", "_") in own else others)[key] = v
    return record(cls, mine, path, arguments=others)
