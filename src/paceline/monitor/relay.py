"""Relay: records on their way from a forked worker to the process that shows them, through a file.

A pipe would stop the worker when it is full; and whatever becomes of the worker, what it has written can be read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO

from paceline.monitor.monitor import Show
from paceline.monitor.watched import Record


class Sender:
    """The worker's end."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("ab", buffering=0)

    def show(self, index: int, record: Record) -> None:
        self._file.write(json.dumps([index, record]).encode() + b"\n")


class Receiver:
    """The other end.  Several workers may send, one after the other."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._file: IO[bytes] = path.open("rb")
        self._rest = b""

    def pump(self, show: Show) -> None:
        """Show what has come."""
        *whole, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in whole:
            index, record = json.loads(line)
            show(index, record)

    def close(self) -> None:
        self._file.close()
