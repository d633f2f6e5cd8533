"""Endpoint: all that a rank can do to the outside world.

The simulator, real processes and a process on its own each implement it; strategies and collectives know nothing else.
Ranks count the workers first and the servers after them: worker i is rank i, server j is rank `layout.workers + j`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from paceline.op import Op
from paceline.protocol.messages import Message
from paceline.trace import Trace

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Layout:
    """How many ranks there are, and which of them serve.

    >>> Layout(workers=4, servers=2).server_ranks
    range(4, 6)
    """

    workers: int
    servers: int = 0

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
        """Ranks beyond those of the beginning are workers that have joined."""
        return f"server {rank - self.workers} (rank {rank})" if rank in self.server_ranks else f"worker {rank}"


class SharedVector(Protocol):
    """A vector in memory that several ranks read and change whenever they like, without a lock.

    Who reads while another writes may get parts of different ages, and of two changes at one place at one time one may be lost.
    """

    @property
    def values(self) -> Tensor:
        """The memory itself."""
        ...

    def read(self, into: Tensor) -> Op[Tensor]: ...

    def draw(self, towards: Tensor, share: float) -> Op[None]:
        """values += share * (towards - values)."""
        ...


class Endpoint(Protocol):
    """A rank's connection to its group.

    Collectives run over `ranks` (by default all workers), must be started by every member in the same order, and work
    in place where they return what they were given.  A buffer handed to an Op belongs to it until it was awaited.
    """

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> Sequence[int]: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def hosts(self) -> Sequence[Sequence[int]] | None:
        """The ranks by host, where sums are best taken within each before they go over a network; None: as they come."""
        ...

    @property
    def trace(self) -> Trace: ...

    @property
    def retransmit_s(self) -> float | None:
        """Seconds without an answer after which a message may have been lost; None: none ever is."""
        ...

    def now(self) -> float:
        """Seconds since the job began; the only clock in the library."""
        ...

    def compute(self, work: Callable[[], T], *, kind: str = "compute", nbytes: int = 0) -> Op[T]:
        """Work of this rank's own processor; in the simulator its time passes until the await."""
        ...

    def spawn(self, routine: Coroutine[Op[Any], Any, T], *, kind: str = "routine") -> Op[T]:
        """Begin a coroutine of this rank's, to be awaited later."""
        ...

    def run_collectives(
        self, routine: Callable[[Endpoint], Coroutine[Op[Any], Any, T]], *, kind: str = "exchange"
    ) -> Op[T]:
        """Start a routine of several collectives on the endpoint that it is given, possibly in another thread.

        The collectives keep their order, among themselves and relative to all others, whatever this rank starts
        meanwhile.  The routine must touch only what is its own until the Op was awaited.
        """
        ...

    def send(self, dst: int, message: Message) -> Op[None]: ...

    def recv(
        self, *, src: int | None = None, types: tuple[type[Message], ...] | None = None, timeout: float | None = None
    ) -> Op[Message]:
        """The next message, from `src` and of one of `types` if these are given; TimeoutError after `timeout` seconds."""
        ...

    def has_ended(self, rank: int) -> bool:
        """Whether one that no longer answers has come to its end, with all work done."""
        ...

    def members_ever(self) -> Sequence[int]:
        """The workers that have come so far, also those that are gone again; this one is among them."""
        ...

    def send_buffer(self, like: Tensor) -> Tensor:
        """Memory for a tensor that is sent again and again, if possible without a copy; see `in_use`."""
        ...

    def in_use(self, x: Tensor) -> bool:
        """Whether what lies in `room` was sent and may not have been read yet, so that it must not be written to."""
        ...

    def shared_vector(self, first: Tensor) -> Op[SharedVector]:
        """Memory that the group has in common, on one host, with the first member's values in it; like a collective, for all at once."""
        ...

    def all_reduce(self, x: Tensor, extras: Tensor | None = None) -> Op[Tensor]:
        """The sum over the group, in place.  `tail`, a few float64 numbers, travels and is summed along."""
        ...

    def all_gather(self, data: Tensor) -> Op[list[Tensor]]:
        """Every member's `data`, in the order of `ranks`; all of one size."""
        ...

    def all_to_all(self, parts: Sequence[Tensor], coming: Sequence[int] | None = None) -> Op[list[Tensor]]:
        """Give the j-th member `parts[j]`; get what each member had for this rank.  Parts are bytes, of any sizes; who knows
        how many bytes are `coming` from each member saves them from being asked."""
        ...

    def reduce(self, x: Tensor, dst: int, extras: Tensor | None = None) -> Op[Tensor]:
        """The sum over the group, in place on rank `dst`; what the others have then is of no use."""
        ...

    def broadcast(self, x: Tensor, src: int) -> Op[Tensor]: ...

    def group(self, ranks: Sequence[int]) -> Endpoint:
        """The same rank among fewer others, in the order of their ranks."""
        ...


SUMMABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64)


def check_summable(x: Tensor) -> None:
    """Refuse what a sum on the wire would silently ruin: encoded bytes wrap around at 255."""
    if x.dtype not in SUMMABLE:
        raise ValueError(
            f"all_reduce of {x.dtype}: encoded values cannot be summed on the wire; use mean_by_gather or mean_by_stripes"
        )
    if not x.is_contiguous():
        raise ValueError(
            f"all_reduce of a tensor of shape {tuple(x.shape)} with strides {x.stride()}: it must be contiguous"
        )
