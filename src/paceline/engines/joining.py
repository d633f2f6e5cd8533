"""Joining: what the ranks of a job tell each other first, and which key they share.

Each rank publishes its versions and its host, signed with the job's key if it was given one.  Ranks with different keys
or versions are refused by name, before anything else is opened.  On one host rank 0 makes the key if none was given,
and hands it to the others through unix sockets, where the kernel tells the user of the other end.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import stat
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from paceline.engines.hosts import Hosts, RollCall, host_name
from paceline.engines.place import Place
from paceline.errors import ClusterError
from paceline.transport.job_key import HEADER, JobKey, SignedStore, differing, is_signed, sign

KEY = "PACELINE_JOB_KEY"
KEY_FILE = "PACELINE_JOB_KEY_FILE"
GIVE = f"give the same {KEY_FILE} (or {KEY}) to all workers"
HELLO = "hello"
BYTES = "latin-1"  # The roll call carries text, and a MAC is bytes.
CREDENTIALS = struct.Struct("iII")  # Process, user and group of a unix socket's other end.
READ_S = 2.0  # How long a rank with an error lets the others read what it has published.


class Joined(NamedTuple):
    """The job's store, signed if there is a key, and the key."""

    store: dist.Store
    key: JobKey | None


def given_key() -> JobKey | None:
    """The key that the user or the launcher has given to this process; None if there is none."""
    path = os.environ.get(KEY_FILE)
    text = os.environ.get(KEY)
    if path and text:
        raise ValueError(f"{KEY} and {KEY_FILE} are both set: unset one of them")
    if text:
        return JobKey.of_text(text, f"the variable {KEY}")
    return _key_in(Path(path)) if path else None


def write_key(key: JobKey, path: Path) -> None:
    """Write a key to a new file that only this user can read."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(file, "w") as opened:
        opened.write(key.text() + "\n")


def _key_in(path: Path) -> JobKey:
    try:
        with path.open() as opened:
            found = os.fstat(opened.fileno())
            if stat.S_IMODE(found.st_mode) & 0o077:
                raise ValueError(f"{KEY_FILE}={path}: other users can read or write the file; run `chmod 600 {path}`")
            if found.st_uid not in (os.geteuid(), 0):
                raise ValueError(f"{KEY_FILE}={path}: the file belongs to another user ({found.st_uid})")
            text = opened.read(4096)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"{KEY_FILE}={path}: the job's key cannot be read: {reason}") from None
    return JobKey.of_text(text, f"{KEY_FILE}={path}")


def join(base: dist.Store, prefix: str, place: Place, *, timeout_s: float, may_return: bool = False) -> Joined:
    """Compare keys and versions with the other ranks through the store; agree on a key if none was given.

    A rank joins once, unless it `may_return` after its death.
    """
    plain = dist.PrefixStore(prefix, base)
    key = place.key or given_key()
    rank, workers = place.rank, place.world
    if workers == 1:
        key = key or JobKey.fresh()
    else:
        # A rank that returns was given the key: it is handed over at the start alone.
        if plain.add(f"{HELLO} of {rank}", 1) > 1 and not (may_return and key is not None):
            raise ClusterError(
                f"rank {rank} has joined this job before: its rendezvous has the keys of an earlier job, or two "
                f"processes are rank {rank}; give each job a store of its own (another MASTER_PORT, or another file)"
            )
        roll = RollCall(plain, base, rank, workers, timeout_s=timeout_s)
        hellos = _exchange(plain, roll, prefix, key)
        if key is None and len({hello["host"] for hello in hellos}) == 1 and hasattr(socket, "SO_PEERCRED"):
            key = _handed_over(plain, rank, workers, time.monotonic() + timeout_s)
    return Joined(plain if key is None else SignedStore(plain, key, prefix), key)


def mailbox_address(hosts: Hosts, key: JobKey | None) -> str:
    """The address at which this process's mailbox listens; beyond this host only in a job that has a key."""
    if key is None and not hosts.is_one:
        raise ValueError(
            "messages between hosts need a job key, without which any process that reaches the rendezvous could "
            f"join: make one by `openssl rand -hex 32`, and {GIVE}"
        )
    return hosts.address


