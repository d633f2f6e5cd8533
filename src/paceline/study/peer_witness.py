"""PeerWitness: whether workers without a server took each other for dead at the end of their run.

A suspicion that is over when the first worker has no data left changes nothing.  One that lasts longer may leave the
workers with different models: each part of them ends the run without the others.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.protocol.messages import Message, PeerDied, PeerSuspected
from paceline.sim.run import Simulation


class PeerWitness:
    """Watches the suspicions of a run, beside what already watches its messages."""

    def __init__(self, simulation: Simulation) -> None:
        self.has_late_suspicion = False
        self._open: set[tuple[int, int]] = set()  # The rank that suspects, and the one that is suspected.
        self._is_ending = False
        world = simulation.world
        if world.layout.servers:
            return
        self._world = world
        world.on_message = self._beside(world.on_message)
        for worker in simulation.workers:
            cursor = worker.replica.cursor
            cursor.on_end = _both(self._end, cursor.on_end)

    def _beside(self, other: Callable[[int, Message], None] | None) -> Callable[[int, Message], None]:
        def on_message(dst: int, message: Message) -> None:
            if isinstance(message, PeerSuspected) and self._is_over(message.src):
                pass  # It is silent for ever, and is known to be, or will be.
            elif isinstance(message, PeerSuspected):
                self._open.add((dst, message.src))
                self.has_late_suspicion |= self._is_ending
            else:
                self._open.discard((dst, message.src))
                if isinstance(message, PeerDied):
                    self._open -= {pair for pair in self._open if pair[0] == message.src}
            if other is not None:
                other(dst, message)

        return on_message

    def _is_over(self, rank: int) -> bool:
        return rank in self._world.dead or self._world.has_ended(rank)

    def _end(self) -> None:
        """A worker has no data left."""
        self._is_ending = True
        self.has_late_suspicion |= bool(self._open)


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        second()

    return both
