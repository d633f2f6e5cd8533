"""Memory that processes of one host share: mappings of files that exist in memory only, and how they are aligned."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

CACHE_LINE = 64  # Bytes of a cache line; everything that another process reads begins at one.

NO_BYTES = torch.empty(0, dtype=torch.uint8)


def aligned(nbytes: int) -> int:
    """`nbytes`, rounded up to whole cache lines.

    >>> [aligned(n) for n in (0, 1, 64, 65)]
    [0, 64, 64, 128]
    """
    return -(-nbytes // CACHE_LINE) * CACHE_LINE


def mapped(file: int, nbytes: int) -> Tensor:
    """The first `nbytes` bytes of a file, mapped as a tensor that keeps the mapping alive."""
    return torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)
