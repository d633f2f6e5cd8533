"""The table of comparisons with references: it has every method, and the references import nothing of paceline."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

import paceline as pl
from benchmarks.fidelity import rows
from paceline.codecs import CODECS
from paceline.families.server_strategy import ServerStrategy
from paceline.server.gates import GATES
from paceline.server.rules import RULES, Attract
from tests.reference.table import Row

REFERENCES = Path(__file__).parent / "reference"
HARNESS = "harness.py"  # The only file there that may import the package: it runs what is compared.
PAGE = Path(__file__).parents[1] / "docs" / "results" / "fidelity.md"


NOT_COMPARED = {
    ("ServerStrategy", "sparse"),  # Which rows travel, not what becomes of them: tests/laws/test_rows.py.
    ("ServerStrategy", "durability"),  # What a shard survives, not what it computes: tests/laws/test_killed_shards.py.
    ("EAWild", "durability"),
    ("Sandblaster", "durability"),
    ("QSGD", "reduction"),  # How often a mean is rounded; the variance of both is in tests/laws/test_quantisers.py.
    ("TernGrad", "reduction"),
}


def parts_of(subject: Any) -> Iterator[Any]:
    """A strategy or codec, and the strategies, codecs, rules and gates in it."""
    yield subject
    inner = [getattr(subject, field.name) for field in fields(subject)]
    if isinstance(subject, ServerStrategy):
        inner += [subject.shard_rule(3), subject.shard_gate()]
    if isinstance(subject, pl.EAWild) and subject.servers:
        inner.append(Attract())  # The rule of its shards.
    for part in inner:
        if is_dataclass(part):
            yield from parts_of(part)


COMPARED = [part for row in rows() for part in parts_of(row.subject)]


@pytest.mark.parametrize("kind", [*pl.STRATEGIES, *CODECS, *RULES, *GATES], ids=lambda kind: kind.__name__)
def test_every_method_has_a_reference_in_every_form(kind: type[Any]):
    """Each choice between names, and each switch, is compared in all its values; those of a family, in one of it."""
    assert any(type(part) is kind for part in COMPARED), f"{kind.__name__} has no row in tests/test_reference_*.py"
    hints = get_type_hints(kind)
    for name in (field.name for field in fields(kind)):
        owner = [base for base in kind.__mro__ if name in vars(base).get("__dataclass_fields__", {})][-1]
        values = [getattr(part, name) for part in COMPARED if isinstance(part, owner)]
        options = (hints[name], *get_args(hints[name]))
        choices = {False, True} if hints[name] is bool else set()
        choices |= {choice for option in options if get_origin(option) is Literal for choice in get_args(option)}
        missing = choices - {value for value in values if value in choices}
        assert not missing or (owner.__name__, name) in NOT_COMPARED, f"{owner.__name__}({name}=...): {missing}"


def imported(path: Path) -> set[str]:
    """The names of the modules that a file imports, in whatever place."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}:{node.lineno} imports by a relative path"
            names.add(str(node.module))
    return names


@pytest.mark.parametrize("path", sorted(REFERENCES.glob("*.py")), ids=lambda path: path.name)
def test_references_import_only_numpy_and_each_other(path: Path):
    if path.name == HARNESS:
        return
    others = {f"tests.reference.{p.stem}" for p in REFERENCES.glob("*.py") if p.name != HARNESS}
    allowed = {*sys.stdlib_module_names, "numpy"} - {"importlib", "runpy"}
    assert not {name for name in imported(path) if name.split(".")[0] not in allowed and name not in others}


def test_no_two_rows_have_the_same_name():
    names = [str(row) for row in rows()]
    assert len(names) == len(set(names))


def test_the_page_has_every_row_and_its_reason():
    """The differences on the page are those of the last run of `python -m benchmarks.fidelity`."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines() if "|" in line]
    shown = [[*cells[:3], *cells[4:]] for cells in lines[2:]]
    assert shown == [[row.algorithm, row.setting, row.source, row.shown_limit, row.reason] for row in rows()]


def test_a_limit_of_its_own_needs_a_reason():
    with pytest.raises(ValueError, match=r"^Top-k, 5 %: a limit of 0\.1 needs a reason$"):
        Row(None, "Top-k", "5 %", "", lambda subject: 0.0, limit=0.1)
