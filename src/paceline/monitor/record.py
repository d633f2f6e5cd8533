"""RecordMeter: how the training goes, a few times a second: loss, speed, share of communication, staleness.

Evaluations, and what the run itself decides, are records of their own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from paceline.monitor.accounts import Account
from paceline.monitor.reader import reader
from paceline.monitor.watched import Record, Watched
from paceline.trace import Point, Span, Staleness

INTERVAL_S = 0.2


class RecordMeter:
    """Says how the training goes after every `every` steps; None: at most five times a second."""

    def __init__(self, watched: Watched, every: int | None = None) -> None:
        self._watched = watched
        self._every = every
        self._read = reader(watched.trace)
        self._read_own = reader(watched.own)
        self._account = Account(watched.now(), fills=watched.is_simulated)
        self._due = time.monotonic() + INTERVAL_S
        self._step: int | None = None  # At the last record,
        self._step_now = 0  # and now.
        self._time = watched.now()
        self._samples: int | None = None
        self._staleness = sum(watched.staleness(), Staleness())
        self._evaluations = len(watched.trace.evaluations)
        self._evaluated = self._time  # When the model was evaluated last.
        self._decisions = len(watched.trace.decisions)

    def step(self, step: int) -> Iterator[Record]:
        step = self._step_now = self._within(step)
        if self._step is None:
            self._step = step
            self._samples = self._watched.samples_before(step)
        yield from self._events(step)
        is_due = time.monotonic() >= self._due if self._every is None else step % self._every == 0
        if is_due and step != self._step:
            yield self._record(step)

    def look(self) -> Iterator[Record]:
        return self._events(self._step_now)

    def end(self) -> Iterator[Record]:
        last = self._last_step()
        step = self._step or 0 if last is None else self._within(last + 1)
        if self._step is not None and step != self._step:
            yield self._record(step, is_last=True)
        yield from self._events(step)

    def _within(self, step: int) -> int:
        """The steps that are done; a worker whose data has ended takes empty ones with the others."""
        steps = self._watched.steps()
        if steps is None:
            last = self._last_step()
            return step if last is None else min(step, last + 1)
        return min(step, steps)

    def _last_step(self) -> int | None:
        """The last step in the trace."""
        return next((p.step for p in reversed(self._watched.trace.points) if p.staleness is None), None)

    def _record(self, step: int, *, is_last: bool = False) -> Record:
        watched = self._watched
        self._due = time.monotonic() + INTERVAL_S
        news = self._read()
        mine = [s for s in news.spans if s.rank == watched.rank or not watched.is_simulated]
        now = watched.now()
        if is_last and watched.is_simulated:  # Servers may go on for longer.
            now = max([self._time, *(s.stop for s in mine)])
        points = [p for p in news.points if p.staleness is None]
        seconds = now - self._time
        samples = watched.samples_before(step)
        done = self._samples_done(step, samples, points)
        record: Record = {
            "kind": "step",
            "time": now,
            **self._where(step),
            "samples": samples,
            "steps": watched.steps(),
            "loss": _mean_loss(points),
            "steps_per_s": _rate(step - (self._step or 0), seconds),
            "samples_per_s": None if done is None else _rate(done, seconds),
            "communication": self._communication(now, mine),
            "staleness": self._mean_staleness(),
            "lr": watched.lr(),
        }
        self._step = step
        self._time = now
        self._samples = samples
        return record

    def _where(self, step: int) -> Record:
        return {"step": step, "epoch": self._watched.epochs_before(step)}

    def _samples_done(self, step: int, samples: int | None, points: Sequence[Point]) -> int | None:
        """Those of all workers since the last record.  Of other processes, a worker takes itself for the average."""
        if samples is None:
            return None
        if self._watched.is_simulated:
            return sum(p.samples for p in points)
        if self._samples is not None and step > (self._step or 0):
            return samples - self._samples
        return sum(p.samples for p in points) * self._watched.workers  # The run has gone back to an earlier step.

    def _communication(self, now: float, spans: Sequence[Span]) -> float | None:
        self._account.add(spans)
        self._account.add(self._read_own().spans)
        shares = self._account.close(now)
        seconds = shares.stop - shares.start
        return shares.communication / seconds if seconds > 0 else None

    def _mean_staleness(self) -> float | None:
        before = self._staleness
        self._staleness = sum(self._watched.staleness(), Staleness())
        return (self._staleness - before).mean

    def _events(self, step: int) -> Iterator[Record]:
        trace = self._watched.trace
        for e in trace.evaluations[self._evaluations :]:
            seconds = e.time - self._evaluated
            self._evaluated = e.time
            values = {name: float(value) for name, value in e.values.items()}
            what = {"samples": e.samples, "seconds": seconds, "values": values}
            yield {"kind": "evaluation", "time": e.time, **self._where(step), **what}
        self._evaluations = len(trace.evaluations)
        for d in trace.decisions[self._decisions :]:
            yield {"kind": "decision", "time": d.time, "step": d.step, "decision": d.kind, "values": d.values}
        self._decisions = len(trace.decisions)


def _mean_loss(points: Sequence[Point]) -> float | None:
    """Weighted by samples."""
    known = [(p.loss, p.samples) for p in points if p.loss is not None and p.samples]
    samples = sum(n for _, n in known)
    return sum(loss * n for loss, n in known) / samples if samples else None


def _rate(count: float, seconds: float) -> float | None:
    return max(0.0, count) / seconds if seconds > 0 else None
