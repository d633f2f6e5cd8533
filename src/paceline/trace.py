"""Trace: what happened in a run, when, on which rank, and how many bytes it sent.

Every driver writes a Trace.  Reports and statistics read nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class Span(NamedTuple):
    """An activity of a rank; `nbytes` is what it sent to other ranks in this time."""

    rank: int
    kind: str
    start: float
    stop: float
    nbytes: int = 0


class Point(NamedTuple):
    """A step of a worker with its loss, or an update of a server with its staleness (`step` is then the version).

    In shared memory a worker's write is such an update: `step` is then the number of writes before it.
    """

    time: float
    rank: int
    step: int
    samples: int
    loss: float | None
    staleness: int | None = None


class Collective(NamedTuple):
    """A rank's part in a collective of the group `ranks`: from when it called it to when it had the result."""

    rank: int
    ranks: tuple[int, ...]
    start: float
    stop: float


class Sync(NamedTuple):
    """A synchronisation of parameters on a worker, after `step` and `period` steps after the one before.

    `divergence` is the mean squared distance of the replicas from their mean, weighted by samples.
    """

    time: float
    rank: int
    step: int
    period: int
    divergence: float


class Evaluation(NamedTuple):
    """The values of an evaluation, and how many samples all workers together had trained on before it."""

    time: float
    samples: int
    values: dict[str, float]


class Decision(NamedTuple):
    """What the run itself decided before a step: "adjust", "batch" or "stop", and from what."""

    time: float
    step: int
    kind: str
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Staleness:
    """The sum of the staleness of some updates, and how many they are.

    >>> (Staleness(7, 3) - Staleness(4, 1)).mean
    1.5
    """

    total: int = 0
    updates: int = 0

    def __add__(self, other: Staleness) -> Staleness:
        return Staleness(self.total + other.total, self.updates + other.updates)

    def __sub__(self, other: Staleness) -> Staleness:
        return Staleness(self.total - other.total, self.updates - other.updates)

    @property
    def mean(self) -> float | None:
        """None if there are no updates."""
        return self.total / self.updates if self.updates > 0 else None


