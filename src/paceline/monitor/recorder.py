"""Recorder: metrics as JSON lines in a file, and for TensorBoard."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from io import SEEK_END
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from paceline.checked import checked
from paceline.monitor.files import LineFile
from paceline.monitor.monitor import Monitor
from paceline.monitor.watched import Facts, Record

if TYPE_CHECKING:
    from paceline.monitor.tensorboard import EventFile


FIRST = b'{"kind": '  # Every line begins so.


class Recorder(Monitor):
    """Adds a line of JSON to the file `path` after every `every` steps; without it, at most five times a second.

    Also one for each evaluation, for each decision of the run, and for its beginning and its end.  If the file is there
    already, the new lines follow the old ones.  `tensorboard` is a folder for the same numbers.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        every: int | None = None,
        tensorboard: str | Path | None = None,
    ) -> None:
        checked("Recorder", "path", path, str | Path | None)
        checked("Recorder", "tensorboard", tensorboard, str | Path | None)
        self.every = checked("Recorder", "every", every, int | None)
        if path is None and tensorboard is None:
            raise ValueError("Recorder(): give the path of a file for JSON lines, tensorboard=folder, or both")
        if every is not None and every < 1:
            raise ValueError(f"Recorder(every={every}): every counts steps and must be at least 1")
        self.path = None if path is None else Path(path)
        self.tensorboard = None if tensorboard is None else Path(tensorboard)
        self._file: LineFile | None = None
        self._events: EventFile | None = None
        self._last: Record = {}  # The last of the steps.

    def begin(self, facts: Facts) -> None:
        self._last = {}
        with ExitStack() as on_failure:
            if self.path is not None:
                self._file = _opened(self.path)
                on_failure.callback(self._file.close)
            if self.tensorboard is not None:
                from paceline.monitor.tensorboard import event_file

                self._events = event_file(self.tensorboard)
            on_failure.pop_all()
        known = {"strategy": facts.strategy, "workers": facts.workers, "steps": facts.steps}
        self._write({"kind": "begin", **known, "simulated": facts.is_simulated})

    def show(self, record: Record) -> None:
        if record["kind"] == "step":
            self._last = record
        self._write(record)
        if self._events is not None:
            self._events.add(record)

    def end(self, *, failed: bool) -> None:
        where = {name: self._last.get(name) for name in ("time", "step", "samples")}
        try:
            self._write({"kind": "end", **where, "failed": failed})
        finally:
            for file in (self._file, self._events):
                if file is not None:
                    file.close()
            self._file = self._events = None

    def leave(self) -> None:
        self._file = self._events = None

    def _write(self, record: Record) -> None:
        if self._file is not None:
            # A line in one piece: no line is cut if this process ends, or if another one reads.
            self._file.add(json.dumps(plain(record), allow_nan=False).encode())


def plain(value: Any) -> Any:
    """What JSON can hold: numbers that are not finite become None.

    >>> plain({"loss": float("nan"), "losses": [1.5, float("inf")]})
    {'loss': None, 'losses': [1.5, None]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(v) for name, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def _opened(path: Path) -> LineFile:
    """The file, to be written at its end; ValueError if it cannot be, or if it holds something else."""
    call = f"Recorder(path={str(path)!r})"
    found = LineFile(path, call)
    found.file.seek(0)
    start = found.file.read(len(FIRST))
    if start != FIRST[: len(start)]:
        found.close()
        raise ValueError(f"{call}: the file is there and holds no records; give another name")
    _end_last_line(found.file)
    return found


def _end_last_line(file: IO[bytes]) -> None:
    """If a process died while it wrote the last line: end it if only that is missing, else remove it."""
    size = file.seek(0, SEEK_END)
    start = size
    rest = b""
    while start and b"\n" not in rest:
        start = max(0, start - (1 << 16))
        file.seek(start)
        rest = file.read(size - start)
    rest = rest.rpartition(b"\n")[2]
    if not rest:
        return
    try:
        json.loads(rest)
    except ValueError:
        file.truncate(size - len(rest))
    else:
        file.write(b"\n")


def scalars(record: Record) -> list[tuple[str, float]]:
    """The numbers of a record, by the names that TensorBoard shows.

    >>> scalars({"kind": "evaluation", "step": 7, "values": {"accuracy": 0.5}})
    [('evaluation/accuracy', 0.5)]
    """
    if record["kind"] == "evaluation":
        return [(f"evaluation/{name}", value) for name, value in record["values"].items()]
    if record["kind"] != "step":
        return []
    names = ("loss", "lr", "samples_per_s", "steps_per_s", "communication", "staleness", "epoch")
    return [(f"training/{name}", record[name]) for name in names if record[name] is not None]
