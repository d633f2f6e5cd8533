"""Random fault plans by seed, for any strategy that can take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

from paceline.endpoint import Layout
from paceline.sim.faults import ClockJump, Cut, Faults, Pause, SlowLink
from paceline.strategy import Strategy
from paceline.study.elastic_plans import OF_ELASTIC, with_survivor

KINDS = (
    "crash",
    "join",
    "suspicion",
    "pause",
    "drop",
    "duplicate",
    "delay",
    "partition",
    "slow",
    "clock",
    "shard-crash",
)
OF_SHARED = ("crash", "join", "pause", "clock")  # What workers can take that share memory, and send nothing.
OF_WAITING = ("pause", "delay", "partition", "slow", "clock")  # What workers can take that wait for each other.

RETRANSMIT_S = 0.05
SILENT_S = 0.08
OUTAGE_S = 8 * RETRANSMIT_S  # All pauses and cuts together: after 12 timeouts a rank gives another one up.


def kinds_of(strategy: Strategy) -> tuple[str, ...]:
    """The kinds of faults that a strategy can take.

    >>> from paceline.strategies import AllReduceSGD, Gossip
    >>> kinds_of(AllReduceSGD())
    ('crash', 'join', 'suspicion', 'pause', 'delay', 'partition', 'slow', 'clock')
    >>> set(KINDS) - set(kinds_of(Gossip()))
    {'shard-crash'}
    """
    if not strategy.needs.elastic:
        return (*OF_ELASTIC, *OF_WAITING) if strategy.needs.ordered else OF_WAITING
    if strategy.needs.shared_memory:
        return OF_SHARED
    return KINDS if strategy.servers and strategy.durability != "none" else KINDS[:-1]


@dataclass(frozen=True)
class Draw:
    """One random plan in the making: `seconds` is how long the run takes without faults."""

    chance: Random
    layout: Layout
    seconds: float

    def time(self) -> float:
        return self.between(0, 1.2 * self.seconds)

    def between(self, least: float, most: float) -> float:
        return round(self.chance.uniform(least, most), 4)

    def ranks(self) -> list[int]:
        """Some ranks, workers or servers, and not all."""
        size = self.layout.size
        return sorted(self.chance.sample(range(size), self.chance.randrange(1, size)))


def drawn_faults(seed: int, strategy: Strategy, workers: int, seconds: float, kinds: Sequence[str]) -> Faults:
    """The plan of a seed, with some of these kinds of faults."""
    chance = Random(f"torture/{seed}")
    draw = Draw(chance, Layout(workers, strategy.servers), seconds)
    others = [kind for kind in kinds if kind != "shard-crash"]
    chosen = [kind for kind in others if chance.random() < 0.4] or [chance.choice(others or kinds)]
    takes_beats = strategy.needs.elastic and not strategy.needs.shared_memory
    has_beats = takes_beats and chance.random() < (0.7 if strategy.servers else 0.4)
    if "suspicion" in chosen and takes_beats and not strategy.servers:
        has_beats = True  # Workers suspect each other by their heartbeats.
    if strategy.needs.ordered and any(kind in OF_ELASTIC for kind in chosen):
        has_beats = chance.random() < 0.7
    faults = Faults(silent_s=SILENT_S if has_beats else None, retransmit_s=RETRANSMIT_S)
    for kind in chosen:
        faults = replace(faults, **_of_kind(kind, faults, draw))
    # By numbers of their own, so that the rest of a plan is the same whether shards may die or not.
    of_shards = Random(f"torture/{seed}/shards")
    if "shard-crash" in kinds and (not others or of_shards.random() < 0.4):
        faults = replace(faults, **_of_kind("shard-crash", faults, Draw(of_shards, draw.layout, seconds)))
    return _within_patience(with_survivor(faults, workers) if strategy.needs.ordered else faults)


def _of_kind(kind: str, faults: Faults, draw: Draw) -> dict[str, Any]:
    """The settings of a plan for a kind of fault."""
    chance, layout = draw.chance, draw.layout
    match kind:
        case "crash":
            ranks = [*layout.worker_ranks, *faults.joining_ranks(layout)]
            mortal = chance.sample(ranks, chance.randrange(1, len(ranks)))  # One of them lives.
            # Only servers find by heartbeats alone that a worker is dead: others may not go on without a majority.
            notices: list[float | None] = [0.0, 0.001, 0.03, *([None] if faults.silent_s and layout.servers else [])]
            return {"deaths": {rank: draw.time() for rank in mortal}, "notice": chance.choice(notices)}
        case "join":
            return {"joins": [draw.time() for _ in range(chance.randrange(1, 3))]}
        case "suspicion":
            ranks = [chance.choice(layout.worker_ranks) for _ in range(chance.randrange(1, 5))]
            return {"suspicions": [(rank, draw.time()) for rank in ranks]}
        case "pause":
            ranks = [chance.randrange(layout.size) for _ in range(chance.randrange(1, 3))]
            return {"pauses": [Pause(rank, draw.time(), draw.between(0.005, 0.3)) for rank in ranks]}
        case "drop":
            return {"lost": chance.choice([0.01, 0.05, 0.1, 0.15])}
        case "duplicate":
            return {"doubled": chance.choice([0.02, 0.1, 0.3])}
        case "delay":
            return {"delayed": chance.choice([0.02, 0.1, 0.3]), "delay_s": draw.between(0.001, 0.12)}
        case "partition":
            return {"cuts": [cut for _ in range(chance.randrange(1, 3)) for cut in _partition(draw)]}
        case "slow":
            start = draw.time()
            seconds, delay = draw.between(0.02, 0.4), draw.between(0.002, 0.1)
            return {"slow_links": [SlowLink(draw.ranks(), draw.ranks(), start, seconds, delay)]}
        case "clock":
            ranks = [chance.randrange(layout.size) for _ in range(chance.randrange(1, 3))]
            return {"clock_jumps": [ClockJump(rank, draw.time(), draw.between(-0.5, 0.5)) for rank in ranks]}
        case "shard-crash":
            ranks = [chance.choice(layout.server_ranks) for _ in range(chance.randrange(1, 4))]
            restart_s = chance.choice([0.001, 0.01, 0.04])
            return {"server_deaths": [(rank, draw.time()) for rank in ranks], "restart_s": restart_s}
        case _:
            raise ValueError(f"there is no kind of fault {kind!r}; the kinds are {', '.join(KINDS)}")


def _partition(draw: Draw) -> list[Cut]:
    """Two sets of ranks that cannot reach each other for a while; sometimes in one direction only."""
    some = draw.ranks()
    others = [rank for rank in range(draw.layout.size) if rank not in some]
    start, seconds = draw.time(), draw.between(0.01, 0.25)
    holds = draw.chance.random() < 0.5
    there = Cut(some, others, start, seconds, holds)
    return [there] if draw.chance.random() < 0.5 else [there, Cut(others, some, start, seconds, holds)]


def _within_patience(faults: Faults) -> Faults:
    """The plan with pauses and cuts so short that no rank gives up one that is alive."""
    names = ("pauses", "cuts", "slow_links")
    total = sum(span.seconds for name in names for span in getattr(faults, name))
    if total <= OUTAGE_S:
        return faults
    factor = OUTAGE_S / total
    return replace(
        faults,
        **{
            name: [replace(span, seconds=round(span.seconds * factor, 4)) for span in getattr(faults, name)]
            for name in names
        },
    )


def end_of(faults: Faults) -> float:
    """When the last fault is over."""
    spans = [span.start + span.seconds for span in (*faults.pauses, *faults.cuts, *faults.slow_links)]
    times = [*faults.deaths.values(), *faults.joins, *(time for _, time in faults.suspicions)]
    times += [time + faults.restart_s for _, time in faults.server_deaths]
    return max([*spans, *times, *(jump.time + abs(jump.seconds) for jump in faults.clock_jumps)], default=0.0)


def as_python(faults: Faults) -> str:
    """The plan as an expression, with the settings that differ from the defaults.

    >>> as_python(Faults({1: 0.5}, pauses=[Pause(0, 0.1, 0.2)]))
    'pl.Faults(deaths={1: 0.5}, pauses=[pl.faults.Pause(rank=0, start=0.1, seconds=0.2)])'
    """
    plain = Faults()
    given = [
        f"{f.name}={getattr(faults, f.name)!r}"
        for f in fields(faults)
        if getattr(faults, f.name) != getattr(plain, f.name)
    ]
    text = f"pl.Faults({', '.join(given)})"
    for cls in (Pause, Cut, SlowLink, ClockJump):
        text = text.replace(f"{cls.__name__}(", f"pl.faults.{cls.__name__}(")
    return text
