"""Hosts: which ranks share a host, and how hosts reach each other."""

from __future__ import annotations

import os
import socket
import time
from ipaddress import ip_address
from pathlib import Path

import torch.distributed as dist

from paceline.engines.interfaces import interface_of
from paceline.errors import ClusterError

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"  # The variable in which a launcher counts its attempts to run the job.
FIRST_PAUSE_S, LAST_PAUSE_S = 0.001, 0.05  # Between two looks for what another rank has published.


class Hosts:
    """The hosts of a job, as all ranks have published them in its store."""

    def __init__(self, roll: RollCall) -> None:
        self.roll = roll
        names = roll.gather("host", host_name())
        self._names = names
        self.ranks = [[r for r in range(roll.workers) if names[r] == name] for name in dict.fromkeys(names)]
        self.name = names[roll.rank]
        self.own = next(i for i, ranks in enumerate(self.ranks) if roll.rank in ranks)
        self.address = LOOPBACK if self.is_one else _own_address(roll)

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def is_one(self) -> bool:
        return len(self.ranks) == 1

    @property
    def interface(self) -> str | None:
        """The interface of this host's address; None if it is not known, or if other hosts do not reach it."""
        found = interface_of(self.address)
        return found if self.is_one or found != LOOPBACK_INTERFACE else None

    def are_together(self, ranks: tuple[int, ...]) -> bool:
        """Whether these ranks are all on one host."""
        return len({self._names[rank] for rank in ranks}) == 1


class RollCall:
    """What the ranks of a job tell each other at its start, through the `base` store below the job's own.

    A rank that was killed and is not replaced never answers: its launcher notes that it is lost.
    """

    def __init__(self, store: dist.Store, base: dist.Store, rank: int, workers: int, *, timeout_s: float) -> None:
        self.rank = rank
        self.workers = workers
        self._store = store
        self._base = base
        self._timeout_s = timeout_s

    def gather(self, key: str, value: str) -> list[str]:
        """Publish a value, and wait for those of all ranks."""
        self._store.set(f"{key}/{self.rank}", value)
        return [self._get(key, other) for other in range(self.workers)]

    def _get(self, key: str, other: int) -> str:
        end, pause_s = time.monotonic() + self._timeout_s, FIRST_PAUSE_S
        while not self._store.check([f"{key}/{other}"]):
            if self._base.check([_lost(os.environ.get(ATTEMPT, "0"), other)]):
                raise ClusterError(f"rank {other} was killed before it had joined the job, and is not replaced")
            if time.monotonic() > end:
                raise ClusterError(
                    f"rank {self.rank} has waited {self._timeout_s:g} s for rank {other} to join the job"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
        return self._store.get(f"{key}/{other}").decode()


def note_lost(base: dist.Store, attempt: int, rank: int) -> None:
    """A launcher notes that a rank was killed and is not replaced, in its attempt to run the job."""
    base.set(_lost(str(attempt), rank), "")


def _lost(attempt: str, rank: int) -> str:
    return f"paceline/{attempt}/lost/{rank}"


def host_name() -> str:
    """Equal for two processes exactly if shared memory and abstract sockets can join them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def _own_address(roll: RollCall) -> str:
    """The address at which the other hosts reach this one."""
    mine = _address_towards(os.environ.get("MASTER_ADDR", LOOPBACK))
    for other in roll.gather("address", mine):
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
