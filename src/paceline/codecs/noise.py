"""Random numbers that follow from a seed and a place alone, so that plain torch, numba and Triton draw the same ones in any order.

Each is a hash of its index: a 32-bit integer mixer (shifts and two odd multipliers, in which every bit of the input moves about
half the bits of the output) is applied twice, with one half of the seed added before the first round and the other before the second.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST, SECOND = 0x7FEB352D, 0x846CA68B  # The mixer's multipliers.
_WORD = 0xFFFFFFFF


def halves(seed: int) -> tuple[int, int]:
    """A seed's lower and upper 32 bits."""
    return seed & _WORD, seed >> 32 & _WORD


def seed_of(*numbers: int) -> int:
    """A seed for torch that follows from whole numbers: torch heeds only the lower 32 bits of one, so they are mixed into these.

    Two rows of numbers that differ in one of them, by less than 2**32, never give the same seed.

    >>> seed_of(0, 1) == seed_of(1, 0)
    False
    """
    word = 0
    for number in numbers:
        for half in halves(number):
            word = _mixed(word ^ half) + 1 & _WORD  # Plus one: 0 is mixed to 0.
    return word


def _mixed(word: int) -> int:
    word = (word ^ word >> 16) * FIRST & _WORD
    word = (word ^ word >> 15) * SECOND & _WORD
    return word ^ word >> 16


def uniform(seed: int, numel: int, device: torch.device | str = "cpu", start: int = 0) -> Tensor:
    """The float32 numbers `start` to `start + numel` of a seed: multiples of 2**-24 in [0, 1).

    >>> uniform(7, 3).tolist() == uniform(7, 2, start=0).tolist() + uniform(7, 1, start=2).tolist()
    True
    """
    low, high = halves(seed)
    # 32-bit words in 64 bits: products may overflow, their lower halves are right all the same.
    words = torch.arange(start, start + numel, dtype=torch.int64, device=device).add_(low).bitwise_and_(_WORD)
    _mix(words)
    words.bitwise_xor_(high)
    _mix(words)
    return words.bitwise_right_shift_(8).to(torch.float32).mul_(2.0**-24)


def _mix(words: Tensor) -> None:
    words.bitwise_xor_(words >> 16).mul_(FIRST).bitwise_and_(_WORD)
    words.bitwise_xor_(words >> 15).mul_(SECOND).bitwise_and_(_WORD)
    words.bitwise_xor_(words >> 16)
