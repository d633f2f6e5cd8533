"""Monitor: shows or keeps how a training goes, while it goes.

It has two parts.  Its meter reads a worker's trace, in the process of that worker.  The monitor itself is where the
person is: in the process that called `train`, `simulate` or `attach`.  What the meter says reaches it as records.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from paceline.monitor.record import RecordMeter
from paceline.monitor.watched import Facts, Meter, Record, Watched

Show = Callable[[int, Record], None]
"""Takes the number of a monitor, and a record for it."""


class Monitor(ABC):
    """What watches a run.  Most subclasses have only `show`: it gets a record at most five times a second, or after
    each `every` steps, and one of each evaluation.
    """

    every: int | None = None

    def begin(self, facts: Facts) -> None:  # noqa: B027 (most have nothing to prepare)
        """Called before the first step.  What cannot work is refused here, before anything is trained."""

    @abstractmethod
    def show(self, record: Record) -> None:
        """Take a record: plain data, whose `kind` is "step", "evaluation" or "decision"."""

    def end(self, *, failed: bool) -> None:  # noqa: B027
        """Called once after each `begin`, also after an error."""

    def meter(self, watched: Watched) -> Meter | None:
        """What is to watch that worker; None: nothing."""
        return RecordMeter(watched, self.every) if watched.is_first else None

    def leave(self) -> None:  # noqa: B027
        """This process is a fork of the one that shows: it is a worker, and must touch no screen and no file."""


class Watch:
    """The meters of one worker."""

    def __init__(self, meters: Sequence[tuple[int, Meter]], show: Show) -> None:
        self._meters = meters
        self._show = show

    @property
    def is_on(self) -> bool:
        """Whether anything watches this worker."""
        return bool(self._meters)

    def step(self, step: int) -> None:
        """Called before each step of the worker."""
        for index, meter in self._meters:
            self._pass_on(index, meter.step(step))

    def look(self) -> None:
        """Show what is new without waiting for the next step."""
        for index, meter in self._meters:
            self._pass_on(index, meter.look())

    def end(self) -> None:
        for index, meter in self._meters:
            self._pass_on(index, meter.end())

    def _pass_on(self, index: int, records: Iterable[Record]) -> None:
        for record in records:
            self._show(index, record)


class Monitors:
    """The monitors of one run."""

    def __init__(self, given: Monitor | Sequence[Monitor] | None) -> None:
        self._monitors = () if given is None else (given,) if isinstance(given, Monitor) else tuple(given)
        if len({id(monitor) for monitor in self._monitors}) < len(self._monitors):
            raise ValueError(f"monitor=[{', '.join(type(m).__name__ for m in self._monitors)}]: give each only once")

    def __bool__(self) -> bool:
        return bool(self._monitors)

    def begin(self, facts: Facts) -> None:
        with ExitStack() as begun:
            for monitor in self._monitors:
                monitor.begin(facts)
                begun.callback(monitor.end, failed=True)  # If a later one refuses.
            begun.pop_all()

    def end(self, *, failed: bool) -> None:
        with ExitStack() as ending:  # All end, also if one of them fails.
            for monitor in reversed(self._monitors):
                ending.callback(monitor.end, failed=failed)

    @contextmanager
    def shown(self, facts: Facts) -> Generator[None]:
        """The run is in this block."""
        self.begin(facts)
        try:
            yield
        except BaseException:
            self.end(failed=True)
            raise
        self.end(failed=False)

    def show(self, index: int, record: Record) -> None:
        self._monitors[index].show(record)

    def leave(self) -> None:
        for monitor in self._monitors:
            monitor.leave()

    def watch(self, watched: Watched, show: Show | None = None) -> Watch:
        """Watch a worker; `show` takes the records, if the monitors are in another process."""
        apart = [replace(watched, channel=watched.channel.of(i)) for i in range(len(self._monitors))]
        meters = [monitor.meter(own) for monitor, own in zip(self._monitors, apart, strict=True)]
        return Watch([(i, meter) for i, meter in enumerate(meters) if meter is not None], show or self.show)


INSTEAD = {"monitor": (type, "monitor is an instance, or a list of them; give ProgressBar(), not the class")}
