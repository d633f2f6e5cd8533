"""Collectives through torch.distributed: gloo or NCCL, whichever the process group has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import ExchangeFailed
from paceline.op import Op, Routine

T = TypeVar("T")


class Work(Op[T]):
    """Handles of torch.distributed, and the result once all of them are done."""

    __slots__ = ("_result", "_works")

    def __init__(self, kind: str, works: Sequence[dist.Work | None], result: Callable[[], T]) -> None:
        super().__init__(kind)
        self._works = works
        self._result = result

    def wait(self) -> T:
        for work in self._works:
            if work is not None:
                try:
                    work.wait()
                except RuntimeError as error:
                    raise ExchangeFailed(f"'{self.kind}' failed, most likely because a peer died: {error}") from error
        return self._result()


class TorchCollectives:
    """One rank's collectives in a process group.

    `extras_group` has the same ranks, and sums extras on connections of its own.  On those of `group` they would wait
    behind values at every hop of the ring, and could be the last to arrive.

    If `is_ordered`, all_reduce adds in the order of the ranks, so that the bits are those of the simulator.  It
    gathers all inputs for that, which takes N times the memory.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        group: dist.ProcessGroup | None,
        *,
        extras_group: dist.ProcessGroup | None = None,
        is_ordered: bool,
    ) -> None:
        self.ranks = tuple(ranks)
        self.is_ordered = is_ordered
        self.group = group
        self.extras_group = extras_group or group
        self._rank = rank

    def all_reduce(self, x: Tensor, extras: Tensor | None) -> Op[Tensor]:
        """The sums of `x` and of `extras`, each in place."""
        if self.is_ordered:
            return Routine("all_reduce", self._ordered_sum(x, extras))
        works = [dist.all_reduce(x, group=self.group, async_op=True)]
        if extras is not None:
            works.append(dist.all_reduce(extras, group=self.extras_group, async_op=True))
        return Work("all_reduce", works, lambda: x)

    async def _ordered_sum(self, x: Tensor, extras: Tensor | None) -> Tensor:
        given = [x] if extras is None else [x, extras.to(x.device)]
        # In one collective: a second one would start when the first is awaited, which ranks do at different moments.
        messages = await self.all_gather(torch.cat([t.view(-1).view(torch.uint8) for t in given]))
        start = 0
        for t, into in zip(given, (x, extras), strict=False):
            first, *others = [m[start : start + t.nbytes].clone().view(t.dtype).view(t.shape) for m in messages]
            for other in others:
                first.add_(other)
            assert into is not None
            into.copy_(first)
            start += t.nbytes
        return x

    def reduce(self, x: Tensor, dst: int, extras: Tensor | None) -> Op[Tensor]:
        """The sums of `x` and of `extras`, each in place on rank `dst`."""
        works = [dist.reduce(t, dst, group=self.group, async_op=True) for t in (x, extras) if t is not None]
        return Work("reduce", works, lambda: x)

    def all_gather(self, data: Tensor) -> Op[list[Tensor]]:
        """Every member's `data`, in the order of the ranks; all of one size."""
        parts = [torch.empty_like(data) for _ in self.ranks]
        work = dist.all_gather(parts, data.contiguous(), group=self.group, async_op=True)
        return Work("all_gather", [work], lambda: parts)

    def all_to_all(self, parts: Sequence[Tensor], coming: Sequence[int] | None) -> Op[list[Tensor]]:
        """Send the j-th member `parts[j]`, bytes of any number; `coming` is how many each member sends, if known."""
        if coming is not None:
            return self._exchange(parts, coming)
        return Routine("all_to_all", self._exchange_sizes_first(parts))

    async def _exchange_sizes_first(self, parts: Sequence[Tensor]) -> list[Tensor]:
        # Without a communication thread the bytes are sent only when this is awaited: no rank may start another
        # collective between the two.
        sizes = await self.all_gather(torch.tensor([p.numel() for p in parts], device=parts[0].device))
        mine = self.ranks.index(self._rank)
        return await self._exchange(parts, [int(s[mine]) for s in sizes])

    def _exchange(self, parts: Sequence[Tensor], coming: Sequence[int]) -> Op[list[Tensor]]:
        received = torch.empty(sum(coming), dtype=torch.uint8, device=parts[0].device)
        going = [p.numel() for p in parts]
        work = dist.all_to_all_single(
            received, concatenated(parts), list(coming), going, group=self.group, async_op=True
        )
        return Work("all_to_all", [work], lambda: list(received.split(list(coming))))

    def broadcast(self, x: Tensor, src: int) -> Op[Tensor]:
        """Copy rank `src`'s `x` into every member's `x`."""
        return Work("broadcast", [dist.broadcast(x, src, group=self.group, async_op=True)], lambda: x)

    def close(self) -> None:
        # Without a reference the group ends its threads.  A thread that releases a tensor while the interpreter shuts
        # down would crash it.
        self.group = self.extras_group = None


def concatenated(parts: Sequence[Tensor]) -> Tensor:
    """The parts one behind the other; without a copy if they are so in memory already."""
    first = parts[0]
    starts = [p.data_ptr() for p in parts]
    storage = first.untyped_storage().data_ptr()
    if all(p.untyped_storage().data_ptr() == storage for p in parts) and starts == [
        starts[0] + sum(p.numel() for p in parts[:i]) for i in range(len(parts))
    ]:
        return first.as_strided((sum(p.numel() for p in parts),), (1,))
    return torch.cat(list(parts))
