"""Faults: which failures happen in a simulated run, and when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from paceline.endpoint import Layout


@dataclass(frozen=True)
class Pause:
    """The process of a rank is stopped at `start` and continues after `seconds`, with a stale view of the run.

    It sends no heartbeat meanwhile.  Messages to it wait.
    """

    rank: int
    start: float
    seconds: float


@dataclass(frozen=True)
class Cut:
    """From `start` on, for `seconds`, nothing arrives that one of `senders` sends to one of `receivers`.

    What they have sent is lost; if the network `holds` it, it arrives after the cut.  Messages in the other direction
    arrive: two cuts make a partition.  A collective with ranks on both sides waits for the end of the cut.
    """

    senders: Sequence[int]
    receivers: Sequence[int]
    start: float
    seconds: float
    holds: bool = False


@dataclass(frozen=True)
class SlowLink:
    """From `start` on, for `seconds`, what one of `senders` sends to one of `receivers` takes `delay` seconds longer.

    So does a collective with ranks on both sides.
    """

    senders: Sequence[int]
    receivers: Sequence[int]
    start: float
    seconds: float
    delay: float


@dataclass(frozen=True)
class ClockJump:
    """At `time` the clock of a rank, `Endpoint.now()`, goes forward by `seconds`, or back if they are negative.

    Real processes read a monotonic clock.  One jumps forward when a host was suspended.
    """

    rank: int
    time: float
    seconds: float


@dataclass(frozen=True)
class Faults:
    """Deaths, joins and pauses of workers, deaths of servers, false suspicions, and what a network and a clock can do.

    Strategies whose workers wait for each other can run with pauses, cuts, slow links, delays and clock jumps only.

    - `deaths`: for each rank, the time at which it dies.  A message that it is just sending does not arrive.  The
      servers, or without servers the other workers, notice the death `notice` seconds later; with None, only by its
      missing heartbeats.
    - `joins`: the times at which new workers join.  Without servers each minibatch has as many parts as there were
      workers at the start, so a new worker waits until it can replace a dead one.
    - `suspicions`: pairs of a rank and a time.  The servers then believe that this worker is dead, although it runs.
    - `pauses`, `cuts`, `slow_links`, `clock_jumps`: see `Pause`, `Cut`, `SlowLink` and `ClockJump`.
    - `lost`, `doubled`: the share of all messages that do not arrive, and the share that arrive twice.
    - `delayed`: the share of all messages, and collectives, that take up to `delay_s` seconds longer.  So messages
      overtake each other.
    - `silent_s`: workers send heartbeats, and one that has sent none for so long is suspected, as on real processes.
      None: there are no heartbeats.
    - `server_deaths`: pairs of a server's rank and a time at which its process is killed.  `restart_s` seconds later
      another one continues from its log.  What was in flight to it is lost.
    - `retransmit_s`: the seconds without an answer after which a worker sends a message again.
    """

    deaths: Mapping[int, float] = field(default_factory=dict[int, float])
    joins: Sequence[float] = ()
    suspicions: Sequence[tuple[int, float]] = ()
    notice: float | None = 0.001
    lost: float = 0.0
    doubled: float = 0.0
    delayed: float = 0.0
    delay_s: float = 0.05
    pauses: Sequence[Pause] = ()
    cuts: Sequence[Cut] = ()
    slow_links: Sequence[SlowLink] = ()
    clock_jumps: Sequence[ClockJump] = ()
    silent_s: float | None = None
    server_deaths: Sequence[tuple[int, float]] = ()
    restart_s: float = 0.05
    retransmit_s: float = 5.0

    def __post_init__(self) -> None:
        spans = [*self.pauses, *self.cuts, *self.slow_links]
        times = [*self.deaths.values(), *self.joins, *(time for _, time in (*self.suspicions, *self.server_deaths))]
        times += [0.0 if self.notice is None else self.notice, self.delay_s, *(jump.time for jump in self.clock_jumps)]
        times += [self.restart_s, *(time for span in spans for time in (span.start, span.seconds))]
        times += [link.delay for link in self.slow_links]
        if not all(0 <= time < inf for time in times):
            raise ValueError(f"{self}: all times but those by which clocks jump must be finite and at least 0")
        if not all(-inf < jump.seconds < inf for jump in self.clock_jumps):
            raise ValueError(f"{self}: a clock jumps by a finite time")
        if not (0 <= self.lost < 1 and 0 <= self.doubled <= 1 and 0 <= self.delayed <= 1 and self.retransmit_s > 0):
            raise ValueError(
                f"{self}: `lost` must be from 0 to below 1, `doubled` and `delayed` from 0 to 1, and `retransmit_s` "
                "above 0"
            )
        if self.silent_s is not None and not 0 < self.silent_s < inf:
            raise ValueError(f"{self}: `silent_s` must be finite and above 0, or None")
        if self.deaths and self.notice is None and self.silent_s is None:
            raise ValueError(f"{self}: no rank would notice these deaths; give `notice` or `silent_s`")

    @property
    def has_any(self) -> bool:
        """Whether anything fails, or any worker joins."""
        return self.needs_elastic or self.is_lossy or bool(self.slow_links or self.clock_jumps or self.server_deaths)

    @property
    def needs_elastic(self) -> bool:
        """Whether workers come and go, or messages are lost: collectives cannot go on then."""
        return bool(self.changes_members or self.lost or self.doubled)

    @property
    def changes_members(self) -> bool:
        """Whether a worker may join, die or be suspected."""
        return bool(self.deaths or self.joins or self.suspicions or self.silent_s)

    @property
    def is_lossy(self) -> bool:
        """Whether a message may not arrive, or so late that its sender must ask again."""
        return bool(self.lost or self.doubled or self.delayed or self.cuts or self.pauses or self.silent_s)

    def joining_ranks(self, layout: Layout) -> range:
        """The ranks of the workers that join, after all ranks of the beginning."""
        return range(layout.size, layout.size + len(self.joins))

    def ranks(self) -> Iterable[int]:
        """Every rank, worker or server, that a pause, a link or a clock is of."""
        for cut in (*self.cuts, *self.slow_links):
            yield from (*cut.senders, *cut.receivers)
        yield from (fault.rank for fault in (*self.pauses, *self.clock_jumps))
