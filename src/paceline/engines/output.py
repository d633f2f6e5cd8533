"""What workers print, in whole lines, each with the name of its worker.

Each worker writes to pipes of its own.  The launcher reads them and writes every line at once, so that lines of
different workers never mix.  There is no thread: a process with threads must not be forked.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass

from paceline.engines.supervisor import Stopped

MOST = 1 << 20  # Bytes of a line without an end that are held back.
STDOUT = 1
STDERR = 2


@dataclass
class _Stream:
    """One pipe: where its lines go, their label, and the beginning of a line whose end has not come."""

    sink: int
    label: bytes
    rest: bytes = b""

    def lines(self, data: bytes, *, is_end: bool = False) -> bytes:
        """The complete lines, labelled; at the end of the stream also the rest."""
        *whole, self.rest = (self.rest + data).split(b"\n")
        if self.rest and (is_end or len(self.rest) > MOST):
            whole.append(self.rest)
            self.rest = b""
        # A progress bar goes back to the start of its line: only its last state is shown, as on a screen.
        return b"".join(self.label + line.removesuffix(b"\r").rpartition(b"\r")[2] + b"\n" for line in whole)


class LineRelay:
    """The pipes of all workers of a launcher.

    >>> stream = _Stream(STDOUT, b"[worker 1] ")
    >>> stream.lines(b"loss 0.5\\nlo"), stream.lines(b"ss 0.4\\n")
    (b'[worker 1] loss 0.5\\n', b'[worker 1] loss 0.4\\n')
    """

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}  # By the end that is read here.

    def open(self, rank: int) -> tuple[int, int]:
        """The ends to which a new worker writes its standard output and error.  Close them here once it has started."""
        ends: list[int] = []
        for sink in (STDOUT, STDERR):
            read, write = os.pipe()
            os.set_blocking(read, False)
            self._streams[read] = _Stream(sink, f"[worker {rank}] ".encode())
            ends.append(write)
        return ends[0], ends[1]

    def become(self, ends: tuple[int, int]) -> None:
        """In a forked worker: print to these pipes, and close the other workers' ones."""
        for end, file in zip(ends, (STDOUT, STDERR), strict=True):
            os.dup2(end, file)
            os.close(end)
        for read in self._streams:
            os.close(read)

    def files(self) -> list[int]:
        """The files on which to wait for output."""
        return list(self._streams)

    def pump(self) -> None:
        """Print all lines that have come."""
        for read in list(self._streams):
            self._pump(read)

    def finish(self) -> None:
        """Print what is left, also lines without an end; do not wait for processes that outlive their worker."""
        for read in list(self._streams):
            self._pump(read)
            if (stream := self._streams.pop(read, None)) is not None:
                os.close(read)
                _write(stream.sink, stream.lines(b"", is_end=True))

    def _pump(self, read: int) -> None:
        stream = self._streams[read]
        with suppress(BlockingIOError):
            while data := os.read(read, 1 << 16):
                _write(stream.sink, stream.lines(data))
            del self._streams[read]  # All its writers have ended.
            os.close(read)
            _write(stream.sink, stream.lines(b"", is_end=True))


def _write(sink: int, data: bytes) -> None:
    (sys.stdout if sink == STDOUT else sys.stderr).flush()
    while data:
        try:
            data = data[os.write(sink, data) :]
        except BrokenPipeError:  # As when `head` has seen enough.
            raise Stopped(signal.SIGPIPE) from None
