"""Processes of a test: which there are below it, by name."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def processes_below(name: str) -> list[int]:
    """The processes below this one that have this name."""
    names, parents = dict[int, str](), dict[int, int]()
    for stat in (Path("/proc", pid, "stat") for pid in os.listdir("/proc") if pid.isdigit()):
        with suppress(OSError):
            before, _, after = stat.read_text().rpartition(")")
            names[int(stat.parent.name)] = before.partition("(")[2]
            parents[int(stat.parent.name)] = int(after.split()[1])

    def is_below(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and is_below(parents[pid]))

    return [pid for pid, its in names.items() if its == name[:15] and is_below(pid)]
