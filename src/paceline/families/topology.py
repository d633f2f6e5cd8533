"""Topology: who averages with whom in gossip, as a function of a worker's place, the number of workers and the round.

A topology is any callable of (rank, size, step) that gives a rank, or None for nobody.  Those here pair workers up: in one round each
has one partner, whose partner it is.  What they must have in common is that in the end everybody hears of everybody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from random import Random

Topology = Callable[[int, int, int], int | None]

ROUNDS_A_WORKER = 16  # A topology is looked at for so many rounds a worker before it is said to fall apart.


@dataclass(frozen=True)
class Ring:
    """With the neighbours on a circle in turn: few connections, slow consensus.

    >>> [[Ring()(rank, 4, step) for rank in range(4)] for step in (0, 1)]
    [[1, 0, 3, 2], [3, 2, 1, 0]]
    """

    def __call__(self, rank: int, size: int, step: int) -> int | None:
        place = (
            rank - step
        ) % size  # The pairs begin one further in every round, and among an odd number one is left over.
        if place == size - 1 and size % 2:
            return None
        return (rank + (-1 if place % 2 else 1)) % size


@dataclass(frozen=True)
class Exponential:
    """With those at the distances 1, 2, 4, ... in turn: among 2**n workers n rounds in step make all of them equal.

    >>> [[Exponential()(rank, 4, step) for rank in range(4)] for step in (0, 1)]
    [[1, 0, 3, 2], [2, 3, 0, 1]]
    """

    def __call__(self, rank: int, size: int, step: int) -> int | None:
        peer = rank ^ 1 << step % max(1, (size - 1).bit_length())
        return peer if peer < size else None


@dataclass(frozen=True)
class RandomPairs:
    """With anybody: in each round all workers are paired up at random, in the same way wherever it is asked for."""

    seed: int = 0

    def __call__(self, rank: int, size: int, step: int) -> int | None:
        order = _shuffled(self.seed, size, step)
        mate = order.index(rank) ^ 1
        return order[mate] if mate < size else None


@lru_cache(maxsize=64)
def _shuffled(seed: int, size: int, step: int) -> list[int]:
    return Random(f"{seed}/{step}").sample(range(size), size)


def peer_of(topology: Topology, rank: int, size: int, step: int) -> int | None:
    """Whom a worker averages with in a round; a ValueError if it is nobody that could."""
    peer = topology(rank, size, step)
    if peer is None:
        return None
    if peer == rank:
        raise ValueError(
            f"{topology}: in round {step} worker {rank} of {size} is to average with itself; None means with nobody"
        )
    if peer not in range(size):
        raise ValueError(
            f"{topology}: in round {step} worker {rank} is to average with {peer!r}, and workers are 0 to {size - 1}"
        )
    return peer


def check_connected(topology: Topology, size: int) -> None:
    """Refuse a topology in which some workers never hear of others."""
    part = list(range(size))  # For each worker the lowest of those that it hears of.
    for step in range(ROUNDS_A_WORKER * size):
        for rank in range(size):
            if (peer := peer_of(topology, rank, size, step)) is not None and part[rank] != part[peer]:
                low, high = sorted((part[rank], part[peer]))
                part = [low if p == high else p for p in part]
        if not any(part):
            return
    parts = [[rank for rank in range(size) if part[rank] == p] for p in sorted(set(part))]
    raise ValueError(
        f"{topology} on {size} workers is not connected: it falls into the parts {', '.join(map(str, parts))}, "
        "which never hear of each other"
    )
