"""Tests of the package as a whole."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

SOURCES = sorted(Path(paceline.__file__).parent.rglob("*.py"))
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


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(SOURCES[0].parents[1])))
def test_nothing_is_unpickled_or_evaluated(path):
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


def test_importing_the_package_needs_only_torch_and_numpy():
    others = ("zmq", "msgspec", "typer", "rich", "jinja2", "vl_convert", "numba", "llvmlite", "triton")
    code = f"import sys, paceline; paceline.attach, paceline.train; print([m for m in {others!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_exists():
    for name in paceline.__all__:
        assert getattr(paceline, name).__doc__, name
    with pytest.raises(AttributeError, match="has no attribute 'atach'"):
        paceline.atach  # noqa: B018


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(SOURCES[0].parents[1])))
def test_every_module_is_short_and_has_a_docstring(path):
    lines = path.read_text().splitlines()
    assert ast.get_docstring(ast.parse(path.read_text())) or not lines
    assert len(lines) <= 450


def test_block_momentum_reads_like_its_paper():
    """About 25 lines of code: the method itself, without blank lines, comments and docstrings."""
    source = (Path(paceline.__file__).parent / "strategies" / "block_momentum.py").read_text()
    [worker] = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.AsyncFunctionDef) and node.name == "worker"
    ]
    assert len(ast.unparse(worker).splitlines()) <= 27
