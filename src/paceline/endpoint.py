"""Endpoint: how a rank communicates with the other ranks.

The simulator, real processes and a single process each implement it.  Strategies and collectives use nothing else.
Workers have the first ranks, servers the next: worker i is rank i, server j is rank `layout.workers + j`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from paceline.op import Op
from paceline.protocol.messages import Message
from paceline.trace import Trace

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Layout:
    """How many workers and servers a job starts with, and which ranks they have.

    >>> Layout(workers=4, servers=2).server_ranks
    range(4, 6)
    """

    workers: int
    servers: int = 0
    numbers: tuple[int, ...] = field(default=(), repr=False)  # Of a part of a job: the job's own rank of each rank.

    def __post_init__(self) -> None:
        if self.workers < 1 or self.servers < 0:
            raise ValueError(f"{self}: there must be at least 1 worker and no fewer than 0 servers")

    @property
    def size(self) -> int:
        return self.workers + self.servers

    @property
    def worker_ranks(self) -> range:
        return range(self.workers)

    @property
    def server_ranks(self) -> range:
        return range(self.workers, self.size)

    def name(self, rank: int) -> str:
        """How messages name a rank.  Ranks from `size` on are workers that joined later."""
        number = self.numbers[rank] if rank < len(self.numbers) else rank
        return f"server {rank - self.workers} (rank {number})" if rank in self.server_ranks else f"worker {rank}"


class WriteCounts:
    """How many times each member of a group has written to a shared vector.

    Each member changes only its own count, so none is lost without a lock.  `counts` is in memory that all members
    share; `member` is the index of this rank among them.

    >>> counts = torch.zeros(2, dtype=torch.int64)
    >>> first, second = WriteCounts(counts, 0), WriteCounts(counts, 1)
    >>> first.add_write()
    >>> first.of_others(), second.of_others(), second.of_all()
    (0, 1, 1)
    """

    def __init__(self, counts: Tensor, member: int) -> None:
        self._counts = counts.numpy().data  # Several times as fast as a tensor, for so few numbers.
        self._member = member

    def of_all(self) -> int:
        return sum(self._counts)

    def of_others(self) -> int:
        return sum(self._counts) - self._counts[self._member]

    def add_write(self) -> None:
        """This rank has written to the vector."""
        self._counts[self._member] += 1


class SharedVector(Protocol):
    """A vector in the host's shared memory that several ranks read and write at any time, without a lock.

    A read during a write may return old values in one part and new values in another.  Of two writes to the same value
    at the same time, one may be lost.
    """

    writes: WriteCounts  # The strategy counts its writes; what counts as one is its decision.
    steps: memoryview  # By member: the step that it comes to next, for a worker that takes its place.

    @property
    def values(self) -> Tensor:
        """The memory itself."""
        ...

    def read(self, into: Tensor) -> Op[Tensor]: ...

    def add(self, change: Tensor) -> Op[None]:
        """values += change."""
        ...

    def draw(self, towards: Tensor, share: float) -> Op[None]:
        """values += share * (towards - values)."""
        ...


class Endpoint(Protocol):
    """A rank's connection to its group.

    Collectives run over `ranks` (by default all workers), and every member must start them in the same order.  Some
    work in place, and return the tensor that they were given.  Do not use a buffer that was given to an Op before the
    Op has been awaited.
    """

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> Sequence[int]: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def hosts(self) -> Sequence[Sequence[int]] | None:
        """The ranks by host, if it is faster to sum within each host first and between hosts then; None otherwise."""
        ...

    @property
    def trace(self) -> Trace: ...

    @property
    def retransmit_s(self) -> float | None:
        """Retransmit timeout in seconds; None on transports that lose no messages."""
        ...

    def now(self) -> float:
        """Seconds since the job began; the only clock in the library."""
        ...

    def compute(self, work: Callable[[], T], *, kind: str = "compute", nbytes: int = 0) -> Op[T]:
        """Run `work` on this rank's own processor.  In the simulator its virtual time passes at the await."""
        ...

    def spawn(self, routine: Coroutine[Op[Any], Any, T], *, kind: str = "routine") -> Op[T]:
        """Start a coroutine on this rank; await its result later."""
        ...

    def run_collectives(
        self,
        routine: Callable[[Endpoint], Coroutine[Op[Any], Any, T]],
        *,
        kind: str = "exchange",
        is_single: bool = False,
    ) -> Op[T]:
        """Start a routine of several collectives on the endpoint that it is given, possibly in another thread.

        The collectives run in the order in which they were started, also relative to those that this rank starts in
        the meantime.  Until the Op has been awaited, the routine must not use data that other code uses.  `is_single`
        is for routines that nearly always have one collective only.  What follows that collective runs when the Op is
        awaited, and the next routine starts without waiting for it.
        """
        ...

    def send(self, dst: int, message: Message) -> Op[None]: ...

    def recv(
        self, *, src: int | None = None, types: tuple[type[Message], ...] | None = None, timeout: float | None = None
    ) -> Op[Message]:
        """The next message, if given from `src` and of one of `types`; TimeoutError after `timeout` seconds."""
        ...

    def has_ended(self, rank: int) -> bool:
        """Whether a rank that no longer answers has finished its work, and not died."""
        ...

    def members_ever(self) -> Sequence[int]:
        """Every worker that ever joined, including dead and finished ones; this one is among them."""
        ...

    def send_buffer(self, like: Tensor) -> Tensor:
        """Memory for a tensor that is sent many times, if possible without a copy; see `in_use`."""
        ...

    def in_use(self, x: Tensor) -> bool:
        """Whether a send buffer may still be read by its receiver: if so, do not write to it."""
        ...

    def shared_vector(self, first: Tensor, member: int | None = None) -> Op[SharedVector]:
        """Shared memory of the group, on one host, with the values of one member.  All members must call it.

        A rank that joins later takes the place of a `member` that has died.
        """
        ...

    def all_reduce(self, x: Tensor, extras: Tensor | None = None) -> Op[Tensor]:
        """The sum over the group, in place.  `extras`, a few float64 numbers, are sent and summed with it."""
        ...

    def all_gather(self, data: Tensor) -> Op[list[Tensor]]:
        """Every member's `data`, in the order of `ranks`; all have the same size."""
        ...

    def all_to_all(self, parts: Sequence[Tensor], coming: Sequence[int] | None = None) -> Op[list[Tensor]]:
        """Send `parts[j]` to the j-th member, and return the part that each member sent to this rank.

        Parts are bytes, of any sizes.  `coming` is the number of bytes from each member; without it, members first
        exchange the sizes.
        """
        ...

    def reduce(self, x: Tensor, dst: int, extras: Tensor | None = None) -> Op[Tensor]:
        """The sum over the group, in place on rank `dst`; on other ranks the content of `x` is then undefined."""
        ...

    def broadcast(self, x: Tensor, src: int) -> Op[Tensor]: ...

    def group(self, ranks: Sequence[int]) -> Endpoint:
        """An endpoint of this rank in a smaller group, ordered by rank."""
        ...


SUMMABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64)


def check_summable(x: Tensor) -> None:
    """Raise ValueError for a tensor that a sum on the wire would corrupt: encoded bytes wrap around at 255."""
    if x.dtype not in SUMMABLE:
        raise ValueError(
            f"all_reduce of {x.dtype}: encoded values cannot be summed on the wire; use mean_by_gather or "
            "mean_by_stripes"
        )
    if not x.is_contiguous():
        raise ValueError(
            f"all_reduce of a tensor of shape {tuple(x.shape)} with strides {x.stride()}: it must be contiguous"
        )
