"""Topology: which workers average with each other in gossip, by rank, number of workers and round.

A topology is any callable of (rank, size, step) that returns the rank of the peer, or None for no peer in that round.
The topologies here form pairs: in one round each worker is its peer's peer.  Over all rounds a topology must be
connected: the values of every worker reach every other worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from random import Random

Topology = Callable[[int, int, int], int | None]

ROUNDS_PER_WORKER = 16  # A topology must be connected after this many rounds times the number of workers.


@dataclass(frozen=True)
class Ring:
    """Average with the two neighbours on a ring in turn: few connections, slow consensus.

    >>> [[Ring()(rank, 4, step) for rank in range(4)] for step in (0, 1)]
    [[1, 0, 3, 2], [3, 2, 1, 0]]
    """

    def __call__(self, rank: int, size: int, step: int) -> int | None:
        place = (
            rank - step
        ) % size  # The first pair moves by one worker in every round.  Of an odd number one is left.
        if place == size - 1 and size % 2:
            return None
        return (rank + (-1 if place % 2 else 1)) % size


@dataclass(frozen=True)
class Exponential:
    """Average with the workers at distance 1, 2, 4, ... in turn: n synchronous rounds make 2**n workers equal.

    >>> [[Exponential()(rank, 4, step) for rank in range(4)] for step in (0, 1)]
    [[1, 0, 3, 2], [2, 3, 0, 1]]
    """

    def __call__(self, rank: int, size: int, step: int) -> int | None:
        peer = rank ^ 1 << step % max(1, (size - 1).bit_length())
        return peer if peer < size else None


@dataclass(frozen=True)
class RandomPairs:
    """Average with a random worker: every round has new random pairs, which are the same on all workers."""

    seed: int = 0

    def __call__(self, rank: int, size: int, step: int) -> int | None:
        order = _shuffled(self.seed, size, step)
        mate = order.index(rank) ^ 1
        return order[mate] if mate < size else None


@lru_cache(maxsize=64)
def _shuffled(seed: int, size: int, step: int) -> list[int]:
    return Random(f"{seed}/{step}").sample(range(size), size)


def peer_of(topology: Topology, rank: int, size: int, step: int) -> int | None:
    """The peer of a worker in a round, or None; ValueError if the topology returns no valid peer."""
    peer = topology(rank, size, step)
    if peer is None:
        return None
    if peer == rank:
        raise ValueError(
            f"{topology}: in round {step} worker {rank} of {size} would average with itself; return None for no peer"
        )
    if peer not in range(size):
        raise ValueError(
            f"{topology}: in round {step} worker {rank} would average with {peer!r}, but workers are 0 to {size - 1}"
        )
    return peer


def check_connected(topology: Topology, size: int) -> None:
    """Raise ValueError for a topology in which the values of some workers never reach others."""
    part = list(range(size))  # For each worker the lowest rank that it is connected to.
    for step in range(ROUNDS_PER_WORKER * size):
        for rank in range(size):
            if (peer := peer_of(topology, rank, size, step)) is not None and part[rank] != part[peer]:
                low, high = sorted((part[rank], part[peer]))
                part = [low if p == high else p for p in part]
        if not any(part):
            return
    parts = [[rank for rank in range(size) if part[rank] == p] for p in sorted(set(part))]
    raise ValueError(
        f"{topology} on {size} workers is not connected: it consists of the parts {', '.join(map(str, parts))}, "
        "which never average with each other"
    )