class Trace:
    """Spans, points, synchronisations and evaluations in the order in which they ended.

    >>> trace = Trace()
    >>> trace.span(0, "all_reduce", 0.0, 0.5, nbytes=400)
    >>> trace.bytes_sent(rank=0)
    400
    """

    def __init__(self, points: list[Point] | None = None, *, keep: int | None = None) -> None:
        """`keep` limits the memory of a long run: at least the newest `keep` spans, points and syncs stay."""
        self.keep = keep
        self.sent: dict[int, int] = defaultdict(int)  # Bytes by rank, of all spans, kept or not.
        self.spans: list[Span] = []
        self.points: list[Point] = [] if points is None else points
        # The updates of each staleness, of all points, kept or not.  An update to several shards counts at each.
        self.staleness_counts: Counter[int] = Counter(p.staleness for p in self.points if p.staleness is not None)
        self.syncs: list[Sync] = []
        self.evaluations: list[Evaluation] = []
        self.decisions: list[Decision] = []
        # For monitors; no file has these.
        self.collectives: list[Collective] | None = None  # None: no monitor needs them.
        self.servers_staleness: dict[int, Staleness] = {}  # By server, from its last answer.

    def span(self, rank: int, kind: str, start: float, stop: float, nbytes: int = 0) -> None:
        self.spans.append(Span(rank, kind, start, stop, nbytes))
        # Two threads of a process write spans.  Only one of them sends, so only that one changes the sum.
        if nbytes or rank not in self.sent:
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

    def decision(self, time: float, step: int, kind: str, values: dict[str, Any]) -> None:
        self.decisions.append(Decision(time, step, kind, values))

    def collective(self, rank: int, ranks: tuple[int, ...], start: float, stop: float) -> None:
        if self.collectives is not None:
            self.collectives.append(Collective(rank, ranks, start, stop))
            if self.keep is not None and len(self.collectives) > 2 * self.keep:
                del self.collectives[: self.keep]

    def merge(self, other: Trace) -> None:
        """Add the trace of another rank.  All entries stay in the order of time."""
        for rank, nbytes in other.sent.items():
            self.sent[rank] += nbytes
        self.staleness_counts.update(other.staleness_counts)
        self.spans = sorted(self.spans + other.spans, key=lambda s: (s.stop, s.rank))
        self.points = sorted(self.points + other.points, key=lambda p: (p.time, p.rank))
        self.syncs = sorted(self.syncs + other.syncs, key=lambda s: (s.time, s.rank))
        self.evaluations = sorted(self.evaluations + other.evaluations, key=lambda e: e.time)
        self.decisions = sorted(self.decisions + other.decisions, key=lambda d: d.time)

    def move_to(self, rank: int) -> None:
        """Give all entries, which are of one process, to this rank."""
        self.sent = defaultdict(int, {rank: sum(self.sent.values())} if self.sent else {})
        self.spans = [span._replace(rank=rank) for span in self.spans]
        self.points = [point._replace(rank=rank) for point in self.points]
        self.syncs = [sync._replace(rank=rank) for sync in self.syncs]

    @property
    def seconds(self) -> float:
        """The time at which the last span ended."""
        return max((s.stop for s in self.spans), default=0.0)

    def bytes_sent(self, rank: int | None = None) -> int:
        return sum(self.sent.values()) if rank is None else self.sent[rank]

    def starts(self, kind: str) -> list[float]:
        """The start times of all spans of a kind, in order.

        >>> trace = Trace(); trace.span(0, "reply", 2.0, 2.5); trace.span(1, "reply", 1.0, 3.0); trace.starts("reply")
        [1.0, 2.0]
        """
        return sorted(s.start for s in self.spans if s.kind == kind)

    def seconds_by_kind(self, rank: int) -> dict[str, float]:
        """The seconds of a rank in spans of each kind.  Overlapping spans count in full."""
        total: dict[str, float] = defaultdict(float)
        for s in self.spans:
            if s.rank == rank:
                total[s.kind] += s.stop - s.start
        return dict(total)

    def mean_period(self, rank: int = 0) -> float | None:
        """The mean number of steps between two synchronisations of parameters; None if there were none."""
        periods = [s.period for s in self.syncs if s.rank == rank]
        return sum(periods) / len(periods) if periods else None

    def staleness(self) -> list[int]:
        """The staleness of each update whose point is kept.  `staleness_counts` has all updates."""
        return [p.staleness for p in self.points if p.staleness is not None]

    def mean_staleness(self) -> float | None:
        """The mean over all updates, kept or not; None without servers.

        >>> trace = Trace(keep=1)
        >>> for version, staleness in enumerate([0, 1, 2, 3]): trace.point(1.0, 2, version, 8, None, staleness)
        >>> trace.staleness(), trace.mean_staleness()
        ([2, 3], 1.5)
        """
        return mean(self.staleness_counts)

    def dumps(self) -> str:
        """The whole trace as JSON.  Equal traces give equal text."""
        parts: dict[str, Any] = {
            "sent": self.sent,
            "staleness": dict(sorted(self.staleness_counts.items())),
            "spans": self.spans,
            "points": self.points,
            "syncs": self.syncs,
            "evaluations": self.evaluations,
        }
        if self.decisions:
            parts["decisions"] = self.decisions
        return json.dumps(parts, separators=(",", ":"))

    @classmethod
    def loads(cls, text: str) -> Trace:
        """Read the text of `dumps`.  If it is older and has no counts of staleness, they are counted from the points.

        >>> trace = Trace(); trace.point(1.5, 0, 9, 90, 0.4); Trace.loads(trace.dumps()).points[0].loss
        0.4
        """
        try:
            return cls._of_plain(json.loads(text))
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"this is not the text of a trace: {type(error).__name__}: {error}"[:300]) from None

    @classmethod
    def _of_plain(cls, raw: dict[str, Any]) -> Trace:
        trace = cls([Point(*p) for p in raw["points"]])
        trace.sent.update({int(rank): nbytes for rank, nbytes in raw["sent"].items()})
        if "staleness" in raw:
            trace.staleness_counts = Counter({int(staleness): n for staleness, n in raw["staleness"].items()})
        trace.spans = [Span(*s) for s in raw["spans"]]
        trace.syncs = [Sync(*s) for s in raw["syncs"]]
        trace.evaluations = [Evaluation(*e) for e in raw["evaluations"]]
        trace.decisions = [Decision(*d) for d in raw.get("decisions", [])]
        return trace

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.dumps())

    def digest(self) -> str:
        """A hash of the whole trace.

        >>> Trace().digest() == Trace().digest()
        True
        """
        return hashlib.sha256(self.dumps().encode()).hexdigest()


def time_to_loss(trace: Trace, target: float) -> float | None:
    """Virtual or wall seconds until the loss of a worker first reaches `target`; None if it never does.

    >>> time_to_loss(Trace(points=[Point(0.0, 0, 0, 0, 2.0), Point(1.5, 0, 9, 90, 0.4)]), target=0.5)
    1.5
    """
    return next((p.time for p in trace.points if p.loss is not None and p.loss <= target), None)


def mean(counts: Mapping[int, int]) -> float | None:
    """The mean of numbers, each with its count; None if there are none.

    >>> mean({0: 3, 4: 1}), mean({})
    (1.0, None)
    """
    total = sum(counts.values())
    return sum(number * n for number, n in counts.items()) / total if total else None
