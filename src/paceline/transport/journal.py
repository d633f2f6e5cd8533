"""Journal: the newest collectives that a rank has started, to be compared with those of other ranks after a failure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

KEPT = 64


class Journal:
    """How many collectives a rank has started, and what the last ones were."""

    def __init__(self) -> None:
        self._count = 0
        self._newest: deque[tuple[str, int]] = deque(maxlen=KEPT)

    def note(self, kind: str, nbytes: int) -> None:
        """A collective starts; `nbytes` is the same on all ranks, or 0."""
        self._count += 1
        self._newest.append((kind, nbytes))

    def entries(self) -> list[tuple[int, str, int]]:
        """Number, kind and bytes of the newest collectives."""
        newest = list(self._newest)
        first = self._count - len(newest) + 1
        return [(first + i, kind, nbytes) for i, (kind, nbytes) in enumerate(newest)]


def first_difference(one: Sequence[Sequence[object]], other: Sequence[Sequence[object]]) -> tuple[str, str] | None:
    """The first collective that two ranks started with the same number, and that differs; as each of them names it.

    >>> first_difference([(6, "all_reduce", 136), (7, "broadcast", 8)], [(6, "all_reduce", 136), (7, "all_gather", 32)])
    ('broadcast of 8 bytes', 'all_gather of 32 bytes')
    """
    theirs = {number: rest for number, *rest in other}
    for number, *mine in one:
        if number in theirs and theirs[number] != mine:
            first, second = (f"{kind} of {nbytes} bytes" for kind, nbytes in (mine, theirs[number]))
            return first, second
    return None
