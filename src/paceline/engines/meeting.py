"""How ranks find rank 0's store.

With MASTER_ADDR and MASTER_PORT it is there.  Without them, and with all ranks on one host, rank 0 serves it on a free
loopback port and tells the others the port through a unix socket.  The socket's name is made of the job's id.  It is
abstract, so nothing stays on a disk, however the job ends.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from paceline.engines.master import store_at_master
from paceline.errors import ClusterError

CREDENTIALS = struct.Struct("iII")  # Process, user and group of a unix socket's other end.
TOKEN = "paceline/token"
RETRY_S = 0.02

_met: dict[tuple[object, ...], dist.Store] = {}  # A process meets the others once; rank 0 may be serving the store.


def meet_alone(timeout_s: float) -> dist.Store:
    """A store for the servers of a job with one worker."""
    return _once(("alone",), lambda: serve_store(loopback_listener()))


def meet_at_master(rank: int, world: int, is_one_host: bool, timeout_s: float) -> dist.Store:
    """The store at MASTER_ADDR and MASTER_PORT, served by rank 0 or by the launcher."""
    return _once(("master", rank, world), lambda: store_at_master(rank, world, timeout_s, is_one_host=is_one_host))


def meet_on_this_host(job_id: str, rank: int, world: int, timeout_s: float) -> dist.Store:
    """A store on loopback, served by rank 0 of the job, all of whose ranks are on this host."""
    if not hasattr(socket, "SO_PEERCRED"):
        raise ValueError("ranks meet through abstract unix sockets on Linux alone: set MASTER_ADDR and MASTER_PORT")
    name = f"\0paceline-meet-{os.getuid()}-{hashlib.sha256(job_id.encode()).hexdigest()[:32]}"
    meet = _serve if rank == 0 else _ask
    return _once((job_id, rank, world), lambda: meet(name, rank, world, time.monotonic() + timeout_s))


def loopback_listener(port: int = 0) -> socket.socket:
    """A listening socket on loopback alone; port 0: any free one."""
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(4096)
    except OSError:
        listener.close()
        raise
    return listener


def serve_store(listener: socket.socket) -> dist.TCPStore:
    """A store served by this process through `listener`, which it takes; torch would listen on every interface."""
    port = listener.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def reach_store(port: int) -> dist.TCPStore:
    """A store that another process of this host serves."""
    return dist.TCPStore("127.0.0.1", port, is_master=False)


def _once(key: tuple[object, ...], meet: Callable[[], dist.Store]) -> dist.Store:
    key = (os.getpid(), *key)
    if key not in _met:
        _met[key] = meet()
    return _met[key]


def _serve(name: str, rank: int, world: int, deadline: float) -> dist.Store:
    """Rank 0: serve the store, and answer until every other rank has asked for its port."""
    store = serve_store(loopback_listener())
    token = secrets.token_hex(16)
    store.set(TOKEN, token)
    answer = json.dumps({"port": store.port, "token": token}).encode()
    waiting = set(range(1, world))
    with socket.socket(socket.AF_UNIX) as listener:
        _bind(listener, name, deadline)
        listener.listen(world)
        while waiting:
            listener.settimeout(max(RETRY_S, deadline - time.monotonic()))
            try:
                connection = listener.accept()[0]
            except TimeoutError:
                raise ClusterError(f"rank 0 has waited for ranks {sorted(waiting)} to start, in vain") from None
            with connection, suppress(OSError, ValueError):  # A rank that dies here is missed by the rest of the job.
                connection.settimeout(1.0)
                if _user(connection) == os.getuid():
                    asking = int(connection.recv(32))
                    connection.sendall(answer)
                    waiting.discard(asking)
    return store


def _bind(listener: socket.socket, name: str, deadline: float) -> None:
    """Take the name; a process of the same job that started another script may still have it."""
    while True:
        try:
            return listener.bind(name)
        except OSError as error:
            if time.monotonic() > deadline:
                raise ClusterError(f"rank 0 cannot listen for the other ranks: {error.strerror}") from None
            time.sleep(RETRY_S)


def _ask(name: str, rank: int, world: int, deadline: float) -> dist.Store:
    """Any other rank: ask rank 0 for the port of its store."""
    while True:
        answer = _asked(name, rank)
        if answer is not None:
            break
        if time.monotonic() > deadline:
            raise ClusterError(
                f"rank {rank} has waited for rank 0 to start, in vain.  If they cannot reach each other through a unix "
                "socket, because they run in different containers, set MASTER_ADDR and MASTER_PORT"
            )
        time.sleep(RETRY_S)
    store = dist.TCPStore("127.0.0.1", answer["port"], is_master=False)
    if not hmac.compare_digest(store.get(TOKEN), answer["token"].encode()):
        raise ClusterError(f"rank {rank} found another job's store at rank 0's port {answer['port']}")
    return store


def _asked(name: str, rank: int) -> dict[str, Any] | None:
    """Rank 0's answer; None if it does not listen yet, or no more."""
    with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
        connection.connect(name)
        if _user(connection) != os.getuid():
            raise ClusterError(f"rank {rank}: another user's process listens in the place of rank 0")
        connection.sendall(str(rank).encode())
        received = b""
        while part := connection.recv(4096):
            received += part
        return json.loads(received) if received else None
    return None


def _user(connection: socket.socket) -> int:
    return CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))[1]
