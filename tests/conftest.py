"""One thread a process, and nothing left behind by tests that start real ones."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("laws", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("laws")

# Of multiprocessing's own: they live as long as the interpreter, by design.
SERVANTS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def children() -> dict[int, str]:
    """The processes that this one has started and not yet waited for, with their command lines."""
    multiprocessing.active_children()  # Waits for those of its own that have ended.
    found: dict[int, str] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            command = stat.with_name("cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, ValueError):  # It ended meanwhile.
            continue
        if parent == os.getpid() and not any(name in command for name in SERVANTS):
            found[int(stat.parent.name)] = command or "a zombie"
    return found


def shared_files() -> set[str]:
    """What in /dev/shm bears our name, this process's number, or that of a process which is gone."""
    found: set[str] = set()
    for path in Path("/dev/shm").glob("*"):
        torchs = re.match(r"torch_(\d+)_", path.name)
        dead_or_own = torchs and (int(torchs[1]) == os.getpid() or not Path("/proc", torchs[1]).exists())
        if "paceline" in path.name or dead_or_own:
            found.add(path.name)
    return found


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("dist") is None:
        yield
        return
    before, files = children(), shared_files()
    yield
    left = {pid: command for pid, command in children().items() if pid not in before}
    assert not left, f"these processes outlived the test: {left}"
    assert not shared_files() - files, f"left in /dev/shm: {sorted(shared_files() - files)}"
