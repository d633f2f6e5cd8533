"""A large sum within one host: blocks of it are relayed from rank to rank.

Each rank adds its own values to a block and passes it on; the last rank's block is the total, which every rank fetches.
However many ranks there are, each goes over its values only twice.  The blocks take turns in a few windows of the first
rank's slot, so that they, and a rank's own values until it fetches their total, stay in the cache.
"""

from __future__ import annotations

from torch import Tensor

from paceline.transport.host_group import Collective, HostGroup, Steps
from paceline.transport.memory import aligned
from paceline.transport.mesh import Kind

RELAYED_FROM = 1 << 21  # Bytes from which a relayed sum is faster, although ranks wait for each other.
BLOCK = 3 << 19  # Bytes of a block: large enough for few notices, small enough to stay in the cache.


class SumLayout:
    """How a sum is laid out in the slots of the ranks."""

    def __init__(self, members: int) -> None:
        self._members = members
        # A block needs one addition after another and a fetch, and every rank has an addition and a fetch to do for
        # each block.  So half as many blocks as ranks keep all ranks busy; two more are in use while notices travel.
        self._windows = 2 + members // 2

    def is_relayed(self, nbytes: int) -> bool:
        return nbytes >= RELAYED_FROM

    def block_nbytes(self, nbytes: int) -> int:
        """Bytes of a block.  Many ranks need many blocks; otherwise most ranks would wait for the first or the last."""
        return min(BLOCK, aligned(-(-nbytes // self._members)))

    def values_nbytes(self, index: int, nbytes: int) -> int:
        """Bytes for values in a rank's slot.  In a relayed sum only the first rank's slot has any: the windows."""
        if not self.is_relayed(nbytes):
            return nbytes
        return min(nbytes, self._windows * self.block_nbytes(nbytes)) if index == 0 else 0

    def slot_nbytes(self, index: int, nbytes: int, extras: int) -> int:
        """Bytes of a rank's slot: the values, then the extras."""
        return aligned(self.values_nbytes(index, nbytes)) + extras


class RelayedSum:
    """One rank's part in a relayed sum of `x`, in place.

    A window changes hands by a notice only: from one rank to the next, from the last to all, and from all back to the
    first.
    """

    def __init__(self, group: HostGroup, op: Collective[Tensor], x: Tensor, layout: SumLayout) -> None:
        self._group = group
        self._op = op
        self._index = group.index
        self._last = len(group.ranks) - 1
        self._block_numel = layout.block_nbytes(x.nbytes) // x.itemsize
        self._window_nbytes = layout.values_nbytes(0, x.nbytes)
        self._dtype = x.dtype
        self._blocks = x.split(self._block_numel)
        self._windows: tuple[Tensor, ...] = ()

    def steps(self) -> Steps:
        """To be run once all ranks have started the sum."""
        me, last = self._index, self._last
        added, fetched = self._op.added, self._op.fetched
        slot = self._group.slots_in_order(self._op)[0]
        self._windows = slot[: self._window_nbytes].view(self._dtype).split(self._block_numel)
        while fetched[me] < len(self._blocks):
            if fetched[me] < added[last]:
                self._fetch()
            elif self._missing():
                yield self._missing
            else:
                self._add()

    def _missing(self) -> list[int]:
        """The peers that must act before this rank can fetch or add the next block."""
        me, last = self._index, self._last
        added, fetched = self._op.added, self._op.fetched
        if fetched[me] < added[last]:
            return []
        if added[me] == len(self._blocks):
            return [last]
        if me > 0:
            late = [me - 1] if added[me - 1] == added[me] else []
        else:
            # All must have read a window before it is used again.  This rank has if the last one has: it fetches first.
            late = [index for index in self._group.others if fetched[index] + len(self._windows) <= added[me]]
        # No rank finishes before this one has added everything, so a peer that is lost now has not done its part.
        return late and [*late, *self._group.lost]

    def _fetch(self) -> None:
        me, fetched = self._index, self._op.fetched
        block = self._blocks[fetched[me]]
        block.copy_(self._windows[fetched[me] % len(self._windows)][: block.numel()])
        fetched[me] += 1
        is_awaited = fetched[me] - 2 < len(self._blocks) - len(self._windows)
        if me > 0 and fetched[me] % 2 == 0 and is_awaited:
            self._group.send({0: self._op.notice.counting(Kind.fetched, fetched[me], self._group.finished)})

    def _add(self) -> None:
        me, added = self._index, self._op.added
        block = self._blocks[added[me]]
        window = self._windows[added[me] % len(self._windows)][: block.numel()]
        if me == 0:
            window.copy_(block)
        else:
            window.add_(block)
        added[me] += 1
        receivers = self._group.others if me == self._last else [me + 1]
        notice = self._op.notice.counting(Kind.added, added[me], self._group.finished)
        self._group.send(dict.fromkeys(receivers, notice))
