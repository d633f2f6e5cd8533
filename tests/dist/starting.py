"""The steps of a worker's start, and death after any one of them.

A step is the first of each operation on the job's store, of each message to each rank, and of each server process that
is started.  The start ends at the first gradient.  Nothing of this is in the package: `mortal` replaces functions in
this process, before workers are forked from it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch.distributed as dist

from paceline.engines import job, servers
from paceline.engines.server_process import NAME
from paceline.transport.mailbox import Mailbox

BEGIN, END = "worker begins", "first gradient"
OPERATIONS = ("set", "get", "add", "compare_set", "check", "wait")
WATCHED = dist.PrefixStore


class Victim(NamedTuple):
    """Which rank is killed, after which step, and how many of its processes."""

    rank: int
    step: str
    times: int


class Steps:
    """What this worker process has done since it began; every rank writes its steps to a file of `folder`.

    The worker of `rank` is killed after `step`, and so are its replacements, `times` in all.
    """

    def __init__(self, folder: Path, *, rank: int = -1, step: str = "", times: int = 1) -> None:
        self.folder = folder
        self.victim = Victim(rank, step, times)
        self._done: list[str] = []
        self._rank = -1
        self._pid = 0

    @property
    def killed(self) -> int:
        deaths = self.folder / "killed"
        return deaths.stat().st_size if deaths.exists() else 0

    def of(self, rank: int) -> list[str]:
        return (self.folder / f"steps-{rank}").read_text().splitlines()

    def begin(self, rank: int) -> None:
        self._rank, self._pid, self._done = rank, os.getpid(), []
        self.note(BEGIN)

    def note(self, step: str) -> None:
        if self._pid != os.getpid() or END in self._done or step in self._done:
            return
        self._done.append(step)
        with (self.folder / f"steps-{self._rank}").open("a") as file:
            print(step, file=file)
        if (self._rank, step) == self.victim[:2] and self.killed < self.victim.times:
            with (self.folder / "killed").open("a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def mortal(steps: Steps) -> Iterator[None]:
    """While this lasts, workers that are forked from this process note their steps."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(dist, "PrefixStore", _noted_store(steps)))
        for owner, name, text in _functions():
            stack.enter_context(patch.object(owner, name, _noted(getattr(owner, name), steps, text)))
        stack.enter_context(patch.object(job.Job, "_meet", _beginning(job.Job._meet, steps)))
        yield


def _functions() -> list[tuple[Any, str, Callable[..., str]]]:
    def message(mailbox: Mailbox, dst: int, sent: Any, *_: Any) -> str:
        return f"send {sent.tag} to {dst}"

    def started(_: object, ranks: Sequence[int], *__: Any) -> str:
        return f"start servers {list(ranks)}"

    return [
        (Mailbox, "__init__", lambda *_, **__: "open the mailbox"),
        (Mailbox, "beat", lambda *_, **__: "start heartbeats"),
        (Mailbox, "send", message),
        (servers, "_fork", started),
        (servers, "_start_interpreter", started),
    ]


def _noted(function: Callable[..., Any], steps: Steps, text: Callable[..., str]) -> Callable[..., Any]:
    def call(*args: Any, **keywords: Any) -> Any:
        result = function(*args, **keywords)
        steps.note(text(*args, **keywords))
        return result

    return call


def _beginning(meet: Callable[..., None], steps: Steps) -> Callable[..., None]:
    def call(self: Any, place: Any) -> None:
        from paceline.engines.place import detect

        steps.begin((place or detect()).rank)
        meet(self, place)
        steps.note("meet")

    return call


def _noted_store(steps: Steps) -> type:
    def operate(name: str, self: Any, key: Any, *args: Any) -> Any:
        result = getattr(WATCHED, name)(self, key, *args)
        first = key[0] if isinstance(key, list) else key
        steps.note(f"{name} {_plain(str(first))}")
        return result

    class NotedStore(WATCHED):
        pass

    for name in OPERATIONS:
        setattr(NotedStore, name, lambda self, key, *args, name=name: operate(name, self, key, *args))
    return NotedStore


def _plain(key: str) -> str:
    """A key without what differs from run to run."""
    return "keys of mailboxes" if len(key) > 50 else key


def leftovers(since: set[str], folder: Path) -> list[str]:
    """Processes, shared memory and folders that a run has left behind; `since` is what `everything` gave before it."""
    return sorted(everything(folder) - since)


def everything(folder: Path) -> set[str]:
    """Processes of this package, files in shared memory, and files in a folder of temporary files."""
    # Another job's launcher may have its folder of temporary files there.
    found = {f"/dev/shm/{p.name}" for p in Path("/dev/shm").glob("*paceline*") if not p.name.startswith("paceline-run")}
    found |= {str(path) for path in folder.iterdir() if not path.name.startswith("torchinductor")}  # Of torch itself.
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, state = stat.read_text().partition("(")[2].rpartition(")")[::2]
            is_own = f"TMPDIR={folder}".encode() in (stat.parent / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if state.split()[0] != "Z" and name in (NAME, "paceline-store") and is_own:
            found.add(f"process {stat.parent.name} ({name})")
    return found
