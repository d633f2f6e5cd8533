"""ProgressBar: how the training goes, in one line of the terminal."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from paceline.checked import checked_seconds
from paceline.monitor.monitor import Monitor
from paceline.monitor.statistics import rate
from paceline.monitor.watched import Facts, Record
from paceline.report import formats
from paceline.report.metric import Metric

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live

MEMORY_S = 30.0  # The time left follows the speed of the last seconds.
BAR = (8, 40)  # Columns: at least, and at most.
CLEAR = "\r\x1b[2K"  # Clears a line of a terminal.


class Part(NamedTuple):
    """A part of the line: in full, and where there is less room.  Of several the most important one stays longest."""

    long: str
    short: str
    importance: int


class ProgressBar(Monitor):
    """A live line with a bar, the loss, the last evaluation, speed, communication, staleness and the time left.

    Where there is no terminal it prints a line every `lines_s` seconds.  A line of each evaluation stays.
    """

    def __init__(self, *, lines_s: float | str = 5.0) -> None:
        self.lines_s = checked_seconds("ProgressBar", "lines_s", lines_s)
        self._live: Live | None = None

    def begin(self, facts: Facts) -> None:
        self._facts = facts
        self._record: Record = {"step": 0, "steps": facts.steps}
        self._values: Record = {}  # Of the last evaluation.
        self._pace: deque[tuple[float, int]] = deque()  # When how many steps were done.
        self._begun = time.monotonic()
        self._printed = self._record  # The last record that has a line of its own,
        self._due = self._begun  # and when the next one gets one.
        self._streams = sys.stdout, sys.stderr
        console = _terminal()
        if console is not None:
            from rich.live import Live

            # It has no thread: a process with threads must not be forked.
            self._live = Live(self, console=console, auto_refresh=False)
            self._live.start(refresh=True)

    def show(self, record: Record) -> None:
        if record["kind"] == "evaluation":
            self._values = record["values"]
            self._say(evaluation(record))
        elif record["kind"] == "decision":
            values = ", ".join(f"{name} {value}" for name, value in record["values"].items())
            self._say(f"step {record['step']}: {record['decision']}: {values}")
        elif record["kind"] == "step":
            self._take(record)
        if self._live is not None:
            self._live.refresh()

    def end(self, *, failed: bool) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        elif not failed and self._record is not self._printed:
            print(self._line(), flush=True)
        if not failed:
            print(f"{self._record['step']:,} steps in {formats.seconds(time.monotonic() - self._begun)}", flush=True)

    def leave(self) -> None:
        is_live = self._live is not None
        streams: Any = [Above(s) if is_live and s.isatty() else s for s in self._streams]
        sys.stdout, sys.stderr = streams
        self._live = None

    def _take(self, record: Record) -> None:
        self._record = record
        now = time.monotonic()
        if self._pace and record["step"] < self._pace[-1][1]:  # The run went back.
            self._pace.clear()
        self._pace.append((now, record["step"]))
        while now - self._pace[0][0] > MEMORY_S and len(self._pace) > 2:
            self._pace.popleft()
        if self._live is None and now >= self._due:
            self._printed = record
            self._due = now + self.lines_s
            print(self._line(), flush=True)

    def _say(self, text: str) -> None:
        """Print a line that stays."""
        if self._live is None:
            print(text, flush=True)
        else:
            self._live.console.print(text, highlight=False, markup=False)

    # The line.

    def _line(self) -> str:
        return ", ".join([f"step {self._steps()}", *(part.long for part in self._parts())])

    def _steps(self) -> str:
        steps = self._record["steps"]
        return f"{self._record['step']:,}" + (f"/{steps:,}" if steps is not None else "")

    def _parts(self) -> list[Part]:
        """In the order in which they are shown."""
        record = self._record
        found: list[Part] = []
        if record.get("epoch") is not None:
            found.append(Part(f"epoch {record['epoch']:.1f}", f"epoch {record['epoch']:.1f}", 1))
        if record.get("loss") is not None:
            found.append(Part(f"loss {formats.number(record['loss'])}", f"loss {record['loss']:.3g}", 7))
        for name, value in list(self._values.items())[:1]:
            text = f"{name} {_shown(name, value)}"
            found.append(Part(text, text, 6))
        if record.get("samples_per_s") is not None:
            speed = rate(record["samples_per_s"])
            found.append(Part(f"{speed} samples/s", f"{speed}/s", 5))
        elif record.get("steps_per_s") is not None:
            speed = f"{rate(record['steps_per_s'])} steps/s"
            found.append(Part(speed, speed, 5))
        if record.get("communication") is not None and self._facts.workers > 1:
            share = f"{100 * record['communication']:.0f}%"
            found.append(Part(f"communication {share}", f"comm {share}", 4))
        if record.get("staleness") is not None:
            found.append(Part(f"staleness {record['staleness']:.1f}", f"stale {record['staleness']:.1f}", 3))
        if self._facts.is_simulated and "time" in record:
            found.append(Part(f"virtual time {formats.seconds(record['time'])}", "", 0))
        if (left := self._seconds_left()) is not None:
            found.append(Part(f"{clock(left)} left", f"{clock(left)} left", 2))
        return found

    def _seconds_left(self) -> float | None:
        steps = self._record["steps"]
        if steps is None or len(self._pace) < 2 or steps <= self._record["step"]:
            return None
        (since, first), (now, last) = self._pace[0], self._pace[-1]
        return (steps - last) * (now - since) / (last - first) if last > first else None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.progress_bar import ProgressBar as Bar
        from rich.table import Table
        from rich.text import Text

        steps = self._steps()
        texts, gap = fitted(self._parts(), options.max_width - len(steps) - BAR[0])
        room = options.max_width - sum(len(text) + gap for text in (steps, *texts))
        total = self._record["steps"]
        bar = Bar(total=total, completed=self._record["step"], width=max(0, min(BAR[1], room)), pulse=total is None)
        table = Table.grid(padding=(0, gap, 0, 0))
        for _ in range(len(texts) + 2):
            table.add_column(no_wrap=True)
        table.add_row(Text(steps), bar, *(Text(text) for text in texts))
        yield table


class Above:
    """A worker's way to a screen on which another process keeps a live line.

    What it writes takes the place of that line, which the other process then draws again below.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_at_start = True  # Of a line.

    def write(self, text: str) -> int:
        if text and self._is_at_start:
            self._stream.write(CLEAR)
        self._is_at_start = text.endswith("\n") if text else self._is_at_start
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def fitted(parts: list[Part], width: int) -> tuple[list[str], int]:
    """The texts of the parts in that many columns, and the spaces before each and after all.

    They are in full, or in short, or without the least important ones.

    >>> parts = [Part("loss 0.25", "loss 0.25", 2), Part("communication 31%", "comm 31%", 1)]
    >>> fitted(parts, 40), fitted(parts, 20), fitted(parts, 13)
    ((['loss 0.25', 'communication 31%'], 2), (['loss 0.25', 'comm 31%'], 1), (['loss 0.25'], 2))
    """
    for texts, gap in _choices(parts):
        if sum(len(text) + gap for text in texts) + gap <= width:
            return texts, gap
    return [], 1


