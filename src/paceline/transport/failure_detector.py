"""Failure detection: which ranks are dead, and which have stopped sending heartbeats.

The process of a rank on the same host is watched, so its end is noticed at once.  A host that is cut off or without
power sends nothing, and neither does a process that is stopped: their heartbeats are missing.
"""

from __future__ import annotations

GONE = "mail/gone/"  # The prefix under which the store has the ranks that were killed and will not be back.
# Seconds after the last message of an ended process in which another one is still expected.
DRAIN_S = 1.0


class FailureDetector:
    """Concludes from heartbeats and ended processes which ranks have failed.

    It has no socket, no clock and no thread: the caller reports what happens, with the time `now` in seconds.

    A rank is suspected if it has sent heartbeats and then none for `silent_s` seconds; with None no rank ever is.  It
    may be alive: its next heartbeat, or any other message, ends the suspicion.  A rank is dead once its process has
    ended and its last message has been received.  It stays dead.
    """

    def __init__(self, now: float, *, silent_s: float | None = None, drain_s: float = DRAIN_S) -> None:
        self.silent_s = silent_s
        self.dead: set[int] = set()
        self._suspected: set[int] = set()
        self._returned: list[int] = []
        self._drain_s = drain_s
        self._last_check = now
        self._heartbeats: dict[int, float] = {}  # When each rank that is not suspected sent its last one.
        self._draining: dict[int, float] = {}  # Ranks whose process has ended, and when to stop waiting for messages.

    @property
    def check_s(self) -> float | None:
        """How many seconds may pass between two checks; None: no check is needed."""
        return None if self.silent_s is None else self.silent_s / 4

    def heartbeat(self, rank: int, now: float) -> None:
        """A rank has sent a heartbeat."""
        if self.silent_s is not None and rank not in self.dead:
            self._heartbeats[rank] = now
            if rank in self._suspected:
                self._suspected.remove(rank)
                self._returned.append(rank)

    def suspect(self, rank: int) -> None:
        """Suspect a rank as if its heartbeats were missing."""
        self._heartbeats.pop(rank, None)
        self._suspected.add(rank)

    def is_suspected(self, rank: int) -> bool:
        return rank in self._suspected

    def returned(self) -> list[int]:
        """The ranks whose suspicion has ended since the last call."""
        returned, self._returned = self._returned, []
        return returned

    def is_due(self, now: float) -> bool:
        """Whether it is time for `check`."""
        return self.check_s is not None and not 0 <= now - self._last_check < self.check_s

    def check(self, now: float) -> list[int]:
        """The ranks that are suspected since this check.  Report all heartbeats that have arrived before."""
        if self.silent_s is None or self.check_s is None:
            return []
        if not 0 <= now - self._last_check <= 2 * self.check_s:
            # This process was stopped or busy itself, and others may have sent heartbeats that it has not received yet;
            # or its clock has jumped.
            self._heartbeats = dict.fromkeys(self._heartbeats, now)
        self._last_check = now
        suspected = [rank for rank, last in self._heartbeats.items() if now - last > self.silent_s]
        for rank in suspected:
            del self._heartbeats[rank]
        self._suspected.update(suspected)
        return suspected

    def process_ended(self, rank: int, now: float) -> None:
        """The process of a rank has ended; its last messages may still be in flight."""
        self._draining[rank] = now + self._drain_s

    def message(self, rank: int, now: float) -> None:
        """A message of a rank has been received.  If its process has ended, more may follow; if it was suspected, it
        is missed again from now on, also if it ends before its next heartbeat."""
        if rank in self._suspected:
            self.heartbeat(rank, now)
        if rank in self._draining:
            self._draining[rank] = now + self._drain_s

    def confirm_death(self, rank: int, now: float, *, is_drained: bool) -> bool:
        """Whether a rank whose process has ended is dead now; `is_drained`: no message of any rank is in flight."""
        if not is_drained and now < self._draining[rank]:
            return False
        del self._draining[rank]
        self._heartbeats.pop(rank, None)
        self._suspected.discard(rank)
        self.dead.add(rank)
        return True
