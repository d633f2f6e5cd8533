"""Liveness: which processes of an elastic job are dead.

A process is dead when it has ended: on this host its descriptor shows that, on another one its tether.  Any process is
dead when another was started in its place, or when its heartbeat, a count in the job's store, has stood still for too
long.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address

import torch.distributed as dist

from paceline.engines.tether import Tether, Tie


class Heartbeat:
    """A thread that counts up in the store, and looks there for what others have written.

    It has a connection of its own, since others may block.
    """

    def __init__(self, connect: Callable[[], dist.Store], process: int, *, every_s: float) -> None:
        self.newcomers = 0  # How many processes have asked to join.
        self._connect = connect
        self.process = process
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-beat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(RuntimeError):  # The store's process has ended, and so has the job.
            store = self._connect()
            count = 0
            while not self._ended.is_set():
                count += 1
                store.set(f"beat/{self.process}", str(count))
                self.newcomers = store.add("newcomers", 0)
                self._ended.wait(self._every_s)

    def close(self) -> None:
        self._ended.set()
        self._thread.join(1.0)


class Liveness:
    """What this process knows of the others, by their numbers in the job."""

    def __init__(self, store: dist.Store, host: str, *, silent_s: float) -> None:
        self._store = store
        self._host = host
        self._silent_s = silent_s
        self._seen: dict[int, tuple[str, float]] = {}  # The last heartbeat of each, and when it was found.
        self._looked: dict[int, float] = {}
        self._files: dict[int, int] = {}  # The pidfds of processes on this host.
        self._places: dict[int, tuple[str, int, int]] = {}  # Of each: its host, its launcher's rank, its incarnation.
        self._ties: dict[int, Tie] = {}  # To processes on other hosts.
        self._tether: Tether | None = None
        self._asking = threading.Lock()  # The thread that writes a checkpoint may ask too.

    def announce(self, process: int, rank: int, incarnation: int, address: str) -> None:
        """Say who this process is; other hosts reach this one at `address`."""
        if self._tether is None and not ip_address(address).is_loopback:
            self._tether = Tether(address)
        tether = None if self._tether is None else self._tether.address
        self._store.set(f"process/{process}", json.dumps([self._host, rank, incarnation, os.getpid(), tether]))

    def is_closed_to(self, process: int) -> bool:
        """Whether a process on another host listens on its loopback alone."""
        if not self._store.check([f"process/{process}"]):
            return False
        host, _, _, _, tether = json.loads(self._store.get(f"process/{process}"))
        return host != self._host and tether is None

    def host_of(self, process: int) -> str | None:
        """Its host's name; None as long as it has not said who it is."""
        with self._asking:
            self._meet(process, None)
        return self._places[process][0] if process in self._places else None

    def why_dead(self, process: int, *, launched_as: int | None = None) -> str | None:
        """Why a process counts as dead; None if it does not.

        `launched_as` is the rank of one of the first processes, which may have died before it said who it is.
        """
        with self._asking:
            return self._why_dead(process, launched_as)

    def _why_dead(self, process: int, launched_as: int | None) -> str | None:
        self._meet(process, launched_as)
        if process in self._files:
            if select.select([self._files[process]], [], [], 0)[0]:
                return "its process has ended"
        elif process in self._ties and self._ties[process].has_ended():
            return "its process has ended"
        elif process in self._places:
            _, rank, incarnation = self._places[process]
            if self._store.add(f"incarnations/{rank}", 0) > incarnation:
                return "another process was started in its place"
        return self._why_silent(process)

    def _meet(self, process: int, launched_as: int | None) -> None:
        if process in self._files or process in self._ties:
            return
        if not self._store.check([f"process/{process}"]):
            if launched_as is not None:
                self._places[process] = ("", launched_as, 1)
            return
        host, rank, incarnation, pid, tether = json.loads(self._store.get(f"process/{process}"))
        self._places[process] = (host, rank, incarnation)
        if host != self._host:
            if tether is not None:
                self._ties[process] = Tie((tether[0], tether[1]))
        else:
            try:
                self._files[process] = os.pidfd_open(pid)
            except ProcessLookupError:
                self._files[process] = os.eventfd(1)  # Ready at once, as the pidfd of a process that has ended.
            except (AttributeError, OSError):  # Some systems have no pidfds.
                return

    def _why_silent(self, process: int) -> str | None:
        now = time.monotonic()
        last, since = self._seen.setdefault(process, ("", now))
        if now - self._looked.get(process, -1.0) < self._silent_s / 20:
            return None
        self._looked[process] = now
        beat = self._store.get(f"beat/{process}").decode() if self._store.check([f"beat/{process}"]) else ""
        if beat != last:
            self._seen[process] = (beat, now)
            return None
        return f"it was silent for {now - since:.1f} s" if now - since > self._silent_s else None

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        for tie in self._ties.values():
            tie.close()
        self._ties.clear()
        if self._tether is not None:
            self._tether.close()
