"""Folder: the checkpoints of one run, each in a folder of its own, named by its step."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import socket
import warnings
from contextlib import suppress
from pathlib import Path

from paceline.checkpoint.checkpoint import BrokenCheckpoint, Checkpoint
from paceline.checkpoint.manifest import NAME

LOCK = ".lock"


class UnusableCheckpoint(RuntimeWarning):
    """The newest checkpoint is broken, and an older one was taken."""


class TakenFolder(RuntimeWarning):
    """A job on another host may still write to this folder."""


class Folder:
    """The checkpoints in a folder."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock: int | None = None
        self._owner = ""  # What this job has written into the file of the lock.

    def at(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self.path / f"step-{step:012d}"

    def steps(self) -> list[Path]:
        """The folders of all checkpoints, complete or not.  A link to elsewhere is none."""
        found = self.path.glob("step-*") if self.path.is_dir() else ()
        return sorted(path for path in found if path.is_dir() and not path.is_symlink())

    def complete(self) -> list[Path]:
        """The folders that have a manifest."""
        return [path for path in self.steps() if (path / NAME).exists()]

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint whose manifest is readable; None if there is no checkpoint.

        Raises BrokenCheckpoint if there are some, and none of them is readable.
        """
        found, broken = self._readable()
        if found:
            return found[-1]
        if broken:
            raise broken[0]
        return None

    def newest_sound(self) -> Checkpoint | None:
        """The newest checkpoint whose files are what was written; a warning names those that are not.

        Raises BrokenCheckpoint if there are some, and none of them is sound.
        """
        found, broken = self._readable()
        for checkpoint in reversed(found):
            try:
                checkpoint.verify()
            except BrokenCheckpoint as error:
                broken.append(error)
                continue
            for error in broken:
                text = f"{error}; continuing from {checkpoint.path}, of step {checkpoint.step}"
                warnings.warn(UnusableCheckpoint(text), stacklevel=2)
            return checkpoint
        if broken:
            raise broken[0]
        return None

    def _readable(self) -> tuple[list[Checkpoint], list[BrokenCheckpoint]]:
        found: list[Checkpoint] = []
        broken: list[BrokenCheckpoint] = []
        for path in self.complete():
            try:
                found.append(Checkpoint(path))
            except BrokenCheckpoint as error:
                broken.append(error)
        return sorted(found, key=lambda checkpoint: checkpoint.manifest.number), broken

    # Writing.

    def claim(self, *, takes_over: bool = False) -> None:
        """Make the folder, and keep other jobs from writing there until this process ends or calls `release`.

        A process `takes_over` the folder from another one of its job, which may be stopped and hold the lock.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ValueError(f"{self.path}: checkpoints cannot be written there: {error.strerror or error}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if takes_over:
                return self._own(lock)
            owner = os.read(lock, 1000).decode(errors="replace")
            os.close(lock)
            raise ValueError(
                f"{self.path}: another job writes its checkpoints there ({owner or 'of an unknown process'}); wait for "
                "its end, or give each job a folder of its own"
            ) from None
        if not takes_over:
            self._warn_of_other_host(os.read(lock, 1000))
        self._own(lock)

    def _own(self, lock: int) -> None:
        self._owner = json.dumps({"host": socket.gethostname(), "process": os.getpid(), "job": secrets.token_hex(8)})
        try:
            os.ftruncate(lock, 0)
            os.pwrite(lock, self._owner.encode(), 0)
        except OSError as error:  # A full disk, most likely.
            os.close(lock)
            raise ValueError(f"{self.path}: checkpoints cannot be written there: {error.strerror or error}") from None
        self._lock = lock

    def _warn_of_other_host(self, left: bytes) -> None:
        """The lock of another host may not be seen here; what its job wrote into the file is."""
        try:
            owner = json.loads(left)
            host = owner["host"]
        except (ValueError, KeyError, TypeError):
            return
        if host != socket.gethostname():
            text = (
                f"{self.path}: a job on {host} (process {owner.get('process')}) has not released this folder; if it "
                "still runs, it writes no more checkpoints here: give each job a folder of its own"
            )
            warnings.warn(TakenFolder(text), stacklevel=5)

    def check_owner(self) -> None:
        """Raise ValueError if another job has claimed the folder since, on a host that does not see this one's lock."""
        if self._lock is None:
            return
        found = (self.path / LOCK).read_text()
        if found != self._owner:
            raise ValueError(
                f"another job writes its checkpoints there now ({found or 'it has removed the lock'}); give each job a "
                "folder of its own"
            )

    def release(self) -> None:
        if self._lock is not None:
            with suppress(OSError):
                if os.pread(self._lock, 1000, 0).decode(errors="replace") == self._owner:
                    os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None

    def clear(self, path: Path) -> None:
        """Remove a checkpoint.  The manifest goes first: what remains after an interruption is no checkpoint."""
        (path / NAME).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)

    def open(self, step: int) -> Path:
        """An empty folder for the checkpoint of a step."""
        path = self.at(step)
        self.clear(path)
        path.mkdir()
        return path

    def next_number(self) -> int:
        found, _ = self._readable()
        return found[-1].manifest.number + 1 if found else 1

    def keep(self, count: int | None, newest: Path) -> None:
        """Remove all but the newest checkpoints, and what earlier interruptions have left."""
        found, _ = self._readable()
        for checkpoint in found[:-count] if count is not None else ():
            if checkpoint.path != newest:
                self.clear(checkpoint.path)
        for path in self.steps():
            if path != newest and not (path / NAME).exists():
                self.clear(path)
