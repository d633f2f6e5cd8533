"""A rank's endpoint among real processes.

Collectives go through shared memory where all ranks share a host and the tensors are on the CPU, otherwise through
torch.distributed: gloo in a thread of its own (`lane`), by host first where hosts have several ranks, or NCCL.  Messages go
through a ZeroMQ mailbox, opened with the first of them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline import costs as network
from paceline.collectives import sum_by_groups
from paceline.endpoint import Endpoint, Layout, SharedVector, check_summable
from paceline.errors import ClusterError
from paceline.op import Op, Ready, Routine, and_then, drive
from paceline.protocol.messages import Message
from paceline.trace import Trace
from paceline.transport.comm_thread import CommThread
from paceline.transport.shared_memory import SharedMemory
from paceline.transport.shared_vector import shared_vector

if TYPE_CHECKING:
    from paceline.transport.mailbox import Mailbox

S = TypeVar("S")
T = TypeVar("T")

SPANS_KEPT = 100_000  # A session may last for millions of steps; its trace keeps the newest, and the totals of all.
BEAT_S = 1.0  # How often a worker lets servers know that it lives.
SILENT_S = 30.0  # How long it may be silent; by then it is not coming back, or has become very slow.
RETRANSMIT_S = 5.0
ANY_LINK = network.Link(bandwidth=1.0, latency=0.0)  # Only the bytes of a collective's cost are asked for here.


class Clock:
    """Seconds since a moment that all ranks of a job agree on."""

    def __init__(self, epoch: float) -> None:
        self._offset = time.time() - time.monotonic() - epoch

    def now(self) -> float:
        return time.monotonic() + self._offset


class Watched(Op[T]):
    """Another Op, with its span written to the trace when it is finished.

    Collectives are finished in the order in which they were started, whichever is waited for first: some have a second part
    that starts when the first is waited for, and ranks must not start these in different orders.
    """

    __slots__ = ("_endpoint", "_inner", "_nbytes", "_start", "_value")

    def __init__(self, inner: Op[T], endpoint: ProcessEndpoint, nbytes: int) -> None:
        super().__init__(inner.kind)
        self._inner: Op[T] | None = inner
        self._endpoint, self._nbytes, self._start = endpoint, nbytes, endpoint.now()

    def wait(self) -> T:
        while self._inner is not None and self in self._endpoint.under_way:
            self._endpoint.under_way.popleft().finish()
        self.finish()
        return self._value

    def finish(self) -> None:
        if self._inner is not None:
            self._value = self._inner.wait()
            self._inner = None
            self._endpoint.trace.span(self._endpoint.rank, self.kind, self._start, self._endpoint.now(), self._nbytes)


class Work(Op[T]):
    """torch.distributed's own handles, and what they leave behind."""

    __slots__ = ("_result", "_works")

    def __init__(self, kind: str, works: Sequence[dist.Work | None], result: Callable[[], T]) -> None:
        super().__init__(kind)
        self._works, self._result = works, result

    def wait(self) -> T:
        for work in self._works:
            if work is not None:
                try:
                    work.wait()
                except RuntimeError as error:
                    raise ClusterError(f"'{self.kind}' failed, most likely because a peer is gone: {error}") from error
        return self._result()


