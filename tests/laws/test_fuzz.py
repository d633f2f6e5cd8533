"""For any bytes a codec decodes a vector of the right length or raises ValueError, and never writes out of bounds.

Bytes are removed, added, flipped bit by bit, set to extreme numbers, or drawn at random, for definitions and kernels.
"""

from __future__ import annotations

import random

import pytest
import torch

from paceline.codecs import Codec, kernels
from tests.laws.every import CODECS
from tests.laws.tasks import numbers

INPUTS = 100_000
SHARES = {name: INPUTS // len(CODECS) + (i < INPUTS % len(CODECS)) for i, name in enumerate(CODECS)}
LENGTHS = (1, 33, 700)
GUARD = 4  # Values on both sides of the written part.
EXTREME = [0, 1, 0x7F, 0xFF, 0x7FC00000, 0x7F800000, 0xFF800000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]


def spoiled(message: bytes, rng: random.Random) -> bytes:
    """A corrupted message."""
    data = bytearray(message)
    match rng.randrange(6):
        case 0:
            return bytes(data[: rng.randrange(len(data) + 1)])
        case 1:
            return bytes(data) + rng.randbytes(rng.randint(1, 9))
        case 2:
            return rng.randbytes(len(data))
        case 3:  # Most formats begin with a type, so try a word there.
            data[(at := 4 * rng.randrange(min(len(data) // 4, 6) or 1)) : at + 4] = rng.choice(EXTREME).to_bytes(
                4, "little"
            )
            return bytes(data[: len(message)])
        case _:
            for _ in range(rng.choice((1, 1, 2, 5))):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            return bytes(data)


def test_there_are_at_least_this_many_inputs():
    assert sum(SHARES.values()) == INPUTS


@pytest.mark.parametrize("name", CODECS)
def test_any_bytes_decode_or_raise(name: str):
    codec, rng = CODECS[name], random.Random(name)
    messages = [(n, bytes(codec.encode(x, generator()).tolist())) for n in LENGTHS for x in vectors(n)]
    for _ in range(SHARES[name]):
        numel, message = rng.choice(messages)
        data = spoiled(message, rng)
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        check(codec, tensor, numel)


def check(codec: Codec, data: torch.Tensor, numel: int) -> None:
    whole = torch.full((numel + 2 * GUARD,), 7.0)
    try:
        kernels.add(codec, data, whole[GUARD : GUARD + numel], 0.5, True)
        added = whole[GUARD : GUARD + numel]
    except ValueError:
        added = None
    assert whole[:GUARD].tolist() == whole[-GUARD:].tolist() == [7.0] * GUARD, "written beyond the vector"
    try:
        values = codec.decode(data, numel)
    except ValueError:
        assert added is None, "the kernel read what the definition refuses"
    else:
        assert values.dtype == torch.float32 and values.shape == (numel,)
        assert added is not None, "the kernel refuses what the definition reads"
        assert torch.equal((values * 0.5).nan_to_num(), added.nan_to_num())


def vectors(numel: int) -> list[torch.Tensor]:
    """Messages of many values and of few, so that an entropy coder can compress some."""
    x = numbers(numel, dtype=torch.float32)
    return [x, x.round(), 9 * (x / 2).round()]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)
