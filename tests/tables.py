"""Tables of a page: their rows, and what the names of ours in them mean."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import paceline as pl
from paceline import optimizers
from paceline.checked import settings_of
from paceline.settings.decode import options_of
from paceline.settings.sections import Settings

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
CALL = re.compile(r"([\w.]+)(?:\((.*)\))?")
REQUIRED = dataclasses.MISSING
PLACES = (pl, pl.codecs, pl.rules, pl.gates, pl.topologies, optimizers, torch.optim)


class Row(NamedTuple):
    heading: str  # Of the section.
    columns: tuple[str, ...]
    cells: tuple[str, ...]

    def cell(self, column: str) -> str:
        return self.cells[self.columns.index(column)]


def read(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def blocks(page: str, language: str) -> list[str]:
    return [found["body"] for found in FENCE.finditer(page) if found["language"] == language]


def rows(page: str) -> Iterator[Row]:
    """All rows of all tables of a page."""
    heading, columns = "", ()
    for line in FENCE.sub("", page).splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if not line.startswith("|"):
            columns = ()
            continue
        cells = tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
        if not columns:
            columns = cells
        elif not set(cells[0]) <= set("-: "):
            assert len(cells) == len(columns), line
            yield Row(heading, columns, cells)


def spans(cell: str) -> list[str]:
    """What a cell shows as code."""
    return SPAN.findall(cell)


def named(text: str) -> tuple[Any, list[str]]:
    """What a name of ours or of torch's means, such as "BlockMomentum(samples=)", and its settings that are named."""
    found = CALL.fullmatch(text)
    assert found, text
    path, settings = found[1].removeprefix("pl."), re.findall(r"(\w+)=", found[2] or "")
    value = _found(path)
    known = inspect.signature(value).parameters if settings else {}
    assert set(settings) <= set(known), f"{text}: {path} has {', '.join(known)}"
    return value, settings


def _found(path: str) -> Any:
    first, *rest = path.split(".")
    if first == "torch":
        value: Any = torch
    else:
        value = next((getattr(place, first) for place in PLACES if hasattr(place, first)), None)
        assert value is not None, f"there is no {path}"
    for part in rest:
        if isinstance(value, type) and not hasattr(value, part):
            value = value()  # An attribute that instances have.
        assert hasattr(value, part), f"there is no {path}"
        value = getattr(value, part)
    return value


def key(path: str, strategy: type[Any]) -> Any:
    """The default of a key of a settings file, under that strategy; the key must exist."""
    kind: Any = Settings
    default: Any = REQUIRED
    for part in path.split("."):
        name = part.replace("-", "_")
        kinds = settings_of(kind)
        assert name in kinds, f"{path}: {kind.__name__} has {', '.join(kinds)}"
        own = next(f.default for f in dataclasses.fields(kind) if f.name == name)
        default = None if own is REQUIRED and default is None else own
        inner = [option for option in options_of(kinds[name]) if dataclasses.is_dataclass(option)]
        kind = strategy if name == "strategy" else inner[0] if len(inner) == 1 else object
    return default


def value_of(text: str) -> Any:
    """A default as a page writes it, as in a settings file."""
    words = {"none": None, "required": REQUIRED, "true": True, "false": False, "inf": float("inf")}
    if text in words:
        return words[text]
    if text[0].isalpha() and text.endswith(")"):
        return named(text)[0]()
    value = ast.literal_eval(text)
    return tuple(value) if isinstance(value, list) else value
