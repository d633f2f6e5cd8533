"""Statistics: where the time goes, after every so many syncs, as CNTK's syncPerfStats.

For each worker the seconds of computing, encoding, waiting and transfer, with its samples and bytes; for all together
the speed-up over one worker.  No worker waits for a report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from paceline.checked import checked
from paceline.monitor.accounts import COMMUNICATION, Account
from paceline.monitor.files import LineFile
from paceline.monitor.ledger import Block, Figures, Ledger, Report
from paceline.monitor.monitor import Monitor
from paceline.monitor.reader import News, reader
from paceline.monitor.watched import Facts, Meter, Record, Watched
from paceline.report import formats

LOOK_S = 0.1  # Between two looks at what the other workers have sent.
LAST_S = 2.0  # How long the first worker waits for the last figures of the others, when all work is done.
SHORTEST_S = 1e-9  # Less is the rounding of sums.

Out = Callable[[str], None]


class Statistics(Monitor):
    """Prints a report after each worker's every `every`-th sync, and after its `first` ones; 0: never.

    A sync is one of parameters, if the method averages these; otherwise each step in which the worker has exchanged
    something.  `out` takes each line, or is the path of a file.  `reports` has all reports of the last run, with
    that of the whole run at the end.  Of a worker in stages, they are about the process with the first stage.
    """

    def __init__(self, every: int, *, first: int = 0, out: Out | str | Path = print) -> None:
        checked("Statistics", "every", every, int)
        checked("Statistics", "first", first, int)
        checked("Statistics", "out", out, Out | str | Path)
        if every < 0 or first < 0:
            raise ValueError(f"Statistics(every={every}, first={first}): both count syncs; give at least 0")
        self._every = every
        self._first = first
        self._out = out
        self.reports: list[Report] = []
        self._file: LineFile | None = None
        self._is_simulated = False

    @property
    def is_on(self) -> bool:
        return self._every > 0 or self._first > 0

    def begin(self, facts: Facts) -> None:
        self.reports = []
        if self.is_on and isinstance(self._out, str | Path):
            self._file = LineFile(Path(self._out), f"Statistics(out={str(self._out)!r})")
        self._is_simulated = facts.is_simulated

    def show(self, record: Record) -> None:
        report = Report.of_plain(record["report"])
        self.reports.append(report)
        for line in lines(report, is_simulated=self._is_simulated):
            if self._file is not None:
                self._file.add(line.encode())
            elif callable(self._out):
                self._out(line)

    def end(self, *, failed: bool) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def leave(self) -> None:
        self._file = None

    def meter(self, watched: Watched) -> Meter | None:
        return BlockMeter(watched, self._every, self._first) if self.is_on else None


class BlockMeter:
    """Cuts what one worker does into blocks and sends them to the first worker, which makes the reports."""

    def __init__(self, watched: Watched, every: int, first: int) -> None:
        self._watched = watched
        self._every = every
        self._first = first
        if watched.trace.collectives is None:
            watched.trace.collectives = []
        self._read = watched.reader()
        self._read_own = reader(watched.own)
        self._account = Account(watched.now(), fills=watched.is_simulated)
        self._syncs = 0
        self._reported = 0  # Syncs, samples and bytes up to the last block.
        self._samples = 0
        self._nbytes = watched.sent()
        self._has_begun = False
        self._last = watched.now()  # When this worker did something.
        self._ledger = Ledger(watched.workers) if watched.is_first else None
        self._look = 0.0

    def step(self, step: int) -> Iterator[Record]:
        before = self._syncs
        self._count(self._read())
        if not self._has_begun:  # What is exchanged before the first step is no sync.
            self._has_begun = True
            self._syncs = 0
        elif any(self._is_due(n) for n in range(before + 1, self._syncs + 1)):
            self._cut(self._watched.now())
        yield from self._reports()

    def look(self) -> Iterator[Record]:
        return iter(())

    def end(self) -> Iterator[Record]:
        before = self._syncs
        self._count(self._read())
        # In the simulator others may have gone on for long after this one.
        now = self._last if self._watched.is_simulated else self._watched.now()
        if any(self._is_due(n) for n in range(before + 1, self._syncs + 1)):
            self._cut(now)
        self._cut(now, is_rest=True)
        if self._ledger is not None:
            yield from self._last_reports(self._ledger)

    # This worker's blocks.

    def _count(self, news: News) -> None:
        watched = self._watched
        self._account.add(news.spans, news.collectives)
        self._account.add(self._read_own().spans, [])
        self._last = max([self._last, *(s.stop for s in news.spans)])
        self._samples += sum(p.samples for p in news.points if p.staleness is None)
        if watched.notes_syncs():
            self._syncs += len(news.syncs)
        elif any(s.kind in COMMUNICATION for s in news.spans):
            self._syncs += 1

    def _is_due(self, sync: int) -> bool:
        return sync <= self._first or (self._every > 0 and sync % self._every == 0)

    def _cut(self, now: float, *, is_rest: bool = False) -> None:
        watched = self._watched
        shares = self._account.close(now)
        sent = watched.sent()
        figures = Figures(
            seconds=shares.stop - shares.start,
            compute=shares.compute,
            encode=shares.encode,
            wait=shares.wait,
            transfer=shares.transfer,
            samples=self._samples,
            nbytes=sent - self._nbytes,
            syncs=self._syncs - self._reported,
        )
        own, known = watched.staleness()
        block = Block(watched.rank, watched.host, shares.stop, figures, shares.participations, own, known, is_rest)
        self._samples = 0
        self._nbytes = sent
        self._reported = self._syncs
        if self._ledger is not None:
            self._ledger.add(block)
        else:
            watched.channel.send(watched.rank, block.dumps())

    # All workers' blocks, on the first one.

    def _reports(self) -> Iterator[Record]:
        ledger = self._ledger
        if ledger is None or not ledger.own_blocks:
            return
        if ledger.own_blocks > 1 or self._watched.is_simulated or time.monotonic() >= self._look:
            self._look = time.monotonic() + LOOK_S
            self._collect(ledger)
            yield from map(record_of, ledger.reports())

    def _last_reports(self, ledger: Ledger) -> Iterator[Record]:
        """When this worker has ended, the others have, or do so soon if their method has a common end."""
        end = time.monotonic() + LAST_S
        self._collect(ledger)
        while not ledger.is_complete and not self._watched.is_simulated and time.monotonic() < end:
            time.sleep(0.01)
            self._collect(ledger)
        yield from map(record_of, ledger.last_reports())

    def _collect(self, ledger: Ledger) -> None:
        for rank in self._watched.ranks:
            for text in self._watched.channel.receive(rank):
                ledger.add(Block.loads(text))


def record_of(report: Report) -> Record:
    return {"kind": "statistics", "report": report.plain()}


def lines(report: Report, *, is_simulated: bool) -> Iterator[str]:
    """A line of all workers together, and one of each."""
    what = f"all {report.syncs} syncs" if report.is_total else f"sync {report.syncs}"
    parts = [
        f"{rate(report.samples_per_s)} samples/s of {len(report.workers)} workers",
        f"{formats.factor(report.speedup)} one worker (peak {formats.factor(report.peak)}, "
        f"average {formats.factor(report.average)})",
        f"{formats.nbytes(report.total.nbytes)} sent",
    ]
    if report.staleness is not None:
        parts.append(f"staleness {report.staleness:.1f}")
    if report.missing:
        parts.append(f"nothing from {'worker' if len(report.missing) == 1 else 'workers'} {_listed(report.missing)}")
    yield f"{what}: {', '.join(parts)}"
    clock = "virtual " if is_simulated else ""
    for rank, f in report.workers.items():
        shares = {name: getattr(f, name) for name in ("compute", "encode", "wait", "transfer", "other")}
        times = ", ".join(f"{name} {formats.seconds(s if s > SHORTEST_S else 0)}" for name, s in shares.items())
        yield (
            f"  worker {rank}: {clock}{formats.seconds(f.seconds)} = {times}; {f.samples:,} samples, "
            f"{rate(f.samples_per_s)}/s, {formats.nbytes(f.nbytes)} sent"
        )


def rate(value: float | None) -> str:
    """How many in a second.

    >>> rate(12345.6), rate(7.123), rate(None)
    ('12,346', '7.12', '-')
    """
    if value is None:
        return formats.MISSING
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
