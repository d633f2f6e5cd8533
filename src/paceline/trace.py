"""Trace: what happened, when, where, and how many bytes it sent.

Every driver writes the same Trace; reports, statistics and comparisons read nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Span(NamedTuple):
    """One thing a rank did; `nbytes` is what it sent to others meanwhile."""

    rank: int
    kind: str
    start: float
    stop: float
    nbytes: int = 0


class Point(NamedTuple):
    """One step of one worker with its loss, or one update of a server (`step` is its version) with its staleness."""

    time: float
    rank: int
    step: int
    samples: int
    loss: float | None
    staleness: int | None = None


class Sync(NamedTuple):
    """A synchronisation of parameters, as a worker took part in it after `step`: so many steps after the one before, with the
    replicas so far apart (the mean squared distance from their mean, weighted by samples)."""

    time: float
    rank: int
    step: int
    period: int
    divergence: float


class Evaluation(NamedTuple):
    """What the model at hand was worth at a time, after so many samples over all workers together."""

    time: float
    samples: int
    values: dict[str, float]


class Trace:
    """Spans, points, synchronisations and evaluations in the order in which they ended.

    >>> trace = Trace()
    >>> trace.span(0, "all_reduce", 0.0, 0.5, nbytes=400)
    >>> trace.bytes_sent(rank=0)
    400
    """

    def __init__(self, points: list[Point] | None = None, *, keep: int | None = None) -> None:
        """`keep` bounds the memory of a long run: of spans and points, at least so many of the newest stay."""
        self.keep = keep
        self.sent: dict[int, int] = defaultdict(int)  # by rank; of all spans, kept or not
        self.spans: list[Span] = []
        self.points: list[Point] = [] if points is None else points
        # How many updates were how stale, of all points, kept or not; an update that goes to several shards counts at each.
        self.staleness_counts: Counter[int] = Counter(p.staleness for p in self.points if p.staleness is not None)
        self.syncs: list[Sync] = []
        self.evaluations: list[Evaluation] = []

    def span(self, rank: int, kind: str, start: float, stop: float, nbytes: int = 0) -> None:
        self.spans.append(Span(rank, kind, start, stop, nbytes))
        if (
            nbytes or rank not in self.sent
        ):  # Two threads write spans in a process, and only one of them sends: neither undoes the other.
            self.sent[rank] += nbytes
        if self.keep is not None and len(self.spans) > 2 * self.keep:
            del self.spans[: self.keep]

    def point(
        self, time: float, rank: int, step: int, samples: int, loss: float | None, staleness: int | None = None
    ) -> None:
        self.points.append(Point(time, rank, step, samples, loss, staleness))
        if staleness is not None:
            self.staleness_counts[staleness] += 1
        if self.keep is not None and len(self.points) > 2 * self.keep:
            del self.points[: self.keep]

    def sync(self, time: float, rank: int, step: int, period: int, divergence: float) -> None:
        self.syncs.append(Sync(time, rank, step, period, divergence))
        if self.keep is not None and len(self.syncs) > 2 * self.keep:
            del self.syncs[: self.keep]

    def evaluation(self, time: float, samples: int, values: dict[str, float]) -> None:
        self.evaluations.append(Evaluation(time, samples, values))

    def merge(self, other: Trace) -> None:
        """Take in what another rank wrote, keeping the order of time."""
        for rank, nbytes in other.sent.items():
            self.sent[rank] += nbytes
        self.staleness_counts.update(other.staleness_counts)
        self.spans = sorted(self.spans + other.spans, key=lambda s: (s.stop, s.rank))
        self.points = sorted(self.points + other.points, key=lambda p: (p.time, p.rank))
        self.syncs = sorted(self.syncs + other.syncs, key=lambda s: (s.time, s.rank))
        self.evaluations = sorted(self.evaluations + other.evaluations, key=lambda e: e.time)

    @property
    def seconds(self) -> float:
        """When the last thing in it ended."""
        return max((s.stop for s in self.spans), default=0.0)

    def bytes_sent(self, rank: int | None = None) -> int:
        return sum(self.sent.values()) if rank is None else self.sent[rank]

    def starts(self, kind: str) -> list[float]:
        """When each span of a kind began, in order.

        >>> trace = Trace(); trace.span(0, "reply", 2.0, 2.5); trace.span(1, "reply", 1.0, 3.0); trace.starts("reply")
        [1.0, 2.0]
        """
        return sorted(s.start for s in self.spans if s.kind == kind)

    def seconds_by_kind(self, rank: int) -> dict[str, float]:
        """How long a rank spent in each kind of thing; overlapping spans each count in full."""
        total: dict[str, float] = defaultdict(float)
        for s in self.spans:
            if s.rank == rank:
                total[s.kind] += s.stop - s.start
        return dict(total)

    def mean_period(self, rank: int = 0) -> float | None:
        """How many steps lay between two synchronisations of parameters, on average; None if there were none."""
        periods = [s.period for s in self.syncs if s.rank == rank]
        return sum(periods) / len(periods) if periods else None

    def staleness(self) -> list[int]:
        """Of each update whose point is still kept; `staleness_counts` knows of all."""
        return [p.staleness for p in self.points if p.staleness is not None]

    def mean_staleness(self) -> float | None:
        """Over all updates, kept or not; None without servers.

        >>> trace = Trace(keep=1)
        >>> for version, staleness in enumerate([0, 1, 2, 3]): trace.point(1.0, 2, version, 8, None, staleness)
        >>> trace.staleness(), trace.mean_staleness()
        ([2, 3], 1.5)
        """
        return mean(self.staleness_counts)

    def dumps(self) -> str:
        """All of it as JSON; equal traces give equal text."""
        parts = {
            "sent": self.sent,
            "staleness": dict(sorted(self.staleness_counts.items())),
            "spans": self.spans,
            "points": self.points,
            "syncs": self.syncs,
            "evaluations": self.evaluations,
        }
        return json.dumps(parts, separators=(",", ":"))

    @classmethod
    def loads(cls, text: str) -> Trace:
        """Read what `dumps` wrote, now or before it kept counts of staleness: those are then the points' own.

        >>> trace = Trace(); trace.point(1.5, 0, 9, 90, 0.4); Trace.loads(trace.dumps()).points[0].loss
        0.4
        """
        raw = json.loads(text)
        trace = cls([Point(*p) for p in raw["points"]])
        trace.sent.update({int(rank): nbytes for rank, nbytes in raw["sent"].items()})
        if "staleness" in raw:
            trace.staleness_counts = Counter({int(staleness): n for staleness, n in raw["staleness"].items()})
        trace.spans = [Span(*s) for s in raw["spans"]]
        trace.syncs = [Sync(*s) for s in raw["syncs"]]
        trace.evaluations = [Evaluation(*e) for e in raw["evaluations"]]
        return trace

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.dumps())

    def digest(self) -> str:
        """A fingerprint of every byte of it.

        >>> Trace().digest() == Trace().digest()
        True
        """
        return hashlib.sha256(self.dumps().encode()).hexdigest()


def time_to_loss(trace: Trace, target: float) -> float | None:
    """Virtual or wall seconds until a worker's loss first reaches `target`; None if none ever does.

    >>> time_to_loss(Trace(points=[Point(0.0, 0, 0, 0, 2.0), Point(1.5, 0, 9, 90, 0.4)]), target=0.5)
    1.5
    """
    return next((p.time for p in trace.points if p.loss is not None and p.loss <= target), None)


def mean(counts: Mapping[int, int]) -> float | None:
    """Of numbers that occur so many times each; None if there are none.

    >>> mean({0: 3, 4: 1}), mean({})
    (1.0, None)
    """
    total = sum(counts.values())
    return sum(number * n for number, n in counts.items()) / total if total else None
