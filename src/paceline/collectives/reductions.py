"""Reductions: the ways in which a group of ranks computes the mean of encoded vectors, by the name that codecs use.

A new one is a function in a module of this package, with the decorator `reduction`; the package imports the module.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from torch import Tensor

from paceline.codecs.codec import CodecState
from paceline.collectives.vote import SyncVote
from paceline.endpoint import Endpoint

Reduction = Callable[[Endpoint, Tensor, SyncVote, CodecState], Awaitable[SyncVote]]

R = TypeVar("R", bound=Reduction)

REDUCTIONS: dict[str, Reduction] = {}


def reduction(name: str) -> Callable[[R], R]:
    """Register a function as the reduction for codecs with `reduction = name`."""

    def register(function: R) -> R:
        if name in REDUCTIONS:
            raise ValueError(f"reduction({name!r}): {REDUCTIONS[name]} has this name already")
        REDUCTIONS[name] = function
        return function

    return register


def reduction_of(codec_state: CodecState) -> Reduction:
    """The reduction that a codec asks for."""
    codec = codec_state.codec
    if codec.reduction not in REDUCTIONS:
        raise ValueError(f"{codec} has the reduction '{codec.reduction}', which is none of {sorted(REDUCTIONS)}")
    return REDUCTIONS[codec.reduction]
