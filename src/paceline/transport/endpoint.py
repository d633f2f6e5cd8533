"""A rank's endpoint among real processes.

Collectives go through shared memory where all ranks are on one host and the tensors are on the CPU.  Otherwise they go
through torch.distributed: NCCL, or gloo in a communication thread, summing within each host first where hosts have
several ranks.  Messages go through a ZeroMQ mailbox, which is opened for the first one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline import costs as network
from paceline.collectives import sum_by_groups
from paceline.endpoint import Endpoint, Layout, Retry, SharedVector, check_summable
from paceline.errors import ClusterError
from paceline.op import Begun, Op, Ready, Routine, drive
from paceline.protocol.messages import Message
from paceline.trace import Trace
from paceline.transport.comm_thread import CommThread
from paceline.transport.journal import Journal
from paceline.transport.progress import Progress
from paceline.transport.shared_memory import SharedMemory
from paceline.transport.shared_vector import HostVectors, shared_vector
from paceline.transport.torch_collectives import TorchCollectives

if TYPE_CHECKING:
    from paceline.transport.mailbox import Mailbox
    from paceline.transport.stage_view import StageMailbox

T = TypeVar("T")

SPANS_KEPT = 100_000  # A session may take millions of steps; its trace keeps the newest spans, and the totals of all.
BEAT_S = 1.0  # Seconds between two heartbeats of a worker.
SILENT_S = 30.0  # Seconds without a heartbeat after which a worker is suspected.
RETRANSMIT_S = 5.0
ANY_LINK = network.Link(bandwidth=1.0, latency=0.0)  # The bytes of a collective do not depend on the link.


class Clock:
    """Seconds since a moment that all ranks of a job agree on."""

    def __init__(self, epoch: float, progress: Progress | None = None) -> None:
        """Who looks at the clock makes `progress`."""
        self._offset = time.time() - time.monotonic() - epoch
        self._progress = progress

    def now(self) -> float:
        if self._progress is not None:
            self._progress.note()
        return time.monotonic() + self._offset

    def rest(self) -> None:
        """What follows is no progress, and need be none."""
        if self._progress is not None:
            self._progress.rest()


@dataclass(frozen=True, slots=True)
class Backends:
    """What the collectives of one group of ranks run on.

    `shared` serves tensors on the CPU if all ranks are on one host; `process_group` serves the others, and
    `extras_group`, if given, the numbers that are summed beside them.  `network` serves in place of both.  With a
    `comm_thread` all collectives run in that thread.  `hosts` are the ranks by host: given if sums should be taken
    within each host first.  `is_ordered`: sums are taken in the order of the ranks.
    """

    shared: SharedMemory | None = None
    process_group: dist.ProcessGroup | None = None
    extras_group: dist.ProcessGroup | None = None
    network: TorchCollectives | None = None
    comm_thread: CommThread | None = None
    hosts: Sequence[Sequence[int]] | None = None
    is_ordered: bool = False


@dataclass(frozen=True, slots=True)
class Membership:
    """Which workers ever joined, including those that have left, and whether one of them has finished its work."""

    members_ever: Callable[[], Sequence[int]]
    has_ended: Callable[[int], bool]


class Recorded(Op[T]):
    """Another Op, whose span is added to the trace when it is finished.

    Collectives are finished in the order in which they were started, whichever is awaited first: some have a second
    part that starts when the first is awaited, and all ranks must start these in the same order.
    """

    __slots__ = ("_endpoint", "_finishing", "_inner", "_nbytes", "_start", "_value")

    def __init__(self, inner: Op[T], endpoint: ProcessEndpoint, nbytes: int) -> None:
        super().__init__(inner.kind)
        self._inner: Op[T] | None = inner
        self._endpoint = endpoint
        self._nbytes = nbytes
        self._start = endpoint.now()
        self._finishing = threading.Lock()  # The training thread and the communication thread may both wait for it.

    def wait(self) -> T:
        while self._inner is not None and self in self._endpoint.in_flight:
            with suppress(IndexError):  # Another thread has just taken the last one.
                self._endpoint.in_flight.popleft().finish()
        self.finish()
        return self._value

    def finish(self) -> None:
        with self._finishing:
            if self._inner is not None:
                self._endpoint.clock.rest()
                self._value = self._inner.wait()
                self._inner = None
                endpoint = self._endpoint
                stop = endpoint.now()
                endpoint.trace.span(endpoint.rank, self.kind, self._start, stop, self._nbytes)
                if self.kind in network.COLLECTIVES:
                    endpoint.trace.collective(endpoint.rank, endpoint.ranks, self._start, stop)


class ProcessEndpoint:
    """One process's endpoint.

    `backends` are needed by groups of several workers only.  `open_mailbox` is called for the first message, and
    `open_group` for the first collective of some of the ranks.
    """

    retransmit_s = RETRANSMIT_S

    def __init__(
        self,
        rank: int,
        layout: Layout,
        clock: Clock,
        *,
        ranks: Sequence[int] | None = None,
        backends: Backends | None = None,
        open_mailbox: Callable[[], Mailbox | StageMailbox] | None = None,
        open_group: Callable[[tuple[int, ...]], ProcessEndpoint] | None = None,
        membership: Membership | None = None,
        vectors: HostVectors | None = None,
        trace: Trace | None = None,
    ) -> None:
        backends = backends or Backends()
        self.rank = rank
        self.layout = layout
        self.clock = clock
        self.ranks = tuple(layout.worker_ranks if ranks is None else ranks)
        self.trace = Trace() if trace is None else trace
        self.hosts = backends.hosts
        self.missed_end = False  # Whether the run ends without this rank.
        self.journal = Journal()
        self.in_flight: deque[Recorded[Any]] = deque()  # Collectives in the order of their start.
        self._shared = backends.shared
        self._torch = backends.network or TorchCollectives(
            rank,
            self.ranks,
            backends.process_group,
            extras_group=backends.extras_group,
            is_ordered=backends.is_ordered,
        )
        self._comm_thread = backends.comm_thread
        self._membership = membership or Membership(members_ever=lambda: self.ranks, has_ended=lambda rank: False)
        self._vectors = vectors  # Of workers that may die; others make them by collectives.
        self._open_mailbox = open_mailbox
        self._mailbox: Mailbox | StageMailbox | None = None
        self._open_group = open_group
        self._groups: dict[tuple[int, ...], ProcessEndpoint] = {}

    def now(self) -> float:
        return self.clock.now()

    def compute(self, work: Callable[[], T], *, kind: str = "compute", nbytes: int = 0) -> Op[T]:
        start = self.now()
        value = work()
        self.trace.span(self.rank, kind, start, self.now())
        return Ready(kind, value)

    def spawn(self, routine: Coroutine[Op[Any], Any, T], *, kind: str = "routine") -> Op[T]:
        return Routine(kind, routine)

    def run_collectives(
        self,
        routine: Callable[[Endpoint], Coroutine[Op[Any], Any, T]],
        *,
        kind: str = "exchange",
        is_single: bool = False,
        retry: Retry | None = None,
    ) -> Op[T]:
        if self._comm_thread is None or self._comm_thread.is_current():
            # It continues when it is awaited, and so in one order on every rank.
            return Routine(kind, routine(self))
        if is_single:
            begun = self._comm_thread.submit(kind, lambda: Routine(kind, routine(self)))
            return Begun(kind, lambda: begun.wait().wait())
        return self._comm_thread.submit(kind, lambda: drive(routine(self)))

    def group(self, ranks: Sequence[int]) -> ProcessEndpoint:
        ranks = tuple(sorted(ranks))
        if ranks == self.ranks:
            return self
        if self.rank not in ranks or not set(ranks) <= set(self.ranks) or self._open_group is None:
            raise ValueError(
                f"rank {self.rank} asked for the group {list(ranks)}: "
                f"it must contain this rank, and only ranks of {list(self.ranks)}"
            )
        if ranks not in self._groups:
            self._groups[ranks] = self._open_group(ranks)
        return self._groups[ranks]

    @property
    def mailbox(self) -> Mailbox | StageMailbox:
        if self._mailbox is None:
            if self._open_mailbox is None:
                raise ClusterError(f"rank {self.rank} is the only rank: there is no other to send to or receive from")
            self._mailbox = self._open_mailbox()
        return self._mailbox

    def send(self, dst: int, message: Message) -> Op[None]:
        return Recorded(self.mailbox.send(dst, message), self, message.nbytes)

    def recv(
        self, *, src: int | None = None, types: tuple[type[Message], ...] | None = None, timeout: float | None = None
    ) -> Op[Message]:
        return Recorded(self.mailbox.recv(src, timeout, types), self, 0)

    def has_ended(self, rank: int) -> bool:
        return self._membership.has_ended(rank)

    def members_ever(self) -> Sequence[int]:
        return self._membership.members_ever()

    def send_buffer(self, like: Tensor) -> Tensor:
        return self.mailbox.send_buffer(like) if like.device.type == "cpu" else torch.empty_like(like)

    def in_use(self, x: Tensor) -> bool:
        return x.device.type == "cpu" and self.mailbox.in_use(x)

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks of a group of several are on one host."""
        return self._shared is not None

    def shared_vector(self, first: Tensor, member: int | None = None) -> Op[SharedVector]:
        if self._vectors is not None and len(self.ranks) > 1:
            return Ready("common", self._vectors.open(self, first, self.rank if member is None else member))
        return Routine("common", shared_vector(self, first))

    def all_reduce(self, x: Tensor, extras: Tensor | None = None) -> Op[Tensor]:
        check_summable(x)
        if len(self.ranks) == 1:
            return Ready("all_reduce", x)
        if self.hosts is not None and x.device.type == "cpu":
            return self._sum_by_host(x, extras, self.hosts)
        backend = self._backend(x)
        is_gathered = isinstance(backend, TorchCollectives) and backend.is_ordered
        return self._begin(
            "all_reduce",
            lambda: backend.all_reduce(x, extras),
            _nbytes(x, extras),
            sent_as="all_gather" if is_gathered else None,
        )

    def _sum_by_host(self, x: Tensor, extras: Tensor | None, hosts: Sequence[Sequence[int]]) -> Op[Tensor]:
        small = torch.zeros(0, dtype=torch.float64) if extras is None else extras

        def exchange(_: Endpoint) -> Coroutine[Op[Any], Any, Tensor]:
            self.journal.note("all_reduce", _nbytes(x, extras))
            return sum_by_groups(self, x, small, hosts)

        return self.run_collectives(exchange, kind="all_reduce")

    def reduce(self, x: Tensor, dst: int, extras: Tensor | None = None) -> Op[Tensor]:
        check_summable(x)
        if len(self.ranks) == 1:
            return Ready("reduce", x)
        backend = self._backend(x)

        def start() -> Op[Tensor]:
            if isinstance(backend, SharedMemory):
                return backend.all_reduce(x, extras)  # All ranks get the sum, with no more work.
            return backend.reduce(x, dst, extras)

        return self._begin("reduce", start, _nbytes(x, extras), self.ranks.index(dst))

    def all_gather(self, data: Tensor) -> Op[list[Tensor]]:
        if len(self.ranks) == 1:
            return Ready("all_gather", [data.clone()])
        backend = self._backend(data)
        return self._begin("all_gather", lambda: backend.all_gather(data), data.nbytes)

    def all_to_all(self, parts: Sequence[Tensor], coming: Sequence[int] | None = None) -> Op[list[Tensor]]:
        if len(parts) != len(self.ranks):
            raise ValueError(f"rank {self.rank} gave all_to_all {len(parts)} parts for {len(self.ranks)} ranks")
        if len(self.ranks) == 1:
            return Ready("all_to_all", [parts[0].clone()])
        backend = self._backend(parts[0])

        def start() -> Op[list[Tensor]]:
            if isinstance(backend, SharedMemory):
                return backend.all_to_all(parts)
            return backend.all_to_all(parts, coming)

        mine = self.ranks.index(self.rank)
        return self._begin("all_to_all", start, sum(p.nbytes for i, p in enumerate(parts) if i != mine))

    def broadcast(self, x: Tensor, src: int) -> Op[Tensor]:
        if len(self.ranks) == 1:
            return Ready("broadcast", x)
        backend = self._backend(x)
        return self._begin("broadcast", lambda: backend.broadcast(x, src), x.nbytes, self.ranks.index(src))

    def _backend(self, x: Tensor) -> SharedMemory | TorchCollectives:
        return self._shared if self._shared is not None and x.device.type == "cpu" else self._torch

    def _begin(
        self, kind: str, start: Callable[[], Op[T]], nbytes: int, root: int = 0, sent_as: str | None = None
    ) -> Op[T]:
        """Start a collective, in the communication thread if there is one; `nbytes` is the input of each rank."""
        if self._comm_thread is not None and not self._comm_thread.is_current():
            return self._comm_thread.submit(kind, lambda: self._begin(kind, start, nbytes, root, sent_as).wait())
        # A group within one of several hosts sends nothing over the network.
        is_local = self._shared is not None and self._comm_thread is not None
        index = (self.ranks.index(self.rank) - root) % len(self.ranks)
        self.journal.note(kind, 0 if kind == "all_to_all" else nbytes)
        sent = wire_nbytes(sent_as or kind, len(self.ranks), 0 if is_local else nbytes, index)
        recorded = Recorded(start(), self, sent)
        self.in_flight.append(recorded)
        return recorded

    def close(self) -> None:
        self.clock.rest()
        for group in self._groups.values():
            group.close()
        if self._comm_thread is not None:
            self._comm_thread.close()
        if self._mailbox is not None:
            self._mailbox.close()
        if self._shared is not None:
            self._shared.close()
        if self._vectors is not None:
            self._vectors.close()
        self._torch.close()


def wire_nbytes(collective: str, members: int, nbytes: int, index: int) -> int:
    """Bytes that a member would send if the collective ran as a ring over a network.

    Every member has an input of `nbytes` bytes; `index` counts members from the root on.  The trace reports this
    number for every collective: it is computed, not measured, and equals the simulator's, so that traces of both can
    be compared.  Through shared memory no byte is sent over a network, and gloo and NCCL may use another algorithm
    than a ring.

    >>> wire_nbytes("all_reduce", 4, 1000, 0)
    1500
    """
    return network.COLLECTIVES[collective]("ring", members, nbytes, ANY_LINK).nbytes(index)


def _nbytes(x: Tensor, extras: Tensor | None) -> int:
    return x.nbytes + (0 if extras is None else extras.nbytes)
