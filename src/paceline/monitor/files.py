"""Files to which monitors add lines."""

from __future__ import annotations

from pathlib import Path
from typing import IO


def appended(path: Path, call: str) -> IO[bytes]:
    """The file, to be read and to be written at its end; a ValueError that quotes `call` if that cannot be."""
    folder = path.absolute().parent
    if path.is_dir():
        raise ValueError(f"{call}: it is a folder; give the name of a file")
    if not folder.is_dir():
        raise ValueError(f"{call}: there is no folder {folder}")
    try:
        return path.open("ab+", buffering=0)
    except OSError as error:
        raise ValueError(f"{call}: it cannot be written: {error.strerror}") from None
