"""Hosts: which ranks share a host, and how hosts reach each other."""

from __future__ import annotations

import os
import socket
from ipaddress import ip_address
from pathlib import Path

import torch.distributed as dist

LOOPBACK = "127.0.0.1"


class Hosts:
    """The hosts of a job, as all ranks have published them in its store."""

    def __init__(self, store: dist.Store, rank: int, workers: int) -> None:
        names = gather(store, rank, workers, "host", _name())
        self._names = names
        self.ranks = [[r for r in range(workers) if names[r] == name] for name in dict.fromkeys(names)]
        self.name = names[rank]
        self.own = next(i for i, ranks in enumerate(self.ranks) if rank in ranks)
        self.address = LOOPBACK if self.is_one else _own_address(store, rank, workers)

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def is_one(self) -> bool:
        return len(self.ranks) == 1

    def are_together(self, ranks: tuple[int, ...]) -> bool:
        """Whether these ranks are all on one host."""
        return len({self._names[rank] for rank in ranks}) == 1


def gather(store: dist.Store, rank: int, workers: int, key: str, value: str) -> list[str]:
    """Publish a value, and wait for those of all ranks."""
    store.set(f"{key}/{rank}", value)
    return [store.get(f"{key}/{other}").decode() for other in range(workers)]


def _name() -> str:
    """Equal for two processes exactly if shared memory and abstract sockets can join them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def _own_address(store: dist.Store, rank: int, workers: int) -> str:
    """The address at which the other hosts reach this one."""
    mine = _address_towards(os.environ.get("MASTER_ADDR", LOOPBACK))
    for other in gather(store, rank, workers, "address", mine):
        # The master's own name often leads to its loopback.
        if ip_address(mine).is_loopback and not ip_address(other).is_loopback:
            mine = _address_towards(other)
    return mine


def _address_towards(host: str) -> str:
    """This host's address on the route to another one; nothing is sent."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
