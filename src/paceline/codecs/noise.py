"""Random numbers that depend only on a seed and an index, so torch, numba and Triton draw the same ones.

Each is a hash of its index.  A 32-bit integer mixer (shifts and two odd multipliers; each bit of the input flips
about half the bits of the output) is applied twice, with one half of the seed added before the first round and the
other before the second.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The multipliers of the mixer.
FIRST = 0x7FEB352D
SECOND = 0x846CA68B
_WORD = 0xFFFFFFFF


def halves(seed: int) -> tuple[int, int]:
    """A seed's lower and upper 32 bits."""
    return seed & _WORD, seed >> 32 & _WORD


def seed_of(*numbers: int) -> int:
    """A seed for torch from integers: torch uses only the lower 32 bits of a seed, so all are mixed into these.

    Two sequences that differ in one number, by less than 2**32, never give the same seed.

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
    # 32-bit words in 64 bits: products may overflow, but their lower halves are right.
    words = torch.arange(start, start + numel, dtype=torch.int64, device=device).add_(low).bitwise_and_(_WORD)
    _mix(words)
    words.bitwise_xor_(high)
    _mix(words)
    return words.bitwise_right_shift_(8).to(torch.float32).mul_(2.0**-24)


def _mix(words: Tensor) -> None:
    words.bitwise_xor_(words >> 16).mul_(FIRST).bitwise_and_(_WORD)
    words.bitwise_xor_(words >> 15).mul_(SECOND).bitwise_and_(_WORD)
    words.bitwise_xor_(words >> 16)
