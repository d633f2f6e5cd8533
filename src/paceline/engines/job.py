"""Job: this process's place among the workers, as its launcher set it up.

A guest of torchrun and everything that sets its variables; of a process group that the user has made; or a worker on its own.
"""

from __future__ import annotations

import itertools
import os
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from paceline.endpoint import Layout
from paceline.engines.server_process import ServerProcesses
from paceline.strategy import Strategy
from paceline.trace import Trace
from paceline.transport.comm_thread import CommThread
from paceline.transport.endpoint import BEAT_S, SILENT_S, SPANS_KEPT, Backends, Clock, Membership, ProcessEndpoint
from paceline.transport.shared_memory import SharedMemory

if TYPE_CHECKING:
    from paceline.transport.mailbox import Mailbox

_joined = itertools.count()  # Jobs that this process has joined; the same on all ranks, so it names the job's keys.


def under_launcher() -> bool:
    """Whether a launcher has told this process its rank."""
    return dist.is_initialized() or ("RANK" in os.environ and "WORLD_SIZE" in os.environ)


@cache
def _launched() -> tuple[dist.Store, int, int]:
    """What the launcher's variables lead to; once in a process, since rank 0 may be the one that serves the store."""
    return next(iter(dist.rendezvous("env://")))


class Job:
    """A strategy's ranks as real processes: rendezvous, process group, shared memory, mailboxes and companions."""

    def __init__(
        self,
        strategy: Strategy,
        *,
        device: torch.device,
        store: dist.Store | None = None,
        rank: int | None = None,
        workers: int | None = None,
        ordered: bool = False,
        apart: bool = False,
        timeout_s: float = 1800.0,
        life: int | None = None,
        takes_nonfinite: bool = False,
        silent_s: float = SILENT_S,
    ) -> None:
        """`life` is a pipe of a launcher that replaces dead workers: servers live as long as it is open, and refuse NaN unless told."""
        self._takes_nonfinite, self._silent_s, self._is_elastic = takes_nonfinite, silent_s, strategy.needs.elastic
        self._life = life if life is not None or "PACELINE_LIFE" not in os.environ else int(os.environ["PACELINE_LIFE"])
        self._timeout_s, self._device, self._own_group, self._folder = timeout_s, device, False, None
        self._companions: ServerProcesses | None = None
        self._apart: dist.ProcessGroup | None = None
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._prefix = f"paceline/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_joined)}"
        self.endpoint: ProcessEndpoint
        try:
            self._join(device, store, rank, workers, alone=strategy.needs.elastic)
            self._open(strategy, ordered, apart)
        except BaseException:
            self.close(failed=True)
            raise

    def _open(self, strategy: Strategy, ordered: bool, apart: bool) -> None:
        self.store = dist.PrefixStore(self._prefix, self._base)
        life = self.store.add(f"lives/{self.rank}", 1) if strategy.needs.elastic else 1
        epoch = float(self.store.compare_set("epoch", "", repr(time.time())).decode())
        self._hosts = self._everyones("host", _host())
        hosts = [[r for r in range(self.workers) if self._hosts[r] == h] for h in dict.fromkeys(self._hosts)]
        self.is_one_host = len(hosts) == 1
        self.bind = "127.0.0.1" if self.is_one_host else self._own_address()
        self._clock, self._ordered = Clock(epoch), ordered
        self.layout = Layout(self.workers, max(strategy.servers, len(hosts)) if strategy.servers else 0)
        if strategy.servers:
            self._serve(strategy, hosts, epoch)
        if strategy.needs.elastic:
            self._open_alone(life)
            return
        # Through shared memory a collective is carried on by whoever waits for it; a GPU has streams of its own.
        self.lane = None if self.is_one_host or self._device.type != "cpu" else CommThread()
        by_host = 1 < len(hosts) < self.workers and self.lane is not None and not ordered
        group = self._group_of_all(apart or self.lane is not None)
        if by_host:
            # By all ranks, members or not: a group that its members alone open is named by how many each of them has open already.
            firsts = tuple(min(h) for h in hosts)
            between = dist.new_group(list(firsts), timeout=timedelta(seconds=self._timeout_s))
            if self.rank in firsts:
                assert between is not None and not isinstance(between, int)
                self._groups[firsts] = between
        self.endpoint = ProcessEndpoint(
            self.rank,
            self.layout,
            self._clock,
            backends=Backends(
                shared=self._share(tuple(range(self.workers))),
                process_group=group,
                comm_thread=self.lane,
                hosts=hosts if by_host else None,
                is_ordered=ordered,
            ),
            open_mailbox=self._open_mailbox,
            open_group=self._open_group,
            trace=Trace(keep=SPANS_KEPT),
        )

    def _serve(self, strategy: Strategy, hosts: list[list[int]], epoch: float) -> None:
        """Start the shards of this host, if this is the worker to do it, and has not died since it did."""
        pids = [int(pid) for pid in self._everyones("pid", str(os.getpid()))]
        own = next(i for i, ranks in enumerate(hosts) if self.rank in ranks)
        if self.rank == hosts[own][0] and not self.store.check([f"served/{own}"]):
            self._companions = ServerProcesses(
                strategy,
                self.layout,
                [rank for j, rank in enumerate(self.layout.server_ranks) if j % len(hosts) == own],
                self._base,
                self._prefix,
                epoch=epoch,
                bind=self.bind,
                timeout_s=self._timeout_s,
                workers={rank: pids[rank] for rank in hosts[own]},
                life=self._life,
                takes_nonfinite=self._takes_nonfinite,
                silent_s=self._silent_s,
            )
            self.store.set(f"served/{own}", "")

    def _open_alone(self, life: int) -> None:
        """A worker that meets others by messages alone: it may die and another take its place, which nobody has seen before."""
        self.lane = None
        # Who died before anybody could write to it has not been seen either.
        is_new = life > 1 and (self.layout.servers > 0 or self.store.check([f"mail/{self.rank}"]))
        rank = self.layout.size + self.store.add("joined", 1) - 1 if is_new else self.rank
        self.endpoint = ProcessEndpoint(
            rank,
            self.layout,
            self._clock,
            open_mailbox=lambda: self._open_mailbox(rank),
            membership=Membership(self._members_ever, self._has_ended),
            trace=Trace(keep=SPANS_KEPT),
        )
        if not self.layout.servers and self.workers > 1:
            self.endpoint.mailbox  # noqa: B018 (opened now: others may write to it from the beginning)
            self._everyones("there", "")

    def _has_ended(self, rank: int) -> bool:
        return self.store.check([f"trace/{rank}" if self.layout.servers else f"ended/{rank}"])

    def _members_ever(self) -> list[int]:
        """The workers that others can have written to."""
        ranks = [*self.layout.worker_ranks, *range(self.layout.size, self.layout.size + self.store.add("joined", 0))]
        return [rank for rank in ranks if self.store.check([f"mail/{rank}"])]

    def server_traces(self, *, first_come: bool = False) -> list[Trace]:
        """What the servers did, once all workers have left them; on the first worker, or on whoever comes first."""
        if not self.layout.servers or (self.store.add("traces", 1) > 1 if first_come else self.rank):
            return []
        if self._companions is not None:
            self._companions.wait()
        return [Trace.loads(self.store.get(f"trace/{server}").decode()) for server in self.layout.server_ranks]

    def _share(self, ranks: tuple[int, ...]) -> SharedMemory | None:
        """Memory shared with these ranks, if they are all on this host."""
        if len(ranks) == 1 or len({self._hosts[r] for r in ranks}) > 1 or not hasattr(os, "memfd_create"):
            return None
        store = dist.PrefixStore(f"shared/{'-'.join(map(str, ranks))}", self.store)
        return SharedMemory.connect(store, self.rank, ranks, timeout_s=self._timeout_s)

    def _open_group(self, ranks: tuple[int, ...]) -> ProcessEndpoint:
        """Only its members take part in opening a group; they must open theirs in the same order, and have opened as many before."""
        shared, group = self._share(ranks), self._groups.get(ranks)
        if group is None and len(ranks) > 1 and (shared is None or self._device.type != "cpu"):
            group = self.open(ranks)
        return ProcessEndpoint(
            self.rank,
            self.layout,
            self._clock,
            ranks=ranks,
            backends=Backends(shared=shared, process_group=group, comm_thread=self.lane, is_ordered=self._ordered),
            open_mailbox=lambda: self.endpoint.mailbox,
            open_group=self._open_group,
            trace=self.endpoint.trace,
        )

    def open(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """torch's own group of these ranks, which they alone open: in the same order, and after as many others."""
        limit = timedelta(seconds=self._timeout_s)  # torch gives a new group its own default, not that of the first.
        group = dist.new_group(list(ranks), backend=self._kind(), timeout=limit, use_local_synchronization=True)
        assert group is not None and not isinstance(group, int)  # What torch gives to those who are no members.
        self._groups[tuple(ranks)] = group
        return group

    def _group_of_all(self, apart: bool) -> dist.ProcessGroup | None:
        """The default group; or another, in which a lane can be at work whatever is done on the default one meanwhile."""
        if self.workers == 1:
            return None
        if not apart:
            return dist.group.WORLD
        group = dist.new_group(backend=self._kind(), timeout=timedelta(seconds=self._timeout_s))
        assert group is not None and not isinstance(group, int)  # What torch gives to those who are no members.
        self._apart = group
        return group

    def _kind(self) -> str | None:
        """Of a new group: the user's is often NCCL's alone, and ballots are on the CPU.  None: of the same kind as the user's."""
        return _backend(self._device) if dist.get_backend() == "nccl" else None

    def _join(
        self, device: torch.device, store: dist.Store | None, rank: int | None, workers: int | None, *, alone: bool
    ) -> None:
        if not dist.is_initialized():
            if store is None and under_launcher():
                store, rank, workers = _launched()
            if store is None:
                self._folder = tempfile.TemporaryDirectory(prefix="paceline-")
                store, rank, workers = dist.FileStore(str(Path(self._folder.name, "store"))), 0, 1
            assert rank is not None and workers is not None
            self.rank, self.workers, self._base = rank, workers, _unwrapped(store)
            if workers == 1 or alone:
                return
            # A prefix of its own: a second job of the same processes must not find the first one's addresses.
            store = dist.PrefixStore(f"{self._prefix}/torch", self._base)
            limit = timedelta(seconds=self._timeout_s)
            dist.init_process_group(_backend(device), store=store, rank=rank, world_size=workers, timeout=limit)
            self._own_group = True
        else:
            from torch.distributed.distributed_c10d import _get_default_store  # pyright: ignore[reportPrivateUsage]

            self.rank, self.workers, self._base = (
                dist.get_rank(),
                dist.get_world_size(),
                _unwrapped(_get_default_store()),
            )

    def _own_address(self) -> str:
        """The address at which the other hosts reach this one."""
        master = os.environ.get("MASTER_ADDR", "127.0.0.1")
        mine = _address_towards(master)
        for other in self._everyones("address", mine):
            if _is_loopback(mine) and not _is_loopback(other):  # The master's own name often leads to its loopback.
                mine = _address_towards(other)
        return mine

    def _open_mailbox(self, rank: int | None = None) -> Mailbox:
        from paceline.transport.mailbox import Mailbox

        mine, is_open = self.rank if rank is None else rank, rank is not None
        beat_s, silent_s = (
            (min(BEAT_S, self._silent_s / 4), self._silent_s) if is_open and not self.layout.servers else (None, None)
        )
        limits: dict[str, float | None] = {"timeout_s": self._timeout_s, "beat_s": beat_s, "silent_s": silent_s}
        mailbox = Mailbox(self.store, mine, self.layout.size, bind=self.bind, is_open=is_open, **limits)  # pyright: ignore
        if is_open and self.layout.servers:
            mailbox.beat(self.layout.server_ranks, every_s=min(BEAT_S, self._silent_s / 4))
        return mailbox

    def _everyones(self, key: str, value: str) -> list[str]:
        self.store.set(f"{key}/{self.rank}", value)
        return [self.store.get(f"{key}/{r}").decode() for r in range(self.workers)]

    def close(self, *, failed: bool = False) -> None:
        """Give back all that was opened.  After a failure nobody is waited for."""
        if self._companions is not None:
            if not failed:
                self._companions.wait()
            self._companions.close()
        if hasattr(self, "endpoint"):
            if not failed and not self.layout.servers and self._is_elastic:
                with suppress(RuntimeError):  # Who serves the store may have ended before.
                    self.store.set(f"ended/{self.endpoint.rank}", "")
            self.endpoint.close()
        self._groups.clear()
        if self._own_group and dist.is_initialized():
            dist.destroy_process_group()
        elif (
            self._apart is not None and dist.is_initialized() and not failed
        ):  # After a failure it may be in use for ever.
            with suppress(ValueError):  # The user's own end of everything took it along.
                dist.destroy_process_group(self._apart)
        self._apart = None
        if self._folder is not None:
            self._folder.cleanup()

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _unwrapped(store: dist.Store) -> dist.Store:
    """The store below its prefixes: companions reach it by address and know nothing of them."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _host() -> str:
    """What two processes have in common exactly if shared memory and abstract sockets can join them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def _address_towards(host: str) -> str:
    """This machine's address on the way to another; nothing is sent."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def _is_loopback(address: str) -> bool:
    return ip_address(address).is_loopback
