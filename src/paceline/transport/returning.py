"""Returning: ranks whose processes may be killed, and which then come back as other processes.

What was sent to the old process is lost.  What the old one has sent, and what comes after the first message of the new
one, is refused.  Such a rank is dead only if the store says that it will not be back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from paceline.transport.connections import Connections
from paceline.transport.peer_monitor import PeerMonitor


class Returning:
    """Which process each of these ranks is taken for.

    `turn` is called when there is another process of a rank, `drop` when its process has ended and there is no other
    one yet, and `give_up` once it is known that there will be none.
    """

    def __init__(
        self,
        ranks: Collection[int],
        connections: Connections,
        *,
        turn: Callable[[int], object],
        drop: Callable[[int], object],
        give_up: Callable[[int], object],
    ) -> None:
        self.ranks = frozenset(ranks)
        self.lost: set[int] = set()  # Ranks that were killed and are not known to be back,
        self._gone: set[int] = set()  # and those that will not be.
        self._connections = connections
        self._turn = turn
        self._drop = drop
        self._give_up = give_up
        self._processes: dict[int, int] = {}  # The process that each rank is taken for,
        self._watched: dict[int, int] = {}  # and the one that is watched.

    def watch(self, rank: int, pid: int, monitor: PeerMonitor) -> None:
        """Watch a process of a rank, unless an earlier one of it is still watched."""
        if monitor.watch(rank, pid):
            self._watched[rank] = pid

    def met(self, rank: int, pid: int) -> None:
        """From now on the rank is this process."""
        self._processes[rank] = pid

    def ended(self, rank: int, monitor: PeerMonitor) -> None:
        """The process that was watched has ended, and another one may be there already."""
        monitor.revive(rank)
        if self._watched.pop(rank, None) == self._processes.get(rank):
            self._drop(rank)
            self.lost.add(rank)
            self.look_for(rank)
        else:
            self.watch(rank, self._processes[rank], monitor)

    def look(self, src: int | None) -> None:
        """Nothing has come from `src`, or from any rank if it is None: look for new processes of lost ranks."""
        for rank in self.ranks & ({src} if src is not None else self.lost):
            self.look_for(rank)

    def look_for(self, rank: int) -> None:
        """Turn to another process of a rank, if there is one by now."""
        if self._connections.has_moved(rank) or self._connections.peer(rank).pid != self._processes.get(rank):
            self._turn_to_new(rank)
        elif self._connections.is_gone(rank) and rank not in self._gone:
            self._gone.add(rank)
            self._give_up(rank)

    def checked(self, src: int, process: int) -> int:
        """The sender of a message.  One from a process that was killed is refused; a new process is turned to."""
        if src not in self.ranks:
            return src
        if process != self._connections.peer(src).pid and (
            not self._connections.has_moved(src) or process != self._connections.peer(src).pid
        ):
            raise ValueError("its sender was killed since, and another process has taken its place")
        if src in self._processes and process != self._processes[src]:
            self._turn_to_new(src)
        return src

    def _turn_to_new(self, rank: int) -> None:
        self.lost.discard(rank)
        self._turn(rank)
