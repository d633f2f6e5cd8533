"""Arena: memory of one rank that its peers have mapped, used as a ring of slots."""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

LINE = 64  # Bytes of a cache line; slots begin at one.
LEAST = 1 << 20  # Bytes of the first arena.

NOTHING = torch.empty(0, dtype=torch.uint8)


class Arena:
    """One rank's own.  It grows when it is full; `announce` is given the new one's file and size, to tell the peers."""

    def __init__(self, announce: Callable[[int, int], None]) -> None:
        self.memory = NOTHING
        self._announce = announce
        self._slots: deque[tuple[int, int, int]] = deque()  # Number, start and stop of those that a peer may yet read.

    def slot(self, number: int, nbytes: int, *, read: int) -> tuple[int, Tensor]:
        """Where collective `number` has its room, and the room; slots up to number `read` are used again."""
        while self._slots and self._slots[0][0] <= read:
            self._slots.popleft()
        size = aligned(max(nbytes, 1))
        start = 0
        if self._slots:
            oldest, newest = self._slots[0][1], self._slots[-1][2]
            is_wrapped = newest <= oldest
            if (oldest if is_wrapped else self.memory.numel()) - newest >= size:
                start = newest
            elif is_wrapped or oldest < size:
                start = self.memory.numel()
        if start + size > self.memory.numel():
            self._grow(max(2 * self.memory.numel(), 2 * size, LEAST))
            start = 0
        self._slots.append((number, start, start + size))
        return start, self.memory[start : start + nbytes]

    def close(self) -> None:
        self.memory = NOTHING

    def _grow(self, nbytes: int) -> None:
        # Peers keep the old arena mapped for as long as they have slots of it to read, so it can be forgotten here.
        self._slots.clear()
        file = os.memfd_create("paceline")
        try:
            os.ftruncate(file, nbytes)
            self.memory = mapped(file, nbytes)
            self._announce(file, nbytes)
        finally:
            os.close(file)


def aligned(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE


def mapped(file: int, nbytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)
