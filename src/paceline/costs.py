"""The cost of communication: seconds and bytes of collectives by ring, tree and star.

In the formulas, n is the number of ranks, alpha the latency of a message and beta the bandwidth in bytes a second.
`nbytes` is what each rank contributes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf, log2
from typing import Literal

from paceline import units

Algorithm = Literal["ring", "tree", "star"]


@dataclass(frozen=True, slots=True, init=False)
class Link:
    """The link between two ranks: its bytes a second, and its latency in seconds.

    >>> Link("1Mbit/s", "5ms")
    Link(bandwidth=125000.0, latency=0.005)
    """

    bandwidth: float
    latency: float

    def __init__(self, bandwidth: float | str, latency: float | str) -> None:
        object.__setattr__(self, "bandwidth", units.bytes_per_second(bandwidth))
        object.__setattr__(self, "latency", units.seconds(latency))
        if not self.bandwidth > 0 or not 0 <= self.latency < inf:
            raise ValueError(
                f"Link(bandwidth={bandwidth!r}, latency={latency!r}): bandwidth must be positive, "
                "latency finite and not negative"
            )


@dataclass(frozen=True, slots=True)
class Cost:
    """The time of a collective after all ranks have called it, and the bytes that the i-th rank sends."""

    seconds: float
    nbytes: Callable[[int], int]


def all_reduce(algorithm: Algorithm, members: int, nbytes: int, link: Link) -> Cost:
    """The sum on every rank.

    >>> cost = all_reduce("ring", 4, 1000, Link(bandwidth=1e6, latency=0.0))
    >>> cost.seconds, cost.nbytes(0)
    (0.0015, 1500)
    """
    n = members
    alpha = link.latency
    beta = link.bandwidth
    if algorithm == "ring":
        return Cost(2 * (n - 1) * alpha + 2 * (n - 1) / n * nbytes / beta, lambda _: 2 * (n - 1) * nbytes // n)
    if algorithm == "tree":
        # Up the tree, every rank but the root sends once.  Down the tree, every rank sends to its children.
        return Cost(2 * _levels(n) * (alpha + nbytes / beta), lambda i: nbytes * ((i > 0) + _children(i, n)))
    return Cost(2 * alpha + 2 * (n - 1) * nbytes / beta, lambda i: nbytes if i else (n - 1) * nbytes)


def all_gather(algorithm: Algorithm, members: int, nbytes: int, link: Link) -> Cost:
    """The data of all ranks on every rank: round a ring, by doubling (tree), or through the first rank (star)."""
    n = members
    alpha = link.latency
    beta = link.bandwidth
    if algorithm == "ring":
        return Cost((n - 1) * (alpha + nbytes / beta), lambda _: (n - 1) * nbytes)
    if algorithm == "tree":
        return Cost(_levels(n) * alpha + (n - 1) * nbytes / beta, lambda _: (n - 1) * nbytes)
    return Cost(2 * alpha + (n - 1) * (n + 1) * nbytes / beta, lambda i: nbytes if i else (n - 1) * n * nbytes)


def all_to_all(algorithm: Algorithm, members: int, nbytes: int, link: Link) -> Cost:
    """A part from every rank to every other, sent directly.  `nbytes` is what a rank sends to all others together."""
    return Cost((members - 1) * link.latency + nbytes / link.bandwidth, lambda _: nbytes)


def broadcast(algorithm: Algorithm, members: int, nbytes: int, link: Link) -> Cost:
    """The data of the first rank on every rank."""
    n = members
    alpha = link.latency
    beta = link.bandwidth
    if algorithm == "ring":
        return Cost((n - 1) * alpha + (n > 1) * nbytes / beta, lambda i: nbytes if i < n - 1 else 0)
    if algorithm == "tree":
        return Cost(_levels(n) * (alpha + nbytes / beta), lambda i: nbytes * _children(i, n))
    return Cost(alpha + (n - 1) * nbytes / beta, lambda i: 0 if i else (n - 1) * nbytes)


def reduce(algorithm: Algorithm, members: int, nbytes: int, link: Link) -> Cost:
    """The sum on the first rank: a broadcast in reverse."""
    seconds = broadcast(algorithm, members, nbytes, link).seconds
    return Cost(seconds, lambda i: nbytes if i else 0)


COLLECTIVES = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "all_to_all": all_to_all,
    "reduce": reduce,
    "broadcast": broadcast,
}


def _levels(members: int) -> int:
    return ceil(log2(members)) if members > 1 else 0


def _children(index: int, members: int) -> int:
    return sum(child < members for child in (2 * index + 1, 2 * index + 2))
