"""The store at MASTER_ADDR and MASTER_PORT, and what can be wrong with them.

torch waits for minutes for a name that does not exist, and for ever for a port where another program listens.  So each
rank looks first: for the name, for a route, and for a store at the port.  A store that is not there yet is waited for.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
import time
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address

import torch.distributed as dist

from paceline.errors import ClusterError

PATIENCE_S = 3.0  # How long a name or a route may be missing: networks of containers appear shortly after them.
NOTICE_S = 5.0  # How long a rank waits for the store in silence.
RETRY_S = 0.1
ANSWER_S = 4.0  # How long a store may take to answer.
NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL)
# TCPStore's own handshake, a query that validates (0, and a magic number) and a ping (13, and any number), which it
# sends back (torch/csrc/distributed/c10d/TCPStoreBackend.hpp).
NONCE = b"pace"
PING = struct.pack("=BIB4s", 0, 0x3C85F7CE, 13, NONCE)


class _NoStore(Exception):
    """Something listens, and is no store."""


def store_at_master(rank: int, world: int, timeout_s: float, *, is_one_host: bool) -> dist.Store:
    """The store at MASTER_ADDR and MASTER_PORT, served by rank 0 or by the launcher."""
    host = os.environ["MASTER_ADDR"]
    port = _port(os.environ["MASTER_PORT"])
    where = f"MASTER_ADDR={host} MASTER_PORT={port}"
    deadline = time.monotonic() + timeout_s
    addresses = _resolved(host, where, rank)
    limit = timedelta(seconds=timeout_s)
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    if serves:
        listener = _listener(addresses, port, may_be_loopback=is_one_host or _is_loopback(host))
        if listener is not None:
            return dist.TCPStore(host, port, world, True, limit, multi_tenant=True, master_listen_fd=listener.detach())
    else:
        _await_store(host, port, where, rank, deadline)
    try:
        return next(iter(dist.rendezvous("env://", rank=rank, world_size=world, timeout=limit)))[0]
    except dist.DistError as error:
        text = str(error).splitlines()[0]
        if "EADDRINUSE" in text or "in use" in text:
            text = f"the port is in use on rank 0's host: choose another MASTER_PORT ({text})"
        raise ClusterError(f"rank {rank}, {where}: {text}") from None


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise ValueError(f"the environment variable MASTER_PORT is {text!r}: it must be a port, 1 to 65535")
    return int(text)


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def _resolved(host: str, where: str, rank: int) -> list[str]:
    """The addresses of a host."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return sorted({str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
        except (OSError, UnicodeError) as error:
            if time.monotonic() > end:
                reason = error.strerror if isinstance(error, OSError) else "it is no host name"
                raise ClusterError(f"rank {rank}, {where}: the name cannot be resolved: {reason}") from None
        time.sleep(RETRY_S)


def _listener(addresses: list[str], port: int, *, may_be_loopback: bool) -> socket.socket | None:
    """A socket that listens at this address alone; None if torch must listen, which it does on every interface.

    The name of a host often leads to loopback on the host itself, where the other hosts would not find the store; it
    may have several addresses; and its address may be a service's, which this host does not have.
    """
    are_loopback = all(ip_address(one.partition("%")[0]).is_loopback for one in addresses)
    if (are_loopback and not may_be_loopback) or (not are_loopback and len(addresses) > 1):
        return None
    address = addresses[0]
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(4096)
    except OSError:
        listener.close()
        return None
    return listener


def _await_store(host: str, port: int, where: str, rank: int, deadline: float) -> None:
    """Until a store answers.  Its server may start later; a missing route, or another program, will not change."""
    began = time.monotonic()
    is_silent = True
    while True:
        now = time.monotonic()
        try:
            return _ping(host, port)
        except _NoStore:
            reason = "another program listens there, or a hung one: nothing there answers as torch's store does"
            raise ClusterError(f"rank {rank}, {where}: {reason}") from None
        except OSError as error:
            reason = error.strerror or str(error)
            if now > deadline or (error.errno in NO_ROUTE and now > began + PATIENCE_S):
                raise ClusterError(f"rank {rank}, {where}: there is no store: {reason}") from None
            if is_silent and now > began + NOTICE_S:
                is_silent = False
                text = f"paceline: rank {rank} waits for the store at {where}: {reason}"
                print(text, file=sys.stderr, flush=True)
        time.sleep(RETRY_S)


def _ping(host: str, port: int) -> None:
    """Raise OSError if nothing listens, and _NoStore if it is no store."""
    with socket.create_connection((host, port), timeout=ANSWER_S) as connection:
        answer = b""
        try:
            connection.sendall(PING)
            while len(answer) < len(NONCE) and (part := connection.recv(len(NONCE) - len(answer))):
                answer += part
        except OSError:  # It closed the connection, or did not answer in time.
            pass
        if answer != NONCE:
            raise _NoStore
