"""What a trace has got since the last look at it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from paceline.trace import Collective, Point, Span, Sync, Trace

T = TypeVar("T")


class News(NamedTuple):
    """The new entries of a trace, in their order."""

    spans: list[Span]
    points: list[Point]
    syncs: list[Sync]
    collectives: list[Collective]


Reader = Callable[[], News]
"""Returns what is new since it was called before."""


def reader(trace: Trace) -> Reader:
    """Reads a trace that is written to, from now on.

    >>> trace = Trace(keep=2); read = reader(trace)
    >>> for k in range(4): trace.span(0, "gradient", k, k + 1.0)
    >>> [s.start for s in read().spans], read().spans
    ([0, 1, 2, 3], [])
    """
    return _TraceReader(trace).read


class _TraceReader:
    # It knows its place by the last entry that it has seen: a trace that keeps only its newest entries has no other.

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._last: dict[str, object] = {}
        self.read()

    def read(self) -> News:
        trace = self._trace
        return News(
            self._new("spans", trace.spans),
            self._new("points", trace.points),
            self._new("syncs", trace.syncs),
            self._new("collectives", trace.collectives or []),
        )

    def _new(self, name: str, entries: list[T]) -> list[T]:
        last = self._last.get(name)
        found: list[T] = []
        for entry in reversed(entries):
            if entry is last:
                break
            found.append(entry)
        if found:
            self._last[name] = found[0]
        found.reverse()
        return found


class RankReaders:
    """Reads the trace of a simulated run, and gives each reader what is new of one rank.

    However many ranks there are, each entry is read once.
    """

    def __init__(self, trace: Trace) -> None:
        self._read = reader(trace)
        self._waiting: defaultdict[int, list[News]] = defaultdict(list)  # For each reader of a rank.

    def reader(self, rank: int) -> Reader:
        index = len(self._waiting[rank])
        self._waiting[rank].append(_nothing())

        def read() -> News:
            self._sort()
            found = self._waiting[rank][index]
            self._waiting[rank][index] = _nothing()
            return found

        return read

    def _sort(self) -> None:
        for kind, entries in zip(News._fields, self._read(), strict=True):
            for entry in entries:
                for waiting in self._waiting.get(entry.rank, ()):
                    getattr(waiting, kind).append(entry)


def _nothing() -> News:
    return News([], [], [], [])
