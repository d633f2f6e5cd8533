"""Membership: the workers of a shard, how many updates each has pushed, and which dead ones may be replaced."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.errors import ClusterError
from paceline.protocol.messages import Request
from paceline.protocol.requests import NotAMember, OlderIncarnation, Refusal
from paceline.protocol.roster import Change, Roster, State
from paceline.server.messages import Idle, Join, Leave, Wake
from paceline.server.snapshots import message_of, plain_message

NOT_A_MEMBER = "it is not, or no longer, among the workers; it may join"


class Membership:
    """`clocks` counts the updates of each active worker; one that joins begins with the slowest.

    For a replacement of a worker that died the shard waits up to `grace_s` seconds before it ends, if there is work
    left.  If no worker has finished, it waits up to `return_s` seconds for those that are only silent.
    """

    def __init__(self, workers: Iterable[int], grace_s: float, return_s: float = math.inf) -> None:
        self.roster = Roster(workers)
        self.grace_s = grace_s
        self.return_s = return_s
        self.clocks = dict.fromkeys(self.roster.members, 0)
        self.leaving: dict[int, Leave] = {}  # Workers that have left, and wait for the final value.
        self.all_done = False  # Whether all work is done.
        self._newest: dict[int, tuple[int, int]] = {}  # Of each worker: the request that its state is from.
        self._awaited: list[float] = []  # Until when the shard waits for each replacement,
        self._return_by = math.inf  # and until when for workers that are silent.
        self._ahead = 0  # How many have joined before the death of the worker that they replace was noticed.

    # Snapshots.

    def snapshot(self) -> dict[str, Any]:
        """All that is known, as plain values."""
        return {
            "roster": self.roster.snapshot(),
            "clocks": dict(self.clocks),
            "leaving": [plain_message(request) for request in self.leaving.values()],
            "all_done": self.all_done,
            "newest": dict(self._newest),
            "awaited": list(self._awaited),
            "return_by": self._return_by,
            "ahead": self._ahead,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.roster.restore(saved["roster"])
        self.clocks = dict(saved["clocks"])
        leaving = [message_of(plain, Leave) for plain in saved["leaving"]]
        self.leaving = {request.src: request for request in leaving}
        self.all_done = saved["all_done"]
        self._newest = dict(saved["newest"])
        self._awaited = list(saved["awaited"])
        self._return_by = saved["return_by"]
        self._ahead = saved["ahead"]

    # Queries.

    @property
    def is_needed(self) -> bool:
        """Whether there are workers, or may be soon."""
        return bool(self.roster.members or (self._awaited and not self.all_done) or self.is_silent)

    @property
    def is_silent(self) -> bool:
        """Whether no worker is left and none has finished, but some may be alive: the run is not over."""
        return not self.roster.members and self._may_return

    @property
    def _may_return(self) -> bool:
        return bool(self.roster.ranks_in(State.SUSPECTED)) and not self.roster.ranks_in(State.LEFT)

    def waits_until(self) -> float | None:
        """When the shard gives up waiting for replacements and for silent workers, if no worker is left."""
        if self.roster.members:
            return None
        ends = [*self._awaited[-1:], *([self._return_by] if self.is_silent else [])]
        return min(filter(math.isfinite, ends), default=None)

    def stop_waiting(self, now: float) -> None:
        """Stop waiting for replacements whose time is over.

        Raises ClusterError if all workers were silent for too long.
        """
        self._awaited = [until for until in self._awaited if until > now]
        if self.is_silent and now >= self._return_by:
            silent = ", ".join(map(str, self.roster.ranks_in(State.SUSPECTED)))
            raise ClusterError(
                f"no worker has finished, and nothing was heard for {self.return_s:g} s of those that may be alive "
                f"(ranks {silent})"
            )

    def check_member(self, request: Request) -> None:
        """Refuse a request of a worker that is no member, or of an incarnation that is not its current one."""
        incarnation = self.roster.incarnation(request.src)
        if request.incarnation < incarnation:
            raise OlderIncarnation(NOT_A_MEMBER)
        if request.incarnation > incarnation or not self.roster.is_member(request.src):
            raise NotAMember(NOT_A_MEMBER)

    def check_admission(self, request: Join | Wake) -> bool:
        """Refuse a worker that cannot become a member; False if the request is old."""
        src = request.src
        if (left := self.leaving.get(src)) is not None and (request.incarnation, request.request_id) <= (
            left.incarnation,
            left.request_id,
        ):
            return False
        state = self.roster.state(src)
        if state is State.LEFT:
            raise Refusal("it has left, and a worker that has left does not come back")
        if state is State.DEAD:
            raise Refusal("it is dead")
        if request.incarnation < self.roster.incarnation(src):
            raise OlderIncarnation("it was declared dead again; it may join")
        return True

    # Events.

    def admit(self, request: Join | Wake) -> list[Change]:
        """A worker joins or comes back.  The loss of its older incarnation, if there was one, is among the changes."""
        if not self._is_news(request):
            return []
        was_member = self.roster.is_member(request.src)
        changes = self.roster.join(request.src, request.incarnation)
        self._note(changes)
        if not was_member and self._awaited:
            self._awaited.pop(0)
        elif not was_member:
            self._ahead += 1
        return changes

    def wake(self, request: Request) -> None:
        """A member asks for something, so it is not idle."""
        if self._is_news(request):
            self._note(self.roster.wake(request.src))

    def idle(self, request: Idle) -> None:
        """A member has nothing to do."""
        if self._is_news(request):
            self._note(self.roster.idle(request.src))

    def _is_news(self, request: Request) -> bool:
        """Whether a worker has sent this after all that is known of it.  Messages may overtake each other."""
        this = request.incarnation, request.request_id
        if this < self._newest.get(request.src, (0, 0)):
            return False
        self._newest[request.src] = this
        return True

    def leave(self, request: Leave) -> None:
        self._note(self.roster.leave(request.src))
        self.leaving[request.src] = request
        self.all_done |= request.all_done

    def lose(self, rank: int, incarnation: int, *, is_dead: bool, now: float) -> Change | None:
        """A worker is dead, or suspected to be in this incarnation.  The change, if it was a member."""
        if is_dead:  # One that has left and is only suspected still waits for the final value.
            self.leaving.pop(rank, None)
        changes = self.roster.die(rank) if is_dead else self.roster.suspect(rank, incarnation)
        self._note(changes)
        loss = next((change for change in changes if change.is_loss), None)
        if loss is not None and self._ahead:
            self._ahead -= 1
        elif loss is not None and self.grace_s:
            self._awaited.append(now + self.grace_s)
        if loss is not None:
            self._return_by = now + self.return_s
        return loss

    def _note(self, changes: list[Change]) -> None:
        for change in changes:
            if change.after is State.ACTIVE:
                self.clocks.setdefault(change.rank, min(self.clocks.values(), default=0))
            else:
                self.clocks.pop(change.rank, None)
