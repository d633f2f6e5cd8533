"""Reductions: the ways in which a group of ranks computes the mean of encoded vectors, by the name that codecs use.

A new one is a function in a module of this package, with the decorator `reduction`; the package imports the module.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from torch import Tensor

from paceline.codecs.codec import Codec, CodecState
from paceline.collectives.vote import SyncVote
from paceline.endpoint import Endpoint

Reduction = Callable[[Endpoint, Tensor, SyncVote, CodecState], Awaitable[SyncVote]]

R = TypeVar("R", bound=Reduction)

REDUCTIONS: dict[str, Reduction] = {}


def reduction(name: str) -> Callable[[R], R]:
    """Register a function as the reduction for codecs with `reduction = name`."""
    if name in REDUCTIONS:
        raise ValueError(f"reduction({name!r}): this name is in use already")

    def register(function: R) -> R:
        REDUCTIONS[name] = function
        return function

    return register


def reduction_of(codec: Codec, ranks: int) -> Reduction:
    """The reduction that a codec asks for in a group of this many ranks."""
    name = codec.reduction_among(ranks)
    if name not in REDUCTIONS:
        raise ValueError(f"{codec} has the reduction '{name}', which is none of {sorted(REDUCTIONS)}")
    return REDUCTIONS[name]
