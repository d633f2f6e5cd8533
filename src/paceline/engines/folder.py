"""The folder of one call of `paceline run`, which its workers share; it is removed at the end.

A launcher that is killed cannot remove its folder.  The next one does: a folder is in use as long as a process holds
the lock of the file in it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "paceline-run-"
LOCK = "in-use"


@contextmanager
def run_folder() -> Generator[Path]:
    """A new folder for this launcher.  Those of dead launchers are removed first."""
    remove_abandoned(Path(tempfile.gettempdir()))
    # Not a TemporaryDirectory: every forked worker would remove it at its exit.
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    # The file gets its name once it is locked: before that the folder must not look abandoned.
    part = folder / f"{LOCK}.part"
    lock = os.open(part, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        part.rename(folder / LOCK)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of launchers that were killed."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # It is another user's, or was just removed.
            lock = os.open(folder / LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            except BlockingIOError:
                pass  # Its launcher lives, or one of its workers.
            finally:
                os.close(lock)
