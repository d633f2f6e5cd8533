"""Collectives between the ranks of one host, through shared memory.

A rank copies its input into its arena, memory that its peers have mapped, and notifies them by a small message on a
unix socket; they sum or copy directly from there.  A large sum is relayed block by block through the first rank's
arena.  Arenas and sockets have no name on any disk, so a killed rank leaves nothing behind, and its peers learn of its
death from its socket.  Every rank adds in the order of the ranks: a sum is exactly `((x0 + x1) + x2) + ...`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from paceline.endpoint import check_summable
from paceline.op import Op, Ready
from paceline.transport.host_group import Collective, HostGroup, Steps
from paceline.transport.memory import aligned
from paceline.transport.mesh import HostPeer, Kind, Notice, Watch, connect_peers
from paceline.transport.relay import RelayedSum, SumLayout

NO_EXTRAS = torch.empty(0, dtype=torch.float64)


class SharedMemory:
    """One rank's collectives in a group on one host.  The caller's thread does all the work, as it starts and waits."""

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        peers: Sequence[HostPeer],
        *,
        timeout_s: float,
        watch: Watch | None = None,
    ) -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self._sums = SumLayout(len(ranks))
        self._group = HostGroup(rank, ranks, peers, slot_nbytes=self._slot_nbytes, timeout_s=timeout_s, watch=watch)

    @classmethod
    def connect(
        cls, store: Store, rank: int, ranks: Sequence[int], *, timeout_s: float, watch: Watch | None = None
    ) -> SharedMemory:
        """Connect to the other `ranks`, found in the store; its keys must be this group's own (a PrefixStore).

        With a `watch`, a rank that it calls dead is lost, whether or not its connections are open.
        """
        if rank not in ranks or len(set(ranks)) < len(ranks) or timeout_s <= 0:
            raise ValueError(
                f"SharedMemory.connect(rank={rank}, ranks={list(ranks)}, timeout_s={timeout_s}): "
                "the rank must be one of the ranks, no rank may occur twice, and the timeout must be above 0"
            )
        peers = connect_peers(store, rank, ranks, timeout_s=timeout_s, watch=watch)
        return cls(rank, ranks, peers, timeout_s=timeout_s, watch=watch)

    def all_reduce(self, x: Tensor, extras: Tensor | None = None) -> Op[Tensor]:
        """The sum over the group, in place.  `extras`, a few float64 numbers, are summed in the same collective."""
        check_summable(x)
        values = flat(x, "all_reduce")
        extras = NO_EXTRAS if extras is None else flat(extras, "all_reduce")
        if extras.dtype != torch.float64:
            raise ValueError(f"all_reduce with extras of {extras.dtype}: they must be of torch.float64")
        if len(self.ranks) == 1:
            return Ready("all_reduce", x)
        op = self._group.begin(
            Kind.all_reduce,
            x,
            x.dtype,
            nbytes=x.nbytes,
            slot_nbytes=self._sums.slot_nbytes(self._group.index, x.nbytes, extras.nbytes),
            extras=extras.nbytes,
        )
        add_up = self._relay if self._sums.is_relayed(values.nbytes) else self._add_whole
        return self._group.start(op, add_up(op, values, extras))

    def all_gather(self, data: Tensor) -> Op[list[Tensor]]:
        """Every member's `data`, in the order of the ranks; all of one size."""
        values = flat(data.contiguous(), "all_gather")
        rows = [values.clone() if rank == self.rank else torch.empty_like(values) for rank in self.ranks]
        result = [row.view(data.shape) for row in rows]
        if len(self.ranks) == 1:
            return Ready("all_gather", result)
        op = self._group.begin(Kind.all_gather, result, data.dtype, nbytes=data.nbytes, slot_nbytes=data.nbytes)
        return self._group.start(op, self._gather(op, [row.view(torch.uint8) for row in rows]))

    def all_to_all(self, parts: Sequence[Tensor]) -> Op[list[Tensor]]:
        """Send the j-th member `parts[j]`; get what each member sent to this rank.  Parts are bytes, of any sizes."""
        if len(parts) != len(self.ranks) or any(part.dtype != torch.uint8 for part in parts):
            raise ValueError(
                f"all_to_all of {len(parts)} parts of {[part.dtype for part in parts]}: "
                f"it takes one of torch.uint8 for each of the {len(self.ranks)} ranks"
            )
        given = [flat(part.contiguous(), "all_to_all") for part in parts]
        result = [given[self._group.index].clone()] * len(given)
        if len(self.ranks) == 1:
            return Ready("all_to_all", result)
        starts = list(accumulate((aligned(part.nbytes) for part in given), initial=0))
        op = self._group.begin(
            Kind.all_to_all,
            result,
            torch.uint8,
            nbytes=sum(part.nbytes for part in given),
            slot_nbytes=starts.pop(),
        )
        notices = {
            i: op.notice._replace(nbytes=given[i].nbytes, offset=op.notice.offset + starts[i])
            for i in self._group.others
        }
        return self._group.start(op, self._exchange(op, given, starts), notices)

    def broadcast(self, x: Tensor, src: int) -> Op[Tensor]:
        """Copy rank `src`'s `x` into every member's `x`."""
        if src not in self.ranks:
            raise ValueError(f"broadcast(src={src}): the ranks of this group are {list(self.ranks)}")
        values = flat(x, "broadcast")
        if len(self.ranks) == 1:
            return Ready("broadcast", x)
        op = self._group.begin(
            Kind.broadcast, x, x.dtype, nbytes=x.nbytes, slot_nbytes=x.nbytes if src == self.rank else 0, src=src
        )
        return self._group.start(op, self._spread(op, values.view(torch.uint8), self.ranks.index(src)))

    def poll(self) -> None:
        """Continue what was started, as far as possible without waiting."""
        self._group.poll()

    def close(self) -> None:
        """Leave the group.  Peers can still read what this rank has given."""
        self._group.close()

    def _slot_nbytes(self, index: int, notice: Notice) -> int:
        if notice.kind == Kind.all_reduce:
            return self._sums.slot_nbytes(index, notice.nbytes, notice.extras)
        return notice.nbytes

    def _add_whole(self, op: Collective[Tensor], x: Tensor, extras: Tensor) -> Steps:
        """Every rank adds up everything.  This takes one notice to each peer, and so has the least latency."""
        op.slot[: x.nbytes].view(x.dtype).copy_(x)
        extras_of(op.slot, extras).copy_(extras)
        yield lambda: self._group.not_started(op)
        slots = self._group.slots_in_order(op)
        add([slot[: x.nbytes].view(x.dtype) for slot in slots], x)
        if extras.numel() > 0:
            add([extras_of(slot, extras) for slot in slots], extras)

    def _relay(self, op: Collective[Tensor], x: Tensor, extras: Tensor) -> Steps:
        """The values by `RelayedSum`, the extras as a whole."""
        extras_of(op.slot, extras).copy_(extras)
        yield lambda: self._group.not_started(op)
        yield from RelayedSum(self._group, op, x, self._sums).steps()
        if extras.numel() > 0:
            add([extras_of(slot, extras) for slot in self._group.slots_in_order(op)], extras)

    def _gather(self, op: Collective[list[Tensor]], rows: list[Tensor]) -> Steps:
        op.slot.copy_(rows[self._group.index])
        yield lambda: self._group.not_started(op)
        for index, slot in op.slots.items():
            rows[index].copy_(slot)

    def _exchange(self, op: Collective[list[Tensor]], given: list[Tensor], starts: list[int]) -> Steps:
        for index in self._group.others:
            op.slot[starts[index] : starts[index] + given[index].nbytes].copy_(given[index])
        yield lambda: self._group.not_started(op)
        for index, slot in op.slots.items():
            op.result[index] = slot.clone()

    def _spread(self, op: Collective[Tensor], x: Tensor, root: int) -> Steps:
        if root == self._group.index:
            op.slot.copy_(x)
        yield lambda: self._group.not_started(op)
        if root != self._group.index:
            x.copy_(op.slots[root])


def flat(x: Tensor, call: str) -> Tensor:
    if x.device.type != "cpu" or not x.is_contiguous():
        raise ValueError(
            f"{call} of a tensor on {x.device} with strides {x.stride()}: it must be contiguous and on the cpu"
        )
    return x.detach().view(-1)


def extras_of(slot: Tensor, extras: Tensor) -> Tensor:
    """The end of a slot, where the extras are."""
    return slot[slot.numel() - extras.nbytes :].view(extras.dtype)


def add(terms: Sequence[Tensor], total: Tensor) -> None:
    """Sum in the order given."""
    torch.add(terms[0], terms[1], out=total)
    for term in terms[2:]:
        total.add_(term)
