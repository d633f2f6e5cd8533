"""Whereabouts: what each rank was doing when an exchange failed, in the user's terms.

A rank notes where it is in plain attributes, which costs nothing.  It writes its place to the job's store only when an
exchange has failed, when it leaves by an error, or when it has been at the same place for long: a thread looks now and
then.  So a rank whose exchange fails finds in the store where the others are, on this host and on others.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch.distributed import Store

from paceline.engines.supervisor import report_now
from paceline.errors import ClusterError, DifferentCollectives, ExchangeFailed
from paceline.transport.journal import Journal, first_difference

LONG_S = 2.0  # At the same place.
PATIENCE_S = 5.0  # For the places of the others: those that wait too write theirs within twice LONG_S.
POLL_S = 0.05

SAME_LOOP = (
    "Every rank must take the same steps and make the same passes over session.shard, also to evaluate; a rank may "
    "leave its loop early only to leave the `with` block."
)
GONE = "Read the error of the rank that has left first."
AWAY = "The others wait for a rank only timeout_s seconds: whatever it does alone must take less, or follow the block."
SILENT = "A rank that has not said where it is may be dead, or cut off."


class Whereabouts:
    """Where this rank is in the user's loop, for the other ranks' errors."""

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: Sequence[int],
        *,
        where: Callable[[], str],
        journal: Journal,
        timeout_s: float,
    ) -> None:
        """`where` says at which step this rank is."""
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._where = where
        self._journal = journal
        self._long_s = min(LONG_S, timeout_s / 8)
        self.passes = 0  # Over session.shard.
        self._doing: str | None = None  # None: it is in the user's own code,
        self._before = "at the start"  # after it has been here.
        self._moves = 0
        self._is_final = False  # Its last place is written.
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look from now on whether this rank has been at one place for long."""
        if len(self._ranks) > 1:
            self._thread = threading.Thread(target=self._watch, name="paceline-whereabouts", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    @contextmanager
    def during(self, doing: str) -> Generator[None]:
        """If an exchange fails in this block, the error says what each rank was doing."""
        outer = self._doing
        self._doing = doing
        self._moves += 1
        try:
            yield
        except (DifferentCollectives, ExchangeFailed) as error:
            text = self._told(error)
            if text is None:
                raise
            raise ClusterError(f"{text}  ({error})") from error
        finally:
            self._doing = outer
            self._before = doing
            self._moves += 1

    def leave(self, error: BaseException) -> None:
        """This rank leaves its session by an error: the others may wait for it in vain."""
        report_now(error)
        with suppress(RuntimeError):  # The process that serves the store may have left before.
            self._write("gone", f"gone ({type(error).__name__}: {str(error)[:200]}), {self._position()}")

    # Writing.

    def _position(self) -> str:
        return f"{self._where()}, in pass {self.passes} over session.shard"

    def _place(self) -> str:
        doing = self._doing or f"in its own code (before that, {self._before})"
        return f"{doing}, {self._position()}"

    def _write(self, state: str, text: str, *, is_final: bool = True) -> None:
        place = {"state": state, "text": text, "started": self._journal.entries()}
        with self._writing:
            if not self._is_final:
                self._is_final = is_final
                self._store.set(f"whereabouts/{self._rank}", json.dumps(place) if state else "")

    def _watch(self) -> None:
        seen = written = -1
        with suppress(RuntimeError):  # The process that serves the store has left.
            while not self._stop.wait(self._long_s):
                moves = self._moves
                if moves == seen and moves != written:
                    self._write("away" if self._doing is None else "waits", self._place(), is_final=False)
                    written = moves
                elif moves != written and written >= 0:
                    self._write("", "", is_final=False)
                    written = -1
                seen = moves

    # Reading.

    def _told(self, error: ClusterError) -> str | None:
        """What all ranks were doing; None if that explains nothing."""
        with suppress(RuntimeError):
            self._write("failed", self._place())
        places = self._places()
        if self._rank not in places:
            return None
        mine = places[self._rank]
        states = {place["state"] for place in places.values()}
        is_different = any(first_difference(mine["started"], other["started"]) for other in places.values())
        lines = "; ".join(_lines(places, self._ranks))
        if is_different or isinstance(error, DifferentCollectives):
            return f"the loops of the ranks have diverged: {lines}.  {SAME_LOOP}"
        if "gone" in states:
            return f"an exchange failed: {lines}.  {GONE}"
        if "away" in states:
            return f"an exchange failed: {lines}.  {AWAY}"
        if len(places) < len(self._ranks):
            return f"an exchange failed: {lines}.  {SILENT}"
        if len({place["text"] for place in places.values()}) > 1:
            return f"an exchange failed: {lines}."
        return None

    def _places(self) -> dict[int, dict[str, Any]]:
        """The places of all ranks that have written theirs, or do so soon."""
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + PATIENCE_S
        with suppress(RuntimeError):
            while True:
                for rank in self._ranks:
                    key = f"whereabouts/{rank}"
                    if rank not in found and self._store.check([key]) and (text := self._store.get(key).decode()):
                        found[rank] = json.loads(text)
                if len(found) == len(self._ranks) or time.monotonic() > deadline:
                    break
                time.sleep(POLL_S)
        return found


def _lines(places: dict[int, dict[str, Any]], ranks: Sequence[int]) -> list[str]:
    """Each place, with the ranks that were there."""
    at: defaultdict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        at[places[rank]["text"] if rank in places else ""].append(rank)
    return [
        f"{_named(there)} {'was' if len(there) == 1 else 'were'} {text}"
        if text
        else f"{_named(there)} {'has' if len(there) == 1 else 'have'} not said where"
        for text, there in at.items()
    ]


def _named(ranks: Sequence[int]) -> str:
    """
    >>> _named([3]), _named([0, 1, 5])
    ('rank 3', 'ranks 0, 1 and 5')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
