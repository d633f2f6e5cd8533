"""On which interface gloo listens: that of the address at which this host's ranks meet the others.

Left alone, gloo listens at the address of the host's name.  That is often open to the network in a job on one host, and
often loopback, where other hosts do not find it, in a job on several.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

VARIABLE = "GLOO_SOCKET_IFNAME"  # torch reads it whenever a group is opened.
LIST_ADDRESSES = 0x8912  # Linux's SIOCGIFCONF: the IPv4 addresses of all interfaces.
ENTRY = struct.Struct("16s4x4s16x")  # struct ifreq: a name, and a sockaddr_in.
MOST = 1024  # Addresses of one host.


@contextmanager
def gloo_on(interface: str | None) -> Generator[None]:
    """Groups that are opened in this block listen on this interface, unless the user's variable names another."""
    if interface is None or VARIABLE in os.environ:
        yield
        return
    os.environ[VARIABLE] = interface
    try:
        yield
    finally:
        del os.environ[VARIABLE]


def interface_of(address: str) -> str | None:
    """The interface with this address; None if this system does not say it."""
    if sys.platform != "linux":
        return None
    packed = ip_address(address.partition("%")[0]).packed
    with suppress(OSError):
        return next((name for name, one in (_ipv4() if len(packed) == 4 else _ipv6()) if one == packed), None)
    return None


def _ipv4() -> list[tuple[str, bytes]]:
    import fcntl

    buffer = array.array("B", bytes(MOST * ENTRY.size))
    request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        nbytes = struct.unpack("iP", fcntl.ioctl(any_socket, LIST_ADDRESSES, request))[0]
    found = ENTRY.iter_unpack(buffer[:nbytes].tobytes())
    return [(name.partition(b"\0")[0].decode(), address) for name, address in found]


def _ipv6() -> list[tuple[str, bytes]]:
    lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    return [(line[-1], bytes.fromhex(line[0])) for line in lines]
