"""Job: this process as one rank of a job, from rendezvous to the end."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from paceline.elastic import ElasticEndpoint
from paceline.endpoint import Layout
from paceline.engines import open_files
from paceline.engines.connections import Connections
from paceline.engines.generations import Generations, another_connection
from paceline.engines.groups import Groups
from paceline.engines.hosts import ATTEMPT, Hosts, RollCall
from paceline.engines.joining import join, mailbox_address
from paceline.engines.mailboxes import elastic_mailbox, plain_mailbox
from paceline.engines.place import Place, detect
from paceline.engines.server_process import ServerSettings
from paceline.engines.servers import ServerProcesses
from paceline.engines.supervisor import report_now, withdraw_report
from paceline.errors import ClusterError
from paceline.needs import Needs
from paceline.strategy import Strategy
from paceline.trace import Trace
from paceline.transport.comm_thread import CommThread
from paceline.transport.endpoint import SILENT_S, SPANS_KEPT, Backends, Clock, Membership, ProcessEndpoint
from paceline.transport.job_key import JobKey
from paceline.transport.progress import Progress
from paceline.transport.shared_memory import SharedMemory
from paceline.transport.shared_vector import HostVectors

if TYPE_CHECKING:
    pass

LAUNCHER_PIPE = "PACELINE_LAUNCHER_PIPE"  # The variable with the file descriptor of the launcher's pipe.
# Servers watch the first process of each rank.  Its replacement joins them as a new rank and publishes this id, which
# is above every id that Linux gives.
DEAD_PID = 2**30

_joined = itertools.count()  # Jobs that this process has joined.  All ranks count the same, so it names the job's keys.


class Job(AbstractContextManager["Job"]):
    """One rank of a job: it has a store, an endpoint, and on the first rank of each host the server processes.

    `served` is the strategy whose server role is run by server processes; None: there are none.  Each of the `stages`
    of a split model, which are ranks of their own, has at least one shard.  `launcher_pipe` is a pipe of a launcher
    that replaces dead workers: servers run until it is closed.  `forks_servers` allows to fork this process to start
    them.  With `elastic` the workers' collectives outlive a worker's death: they are those of the endpoint `elastic`.
    `on_met` gets the store, the rank and the number of workers before anything else is opened.
    """

    def __init__(
        self,
        needs: Needs,
        *,
        device: torch.device,
        served: Strategy | None = None,
        stages: int = 1,
        place: Place | None = None,
        ordered: bool = False,
        apart: bool = False,
        timeout_s: float = 1800.0,
        silent_s: float = SILENT_S,
        takes_nonfinite: bool = False,
        launcher_pipe: int | None = None,
        forks_servers: bool = False,
        elastic: bool = False,
        on_met: Callable[[dist.Store, int, int], None] = lambda store, rank, workers: None,
    ) -> None:
        self._is_elastic = needs.elastic
        self._may_return = needs.elastic or elastic
        self._stages = stages
        self.is_durable = served is not None and served.durability != "none"
        self._device = device
        self.ordered = ordered
        self.timeout_s = timeout_s
        self.silent_s = silent_s
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._servers: ServerProcesses | None = None
        self._groups = Groups(device, timeout_s=timeout_s)
        self._prefix = f"paceline/{os.environ.get(ATTEMPT, '0')}/{next(_joined)}"
        launcher_pipe = _launchers_pipe() if launcher_pipe is None else launcher_pipe
        self.endpoint: ProcessEndpoint
        self.elastic: ElasticEndpoint | None = None
        self._generations: Generations | None = None
        self.comm_thread: CommThread | None = None
        try:
            self._meet(place)
            on_met(self.store, self.rank, self.workers)
            incarnation = self.store.add(f"incarnations/{self.rank}", 1) if self._may_return else 1
            epoch = float(self.store.compare_set("epoch", "", repr(time.time())).decode())
            self.clock = Clock(epoch, Progress.of_launcher(timeout_s) if needs.elastic else None)
            self._find_hosts(needs, served)
            if served is not None and served.servers:
                # Before this process has threads, so that it can be forked.
                pid = os.getpid() if incarnation == 1 else DEAD_PID
                settings = self._server_settings(epoch, pid, takes_nonfinite, launcher_pipe is not None)
                self._serve(served, settings, launcher_pipe, forks_servers)
            if elastic:
                self.endpoint = ProcessEndpoint(0, Layout(1), self.clock, trace=Trace(keep=SPANS_KEPT))
                self._generations = _open_generations(self, self._base, self._prefix, self._key, incarnation)
                self.elastic = self._generations.first()
            elif needs.elastic:
                self.endpoint = self._elastic_endpoint(incarnation, needs)
            else:
                self.endpoint = self._synchronous_endpoint(apart)
        except BaseException as error:
            self._abandon(error)
            raise

    @property
    def is_one_host(self) -> bool:
        return self.hosts.is_one

    def _meet(self, place: Place | None) -> None:
        """Find the store that all ranks share, and this process's rank in it."""
        withdraw_report()
        if place is None or dist.is_initialized():
            place = detect()
        if place is None:
            self._folder = tempfile.TemporaryDirectory(prefix="paceline-")
            path = str(Path(self._folder.name, "store"))
            place = Place("alone", 0, 1, lambda _: dist.FileStore(path))
        if self._may_return and not self._is_elastic:
            _refuse_own_group(place)
        self.rank, self.workers = place.rank, place.world
        self._base = _unwrapped(place.meet(self.timeout_s))
        self.store, self._key = join(
            self._base, self._prefix, place, timeout_s=self.timeout_s, may_return=self._may_return
        )

    def _find_hosts(self, needs: Needs, served: Strategy | None) -> None:
        """Which ranks share a host, on which interface this one listens, and whether it may open as many files."""
        self.hosts = Hosts(RollCall(self.store, self._base, self.rank, self.workers, timeout_s=self.timeout_s))
        self._groups.interface = self.hosts.interface
        self.layout = Layout(self.workers, _servers(served, len(self.hosts), self._stages))
        _check_files(self.rank, self.layout, self.hosts, needs)

    def _server_settings(self, epoch: float, pid: int, takes_nonfinite: bool, may_lose_starter: bool) -> ServerSettings:
        pids = self.hosts.roll.gather("pid", str(pid))
        return ServerSettings.of(
            self.layout,
            self._base,
            self._prefix,
            epoch=epoch,
            key=self._key,
            bind=mailbox_address(self.hosts, self._key),
            timeout_s=self.timeout_s,
            silent_s=self.silent_s,
            workers={rank: int(pids[rank]) for rank in self.hosts.ranks[self.hosts.own]},
            is_elastic=self._is_elastic,
            may_lose_starter=may_lose_starter,
            takes_nonfinite=takes_nonfinite,
            stages=self._stages,
        )

    def _serve(self, served: Strategy, settings: ServerSettings, launcher_pipe: int | None, forks: bool) -> None:
        """Start the servers of this host, on its first rank; an earlier incarnation of it may have done so."""
        own = self.hosts.own
        if self.rank == self.hosts.ranks[own][0] and not self.store.check([f"served/{own}"]):
            ranks = [rank for j, rank in enumerate(self.layout.server_ranks) if j % len(self.hosts) == own]
            self._servers = ServerProcesses(served, ranks, settings, launcher_pipe=launcher_pipe, forks=forks)
            self.store.set(f"served/{own}", "")

    def _synchronous_endpoint(self, apart: bool) -> ProcessEndpoint:
        """The endpoint of a worker that takes part in collectives from the first step to the last."""
        # A collective through shared memory advances in the thread that waits for it; a GPU has its own streams.
        self.comm_thread = None if self.hosts.is_one or self._device.type != "cpu" else CommThread()
        is_ring = self.comm_thread is not None and not self.ordered
        by_host = is_ring and 1 < len(self.hosts) < self.workers
        group: dist.ProcessGroup | None = None
        if self.workers > 1:
            # Its own prefix: a second job of the same processes must not find the first one's addresses.
            self._groups.make_default(dist.PrefixStore(f"{self._prefix}/torch", self._base), self.rank, self.workers)
            group = self._groups.of_all(apart=apart or self.comm_thread is not None)
        if by_host:
            self._groups.open_from_all(tuple(min(ranks) for ranks in self.hosts.ranks), self.rank)
        return ProcessEndpoint(
            self.rank,
            self.layout,
            self.clock,
            backends=Backends(
                shared=self._share(tuple(range(self.workers))),
                process_group=group,
                extras_group=self._groups.of_all(apart=True) if is_ring and not by_host else None,
                comm_thread=self.comm_thread,
                hosts=self.hosts.ranks if by_host else None,
                is_ordered=self.ordered,
            ),
            open_mailbox=lambda: plain_mailbox(self, mailbox_address(self.hosts, self._key)),
            open_group=self._open_group,
            trace=Trace(keep=SPANS_KEPT),
        )

    def _elastic_endpoint(self, incarnation: int, needs: Needs) -> ProcessEndpoint:
        """The endpoint of a worker that uses messages alone, so that it may die and be replaced.

        A replacement gets a new rank among messages, which no other worker has seen before.  It can keep the old one if
        the dead worker had not opened its mailbox.
        """
        is_new = incarnation > 1 and (self.layout.servers > 0 or self.store.check([f"mail/{self.rank}"]))
        rank = self.layout.size + self.store.add("joined", 1) - 1 if is_new else self.rank
        endpoint = ProcessEndpoint(
            rank,
            self.layout,
            self.clock,
            open_mailbox=lambda: elastic_mailbox(self, rank, mailbox_address(self.hosts, self._key)),
            membership=_membership(self.store, self.layout),
            vectors=HostVectors(self.store, self.workers) if self.hosts.is_one else None,
            trace=Trace(keep=SPANS_KEPT),
        )
        # Workers that share memory are refused on several hosts, whatever their mailboxes would need there.
        can_run = self.hosts.is_one or not needs.shared_memory
        if not self.layout.servers and self.workers > 1 and can_run:
            endpoint.mailbox  # noqa: B018 (opened now: peers may write to it from the first step)
            self.hosts.roll.gather("there", "")
        return endpoint

    def _share(self, ranks: tuple[int, ...]) -> SharedMemory | None:
        """Memory shared with these ranks, if they are all on this host."""
        if len(ranks) == 1 or not self.hosts.are_together(ranks) or not hasattr(os, "memfd_create"):
            return None
        store = dist.PrefixStore(f"shared/{'-'.join(map(str, ranks))}", self.store)
        return SharedMemory.connect(store, self.rank, ranks, timeout_s=self.timeout_s)

    def _open_group(self, ranks: tuple[int, ...]) -> ProcessEndpoint:
        """An endpoint for collectives among `ranks`; see `open` for the order in which its members must open it."""
        shared = self._share(ranks)
        group = self._groups.get(ranks)
        if group is None and len(ranks) > 1 and (shared is None or self._device.type != "cpu"):
            group = self.open(ranks)
        return ProcessEndpoint(
            self.rank,
            self.layout,
            self.clock,
            ranks=ranks,
            backends=Backends(
                shared=shared, process_group=group, comm_thread=self.comm_thread, is_ordered=self.ordered
            ),
            open_mailbox=lambda: self.endpoint.mailbox,
            open_group=self._open_group,
            trace=self.endpoint.trace,
        )

    def open(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """torch's own group of these ranks.  Only they open it: in the same order, and after as many others."""
        return self._groups.open(ranks)

    def server_traces(self, *, on_first_caller: bool = False) -> list[Trace]:
        """The servers' traces, once all workers have left them: on rank 0, or on the first rank that asks for them."""
        if not self.layout.servers:
            return []
        if self.store.add("traces", 1) > 1 if on_first_caller else self.rank:
            return []
        if self._servers is not None:
            self._servers.wait()
        return [Trace.loads(self.store.get(f"trace/{server}").decode()) for server in self.layout.server_ranks]

    def close(self, *, failed: bool = False) -> None:
        """Close all that was opened; wait for the servers, but not after a failure."""
        if self._servers is not None:
            if not failed:
                self._servers.wait()
            self._servers.close()
        if self._generations is not None:
            self._generations.close()
        if hasattr(self, "endpoint"):
            if not (failed or self.endpoint.missed_end or self.layout.servers) and self._is_elastic:
                with suppress(RuntimeError):  # The process that serves the store may have ended before.
                    self.store.set(f"ended/{self.endpoint.rank}", "")
            self.endpoint.close()
        self._groups.close(failed=failed)
        if self._folder is not None:
            self._folder.cleanup()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._abandon(error)

    def _abandon(self, error: BaseException) -> None:
        report_now(error)
        self.close(failed=True)


def _check_files(rank: int, layout: Layout, hosts: Hosts, needs: Needs) -> None:
    """Whether this process, and the servers that it starts, may open as many files as they will."""
    workers, servers = layout.workers, layout.servers
    if workers > 1 or servers:
        more = open_files.of_worker(workers, servers, takes_part=needs.collectives)
        open_files.check(f"rank {rank} of {workers} workers", more)
    if servers and rank == hosts.ranks[hosts.own][0]:
        open_files.check(f"a server of {workers} workers", open_files.of_server(workers))


def _refuse_own_group(place: Place) -> None:
    if place.engine == "torch.distributed":
        raise ValueError(
            "elastic=True in a torch process group of your own: it ends with its first process; leave out "
            "init_process_group, and start the workers by paceline run"
        )


def _open_generations(job: Job, base: dist.Store, prefix: str, key: JobKey | None, incarnation: int) -> Generations:
    """The rendezvous of workers that may die and join, in the job's store, which is this prefix of its base."""
    connections = Connections(
        job.store,
        lambda: another_connection(base, f"{prefix}/torch", None),
        job.clock,
        job.endpoint.trace,
        host=job.hosts.name,
        address=job.hosts.address,
        timeout_s=job.timeout_s,
        ordered=job.ordered,
    )
    return Generations(
        job.store,
        lambda: another_connection(base, prefix, key),
        connections,
        rank=job.rank,
        incarnation=incarnation,
        workers=job.workers,
        silent_s=job.silent_s,
    )


def _membership(store: dist.Store, layout: Layout) -> Membership:
    """The workers that ever had a mailbox, and whether one of them has finished, as the store has it."""

    def members_ever() -> list[int]:
        ranks = [*layout.worker_ranks, *range(layout.size, layout.size + store.add("joined", 0))]
        return [rank for rank in ranks if store.check([f"mail/{rank}"])]

    return Membership(members_ever, lambda rank: _has(store, f"trace/{rank}" if layout.servers else f"ended/{rank}"))


def _launchers_pipe() -> int | None:
    return int(os.environ[LAUNCHER_PIPE]) if LAUNCHER_PIPE in os.environ else None


def _servers(served: Strategy | None, hosts: int, stages: int) -> int:
    """How many servers a strategy has: at least one on each host, and at least one shard for each stage."""
    return max(served.servers, hosts, served.coordinators + stages) if served is not None and served.servers else 0


def _unwrapped(store: dist.Store) -> dist.Store:
    """The store below its prefixes: server processes reach it by its address, which has none."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _has(store: dist.Store, key: str) -> bool:
    try:
        return store.check([key])
    except RuntimeError as error:
        raise ClusterError(f"the job's store, in another process, cannot be reached: {error}") from error
