"""Hostile bytes to the port of torch's store: a connection each, from a process that has no part in the job.

What is wrong is in the bytes of torch's own protocol (torch/csrc/distributed/c10d/TCPStoreBackend.hpp): a number that
validates the connection, then a number for each query, and lengths before texts and lists.
"""

from __future__ import annotations

import os
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.engines.meeting import loopback_listener, reach_store
from paceline.engines.store_process import start_store, stop_store

VALID = struct.pack("=BI", 0, 0x3C85F7CE)
SET, GET, ADD, CHECK, WAIT, MULTI_GET, MULTI_SET = 1, 3, 4, 5, 6, 9, 10
HUGE = (2**30, 2**31, 2**33, 2**40, 2**63, 2**64 - 1)
HELD = 100  # Connections that stay open.
EVERY = 50  # Connections between two looks whether the store still answers.


class Garbage:
    """What strangers send, by kind."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.kinds: dict[str, Callable[[], bytes]] = {
            "nothing": lambda: b"",
            "noise": self._noise,
            "another protocol": lambda: chance.choice(
                [b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-x\r\n", b"\x16\x03\x01\2\0"]
            ),
            "a wrong number first": lambda: struct.pack("=BI", 0, chance.getrandbits(32)),
            "noise after the right number": lambda: VALID + self._noise(),
            "a query of noise": lambda: VALID + chance.randbytes(1 + chance.randrange(200)),
            "a key of gigabytes": lambda: self._query((SET, GET, ADD, WAIT, MULTI_GET), chance.choice(HUGE)),
            "a value of gigabytes": lambda: self._query((SET,), 1) + b"a" + struct.pack("=Q", chance.choice(HUGE)),
            "too many keys": lambda: self._query((CHECK, WAIT, MULTI_GET, MULTI_SET), chance.choice((1000, *HUGE))),
            "a query cut short": lambda: self._set(b"key", bytes(50))[: chance.randrange(60)],
            "a valid query": lambda: self._set(b"stranger/%d" % chance.randrange(50), chance.randbytes(20)),
        }

    def _noise(self) -> bytes:
        return self._chance.randbytes(self._chance.choice([1, 3, 10, 100, 3000]))

    def _query(self, types: tuple[int, ...], length: int) -> bytes:
        return VALID + struct.pack("=BQ", self._chance.choice(types), length)

    def _set(self, key: bytes, value: bytes) -> bytes:
        return VALID + struct.pack("=BQ", SET, len(key)) + key + struct.pack("=Q", len(value)) + value


def fuzz_store(connections: int, seed: int) -> dict[str, Any]:
    """Make so many connections to a store; every so often a client of the job asks it for a value."""
    chance = random.Random(seed)
    garbage = Garbage(chance)
    listener = loopback_listener()
    port = listener.getsockname()[1]
    process = start_store(listener, 1)
    listener.close()
    pid = process.pid
    client = reach_store(port)
    client.set("good", "value")
    held: list[socket.socket] = []
    kinds, memory, waits = Counter[str](), [resident_kib(pid)], list[float]()
    exact = True
    began = time.monotonic()
    try:
        for number in range(connections):
            kind = chance.choice(list(garbage.kinds))
            kinds[kind] += 1
            with suppress(ConnectionError):
                connection = socket.create_connection(("127.0.0.1", port), timeout=10)
                held.append(connection)
                connection.sendall(garbage.kinds[kind]())
            if len(held) > HELD or chance.random() < 0.9:
                held.pop(0).close()
            if number % EVERY == 0:
                start = time.monotonic()
                exact &= client.get("good") == b"value"
                waits.append(time.monotonic() - start)
                memory.append(resident_kib(pid))
                if process.poll() is not None:
                    break
        code = process.poll()
    finally:
        for connection in held:
            connection.close()
        with suppress(ProcessLookupError):
            stop_store(process)
    return {
        "connections": kinds.total(),
        "kinds": dict(kinds),
        "seconds": round(time.monotonic() - began, 1),
        "exit code": code,
        "longest answer, s": round(max(waits), 3),
        "value is exact": exact,
        "KiB at the start": memory[0],
        "KiB after a quarter": memory[len(memory) // 4],
        "KiB at the end": memory[-1],
    }


def resident_kib(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
