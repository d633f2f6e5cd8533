"""Account: the time of one worker, shared out between computing, encoding, waiting and transfer.

No second counts twice.  What runs behind a gradient costs nothing: a worker that computes while a collective is in
flight computes.  So the shares add up to at most the time that has passed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from paceline.trace import Collective, Span

Interval = tuple[float, float]

COLLECTIVES = frozenset({"all_reduce", "all_gather", "all_to_all", "reduce", "broadcast"})
ENCODING = frozenset({"encode", "decode"})
SENDING = frozenset({"send", "read", "write"})  # Reads and writes are those of memory that workers share.
RECEIVING = frozenset({"recv"})
COMMUNICATION = COLLECTIVES | SENDING | RECEIVING


class Participation(NamedTuple):
    """A worker's part in the `number`-th collective of a group of ranks.

    `shown` seconds of its `seconds` were not hidden behind other work.
    """

    ranks: tuple[int, ...]
    number: int
    start: float
    seconds: float
    shown: float


class Shares(NamedTuple):
    """The seconds of a worker from `start` to `stop`.

    Those in collectives are not in `wait` and `transfer`: their division depends on when the other ranks came.
    """

    start: float
    stop: float
    compute: float
    encode: float
    wait: float
    transfer: float
    participations: list[Participation]

    @property
    def communication(self) -> float:
        return self.wait + self.transfer + sum(a.shown for a in self.participations)


class Account:
    """One worker's time since it began.

    In the simulator a rank that does nothing else waits for a message, and so what is left is waiting (`fills`).  A
    real process has other work, such as reading data.

    >>> account = Account(0.0)
    >>> account.add([Span(0, "gradient", 0.0, 2.0), Span(0, "all_reduce", 1.0, 5.0)])
    >>> shares = account.close(6.0)
    >>> shares.compute, shares.communication
    (2.0, 3.0)
    """

    def __init__(self, start: float, *, fills: bool = False) -> None:
        self._start = start
        self._fills = fills
        self._spans: list[Span] = []
        self._collectives: list[Collective] = []
        self._numbers: Counter[tuple[int, ...]] = Counter()

    def add(self, spans: Iterable[Span], collectives: Sequence[Collective] | None = None) -> None:
        """With `collectives`, the spans of collectives are left out: they say less."""
        self._spans += [s for s in spans if collectives is None or s.kind not in COLLECTIVES]
        self._collectives += collectives or []

    def close(self, stop: float) -> Shares:
        """Share out the time since the last call.  In the simulator a span may end later: its rest counts then."""
        start = self._start
        stop = max(start, stop)
        spans = [(s.kind, max(start, s.start), min(stop, s.stop)) for s in self._spans]
        encode = _union((a, b) for kind, a, b in spans if kind in ENCODING)
        work = _union((a, b) for kind, a, b in spans if kind not in COMMUNICATION)
        sends = [((a, b), None) for kind, a, b in spans if kind in COLLECTIVES | SENDING]
        joint = [((max(start, c.start), min(stop, c.stop)), c) for c in self._collectives]
        busy = _Covered(work)
        transfer = 0.0
        participations: list[Participation] = []
        reach = start
        for (a, b), collective in sorted(sends + joint, key=lambda entry: entry[0]):
            shown = busy.free(max(a, reach), b)
            reach = max(reach, b)
            if collective is None or collective.stop > stop:
                transfer += shown
            else:
                participations.append(self._participation(collective, shown))
        taken = _union([*work, *(interval for interval, _ in sends + joint)])
        receiving = _Covered(taken)
        wait = sum(receiving.free(a, b) for a, b in _union((a, b) for k, a, b in spans if k in RECEIVING))
        if self._fills:
            wait = receiving.free(start, stop)
        self._start = stop
        self._spans = [s for s in self._spans if s.stop > stop]
        self._collectives = [c for c in self._collectives if c.stop > stop]
        encoded = _length(encode)
        return Shares(start, stop, _length(work) - encoded, encoded, wait, transfer, participations)

    def _participation(self, collective: Collective, shown: float) -> Participation:
        self._numbers[collective.ranks] += 1
        number = self._numbers[collective.ranks]
        return Participation(collective.ranks, number, collective.start, collective.stop - collective.start, shown)


def waits(participations: dict[int, Participation], hosts: dict[int, str]) -> dict[int, float]:
    """For each rank of one collective, the seconds that it waited for the last one, and that nothing hid.

    Ranks of one host have one clock, which shows the last rank.  Between hosts only durations compare: all ranks have
    the result at nearly the same time, so the last one took part for the shortest time.

    >>> late = Participation((0, 1), 1, start=3.0, seconds=1.0, shown=1.0)
    >>> early = Participation((0, 1), 1, start=1.0, seconds=3.0, shown=2.5)
    >>> waits({0: early, 1: late}, {0: "a", 1: "a"}), waits({0: early, 1: late}, {0: "a", 1: "b"})
    ({0: 1.5, 1: 0.0}, {0: 1.5, 1: 0.0})
    """
    if len({hosts[rank] for rank in participations}) == 1:
        last = max(a.start for a in participations.values())
        waited = {rank: last - a.start for rank, a in participations.items()}
    else:
        shortest = min(a.seconds for a in participations.values())
        waited = {rank: a.seconds - shortest for rank, a in participations.items()}
    # What hides a part of a collective is what the worker did when it had started it, so it hides the waiting first.
    return {rank: min(a.shown, max(0.0, waited[rank] - (a.seconds - a.shown))) for rank, a in participations.items()}


class _Covered:
    """Disjoint intervals, in order."""

    def __init__(self, intervals: Sequence[Interval]) -> None:
        self._starts = [a for a, _ in intervals]
        self._stops = [b for _, b in intervals]
        self._lengths = [0.0, *accumulate(b - a for a, b in intervals)]

    def free(self, start: float, stop: float) -> float:
        """How much of an interval they do not cover."""
        return max(0.0, stop - start - (self._before(stop) - self._before(start))) if stop > start else 0.0

    def _before(self, time: float) -> float:
        """Their length before a time."""
        i = bisect_right(self._starts, time)
        return self._lengths[i] - (max(0.0, self._stops[i - 1] - time) if i else 0.0)


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same set as disjoint intervals, in order.

    >>> _union([(3, 4), (0, 1), (0.5, 2), (5, 5)])
    [(0, 2), (3, 4)]
    """
    found: list[Interval] = []
    for a, b in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if found and a <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], b))
        else:
            found.append((a, b))
    return found


def _length(intervals: Sequence[Interval]) -> float:
    return sum(b - a for a, b in intervals)
