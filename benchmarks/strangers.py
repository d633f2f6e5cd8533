"""What strangers and encryption cost a mailbox.

Two ranks exchange a small message there and back, while strangers connect to one of them and say nothing, or a byte a
second. Then ZeroMQ's own round trips, with CURVE and without it, in turn.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import socket
import tempfile
import time
from contextlib import suppress
from multiprocessing.context import ForkContext
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import zmq
from torch.distributed import FileStore

from benchmarks._frame import markdown, show, table
from paceline.protocol.messages import Message
from paceline.transport import mailbox
from paceline.transport.mailbox import Mailbox

STRANGERS = ((10_000, False), (200, True))  # How many, and whether each sends a byte a second.
SIZES = ((100, 300), (25_000_000, 5))  # Bytes of a message, and round trips in a row.
TURNS = 4
BETWEEN_S = 0.002  # Between two round trips.
STRANGERS_HEAD = ["strangers", "median", "99 of 100 below", "files of that process", "its memory"]
CURVE_HEAD = ["message", "plain", "CURVE", "ratio"]


class Ping(Message):
    """Carries nothing."""


def echo(store: str) -> None:
    torch.set_num_threads(1)
    box = Mailbox(FileStore(store), 0, 2, timeout_s=300)
    while True:
        box.recv().wait()
        box.send(1, Ping()).wait()


def connect(address: tuple[str, int], count: int, sends: bool) -> None:
    """Open so many connections, and keep them open."""
    sockets: list[socket.socket] = []
    for _ in range(count):
        one = socket.socket()
        one.settimeout(10)
        with suppress(OSError):
            one.connect(address)
        sockets.append(one)
    while True:
        time.sleep(1)
        for one in sockets if sends else ():
            with suppress(OSError):
                one.send(b"\xff")


def round_trips(box: Mailbox, seconds: float) -> list[str]:
    """The median and the 99th percentile of round trips, in ms."""
    times: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.perf_counter()
        box.send(0, Ping()).wait()
        box.recv().wait()
        times.append(1e3 * (time.perf_counter() - start))
        time.sleep(BETWEEN_S)
    return [f"{median(times):.2f} ms", f"{quantiles(times, n=100)[98]:.1f} ms"]


def memory_kib(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 1024


def strangers_lines(context: ForkContext, seconds: float) -> list[list[str]]:
    mailbox.memory_domain = lambda: ""  # No shared memory: messages go through the sockets.
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        other = context.Process(target=echo, args=(store,), daemon=True)
        other.start()
        assert other.pid is not None
        box = Mailbox(FileStore(store), 1, 2, timeout_s=300)
        host, _, port = FileStore(store).get("mail/0").decode().split(" ")[0].removeprefix("tcp://").rpartition(":")
        lines = [["none", *round_trips(box, seconds), "", ""]]
        for count, sends in STRANGERS:
            before = memory_kib(other.pid)
            crowd = context.Process(target=connect, args=((host, int(port)), count, sends), daemon=True)
            crowd.start()
            times = round_trips(box, seconds)
            files = len(os.listdir(f"/proc/{other.pid}/fd"))
            what = "send a byte a second" if sends else "say nothing"
            more = f"+ {memory_kib(other.pid) - before:,} KiB"
            lines.append([f"{count:,} that {what}", *times, str(files), more])
            crowd.kill()
            crowd.join()
        other.kill()
        other.join()
        box.close()
    return lines


def echo_plainly(queue: Any, keys: tuple[bytes, bytes] | None) -> None:
    pair = zmq.Context().socket(zmq.PAIR)
    if keys is not None:
        pair.curve_server = True
        pair.curve_publickey, pair.curve_secretkey = keys
    queue.put(pair.bind_to_random_port("tcp://127.0.0.1"))
    while True:
        pair.send(pair.recv(copy=False), copy=False)


def curve_lines(context: ForkContext) -> list[list[str]]:
    server, client = zmq.curve_keypair(), zmq.curve_keypair()
    queue = context.Queue()
    pairs: dict[bool, zmq.SyncSocket] = {}
    others: list[Any] = []
    for is_encrypted in (False, True):
        others.append(context.Process(target=echo_plainly, args=(queue, server if is_encrypted else None), daemon=True))
        others[-1].start()
        pairs[is_encrypted] = zmq.Context.instance().socket(zmq.PAIR)
        if is_encrypted:
            pairs[True].curve_serverkey = server[0]
            pairs[True].curve_publickey, pairs[True].curve_secretkey = client
        pairs[is_encrypted].connect(f"tcp://127.0.0.1:{queue.get()}")
    lines: list[list[str]] = []
    for nbytes, count in SIZES:
        message = bytes(nbytes)
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(TURNS):
            for is_encrypted, pair in pairs.items():
                times[is_encrypted] += [round_trip(pair, message) for _ in range(count)]
        plain, encrypted = median(times[False]), median(times[True])
        lines.append([f"{nbytes:,} bytes", f"{1e3 * plain:.3g} ms", f"{1e3 * encrypted:.3g} ms"])
        lines[-1].append(f"{encrypted / plain:.2f}")
    for other in others:
        other.kill()
        other.join()
    for pair in pairs.values():
        pair.close(linger=0)
    return lines


def round_trip(pair: zmq.SyncSocket, message: bytes) -> float:
    start = time.perf_counter()
    pair.send(message, copy=False)
    pair.recv(copy=False)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of round trips with each kind of strangers")
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    args = parser.parse_args()
    # 10,000 connections of one process.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    context = multiprocessing.get_context("fork")
    for head, lines in ((STRANGERS_HEAD, strangers_lines(context, args.seconds)), (CURVE_HEAD, curve_lines(context))):
        show(markdown(head, lines) if args.markdown else table(head, lines, right=0), width=160)
        print()


if __name__ == "__main__":
    main()
