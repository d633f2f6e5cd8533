"""Arena: one rank's memory that its peers have mapped, used as a ring buffer of slots."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from paceline.transport.memory import NO_BYTES, aligned, mapped

FIRST_NBYTES = 1 << 20  # Bytes of the first arena.


class Slot(NamedTuple):
    """The bytes from `start` to `stop` that collective `number` uses."""

    number: int
    start: int
    stop: int


class Arena:
    """Gives each collective a slot.  A full arena is replaced by a larger one.

    `announce(file, nbytes)` must send the file of the new arena to the peers.
    """

    def __init__(self, announce: Callable[[int, int], None]) -> None:
        self.memory = NO_BYTES
        self._announce = announce
        self._slots: deque[Slot] = deque()  # Those that a peer may still read, oldest first.

    def slot(self, number: int, nbytes: int, *, read: int) -> tuple[int, Tensor]:
        """The offset and memory of a slot for collective `number`; slots up to number `read` are reused."""
        while self._slots and self._slots[0].number <= read:
            self._slots.popleft()
        size = aligned(max(nbytes, 1))
        start = self._gap(size)
        if start is None:
            self._grow(max(2 * self.memory.numel(), 2 * size, FIRST_NBYTES))
            start = 0
        self._slots.append(Slot(number, start, start + size))
        return start, self.memory[start : start + nbytes]

    def close(self) -> None:
        self.memory = NO_BYTES

    def _gap(self, size: int) -> int | None:
        """Where `size` bytes are free: behind the newest slot, or at the beginning of the ring; None if nowhere."""
        capacity = self.memory.numel()
        if not self._slots:
            return 0 if size <= capacity else None
        oldest = self._slots[0].start
        newest = self._slots[-1].stop
        is_wrapped = newest <= oldest
        if (oldest if is_wrapped else capacity) - newest >= size:
            return newest
        return None if is_wrapped or oldest < size else 0

    def _grow(self, nbytes: int) -> None:
        # Peers keep the old arena mapped while they have slots of it to read, so this rank can forget it.
        self._slots.clear()
        file = os.memfd_create("paceline")
        try:
            os.ftruncate(file, nbytes)
            self.memory = mapped(file, nbytes)
            self._announce(file, nbytes)
        finally:
            os.close(file)
