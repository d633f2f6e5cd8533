"""Collectives in gloo groups that end when a member is dead."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.op import Op
from paceline.transport.gloo_group import GlooGroup
from paceline.transport.torch_collectives import TorchCollectives, concatenated


class WatchedCollectives(TorchCollectives):
    """The same collectives in groups of their own."""

    def __init__(self, group: GlooGroup, *, extras: GlooGroup | None = None, is_ordered: bool) -> None:
        super().__init__(group.rank, group.ranks, None, is_ordered=is_ordered)
        self._own = group
        self._extras = extras

    def all_reduce(self, x: Tensor, extras: Tensor | None) -> Op[Tensor]:
        if self.is_ordered:
            return super().all_reduce(x, extras)
        main = self._own.begin("all_reduce", lambda g: g.allreduce([x]), lambda: x)
        if extras is None:
            return main
        others = self._extras or self._own
        return _Both(main, others.begin("all_reduce", lambda g: g.allreduce([extras]), lambda: extras))

    def reduce(self, x: Tensor, dst: int, extras: Tensor | None) -> Op[Tensor]:
        options = dist.ReduceOptions()
        options.rootRank = self.ranks.index(dst)
        main = self._own.begin("reduce", lambda g: g.reduce([x], options), lambda: x)
        if extras is None:
            return main
        return _Both(main, self._own.begin("reduce", lambda g: g.reduce([extras], options), lambda: extras))

    def all_gather(self, data: Tensor) -> Op[list[Tensor]]:
        parts = [torch.empty_like(data) for _ in self.ranks]
        given = data.contiguous()
        return self._own.begin("all_gather", lambda g: g.allgather([parts], [given]), lambda: parts)

    def _exchange(self, parts: Sequence[Tensor], coming: Sequence[int]) -> Op[list[Tensor]]:
        received = torch.empty(sum(coming), dtype=torch.uint8)
        going = [p.numel() for p in parts]
        given = concatenated(parts)
        return self._own.begin(
            "all_to_all",
            lambda g: g.alltoall_base(received, given, list(coming), going),
            lambda: list(received.split(list(coming))),
        )

    def broadcast(self, x: Tensor, src: int) -> Op[Tensor]:
        options = dist.BroadcastOptions()
        options.rootRank = self.ranks.index(src)
        options.rootTensor = 0
        return self._own.begin("broadcast", lambda g: g.broadcast([x], options), lambda: x)

    def close(self) -> None:
        self._own.abort()
        if self._extras is not None:
            self._extras.abort()


class _Both(Op[Tensor]):
    """Two collectives under way; the first one's result."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: Op[Tensor], second: Op[Tensor]) -> None:
        super().__init__(first.kind)
        self._first = first
        self._second = second

    def wait(self) -> Tensor:
        result = self._first.wait()
        self._second.wait()
        return result