def _exchange(store: dist.Store, roll: RollCall, scope: str, key: JobKey | None) -> list[dict[str, Any]]:
    """What all ranks have published about themselves."""
    mine = json.dumps({"host": host_name(), **_versions()}).encode()
    published = mine if key is None else sign(key, scope, f"{HELLO}/{roll.rank}", mine)
    try:
        raws = [text.encode(BYTES) for text in roll.gather(HELLO, published.decode(BYTES))]
    except UnicodeError:
        raise ClusterError("what ranks have published in the job's store is not from ranks of paceline") from None
    store.add(f"{HELLO} read", 1)
    wrong = differing(raws, key, scope, HELLO)
    if wrong is not None:
        raise _after_others(store, roll, f"{wrong}: {GIVE}.  Or another job uses the same rendezvous")
    hellos = [_parsed(raw, other) for other, raw in enumerate(raws)]
    for other, hello in enumerate(hellos):
        for name in _versions():
            if hello.get(name) != hellos[0].get(name):
                text = f"rank 0 has {name} {hellos[0].get(name)} and rank {other} has {name} {hello.get(name)}"
                raise _after_others(store, roll, f"{text}: install the same version on all hosts")
    return hellos


def _versions() -> dict[str, str]:
    from paceline import __version__

    # Without what follows a plus: hosts may have builds for different processors.
    return {"paceline": __version__, "torch": torch.__version__.partition("+")[0]}


def _parsed(raw: bytes, rank: int) -> dict[str, Any]:
    try:
        hello = json.loads(raw[HEADER:] if is_signed(raw) else raw)
    except ValueError:
        hello = None
    if not isinstance(hello, dict) or not isinstance(hello.get("host"), str):
        raise ClusterError(f"what rank {rank} has published in the job's store is not from a rank of paceline")
    return hello


def _after_others(store: dist.Store, roll: RollCall, text: str) -> ValueError:
    """The error, once the others have read the same: this rank may be the one that serves the store."""
    deadline = time.monotonic() + READ_S
    with suppress(RuntimeError):
        while store.add(f"{HELLO} read", 0) < roll.workers and time.monotonic() < deadline:
            time.sleep(0.01)
    return ValueError(text)


def _handed_over(store: dist.Store, rank: int, workers: int, deadline: float) -> JobKey:
    """A fresh key of rank 0's, on all ranks of this host.  A socket of another user neither gets nor gives it."""
    if rank:
        return _asked(store.get("key").decode(), rank, deadline)
    key = JobKey.fresh()
    waiting = set(range(1, workers))
    name = secrets.token_hex(16)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0paceline-key-{name}")
        listener.listen(workers)
        store.set("key", name)
        while waiting:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connection = listener.accept()[0]
            except TimeoutError:
                raise ClusterError(f"rank 0 has waited for ranks {sorted(waiting)} to ask for the job's key") from None
            with connection, suppress(OSError, ValueError):  # A rank that dies here is missed by the rest of the job.
                connection.settimeout(1.0)
                if _user(connection) == os.geteuid():
                    asking = int(connection.recv(32))
                    connection.sendall(key.text().encode())
                    waiting.discard(asking)
    return key


def _asked(name: str, rank: int, deadline: float) -> JobKey:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            connection.connect(f"\0paceline-key-{name}")
            if _user(connection) != os.geteuid():
                raise ClusterError(f"rank {rank}: another user's process offers a job key in the place of rank 0")
            connection.sendall(str(rank).encode())
            received = b""
            while part := connection.recv(256):
                received += part
        except OSError as error:
            raise ClusterError(
                f"rank {rank} did not get the job's key from rank 0: {error.strerror or error}"
            ) from None
    return JobKey.of_text(received.decode(errors="replace"), "rank 0's answer")


def _user(connection: socket.socket) -> int:
    return CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))[1]
