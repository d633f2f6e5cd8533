"""Topology: which workers average with each other in gossip.

A topology is any function of (rank, size, step) that returns the rank of the partner, or None for no partner.  Here
`rank` counts data shards, `size` is their number, and `step` counts rounds.  The topologies in this file form pairs: in
a round each worker is the partner of its partner.  Any topology must be connected: over many rounds, every worker
reaches every other, directly or through others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from random import Random

Topology = Callable[[int, int, int], int | None]

ROUNDS_A_WORKER = 16  # Rounds for each worker that are checked before a topology is refused as not connected.


@dataclass(frozen=True)
class Ring:
    """Pairs of neighbours on a circle, left and right in turn: few connections, slow consensus.

    >>> [[Ring()(rank, 4, step) for rank in range(4)] for step in (0, 1)]
    [[1, 0, 3, 2], [3, 2, 1, 0]]
    """

    def __call__(self, rank: int, size: int, step: int) -> int | None:
        # In every round the pairs start one place further.  If the number is odd, one worker has no partner.
        place = (rank - step) % size
        if place == size - 1 and size % 2:
            return None
        return (rank + (-1 if place % 2 else 1)) % size


@dataclass(frozen=True)
class Exponential:
    """Pairs at the distances 1, 2, 4, ... in turn: with 2**n workers, n synchronous rounds make all models equal.

    >>> [[Exponential()(rank, 4, step) for rank in range(4)] for step in (0, 1)]
    [[1, 0, 3, 2], [2, 3, 0, 1]]
    """

    def __call__(self, rank: int, size: int, step: int) -> int | None:
        peer = rank ^ 1 << step % max(1, (size - 1).bit_length())
        return peer if peer < size else None


@dataclass(frozen=True)
class RandomPairs:
    """Random pairs, new in each round.  All workers compute the same ones."""

    seed: int = 0

    def __call__(self, rank: int, size: int, step: int) -> int | None:
        order = _shuffled(self.seed, size, step)
        mate = order.index(rank) ^ 1
        return order[mate] if mate < size else None


@lru_cache(maxsize=64)
def _shuffled(seed: int, size: int, step: int) -> list[int]:
    return Random(f"{seed}/{step}").sample(range(size), size)


def peer_of(topology: Topology, rank: int, size: int, step: int) -> int | None:
    """The partner of a worker in a round; ValueError if the topology returns no valid rank."""
    peer = topology(rank, size, step)
    if peer is None:
        return None
    if peer == rank:
        raise ValueError(
            f"{topology}: in round {step} worker {rank} of {size} averages with itself; return None for no partner"
        )
    if peer not in range(size):
        raise ValueError(
            f"{topology}: in round {step} worker {rank} averages with {peer!r}; workers are 0 to {size - 1}"
        )
    return peer


def check_connected(topology: Topology, size: int) -> None:
    """Refuse a topology in which some workers never reach others."""
    part = list(range(size))  # For each worker, the lowest rank that it reaches.
    for step in range(ROUNDS_A_WORKER * size):
        for rank in range(size):
            if (peer := peer_of(topology, rank, size, step)) is not None and part[rank] != part[peer]:
                low, high = sorted((part[rank], part[peer]))
                part = [low if p == high else p for p in part]
        if not any(part):
            return
    parts = [[rank for rank in range(size) if part[rank] == p] for p in sorted(set(part))]
    raise ValueError(
        f"{topology} on {size} workers is not connected: no average links the parts {', '.join(map(str, parts))}"
    )
