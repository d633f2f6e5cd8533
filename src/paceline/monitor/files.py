"""LineFile: a file to which one monitor adds lines."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from errno import ENOSPC
from pathlib import Path

if sys.platform != "win32":
    import fcntl


class LineFile:
    """The file, to be read and to be written at its end; a ValueError that quotes `call` if that cannot be.

    Nothing else writes there until it is closed: neither another monitor, nor another run.
    """

    def __init__(self, path: Path, call: str) -> None:
        folder = path.absolute().parent
        if path.is_dir():
            raise ValueError(f"{call}: it is a folder; give the name of a file")
        if not folder.is_dir():
            raise ValueError(f"{call}: there is no folder {folder}")
        try:
            self.file = path.open("ab+", buffering=0)
        except OSError as error:
            raise ValueError(f"{call}: it cannot be written: {error.strerror}") from None
        try:
            _lock(self.file.fileno())
        except BlockingIOError:
            self.file.close()
            raise ValueError(
                f"{call}: another monitor writes to this file, of this run or of one that has not ended; give another "
                "name"
            ) from None

    def add(self, line: bytes) -> None:
        """Write a whole line, or raise an OSError with the name of the file and write nothing."""
        data = line + b"\n"
        size = os.fstat(self.file.fileno()).st_size
        try:
            if self.file.write(data) < len(data):
                raise OSError(ENOSPC, os.strerror(ENOSPC))
        except OSError as error:
            with suppress(OSError):
                self.file.truncate(size)
            raise OSError(error.errno, error.strerror, self.file.name) from None

    def close(self) -> None:
        # Processes that were forked meanwhile, such as those of a DataLoader, would keep the lock.
        _unlock(self.file.fileno())
        self.file.close()


def _lock(file: int) -> None:
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:  # Some file systems have no locks.
            pass


def _unlock(file: int) -> None:
    if sys.platform != "win32":
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
