"""What the processes of a job listen on: `python -m tools.ports PID` shows it for a process and its descendants.

It reads /proc, so it sees what `ss -ltnpx` shows, without that program.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

LISTEN = "0A"  # The state of a listening socket in /proc/net/tcp,
ACCEPTING = 1 << 16  # and its flag in /proc/net/unix.


class Listener(NamedTuple):
    """A listening socket: its process, the name of that, "tcp" or "unix", and its address."""

    pid: int
    name: str
    kind: str
    address: str


def descendants(pid: int) -> list[int]:
    """A process, its children, theirs, and so on."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            with suppress(OSError):
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(path.name))
    found = [pid]
    for one in found:
        found += sorted(children.get(one, ()))
    return found


def listeners(*pids: int) -> list[Listener]:
    """The sockets on which these processes listen, each in its own network namespace."""
    found: list[Listener] = []
    for pid in pids:
        with suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            sockets = _sockets(pid)
            listening = {**_tcp(pid, "tcp"), **_tcp(pid, "tcp6"), **_unix(pid)}
            found += [Listener(pid, name, *listening[inode]) for inode in sorted(sockets) if inode in listening]
    return found


def _sockets(pid: int) -> set[str]:
    """The inodes of a process's sockets."""
    found: set[str] = set()
    for file in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):  # The one of this listing is closed already.
            link = os.readlink(f"/proc/{pid}/fd/{file}")
            if link.startswith("socket:["):
                found.add(link[len("socket:[") : -1])
    return found


def _tcp(pid: int, file: str) -> dict[str, tuple[str, str]]:
    lines = [line.split() for line in Path(f"/proc/{pid}/net/{file}").read_text().splitlines()[1:]]
    return {line[9]: ("tcp", _address(line[1])) for line in lines if line[3] == LISTEN}


def _address(text: str) -> str:
    """An address of /proc/net/tcp: hexadecimal, in words of this processor's byte order."""
    host, port = text.split(":")
    words = bytes.fromhex(host)
    packed = b"".join(struct.pack(">I", word) for word in struct.unpack(f"={len(words) // 4}I", words))
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    shown = socket.inet_ntop(family, packed)
    return f"{shown if family == socket.AF_INET else f'[{shown}]'}:{int(port, 16)}"


def _unix(pid: int) -> dict[str, tuple[str, str]]:
    lines = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    return {line[6]: ("unix", line[7] if len(line) > 7 else "") for line in lines if int(line[3], 16) & ACCEPTING}


def main() -> None:
    for one in listeners(*descendants(int(sys.argv[1]))):
        print(f"{one.kind:5} {one.address:40} {one.name} ({one.pid})")


if __name__ == "__main__":
    main()
