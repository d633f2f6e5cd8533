"""Queues: the requests of workers that a shard has not answered yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any, TypeVar

from paceline.protocol.messages import Request
from paceline.protocol.requests import Refusal
from paceline.server.gates import Gate
from paceline.server.messages import Exchange, Update
from paceline.server.shard_state import Wanted
from paceline.server.snapshots import message_of, plain_message

MOST_HELD = 64  # Requests of one worker that a shard keeps until it can answer them.
QUEUES = ("early", "updates", "waiting", "wanted")

Event = Update | Wanted
E = TypeVar("E", Update, Wanted)


class Queues:
    """Updates that wait for the gate, and workers that wait for the value."""

    def __init__(self) -> None:
        self.early: list[Event] = []  # Requests that arrived before the first value.
        self.updates: list[Update] = []  # Updates that wait for the gate,
        self.waiting: list[Wanted] = []  # workers with an update that a rule holds back,
        self.wanted: list[Wanted] = []  # and workers that want the value.
        # Workers with an early reply, of which they want another: their updates are held back by the rule,
        self.owed: set[int] = set()
        self.unapplied: set[int] = set()  # or wait for the gate.

    def snapshot(self) -> dict[str, Any]:
        """All requests, as plain values."""
        queues = {name: [_plain(event) for event in getattr(self, name)] for name in QUEUES}
        return {**queues, "owed": sorted(self.owed), "unapplied": sorted(self.unapplied)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        for name in QUEUES:
            setattr(self, name, [_event_of(plain) for plain in saved[name]])
        self.owed, self.unapplied = set(saved["owed"]), set(saved["unapplied"])

    def add(self, event: Event) -> None:
        if isinstance(event, Update):
            self.updates.append(event)
        elif event.src in self.owed:
            self.waiting.append(event)
        else:
            self.wanted.append(event)

    def next_update(self, gate: Gate, clocks: Mapping[int, int]) -> Update | None:
        return _first(self.updates, gate.may_push, clocks)

    def next_wanted(self, gate: Gate, clocks: Mapping[int, int]) -> Wanted | None:
        return _first(
            self.wanted, lambda src, clocks: src not in self.unapplied and gate.may_go_on(src, clocks), clocks
        )

    def release(self) -> None:
        """Answer the workers with updates that a rule has held back until now."""
        self.wanted += self.waiting
        self.waiting = []
        self.owed.clear()

    def let_go(self) -> list[Wanted]:
        """The workers that wait for a reply, which get it early so that they come to a save point."""
        held = [u for u in self.updates if isinstance(u, Exchange) and u.src not in self.unapplied]
        early = [*self.wanted, *self.waiting, *(Wanted.by(update) for update in held)]
        self.owed |= {wanted.src for wanted in self.waiting}
        self.unapplied |= {update.src for update in held}
        self.wanted, self.waiting = [], []
        return early

    def owe(self, worker: int) -> None:
        """The rule holds back the update of a worker that had an early reply."""
        self.owed.add(worker)
        self.waiting += [wanted for wanted in self.wanted if wanted.src == worker]
        self.wanted = [wanted for wanted in self.wanted if wanted.src != worker]

    def held(self, worker: int) -> list[Event]:
        """The requests of a worker that were not answered."""
        queues = (*self.early, *self.updates, *self.waiting, *self.wanted)
        return [event for event in queues if event.src == worker]

    def holds(self, request: Request) -> bool:
        """Whether a request is here and waits for its reply."""
        return any(event.request_id == request.request_id for event in self.held(request.src))

    def check_room(self, worker: int) -> None:
        if len(self.held(worker)) >= MOST_HELD:
            raise Refusal(
                f"{MOST_HELD} of its requests wait to be answered, and this shard keeps no more of one worker"
            )

    def drop(self, worker: int) -> None:
        """Forget the requests of a worker that has left or died."""
        self.early = [event for event in self.early if event.src != worker]
        self.updates = [update for update in self.updates if update.src != worker]
        self.waiting = [wanted for wanted in self.waiting if wanted.src != worker]
        self.wanted = [wanted for wanted in self.wanted if wanted.src != worker]
        self.owed.discard(worker)
        self.unapplied.discard(worker)


def _plain(event: Event) -> Any:
    return {"update": plain_message(event)} if isinstance(event, Update) else {"wanted": list(astuple(event))}


def _event_of(plain: Any) -> Any:
    return message_of(plain["update"], Update) if "update" in plain else Wanted(*plain["wanted"])


def _first(queue: list[E], may: Callable[[int, Mapping[int, int]], bool], clocks: Mapping[int, int]) -> E | None:
    """Remove and return the first that may pass.  No worker waits for an idle one, and an idle one does not wait."""
    for i, event in enumerate(queue):
        if event.src not in clocks or may(event.src, clocks):
            return queue.pop(i)
    return None
