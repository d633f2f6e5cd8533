"""Connections: the endpoints of a worker of an elastic job, one for each generation.

On one host they go through shared memory alone.  On several they go through gloo between the hosts, in groups of the
generation's own, and through shared memory within each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import torch.distributed as dist

from paceline.endpoint import Layout
from paceline.errors import ClusterError
from paceline.trace import Trace
from paceline.transport.comm_thread import CommThread
from paceline.transport.endpoint import Backends, Clock, ProcessEndpoint
from paceline.transport.gloo_group import GlooGroup
from paceline.transport.mesh import Watch
from paceline.transport.shared_memory import SharedMemory
from paceline.transport.watched_collectives import WatchedCollectives


class Connections:
    """Makes the endpoints of this process."""

    def __init__(
        self,
        store: dist.Store,
        open_store: Callable[[], dist.Store],
        clock: Clock,
        trace: Trace,
        *,
        host: str,
        address: str,
        timeout_s: float,
        ordered: bool = False,
    ) -> None:
        """`open_store` makes another connection to torch's own store of this job; `address` is that of this host."""
        self._store = store
        self._open_store = open_store
        self._clock = clock
        self._trace = trace
        self._is_ordered = ordered
        self._comm_thread: CommThread | None = None  # Of the last generation.
        self._gloo_store: dist.Store | None = None  # A connection for gloo alone.
        self.host = host
        self.address = address
        self.timeout_s = timeout_s

    def __call__(self, name: str, rank: int, hosts: Mapping[int, str], layout: Layout, watch: Watch) -> ProcessEndpoint:
        """An endpoint among these ranks, each on its host.

        `watch` is asked meanwhile, and later, which of some of them is dead.
        """
        self._comm_thread = CommThread(stops_at_error=True) if len(set(hosts.values())) > 1 else None
        return _Generation(self, name, rank, hosts, layout, watch, self._comm_thread).endpoint

    def check_ended(self) -> None:
        """Raise ClusterError if the last generation, which was closed, still writes to tensors."""
        if self._comm_thread is not None and not self._comm_thread.is_idle:
            raise ClusterError("an exchange of the last generation of the run's workers did not end")

    def share(self, name: str, rank: int, ranks: Sequence[int], watch: Watch) -> SharedMemory:
        store = dist.PrefixStore(f"generation/{name}/shared", self._store)
        return SharedMemory.connect(store, rank, ranks, timeout_s=self.timeout_s, watch=watch)

    def between(self, name: str, rank: int, ranks: Sequence[int], watch: Watch) -> GlooGroup:
        group = GlooGroup(rank, ranks, timeout_s=self.timeout_s, watch=watch)
        store, self._gloo_store = self._gloo_store, None
        store = store or self._open_store()  # It takes seconds at times, so it is used for all groups.
        group.connect(dist.PrefixStore(f"generation/{name}", store), self.address)
        self._gloo_store = store
        return group

    def endpoint(
        self,
        rank: int,
        ranks: Sequence[int],
        layout: Layout,
        backends: Backends,
        open_group: Callable[[tuple[int, ...]], ProcessEndpoint],
    ) -> ProcessEndpoint:
        return ProcessEndpoint(
            rank, layout, self._clock, ranks=ranks, backends=backends, open_group=open_group, trace=self._trace
        )

    @property
    def is_ordered(self) -> bool:
        return self._is_ordered


class _Generation:
    """The groups of one generation."""

    def __init__(
        self,
        make: Connections,
        name: str,
        rank: int,
        hosts: Mapping[int, str],
        layout: Layout,
        watch: Watch,
        comm_thread: CommThread | None,
    ) -> None:
        self._make = make
        self._name = name
        self._rank = rank
        self._hosts = hosts
        self._layout = layout
        self._watch = watch
        self._comm_thread = comm_thread
        self._by_host = [
            tuple(ranks) for _, ranks in groupby(sorted(hosts, key=lambda r: (hosts[r], r)), key=lambda r: hosts[r])
        ]
        self._by_host.sort()
        self.endpoint = self._open(tuple(hosts))

    def _open(self, ranks: tuple[int, ...]) -> ProcessEndpoint:
        """An endpoint among some of the ranks, which all of them open."""
        make, rank = self._make, self._rank
        name = f"{self._name}/{'-'.join(map(str, ranks))}"
        if len(ranks) == 1:
            return self._endpoint(ranks, Backends(comm_thread=self._comm_thread))
        if len({self._hosts[r] for r in ranks}) == 1:
            shared = make.share(name, rank, ranks, self._watch)
            return self._endpoint(ranks, Backends(shared=shared, comm_thread=self._comm_thread))
        is_whole = len(ranks) == len(self._hosts)
        sums_by_host = is_whole and not make.is_ordered and len(self._by_host) < len(ranks)
        is_apart = is_whole and not make.is_ordered and not sums_by_host
        group = make.between(f"{name}/values", rank, ranks, self._watch)
        collectives = WatchedCollectives(
            group,
            extras=make.between(f"{name}/extras", rank, ranks, self._watch) if is_apart else None,
            is_ordered=make.is_ordered,
        )
        return self._endpoint(
            ranks,
            Backends(
                network=collectives,
                comm_thread=self._comm_thread,
                hosts=self._by_host if sums_by_host else None,
                is_ordered=make.is_ordered,
            ),
        )

    def _endpoint(self, ranks: tuple[int, ...], backends: Backends) -> ProcessEndpoint:
        return self._make.endpoint(self._rank, ranks, self._layout, backends, self._open)
