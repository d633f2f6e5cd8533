"""Queues: the requests of workers that a shard has not answered yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any, TypeVar

from paceline.protocol.messages import Request
from paceline.protocol.requests import Refusal
from paceline.server.gates import Gate
from paceline.server.messages import Update
from paceline.server.shard_state import Wanted
from paceline.server.snapshots import message_of, plain_message

MOST_HELD = 64  # Requests of one worker that a shard keeps until it can answer them.

Event = Update | Wanted
E = TypeVar("E", Update, Wanted)


class Queues:
    """Updates that wait for the gate, and workers that wait for the value."""

    def __init__(self) -> None:
        self.early: list[Event] = []  # Requests that arrived before the first value.
        self.updates: list[Update] = []  # Updates that wait for the gate,
        self.waiting: list[Wanted] = []  # workers with an update that a rule holds back,
        self.wanted: list[Wanted] = []  # and workers that want the value.

    def snapshot(self) -> dict[str, Any]:
        """All requests, as plain values."""
        return {name: [_plain(event) for event in queue] for name, queue in vars(self).items()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        for name, queue in saved.items():
            setattr(self, name, [_event_of(plain) for plain in queue])

    def add(self, event: Event) -> None:
        if isinstance(event, Update):
            self.updates.append(event)
        else:
            self.wanted.append(event)

    def next_update(self, gate: Gate, clocks: Mapping[int, int]) -> Update | None:
        return _first(self.updates, gate.may_push, clocks)

    def next_wanted(self, gate: Gate, clocks: Mapping[int, int]) -> Wanted | None:
        return _first(self.wanted, gate.may_go_on, clocks)

    def release(self) -> None:
        """Answer the workers with updates that a rule has held back until now."""
        self.wanted += self.waiting
        self.waiting = []

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