class ProcessEndpoint:
    """One process's hold on its job.  `group` is None for a worker on its own, for servers, and for those who only talk to these."""

    retransmit_s = RETRANSMIT_S

    def __init__(
        self,
        rank: int,
        layout: Layout,
        clock: Clock,
        *,
        ranks: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        shared: SharedMemory | None = None,
        lane: CommThread | None = None,
        hosts: Sequence[Sequence[int]] | None = None,
        open_mailbox: Callable[[], Mailbox] | None = None,
        open_group: Callable[[tuple[int, ...]], ProcessEndpoint] | None = None,
        has_ended: Callable[[int], bool] = lambda rank: False,
        members_ever: Callable[[], Sequence[int]] | None = None,
        ordered: bool = False,
        trace: Trace | None = None,
    ) -> None:
        self._has_ended, self._members_ever = has_ended, members_ever
        self.rank, self.layout, self.clock, self.ordered = rank, layout, clock, ordered
        self.ranks = tuple(layout.worker_ranks if ranks is None else ranks)
        self.trace = Trace() if trace is None else trace
        self.hosts = hosts  # The ranks by host, if several hosts have several.
        self._process_group, self._shared, self._lane = group, shared, lane
        self._open_mailbox, self._mailbox = open_mailbox, None
        self._open_group = open_group
        self._groups: dict[tuple[int, ...], ProcessEndpoint] = {}
        self.under_way: deque[Watched[Any]] = deque()

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
        routine: Callable[[Endpoint], Coroutine[Op[Any], Any, S]],
        then: Callable[[S], T],
        *,
        kind: str = "exchange",
    ) -> Op[T]:
        if self._lane is None or self._lane.is_here():
            # Carried on where it is waited for, and so in one order on every rank.
            return Routine(kind, and_then(routine(self), then))
        return self._lane.ask(kind, lambda: drive(routine(self)), then)

    def group(self, ranks: Sequence[int]) -> ProcessEndpoint:
        ranks = tuple(sorted(ranks))
        if ranks == self.ranks:
            return self
        if self.rank not in ranks or not set(ranks) <= set(self.ranks) or self._open_group is None:
            raise ValueError(
                f"rank {self.rank} asked for the group {list(ranks)}: it must be one of them, and they some of {list(self.ranks)}"
            )
        if ranks not in self._groups:
            self._groups[ranks] = self._open_group(ranks)
        return self._groups[ranks]

    @property
    def mailbox(self) -> Mailbox:
        if self._mailbox is None:
            if self._open_mailbox is None:
                raise ClusterError(f"rank {self.rank} is on its own: there is nobody to write to or hear from")
            self._mailbox = self._open_mailbox()
        return self._mailbox

    def send(self, dst: int, message: Message) -> Op[None]:
        return Watched(self.mailbox.send(dst, message), self, message.nbytes)

    def recv(
        self, *, src: int | None = None, types: tuple[type[Message], ...] | None = None, timeout: float | None = None
    ) -> Op[Message]:
        return Watched(self.mailbox.recv(src, timeout, types), self, 0)

    def has_ended(self, rank: int) -> bool:
        return self._has_ended(rank)

    def members_ever(self) -> Sequence[int]:
        return self.ranks if self._members_ever is None else self._members_ever()

    def send_buffer(self, like: Tensor) -> Tensor:
        return self.mailbox.send_buffer(like) if like.device.type == "cpu" else torch.empty_like(like)

    def in_use(self, x: Tensor) -> bool:
        return x.device.type == "cpu" and self.mailbox.in_use(x)

    @property
    def is_one_host(self) -> bool:
        return self._shared is not None

    def shared_vector(self, first: Tensor) -> Op[SharedVector]:
        return Routine("common", shared_vector(self, first))

    def all_reduce(self, x: Tensor, extras: Tensor | None = None) -> Op[Tensor]:
        check_summable(x)
        if len(self.ranks) == 1:
            return Ready("all_reduce", x)
        nbytes = x.nbytes + (0 if extras is None else extras.nbytes)
        if (shared := self._sharing(x)) is not None:
            return self._begin("all_reduce", lambda: shared.all_reduce(x, extras), nbytes)
        if self.ordered:
            return self._begin(
                "all_reduce", lambda: Routine("all_reduce", self._ordered_sum(x, extras)), nbytes, sent_as="all_gather"
            )
        if self.hosts is not None and x.device.type == "cpu":
            hosts, small = self.hosts, torch.zeros(0, dtype=torch.float64) if extras is None else extras
            return self.run_collectives(
                lambda _: sum_by_groups(self, x, small, hosts), lambda total: total, kind="all_reduce"
            )
        return self._begin("all_reduce", lambda: self._sum(x, extras), nbytes)

    def _sum(self, x: Tensor, extras: Tensor | None) -> Op[Tensor]:
        works = [dist.all_reduce(t, group=self._process_group, async_op=True) for t in (x, extras) if t is not None]
        return Work("all_reduce", works, lambda: x)

    async def _ordered_sum(self, x: Tensor, extras: Tensor | None) -> Tensor:
        """In order of ranks, so that the bits are those of the simulator; it costs N times the memory."""
        given = [x] if extras is None else [x, extras.to(x.device)]
        # In one message: a second one, started when the first is waited for, might start at another moment on another rank.
        messages = await self._gather(torch.cat([t.view(-1).view(torch.uint8) for t in given]))
        start = 0
        for t, into in zip(given, (x, extras), strict=False):
            first, *others = [m[start : start + t.nbytes].clone().view(t.dtype).view(t.shape) for m in messages]
            for other in others:
                first.add_(other)
            assert into is not None
            into.copy_(first)
            start += t.nbytes
        return x

    def reduce(self, x: Tensor, dst: int, extras: Tensor | None = None) -> Op[Tensor]:
        check_summable(x)
        if len(self.ranks) == 1:
            return Ready("reduce", x)
        nbytes, root = x.nbytes + (0 if extras is None else extras.nbytes), self.ranks.index(dst)
        if (shared := self._sharing(x)) is not None:
            return self._begin("reduce", lambda: shared.all_reduce(x, extras), nbytes, root)
        return self._begin("reduce", lambda: self._sum_at(x, dst, extras), nbytes, root)

    def _sum_at(self, x: Tensor, dst: int, extras: Tensor | None) -> Op[Tensor]:
        works = [dist.reduce(t, dst, group=self._process_group, async_op=True) for t in (x, extras) if t is not None]
        return Work("reduce", works, lambda: x)

    def all_gather(self, data: Tensor) -> Op[list[Tensor]]:
        if len(self.ranks) == 1:
            return Ready("all_gather", [data.clone()])
        shared = self._sharing(data)
        return self._begin(
            "all_gather", lambda: self._gather(data) if shared is None else shared.all_gather(data), data.nbytes
        )

    def _gather(self, data: Tensor) -> Op[list[Tensor]]:
        parts = [torch.empty_like(data) for _ in self.ranks]
        return Work(
            "all_gather",
            [dist.all_gather(parts, data.contiguous(), group=self._process_group, async_op=True)],
            lambda: parts,
        )

    def all_to_all(self, parts: Sequence[Tensor], coming: Sequence[int] | None = None) -> Op[list[Tensor]]:
        if len(parts) != len(self.ranks):
            raise ValueError(f"rank {self.rank} gave all_to_all {len(parts)} parts for {len(self.ranks)} ranks")
        if len(self.ranks) == 1:
            return Ready("all_to_all", [parts[0].clone()])
        mine = self.ranks.index(self.rank)
        nbytes = sum(p.nbytes for i, p in enumerate(parts) if i != mine)
        if (shared := self._sharing(parts[0])) is not None:
            return self._begin("all_to_all", lambda: shared.all_to_all(parts), nbytes)
        if coming is not None:
            return self._begin("all_to_all", lambda: self._swap(parts, coming), nbytes)
        return self._begin("all_to_all", lambda: Routine("all_to_all", self._ask_and_swap(parts)), nbytes)

    async def _ask_and_swap(self, parts: Sequence[Tensor]) -> list[Tensor]:
        # Nobody knows how much the others have for it, so the sizes go first.  Without a lane the bytes follow when this is
        # waited for: ranks must not start another collective in between on one side only.
        sizes = await self._gather(torch.tensor([p.numel() for p in parts], device=parts[0].device))
        mine = self.ranks.index(self.rank)
        return await self._swap(parts, [int(s[mine]) for s in sizes])

    def _swap(self, parts: Sequence[Tensor], coming: Sequence[int]) -> Op[list[Tensor]]:
        received = torch.empty(sum(coming), dtype=torch.uint8, device=parts[0].device)
        going = [p.numel() for p in parts]
        work = dist.all_to_all_single(
            received, _in_one(parts), list(coming), going, group=self._process_group, async_op=True
        )
        return Work("all_to_all", [work], lambda: list(received.split(list(coming))))

    def broadcast(self, x: Tensor, src: int) -> Op[Tensor]:
        if len(self.ranks) == 1:
            return Ready("broadcast", x)
        root = self.ranks.index(src)
        if (shared := self._sharing(x)) is not None:
            return self._begin("broadcast", lambda: shared.broadcast(x, src), x.nbytes, root)
        return self._begin("broadcast", lambda: self._spread(x, src), x.nbytes, root)

    def _spread(self, x: Tensor, src: int) -> Op[Tensor]:
        return Work("broadcast", [dist.broadcast(x, src, group=self._process_group, async_op=True)], lambda: x)

    def _sharing(self, x: Tensor) -> SharedMemory | None:
        return self._shared if x.device.type == "cpu" else None

    def _begin(
        self, kind: str, start: Callable[[], Op[T]], nbytes: int, root: int = 0, sent_as: str | None = None
    ) -> Op[T]:
        """Start a collective, here or in the lane; `nbytes` is what each rank puts in."""
        if self._lane is not None and not self._lane.is_here():
            return self._lane.ask(
                kind, lambda: self._begin(kind, start, nbytes, root, sent_as).wait(), lambda value: value
            )
        # Within one host of several nothing goes over a network.
        is_free = self._shared is not None and self._lane is not None
        cost = network.COLLECTIVES[sent_as or kind]("ring", len(self.ranks), 0 if is_free else nbytes, ANY_LINK)
        watched = Watched(start(), self, cost.nbytes((self.ranks.index(self.rank) - root) % len(self.ranks)))
        self.under_way.append(watched)
        return watched

    def close(self) -> None:
        for group in self._groups.values():
            group.close()
        if self._lane is not None:
            self._lane.close()
        if self._mailbox is not None:
            self._mailbox.close()
        if self._shared is not None:
            self._shared.close()
        # Held by nobody the group ends its threads; one that still lets go of a tensor when the interpreter ends takes it down.
        self._process_group = None


def _in_one(parts: Sequence[Tensor]) -> Tensor:
    """The parts one behind the other; no copy if they lie so already."""
    first, starts = parts[0], [p.data_ptr() for p in parts]
    storage = first.untyped_storage().data_ptr()
    if all(p.untyped_storage().data_ptr() == storage for p in parts) and starts == [
        starts[0] + sum(p.numel() for p in parts[:i]) for i in range(len(parts))
    ]:
        return first.as_strided((sum(p.numel() for p in parts),), (1,))
    return torch.cat(list(parts))
