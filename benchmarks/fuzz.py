"""Hostile bytes: to a live shard with and without the job's key, to torch's store, and as files to every loader.

The shard serves in a process of its own.  Ranks that have the key send it what `tests/dist/test_server_fuzz.py` makes:
valid messages with fields, lengths, types, shapes and numbers that are wrong, and plain noise.  Strangers connect and
send noise, parts of ZeroMQ's handshake, and whole ones without a key.  After every thousand messages a correct worker
exchanges an update with the shard; the value must be that of the correct updates alone, to the bit.  A process of its
own loads damaged files: each must load, or be refused by a ValueError or an OSError.

    python -m benchmarks.fuzz --messages 1000000 --strangers 50000 --store 20000 --files 20000
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import random
import signal
import socket
import struct
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from benchmarks._hostile_store import fuzz_store, resident_kib
from paceline.errors import ClusterError
from paceline.transport.job_key import JobKey, SignedStore

BATCH = 1000
PICKLE = b"cos\nsystem\n(S'id'\ntR."


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def show_state(pid: int, waited_s: float) -> None:
    """Print what a server that does not answer is doing; "t" and "T" are states of processes that were stopped."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = [line for line in status if line.startswith(("State:", "TracerPid:", "VmRSS:"))]
    print(f"no answer for {waited_s:.1f} s; the server:", *found, sep="\n  ", flush=True)
    os.kill(pid, signal.SIGUSR1)  # Its threads' stacks, once it runs.
    time.sleep(1)


def serve(path: str, key: JobKey) -> None:
    from tests.dist import served
    from tests.dist.test_server_fuzz import SERVERS

    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    served.mailbox.memory_domain = lambda: ""
    server = served.Server(SignedStore(FileStore(path), key, "fuzz"), **SERVERS["plain"])
    server.thread.join()
    if server.error is not None:
        raise server.error


def fuzz_server(messages: int, strangers: int, seed: int) -> dict[str, Any]:
    """Send so many messages in all, of which so many by strangers."""
    from paceline.op import drive
    from paceline.server.messages import Leave, Pull
    from tests.dist import served
    from tests.dist.test_server_fuzz import LAST, SERVERS, Fuzz

    served.mailbox.memory_domain = lambda: ""
    chance = random.Random(seed)
    key = JobKey.fresh()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "keys"))
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(path, key), daemon=True)
        process.start()
        keys = SignedStore(FileStore(path), key, "fuzz")
        good = served.Good(keys, SERVERS["plain"]["rule"])
        rogues = [served.Rogue(rank, keys) for rank in (served.ROGUE, served.OTHER)]
        good.exchange()
        fuzzes = [Fuzz(rogue, chance) for rogue in rogues]
        address = good.box._connections.peer(served.SERVER)
        knocking = Strangers(address.address, address.key, chance)
        assert process.pid is not None
        sent, waits, memory = Counter[str](), list[float](), list[int]()
        began = time.monotonic()
        batch = 0
        while sent.total() < messages:
            share = min(BATCH, messages - sent.total())
            unknown = min(share, round(strangers * (sent.total() + share) / messages) - sent["without the key"])
            for _ in range(unknown):
                knocking.send()
            sent["without the key"] += unknown
            letters: list[Any] = []
            while len(letters) < share - unknown:
                fuzz = chance.choice(fuzzes)
                letters += [(fuzz.rogue, letter) for letter in fuzz.letters()]
            for rogue, letter in letters:
                rogue.throw(letter.frames)
            sent["with the key"] += len(letters)
            start = time.monotonic()
            try:
                for rogue in rogues:
                    rogue.say(Pull(request_id=LAST + batch))
                    rogue.take(LAST + batch)
                start = time.monotonic()
                good.exchange()
            except (AssertionError, ClusterError):
                show_state(process.pid, time.monotonic() - start)
                raise
            waits.append(time.monotonic() - start)
            batch += 1
            memory.append(resident_kib(process.pid))
            if batch % 50 == 0:
                print(f"{sent.total():9,} messages, {memory[-1]:,} KiB, {time.monotonic() - began:.0f} s", flush=True)
        seconds = time.monotonic() - began
        files = open_files(process.pid)
        answers = sum((rogue.answers for rogue in rogues), Counter[str]())
        for rogue in rogues:
            rogue.say(Leave(request_id=4 * 10**9))
        is_exact = torch.equal(drive(good.store.leave()), good.expected)
        for box in (good.box, *(rogue.box for rogue in rogues)):
            box.close(linger_s=1)
        process.join(30)
        alive = process.is_alive()
        process.kill()
    quarter = len(memory) // 4
    return {
        "messages": dict(sent),
        "kinds of strangers": dict(knocking.kinds),
        "answers": dict(answers),
        "seconds": round(seconds, 1),
        "crashes": int(process.exitcode not in (0, None) and not alive),
        "hangs (exchanges that took over 1 s)": sum(wait > 1 for wait in waits),
        "longest exchange, s": round(max(waits), 3),
        "value is exact": is_exact,
        "KiB after a quarter": memory[quarter],
        "KiB at the end": memory[-1],
        "files open at the end": files,
        "exit code": None if alive else process.exitcode,
    }


