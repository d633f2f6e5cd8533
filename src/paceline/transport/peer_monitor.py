"""Watches the other ranks of a mailbox while it waits for messages, and reports those that have failed."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from paceline.transport.failure_detector import FailureDetector

# Messages that are received at most before a rank is suspected: its heartbeat may be behind them.
MAX_DRAINED = 1000


class Events(NamedTuple):
    """What happened while a mailbox waited.  `is_any` is False if the time passed without any event."""

    is_any: bool
    has_message: bool
    suspected: list[int]
    returned: list[int]
    dead: list[int]


class PeerMonitor:
    """Drives a `FailureDetector` by the clock, by heartbeats and by the ends of processes on this host.

    `receive` must receive one message from `inbox` and return its sender; None if it was none, or a heartbeat.
    """

    def __init__(
        self, inbox: zmq.SyncSocket, address: str, receive: Callable[[], int | None], *, silent_s: float | None
    ) -> None:
        self._inbox = inbox
        self._address = address
        self._receive = receive
        self._detector = FailureDetector(time.monotonic(), silent_s=silent_s)
        self._watched: dict[int, int] = {}  # The ranks whose processes are watched, by their pidfds.
        self._poller = zmq.Poller()
        self._poller.register(inbox, zmq.POLLIN)

    @property
    def dead(self) -> set[int]:
        return self._detector.dead

    def watch(self, rank: int, pid: int) -> bool:
        """Watch a process of this host that was, is or will be a rank; False if one of that rank is watched."""
        if rank in self.dead or rank in self._watched.values():
            return False
        try:
            file = os.pidfd_open(pid)
        except ProcessLookupError:
            file = os.eventfd(1)  # It has ended already; this file is ready at once, as its pidfd would be.
        except (AttributeError, OSError):  # Some systems have no pidfds.
            return False
        self._watched[file] = rank
        self._poller.register(file, zmq.POLLIN)
        return True

    def revive(self, rank: int) -> None:
        """Another process of a dead rank is there, or will be."""
        self.dead.discard(rank)

    def heartbeat(self, rank: int) -> None:
        self._detector.heartbeat(rank, time.monotonic())

    def note_message(self, rank: int) -> None:
        """A rank has sent something: if it is suspected, it is alive, and may be suspected again."""
        if self._detector.is_suspected(rank):
            self.heartbeat(rank)

    def wait(self, timeout_s: float) -> Events:
        """Wait for a message or a failure, at most `timeout_s` seconds."""
        end = time.monotonic() + min(timeout_s, 1e6)
        check_s = self._detector.check_s
        while True:
            left = max(0.0, end - time.monotonic())
            poll_s = left if check_s is None else min(left, check_s)
            ready: dict[Any, int] = dict(self._poller.poll(math.ceil(1000 * poll_s)))
            received, suspected = (0, []) if check_s is None else self._check()
            returned = self._detector.returned()
            if ready or received or suspected or returned or left <= 0:
                break
        ended = [file for file in self._watched if file in ready]
        return Events(
            is_any=bool(ready or received or suspected or returned),
            has_message=self._inbox in ready and not ended,
            suspected=suspected,
            returned=returned,
            dead=[self._confirm_death(file) for file in ended],
        )

    def close(self) -> None:
        for file in self._watched:
            os.close(file)

    def _check(self) -> tuple[int, list[int]]:
        """If it is time: receive what has arrived, and return how much that was and which ranks are suspected now."""
        if not self._detector.is_due(time.monotonic()):
            return 0, []
        received = 0
        while received < MAX_DRAINED and self._inbox.poll(0):
            self._receive()
            received += 1
        return received, self._detector.check(time.monotonic())

    def _confirm_death(self, file: int) -> int:
        """Receive the last messages of a process that has ended; its rank."""
        rank = self._watched[file]
        self._detector.process_ended(rank, time.monotonic())
        while not self._detector.confirm_death(rank, time.monotonic(), is_drained=self._is_drained()):
            if self._inbox.poll(1) and (src := self._receive()) is not None:
                self._detector.message(src, time.monotonic())
        del self._watched[file]
        self._poller.unregister(file)
        os.close(file)
        return rank

    def _is_drained(self) -> bool:
        # The inbox is polled again after the kernel: what has left the kernel since the first poll is in the inbox.
        return not (self._inbox.poll(0) or has_bytes_in_flight(self._address) or self._inbox.poll(0))


def has_bytes_in_flight(address: str) -> bool:
    """Whether the kernel has unread bytes for an address of this host, or a connection whose end has not been read."""
    port = f":{int(address.rpartition(':')[2]):04X}"
    lines: list[str] = []
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            lines += Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    connections = [line.split()[1:5] for line in lines]
    # 08 is CLOSE_WAIT: all bytes of the other end have arrived, and this end has not read up to their end.
    return any(
        port in (mine[-5:], theirs[-5:]) and (state == "08" or queues != "00000000:00000000")
        for mine, theirs, state, queues in connections
    )
