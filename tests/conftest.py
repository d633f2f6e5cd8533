"""One thread a process, the order of tests in several pytest processes, and a check that nothing outlives a test."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("laws", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("laws")

# Processes of multiprocessing itself: by design they live as long as the interpreter.
SERVANTS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
QUICK_CASES = 4


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help=f"no real processes, nothing marked slow, and at most {QUICK_CASES} cases of each test",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).with_name("dist") in item.path.parents:
            item.add_marker("dist")
    if config.getoption("--quick"):
        kept = _quick(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    if hasattr(config, "workerinput"):  # One of several pytest processes.
        _longest_first(items)


def _quick(items: list[pytest.Item]) -> set[pytest.Item]:
    """Spread the chosen cases evenly over each test. Different tests start at different cases."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not (item.get_closest_marker("dist") or item.get_closest_marker("slow")):
            cases[_function(item.nodeid)].append(item)
    kept: set[pytest.Item] = set()
    for name, found in cases.items():
        first = crc32(name.encode())
        kept.update(found[(first + i * len(found) // QUICK_CASES) % len(found)] for i in range(QUICK_CASES))
    return kept


def _function(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def _unit(nodeid: str) -> str:
    """What runs in one pytest process: a file of tests with real processes, as it has fixtures of its own, or all cases
    of another test, as they share caches."""
    return nodeid.partition("::")[0] if nodeid.startswith("tests/dist/") else _function(nodeid)


def _longest_first(items: list[pytest.Item]) -> None:
    """Sort by units: tests with real processes, then slow ones, then those with many cases.  Short units fill the end,
    so that all pytest processes end at about the same time."""
    units: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        units[_unit(item.nodeid)].append(item)

    def place(unit: list[pytest.Item]) -> tuple[bool, bool, int]:
        marks = [{mark.name for mark in item.iter_markers()} for item in unit]
        return not any("dist" in m for m in marks), not any("slow" in m for m in marks), -len(unit)

    items[:] = [item for unit in sorted(units.values(), key=place) for item in unit]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute the tests by units, in the order in which they were collected."""
    from xdist.scheduler import LoadGroupScheduling

    class Units(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _unit(nodeid)

    config.option.loadscopereorder = False
    return Units(config, log) if config.getoption("dist") == "loadgroup" else None


def children() -> dict[int, str]:
    """The processes that this one has started and not yet waited for, with their command lines."""
    multiprocessing.active_children()  # Reaps its own ended processes.
    found: dict[int, str] = {}
    own = str(os.getpid()).encode()
    for pid in filter(str.isdigit, os.listdir("/proc")):  # glob fails if a process ends meanwhile.
        try:
            if _read(f"/proc/{pid}/stat").rpartition(b")")[2].split(maxsplit=2)[1] != own:
                continue
            command = _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode()
        except (OSError, IndexError):  # It ended meanwhile.
            continue
        if not any(name in command for name in SERVANTS):
            found[int(pid)] = command or "a zombie"
    return found


def _read(path: str) -> bytes:
    """A small file, in less time than by `open`: every test with real processes looks at all processes twice."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)


def shared_files() -> set[str]:
    """The files in /dev/shm whose name has the package's name, the id of this process, or the id of an ended
    process."""
    found: set[str] = set()
    for path in Path("/dev/shm").glob("*"):
        torchs = re.match(r"torch_(\d+)_", path.name)
        dead_or_own = torchs and (int(torchs[1]) == os.getpid() or not Path("/proc", torchs[1]).exists())
        if "paceline" in path.name or dead_or_own:
            found.add(path.name)
    return found


@pytest.fixture(scope="session")
def compiled_kernels() -> None:
    """Compile numba's kernels, or load them from its cache, before processes are forked: otherwise each does so.

    Several pytest processes begin at different places, and find in the cache what the others have compiled.
    """
    from paceline.codecs import kernels
    from tests.laws.every import CODECS

    known = kernels.kernels_of("cpu") if find_spec("numba") else ()
    codecs = [codec for codec in CODECS.values() if type(codec) in known]
    own = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = len(codecs) * own // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    for codec in codecs[first:] + codecs[:first]:
        for residual in (None, torch.zeros(700)):
            values = torch.linspace(-3, 3, 700)
            data = kernels.encode(codec, values, residual, torch.Generator().manual_seed(0), None)
            kernels.add(codec, data, torch.zeros(700), 0.5)


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("dist") is None:
        yield
        return
    request.getfixturevalue("compiled_kernels")
    before, files = children(), shared_files()
    gc.freeze()  # Forked processes do not read, and so copy, what there is already, when they collect garbage.
    yield
    gc.unfreeze()
    left = {pid: command for pid, command in children().items() if pid not in before}
    assert not left, f"these processes outlived the test: {left}"
    deadline = time.monotonic() + 5.0  # Another pytest process may be about to remove a file of its own.
    while shared_files() - files and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not shared_files() - files, f"left in /dev/shm: {sorted(shared_files() - files)}"