class Strangers:
    """Connections without the job's key, one message each."""

    GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)

    def __init__(self, address: str, server_key: str, chance: random.Random) -> None:
        host, port = address.removeprefix("tcp://").split(":")
        self.where = host, int(port)
        self.server_key = server_key
        self.chance = chance
        self.kinds = Counter[str]()
        self._makes: dict[str, Callable[[], bytes]] = {
            "noise": lambda: chance.randbytes(chance.choice([0, 1, 10, 64, 300, 5000])),
            "another protocol": lambda: chance.choice(
                [
                    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                    b"SSH-2.0-x\r\n",
                    b"\x16\x03\x01\x02\x00",
                    PICKLE,
                ]
            ),
            "a greeting, cut short": lambda: self.GREETING[: chance.randrange(64)],
            "a damaged greeting": lambda: self._damaged(self.GREETING),
            "another mechanism": lambda: (
                self.GREETING.replace(b"CURVE", chance.choice([b"NULL\0", b"PLAIN", b"GSSAP"]))
                + self._command(b"READY", bytes(20))
            ),
            "a HELLO of noise": lambda: self.GREETING + self._command(b"HELLO", b"\1\0" + chance.randbytes(192)),
            "an INITIATE without a HELLO": lambda: self.GREETING + self._command(b"INITIATE", chance.randbytes(300)),
            "a frame of 2**63 bytes": lambda: (
                self.GREETING + struct.pack(">BQ", chance.choice([2, 4, 6]), chance.choice([2**63, 2**64 - 1, 2**40]))
            ),
        }

    def send(self) -> None:
        kind = self.chance.choice(list(self._makes))
        self.kinds[kind] += 1
        with socket.socket() as connection:
            connection.settimeout(10)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.connect(self.where)
            with suppress(ConnectionError):
                connection.sendall(self._makes[kind]())

    def _damaged(self, data: bytes) -> bytes:
        changed = bytearray(data)
        changed[self.chance.randrange(len(changed))] ^= 1 << self.chance.randrange(8)
        return bytes(changed)

    def _command(self, name: bytes, body: bytes) -> bytes:
        content = bytes([len(name)]) + name + body
        short = len(content) < 256
        return (struct.pack(">BB", 4, len(content)) if short else struct.pack(">BQ", 6, len(content))) + content


def fuzz_files(cases: int, seed: int) -> dict[str, Any]:
    """Load so many damaged files, by every loader in turn."""
    from benchmarks._damaged_files import Loaders

    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        loaders = Loaders(Path(name))
        outcomes: dict[str, Counter[str]] = {}
        crashes: list[str] = []
        longest = 0.0
        memory: list[int] = []
        for case in range(cases):
            loader = loaders.all[case % len(loaders.all)]
            path = loader.damage(chance)
            start = time.monotonic()
            try:
                loader.load()
                outcome = "loaded"
            except (ValueError, OSError):
                outcome = "refused"
            except Exception:
                outcome = "crashed"
                if len(crashes) < 20 and outcomes.setdefault(loader.name, Counter())["crashed"] < 4:
                    crashes.append(f"{loader.name}, {path}: {traceback.format_exc()}")
            longest = max(longest, time.monotonic() - start)
            outcomes.setdefault(loader.name, Counter())[outcome] += 1
            if case % 500 == 0:
                memory.append(resident_kib(os.getpid()))
            loader.restore()
        found = {name: dict(counts) for name, counts in outcomes.items()}
    return {
        "files": cases,
        "outcomes": found,
        "errors of another type": crashes,
        "longest load, s": round(longest, 3),
        "KiB after a quarter": memory[len(memory) // 4],
        "KiB at the end": memory[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--messages", type=int, default=3000, help="messages to the shard in all")
    parser.add_argument("--strangers", type=int, default=200, help="so many of them without the job's key")
    parser.add_argument("--store", type=int, default=1000, help="connections with garbage to torch's store")
    parser.add_argument("--files", type=int, default=500, help="damaged files to load")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    given = parser.parse_args()
    found: dict[str, Any] = {"seed": given.seed}
    if given.files:
        found["files"] = fuzz_files(given.files, given.seed)
        print(json.dumps(found["files"], indent=1), flush=True)
    if given.store:
        found["store"] = fuzz_store(given.store, given.seed)
        print(json.dumps(found["store"], indent=1), flush=True)
    if given.messages:
        found["server"] = fuzz_server(given.messages, given.strangers, given.seed)
        print(json.dumps(found["server"], indent=1), flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
