"""Gates: when a shard goes on with what a worker has asked for.

A worker's clock counts the updates that it has pushed.  A worker that has left or died has no clock: no other worker
waits for it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paceline.checked import Checked


class Gate(Checked):
    """A frozen dataclass of settings.  Shards that see the same clocks decide the same."""

    KIND: ClassVar = "gate"
    is_lock: ClassVar[bool] = False  # Whether a worker keeps all others out, from its answer until its push.

    def may_push(self, src: int, clocks: Mapping[int, int]) -> bool:
        """Whether an update may be applied now; if not, it is asked again after every other event."""
        return True

    @abstractmethod
    def may_go_on(self, src: int, clocks: Mapping[int, int]) -> bool:
        """Whether a worker may get its reply and begin its next iteration.  Its clock counts its last push."""


@dataclass(frozen=True)
class Free(Gate):
    """No worker waits."""

    def may_go_on(self, src: int, clocks: Mapping[int, int]) -> bool:
        return True


@dataclass(frozen=True)
class Bound(Gate):
    """Bounded staleness (Ho et al. 2013): no worker begins an iteration if it is more than `bound` ahead."""

    bound: int = 4

    def __post_init__(self) -> None:
        if self.bound < 0:
            raise ValueError(
                f"Bound(bound={self.bound}): it counts the iterations that a worker may be ahead of the slowest, from 0"
            )

    def may_go_on(self, src: int, clocks: Mapping[int, int]) -> bool:
        return clocks[src] - min(clocks.values()) <= self.bound


@dataclass(frozen=True)
class RoundRobin(Gate):
    """Updates are applied in the order of ranks, one of each worker in turn."""

    def may_push(self, src: int, clocks: Mapping[int, int]) -> bool:
        return (clocks[src], src) == min((clock, rank) for rank, clock in clocks.items())

    def may_go_on(self, src: int, clocks: Mapping[int, int]) -> bool:
        return True


@dataclass(frozen=True)
class Turns(Gate):
    """A lock that workers get in the order of ranks: a worker has it from its reply until it pushes.

    Of several shards the first one keeps it.  A worker asks the others when the first one has answered, and pushes to
    the first one when the others have its push.  So no two workers ever wait for each other, each with the answers of
    some shards: not even when shards have declared workers dead at different times, and so count other clocks.
    """

    is_lock: ClassVar[bool] = True

    def may_go_on(self, src: int, clocks: Mapping[int, int]) -> bool:
        return (clocks[src], src) == min((clock, rank) for rank, clock in clocks.items())


GATES: tuple[type[Gate], ...] = (Free, Bound, RoundRobin, Turns)
