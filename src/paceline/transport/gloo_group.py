"""GlooGroup: a gloo process group of its own, whose collectives end when a member is dead.

gloo notices a killed member in milliseconds, and one that was stopped or cut off only after its timeout.  So a rank
that waits asks a watch now and then.  It ends what is under way by shutting down the group's connections: then gloo
writes to no tensor any more.  torch's own abort of such a group ends nothing (2.13).
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from paceline.errors import ClusterError, ExchangeFailed
from paceline.op import Op
from paceline.transport.mesh import LOOK_S, WATCH_S, Watch

T = TypeVar("T")
INTERFACE = "GLOO_SOCKET_IFNAME"
CONNECT_S = 10.0  # How long members that are alive may take to connect.
END_S = 10.0  # How long gloo may take to end what was aborted.


class GlooGroup:
    """One rank's part.  It opens no connection until `connect`."""

    def __init__(self, rank: int, ranks: Sequence[int], *, timeout_s: float, watch: Watch) -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self._timeout_s = timeout_s
        self._watch = watch
        self._others = [other for other in ranks if other != rank]
        self._listeners: list[tuple[str, int]] = []  # The address of each member.
        self._pending: list[dist.Work] = []
        self.group: dist.ProcessGroupGloo | None = None

    def connect(self, store: dist.Store, address: str) -> None:
        """Connect to the other members, found in the store.

        Its keys must be this group's own, and its connection is used by nothing else: after an error not at all.
        """
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore
        options._timeout = timedelta(seconds=min(CONNECT_S, self._timeout_s))  # pyright: ignore
        device, listener = _device(address)
        options._devices = [device]  # pyright: ignore
        store.set(f"at/{self.rank}", json.dumps(listener))
        self._wait_for(lambda: store.check([f"at/{other}" for other in self.ranks]), "to come")
        found = [json.loads(store.get(f"at/{other}")) for other in self.ranks]
        self._listeners = [(where, port) for where, port in found]
        made: list[dist.ProcessGroupGloo | Exception] = []

        def make() -> None:
            try:
                index = self.ranks.index(self.rank)
                made.append(dist.ProcessGroupGloo(store, index, len(self.ranks), options))
            except Exception as error:
                made.append(error)

        # It ends by itself after CONNECT_S, and the group that it makes then has no owner.
        threading.Thread(target=make, name="paceline-gloo", daemon=True).start()
        try:
            self._wait_for(lambda: bool(made), "to connect")
        except ClusterError:
            self._shut_down()
            raise
        if isinstance(made[0], Exception):
            raise ExchangeFailed(f"rank {self.rank} could not connect to ranks {self._others}: {made[0]}")
        self.group = made[0]
        self.group._set_default_timeout(timedelta(seconds=self._timeout_s))  # pyright: ignore

    def _wait_for(self, is_done: Callable[[], bool], doing: str) -> None:
        deadline = time.monotonic() + min(CONNECT_S, self._timeout_s)
        looked = time.monotonic()
        while not is_done():
            now = time.monotonic()
            if now - looked > WATCH_S:
                looked = now
                if (why := self._watch(self._others)) is not None:
                    raise ExchangeFailed(why)
            if now > deadline:
                raise ExchangeFailed(f"rank {self.rank} has waited for ranks {self._others} {doing}, in vain")
            time.sleep(LOOK_S)

    def begin(self, kind: str, start: Callable[[Any], dist.Work], result: Callable[[], T]) -> Op[T]:
        """Start a collective."""
        if self.group is None:
            raise ExchangeFailed(f"'{kind}' in a group that has ended")
        try:
            work = start(self.group)
        except RuntimeError as error:
            raise ExchangeFailed(f"'{kind}' failed: {error}") from error
        self._pending.append(work)
        return Watched(kind, self, work, result)

    def finish(self, work: dist.Work, kind: str) -> None:
        """Wait for a collective; abort the group if a member is dead."""
        deadline = time.monotonic() + self._timeout_s
        try:
            while not _is_done(work, kind):
                why = self._watch(self._others)
                if why is None and time.monotonic() > deadline:
                    why = f"not all of the ranks {list(self.ranks)} took part within {self._timeout_s:g} s"
                if why is not None:
                    self.abort()
                    raise ExchangeFailed(f"'{kind}': {why}")
        finally:
            if work in self._pending:
                self._pending.remove(work)

    def abort(self) -> None:
        """End what is under way; when this returns gloo does not use its tensors any more."""
        pending, self._pending = self._pending, []
        if self.group is None:
            return
        if pending:
            self._shut_down()
        for work in pending:
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=END_S))
            if not work.is_completed():
                raise AssertionError("gloo did not end a collective whose connections were shut down")
        self.group = None

    def _shut_down(self) -> None:
        """Shut down this rank's connections with the members: one end of each has the address of a listener."""
        mine = self.ranks.index(self.rank)
        others = [at for i, at in enumerate(self._listeners) if i != mine]
        for connection in _sockets():
            with connection, suppress(OSError):
                is_of_group = (
                    connection.getsockname()[:2] == self._listeners[mine] or connection.getpeername()[:2] in others
                )
                if is_of_group and not _listens(connection):
                    connection.shutdown(socket.SHUT_RDWR)


class Watched(Op[T]):
    """A collective of a group that is watched."""

    __slots__ = ("_group", "_result", "_work")

    def __init__(self, kind: str, group: GlooGroup, work: dist.Work, result: Callable[[], T]) -> None:
        super().__init__(kind)
        self._group = group
        self._work = work
        self._result = result

    def wait(self) -> T:
        self._group.finish(self._work, self.kind)
        return self._result()


def _is_done(work: dist.Work, kind: str) -> bool:
    """Wait a moment for a collective; ExchangeFailed if it has failed."""
    try:
        work.wait(timedelta(seconds=WATCH_S))
    except RuntimeError as error:
        if not work.is_completed():
            return False
        raise ExchangeFailed(f"'{kind}' failed, most likely because a peer died: {error}") from error
    return True


_making = threading.Lock()


def _device(address: str) -> tuple[dist.ProcessGroupGloo.Device, tuple[str, int]]:
    """A device of gloo on this address, or on the interface that the user has chosen, and where it listens."""
    make = dist.ProcessGroupGloo.create_device
    with _making:
        before = _listening()
        device = make(interface=os.environ[INTERFACE]) if INTERFACE in os.environ else make(hostname=address)
        new = _listening() - before
    if len(new) != 1:  # Another thread has opened one at the same moment.
        return _device(address)
    return device, new.pop()


def _listening() -> set[tuple[str, int]]:
    found: set[tuple[str, int]] = set()
    for listener in _sockets():
        with listener, suppress(OSError):
            if _listens(listener):
                found.add(listener.getsockname()[:2])
    return found


def _listens(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _sockets() -> list[socket.socket]:
    """This process's TCP sockets, each by another descriptor, to be closed."""
    found: list[socket.socket] = []
    for file in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{file}").startswith("socket:"):
                one = socket.socket(fileno=os.dup(int(file)))
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    found.append(one)
                else:
                    one.close()
    return found
