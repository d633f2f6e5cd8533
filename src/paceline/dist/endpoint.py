"""A rank's endpoint among real processes.

Collectives go through shared memory where all ranks share a host and the tensors are on the CPU, otherwise through
torch.distributed (gloo, NCCL); messages go through a ZeroMQ mailbox, opened with the first of them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.dist.shared import SharedMemory
from paceline.endpoint import Layout, Message, check_summable
from paceline.errors import ClusterError
from paceline.op import Op, Ready, Routine
from paceline.sim import network
from paceline.trace import Trace

if TYPE_CHECKING:
    from paceline.dist.mailbox import Mailbox

T = TypeVar("T")

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
    """One process's hold on its job.  `group` is None for a worker on its own and for servers."""

    def __init__(
        self,
        rank: int,
        layout: Layout,
        clock: Clock,
        *,
        ranks: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        shared: SharedMemory | None = None,
        open_mailbox: Callable[[], Mailbox] | None = None,
        open_group: Callable[[tuple[int, ...]], ProcessEndpoint] | None = None,
        ordered: bool = False,
        trace: Trace | None = None,
    ) -> None:
        self.rank, self.layout, self.clock, self.ordered = rank, layout, clock, ordered
        self.ranks = tuple(layout.worker_ranks if ranks is None else ranks)
        self.trace = Trace() if trace is None else trace
        self._process_group, self._shared = group, shared
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

    def group(self, ranks: Sequence[int]) -> ProcessEndpoint:
        ranks = tuple(sorted(ranks))
        if ranks == self.ranks:
            return self
        if self.rank not in ranks or not set(ranks) <= set(self.ranks) or self._open_group is None:
            raise ValueError(f"rank {self.rank} asked for the group {list(ranks)}: it must be one of them, and they some of {list(self.ranks)}")
        if ranks not in self._groups:
            self._groups[ranks] = self._open_group(ranks)
        return self._groups[ranks]

    def channel(self) -> ProcessEndpoint:
        return self  # Routines are carried on where they are waited for, and so in one order on every rank.

    @property
    def mailbox(self) -> Mailbox:
        if self._mailbox is None:
            if self._open_mailbox is None:
                raise ClusterError(f"rank {self.rank} is on its own: there is nobody to write to or hear from")
            self._mailbox = self._open_mailbox()
        return self._mailbox

    def send(self, dst: int, message: Message) -> Op[None]:
        return Watched(self.mailbox.send(dst, message), self, message.nbytes)

    def recv(self, *, src: int | None = None, timeout: float | None = None) -> Op[Message]:
        return Watched(self.mailbox.recv(src, timeout), self, 0)

    def all_reduce(self, x: Tensor, tail: Tensor | None = None) -> Op[Tensor]:
        check_summable(x)
        if len(self.ranks) == 1:
            return Ready("all_reduce", x)
        nbytes = x.nbytes + (0 if tail is None else tail.nbytes)
        if self._shared is not None and x.device.type == "cpu":
            return self._watched(self._shared.all_reduce(x, tail), nbytes)
        if self.ordered:
            return self._watched(Routine("all_reduce", self._ordered_sum(x, tail)), nbytes, sent_as="all_gather")
        works = [dist.all_reduce(t, group=self._process_group, async_op=True) for t in (x, tail) if t is not None]
        return self._watched(Work("all_reduce", works, lambda: x), nbytes)

    async def _ordered_sum(self, x: Tensor, tail: Tensor | None) -> Tensor:
        """In order of ranks, so that the bits are those of the simulator; it costs N times the memory."""
        given = [x] if tail is None else [x, tail.to(x.device)]
        # In one message: a second one, started when the first is waited for, might start at another moment on another rank.
        messages = await self._gather(torch.cat([t.view(-1).view(torch.uint8) for t in given]))
        start = 0
        for t, into in zip(given, (x, tail), strict=False):
            first, *others = [m[start : start + t.nbytes].clone().view(t.dtype).view(t.shape) for m in messages]
            for other in others:
                first.add_(other)
            assert into is not None
            into.copy_(first)
            start += t.nbytes
        return x

    def all_gather(self, data: Tensor) -> Op[list[Tensor]]:
        if len(self.ranks) == 1:
            return Ready("all_gather", [data.clone()])
        if self._shared is not None and data.device.type == "cpu":
            return self._watched(self._shared.all_gather(data), data.nbytes)
        return self._watched(self._gather(data), data.nbytes)

    def _gather(self, data: Tensor) -> Op[list[Tensor]]:
        parts = [torch.empty_like(data) for _ in self.ranks]
        return Work("all_gather", [dist.all_gather(parts, data.contiguous(), group=self._process_group, async_op=True)], lambda: parts)

    def all_to_all(self, parts: Sequence[Tensor]) -> Op[list[Tensor]]:
        if len(parts) != len(self.ranks):
            raise ValueError(f"rank {self.rank} gave all_to_all {len(parts)} parts for {len(self.ranks)} ranks")
        if len(self.ranks) == 1:
            return Ready("all_to_all", [parts[0].clone()])
        mine = self.ranks.index(self.rank)
        nbytes = sum(p.nbytes for i, p in enumerate(parts) if i != mine)
        if self._shared is not None and parts[0].device.type == "cpu":
            return self._watched(self._shared.all_to_all(parts), nbytes)
        return self._watched(Routine("all_to_all", self._exchange(parts)), nbytes)

    async def _exchange(self, parts: Sequence[Tensor]) -> list[Tensor]:
        # Nobody knows how much the others have for it, so the sizes go first and the bytes follow when this is waited for:
        # ranks must not start another collective in between on one side only.
        sizes = await self._gather(torch.tensor([p.numel() for p in parts]))
        mine = self.ranks.index(self.rank)
        coming = [int(s[mine]) for s in sizes]
        received = torch.empty(sum(coming), dtype=torch.uint8, device=parts[0].device)
        work = dist.all_to_all_single(
            received, torch.cat(list(parts)), coming, [p.numel() for p in parts], group=self._process_group, async_op=True
        )
        return await Work("all_to_all", [work], lambda: list(received.split(coming)))

    def broadcast(self, x: Tensor, src: int) -> Op[Tensor]:
        if len(self.ranks) == 1:
            return Ready("broadcast", x)
        if self._shared is not None and x.device.type == "cpu":
            return self._watched(self._shared.broadcast(x, src), x.nbytes, self.ranks.index(src))
        work = dist.broadcast(x, src, group=self._process_group, async_op=True)
        return self._watched(Work("broadcast", [work], lambda: x), x.nbytes, self.ranks.index(src))

    def _watched(self, op: Op[T], nbytes: int, root: int = 0, sent_as: str | None = None) -> Op[T]:
        cost = network.COLLECTIVES[sent_as or op.kind]("ring", len(self.ranks), nbytes, ANY_LINK)
        watched = Watched(op, self, cost.nbytes((self.ranks.index(self.rank) - root) % len(self.ranks)))
        self.under_way.append(watched)
        return watched

    def close(self) -> None:
        for group in self._groups.values():
            group.close()
        if self._mailbox is not None:
            self._mailbox.close()
        if self._shared is not None:
            self._shared.close()
