"""Ledger: the blocks of all workers, and the reports that the first worker makes of them.

A block is what one worker did from one report to the next.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from paceline.monitor.accounts import Participation, waits
from paceline.trace import Staleness


@dataclass(frozen=True)
class Figures:
    """What a worker did in some time: seconds by what they were for, samples, bytes sent, syncs."""

    seconds: float = 0.0
    compute: float = 0.0
    encode: float = 0.0
    wait: float = 0.0
    transfer: float = 0.0
    samples: int = 0
    nbytes: int = 0
    syncs: int = 0

    @property
    def other(self) -> float:
        """What is left: in a real process, evaluations and what no span tells of."""
        return max(0.0, self.seconds - self.compute - self.encode - self.wait - self.transfer)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    def __add__(self, other: Figures) -> Figures:
        return Figures(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Figures)})


@dataclass(frozen=True)
class Block:
    """One worker's figures without its collectives, its part in these, and the staleness of all updates so far:
    of those that it alone knows of (`own`), and of those that all know of (`known`).
    """

    rank: int
    host: str
    stop: float
    figures: Figures
    participations: list[Participation]
    own: Staleness
    known: Staleness
    is_rest: bool = False  # What is left at the end of the run.

    def dumps(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def loads(cls, text: str) -> Block:
        raw: dict[str, Any] = json.loads(text)
        raw["figures"] = Figures(**raw["figures"])
        raw["participations"] = [Participation(tuple(ranks), *rest) for ranks, *rest in raw["participations"]]
        raw["own"] = Staleness(**raw["own"])
        raw["known"] = Staleness(**raw["known"])
        return cls(**raw)


@dataclass(frozen=True)
class Report:
    """What workers did in some time, up to the moment `time` and to that number of syncs of the first worker.

    `missing` have sent nothing since the report before.  `speedup` is how much faster all together were than one
    worker that would only compute; None if nothing was computed.  The report at the end, which `is_total`, is of the
    whole run.
    """

    time: float
    syncs: int
    workers: dict[int, Figures]
    missing: list[int]
    staleness: float | None
    speedup: float | None
    peak: float | None
    average: float | None
    is_total: bool = False

    @property
    def total(self) -> Figures:
        """Of all workers together."""
        return sum(self.workers.values(), Figures())

    @property
    def samples_per_s(self) -> float:
        return sum(f.samples_per_s for f in self.workers.values())

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_plain(cls, raw: dict[str, Any]) -> Report:
        workers: Any = {int(rank): Figures(**f) for rank, f in raw["workers"].items()}
        return cls(**{**raw, "workers": workers})


def speedup(figures: Iterable[Figures]) -> float | None:
    """The samples per second of all workers, over those of one worker's compute time alone.

    >>> speedup([Figures(seconds=2.0, compute=1.0, samples=10), Figures(seconds=2.0, compute=0.5, samples=5)])
    0.75
    """
    figures = list(figures)
    alone = [f.samples / f.compute for f in figures if f.compute and f.samples]
    return sum(f.samples_per_s for f in figures) * len(alone) / sum(alone) if alone else None


class Ledger:
    """Collects blocks, and makes a report when each worker has sent one, or when the first one cannot wait longer."""

    def __init__(self, workers: int) -> None:
        self._workers = range(workers)
        self._open: defaultdict[int, list[Block]] = defaultdict(list)  # Not reported yet.
        self._rest: list[Block] = []
        self._totals: defaultdict[int, Figures] = defaultdict(Figures)
        self._peak: float | None = None
        self._known = Staleness()
        self._reported = Staleness()  # Of all updates that are in a report.
        self._own: dict[int, Staleness] = {}

    def add(self, block: Block) -> None:
        if block.is_rest:
            self._rest.append(block)
        else:
            self._open[block.rank].append(block)

    @property
    def is_complete(self) -> bool:
        """Whether all workers have ended."""
        return len({block.rank for block in self._rest}) == len(self._workers)

    def reports(self) -> Iterator[Report]:
        """Those that are due.

        A report is due when all workers that still train have sent a block, or when the first one has sent its next.
        """
        while self._is_due:
            yield self._next_report()

    @property
    def _is_due(self) -> bool:
        ended = {block.rank for block in self._rest}
        waits = (rank for rank in self._workers if rank not in ended and not self._open[rank])
        return self.own_blocks > 1 or (self.own_blocks == 1 and next(waits, None) is None)

    @property
    def own_blocks(self) -> int:
        """The blocks of the first worker that are in no report yet."""
        return len(self._open[0])

    def _next_report(self) -> Report:
        """Of the first worker's next block, and of those of the others up to the same number of syncs."""
        most = self._totals[0].syncs + self._open[0][0].figures.syncs
        is_last = self.own_blocks == 1
        blocks: list[Block] = []
        for rank in sorted(self._open):
            taken = 1 if rank == 0 else self._taken(rank, most, is_last=is_last)
            blocks += self._open[rank][:taken]
            del self._open[rank][:taken]
        workers = self._entered(blocks)
        return self._report(blocks, workers, [rank for rank in self._workers if rank not in workers])

    def _taken(self, rank: int, most: int, *, is_last: bool) -> int:
        """How many blocks of another worker go into a report that ends after `most` syncs of the first one."""
        syncs = self._totals[rank].syncs
        ahead = 0
        for block in self._open[rank]:
            syncs += block.figures.syncs
            ahead += syncs > most
        # Of a worker that is faster all the time, at most one block is left for the next report.
        return max(1, len(self._open[rank]) - (min(ahead, 1) if is_last else ahead))

    def last_reports(self) -> Iterator[Report]:
        """At the end of the run: of the blocks that are left, and of the whole run."""
        while self.own_blocks:
            yield self._next_report()
        left = [*(block for blocks in self._open.values() for block in blocks), *self._rest]
        self._open.clear()
        self._entered(left)
        self._reported = Staleness()
        missing = sorted(set(self._workers) - {block.rank for block in self._rest})
        yield self._report(left, dict(sorted(self._totals.items())), missing, is_total=True)

    def _entered(self, blocks: Sequence[Block]) -> dict[int, Figures]:
        """The figures of each worker, with its time in collectives.  They are added to the totals."""
        found: dict[int, Figures] = {}
        for block, figures in zip(blocks, _divided(blocks), strict=True):
            found[block.rank] = found.get(block.rank, Figures()) + figures
            self._totals[block.rank] += figures
            self._own[block.rank] = block.own
            self._known = max(self._known, block.known, key=lambda staleness: staleness.updates)
        return found

    def _report(
        self, blocks: Sequence[Block], workers: dict[int, Figures], missing: list[int], *, is_total: bool = False
    ) -> Report:
        now = speedup(workers.values())
        if not is_total and now is not None:
            self._peak = now if self._peak is None else max(self._peak, now)
        return Report(
            time=max((block.stop for block in blocks), default=0.0),
            syncs=self._totals[0].syncs,
            workers=workers,
            missing=missing,
            staleness=self._mean_staleness(),
            speedup=now,
            peak=self._peak,
            average=speedup(self._totals.values()),
            is_total=is_total,
        )

    def _mean_staleness(self) -> float | None:
        """Of the updates since the last report."""
        before = self._reported
        self._reported = sum(self._own.values(), self._known)
        return (self._reported - before).mean


def _divided(blocks: Sequence[Block]) -> list[Figures]:
    """The figures of blocks, with what they waited and what they transferred in collectives."""
    met: defaultdict[tuple[tuple[int, ...], int], dict[int, Participation]] = defaultdict(dict)
    for block in blocks:
        for a in block.participations:
            met[a.ranks, a.number][block.rank] = a
    hosts = {block.rank: block.host for block in blocks}
    waited = {key: waits(participations, hosts) for key, participations in met.items()}
    found: list[Figures] = []
    for block in blocks:
        wait = sum(waited[a.ranks, a.number][block.rank] for a in block.participations)
        shown = sum(a.shown for a in block.participations)
        found.append(block.figures + Figures(wait=wait, transfer=shown - wait))
    return found
