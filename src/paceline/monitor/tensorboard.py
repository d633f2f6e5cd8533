"""Event files of TensorBoard, by the package `tensorboard`.

Its own writer runs in a thread, and a process with a thread must not be forked; so records are written here at once.
"""

from __future__ import annotations

import os
import socket
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.monitor.recorder import scalars
from paceline.monitor.watched import Record


class EventFile:
    """One file of events, in a folder that TensorBoard reads."""

    def __init__(self, writer: Any, event: Any, summary: Any) -> None:
        self._writer = writer
        self._event = event
        self._summary = summary
        self._write(file_version="brain.Event:2")

    def add(self, record: Record) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars(record)]
        if values:
            self._write(step=record["step"], summary=self._summary(value=values))

    def close(self) -> None:
        self._writer.close()

    def _write(self, **what: Any) -> None:
        self._writer.write(self._event(wall_time=time.time(), **what).SerializeToString())


def event_file(folder: Path) -> EventFile:
    """A new event file in a folder, which is made if there is none; ValueError if that cannot be."""
    call = f"Recorder(tensorboard={str(folder)!r})"
    try:
        proto = "tensorboard.compat.proto"
        event = import_module(f"{proto}.event_pb2").Event
        summary = import_module(f"{proto}.summary_pb2").Summary
        writer = import_module("tensorboard.summary.writer.record_writer").RecordWriter
    except ImportError as error:
        raise ValueError(
            f"{call} needs the package tensorboard ({error}): pip install 'paceline[tensorboard]'"
        ) from None
    name = f"events.out.tfevents.{time.time_ns() // 10**9:010}.{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / name).open("xb", buffering=0)
    except OSError as error:
        raise ValueError(f"{call}: it cannot be written: {error.strerror}") from None
    return EventFile(writer(file), event, summary)
