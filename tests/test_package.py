"""Rules for the package as a whole: imports between rooms, sizes, public names, no pickle."""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import Replica
from tests.in_turn import in_turn

PACKAGE = Path(paceline.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
every_source = in_turn(path=SOURCES)

# A room may import only the rooms before it.  docs/architecture.md says what each is for.
ROOMS = [
    "errors",
    "units",
    "op",
    "stripes",
    "aliases",
    "checked",
    "optimizers",
    "training",
    "trace",
    "report",
    "monitor",
    "needs",
    "slot_values",
    "resize",
    "state",
    "costs",
    "protocol",
    "endpoint",
    "codecs",
    "collectives",
    "strategy",
    "worker",
    "checkpoint",
    "elastic",
    "task",
    "run",
    "server",
    "families",
    "strategies",
    "registry",
    "transport",
    "engines",
    "pipeline",
    "sim",
    "session",
    "data",
    "models",
    "settings",
    "study",
    "cli",
]

FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
FORBIDDEN_NAMES = {
    "eval",
    "exec",
    "recv_pyobj",
    "send_pyobj",
    "broadcast_object_list",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}


@every_source
def test_nothing_is_unpickled_or_evaluated(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & FORBIDDEN_MODULES
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in FORBIDDEN_MODULES
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if ast.unparse(node.func) == "model.eval":  # A module's evaluation mode, not Python's eval.
                continue
            assert called not in FORBIDDEN_NAMES, f"{path.name}:{node.lineno} calls {called}"
            assert not (called == "load" and ast.unparse(node.func) == "torch.load"), f"{path.name}:{node.lineno}"


# A newer torch, from before the package is imported; then the names that import nearly all of it.
PROGRAM = """
import json, sys, torch, warnings
torch.__version__ = "2.99.0+cpu"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import paceline as pl
    early = len(caught)
    pl.attach, pl.train, pl.ddp_hook
print(json.dumps({"early": early, "said": [str(w.message) for w in caught], "modules": list(sys.modules)}))
"""


@cache
def fresh_interpreter() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=100)
    return json.loads(done.stdout)


def test_importing_the_package_needs_only_torch_numpy_and_msgspec():
    others = {"zmq", "typer", "rich", "jinja2", "vl_convert", "numba", "llvmlite", "triton"}
    assert "paceline.session.attach" in fresh_interpreter()["modules"]
    assert not others & set(fresh_interpreter()["modules"])


def test_every_public_name_exists_and_is_documented():
    for name in paceline.__all__:
        assert getattr(paceline, name).__doc__ or name == "STRATEGIES", name
        assert name in dir(paceline)
    with pytest.raises(AttributeError, match="has no attribute 'atach'"):
        paceline.atach  # noqa: B018


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """The rooms that a module imports at run time, with line numbers."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and id(node) not in for_types
            and (node.module or "").startswith("paceline")
        ):
            assert node.module is not None
            names = [f"paceline.{a.name}" for a in node.names] if node.module == "paceline" else [node.module]
            yield from ((node.lineno, name.split(".")[1]) for name in names)


@every_source
def test_every_room_imports_only_lower_rooms(path: Path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts == ("__init__",):
        return
    room = parts[0]
    assert room in ROOMS, f"{room} is a new room: give it a place in ROOMS and in docs/architecture.md"
    allowed = {*ROOMS[: ROOMS.index(room) + 1], "__version__"}
    wrong = [f"line {line} imports {other}" for line, other in imports(path) if other not in allowed]
    assert not wrong, f"{room} may import only the rooms before it: {wrong}"


def test_the_page_on_the_architecture_names_every_room():
    page = (PACKAGE.parents[1] / "docs" / "architecture.md").read_text()
    assert not [room for room in ROOMS if f"`{room}" not in page]


def length(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


@every_source
def test_every_module_is_short_and_has_a_docstring(path: Path):
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree) or not text
    assert len(text.splitlines()) <= 400
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            assert length(node) <= 250, f"class {node.name}"
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert length(node) <= 60, f"def {node.name}"


@every_source
def test_no_line_packs_three_assignments(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Tuple)
            and isinstance(node.value, ast.Tuple)
        ):
            assert len(node.value.elts) < 3, f"{path.name}:{node.lineno}"


def lines_of_logic(path: Path) -> int:
    """Lines with code: no blank lines, comments, docstrings and imports."""
    text = path.read_text()
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node
        ):
            skipped.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            skipped.update(range(node.lineno, (node.end_lineno or 0) + 1))
    blank = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in blank:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - skipped)


@pytest.mark.parametrize("path", sorted((PACKAGE / "strategies").glob("[a-z]*.py")), ids=lambda p: p.stem)
def test_every_strategy_reads_like_its_paper(path: Path):
    assert lines_of_logic(path) <= (80 if path.stem in ("gossip", "strom") else 100)


def test_a_worker_is_one_small_page_to_the_author_of_a_method():
    members = {name for name in dir(Replica) if not name.startswith("_")}
    tree = ast.parse((PACKAGE / "worker" / "replica.py").read_text())
    [init] = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    targets = [t for n in ast.walk(init) for t in (n.targets if isinstance(n, ast.Assign) else [])]
    targets += [n.target for n in ast.walk(init) if isinstance(n, ast.AnnAssign)]
    members |= {t.attr for t in targets if isinstance(t, ast.Attribute) and not t.attr.startswith("_")}
    assert len(members) <= 20, sorted(members)


def test_newer_torch_than_the_supported_one_is_warned_about_once():
    said = [text for text in fresh_interpreter()["said"] if "newest" in text]
    assert not fresh_interpreter()["early"]
    assert len(said) == 1 and said[0].startswith("torch 2.99.0+cpu is newer than 2.13, the newest"), said


def test_supported_torch_is_what_the_project_file_says():
    from paceline.session import NEWEST_TORCH

    limit = (PACKAGE.parents[1] / "pyproject.toml").read_text().split('"torch>=')[1].split('"')[0].split(",<")[1]
    assert limit == f"{NEWEST_TORCH[0]}.{NEWEST_TORCH[1] + 1}"