def _choices(parts: list[Part]) -> Iterator[tuple[list[str], int]]:
    yield [part.long for part in parts], 2
    kept = list(parts)
    while kept:
        for gap in (2, 1):
            yield [part.short for part in kept if part.short], gap
        kept.remove(min(kept, key=lambda part: part.importance))


def clock(seconds: float) -> str:
    """
    >>> clock(9.4), clock(172), clock(3725)
    ('0:09', '2:52', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def evaluation(record: Record) -> str:
    """
    >>> values = {"accuracy": 0.881, "loss": 0.41}
    >>> evaluation({"epoch": 3.0, "step": 360, "seconds": 12.3, "values": values})
    'epoch 3: accuracy 88.1%, loss 0.41, 12.3 s'
    """
    where = f"step {record['step']:,}" if record["epoch"] is None else f"epoch {record['epoch']:.4g}"
    values = [f"{name} {_shown(name, value)}" for name, value in record["values"].items()]
    return f"{where}: {', '.join([*values, formats.seconds(record['seconds'])])}"


def _shown(name: str, value: float) -> str:
    return formats.percent(value) if Metric(name).is_share and 0 <= value <= 1 else formats.number(value)


def _terminal() -> Console | None:
    """The terminal that standard output is; None if it is none, or one that cannot go back in a line."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal and not (console.is_dumb_terminal or console.is_jupyter) else None
